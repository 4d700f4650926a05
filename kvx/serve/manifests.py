"""A deployment as Kubernetes manifests: plain YAML, and nothing to install in the cluster.

Each role is a StatefulSet, whose pods have names that the router can list, and a headless Service; the router is a
Deployment and a Service. The data plane of transfer libraries authenticates nobody: a NetworkPolicy lets only the
deployment's own pods reach the engines, and on the strength of it the engines are told that strangers are kept out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvx
from kvx.engine_settings import EngineSettings, bridge
from kvx.errors import EngineError
from kvx.secret import FILE as SECRET_FILE
from kvx.serve.deployment import DECODE, PREFILL, engine_settings, environment_of, require_vllm, words_of
from kvx.serve.options import ServeOptions
from kvx.serve.ports import DEFAULT_PORT
from kvx.serve.router import RouterSettings
from kvx.serve.words import world_size
from kvx.serve.yaml_text import documents

ENGINE_PORT, SIDE_PORT, METRICS_PORT = 8000, 5600, 29000
MODEL_FOLDER, MODEL_CLAIM = Path("/model"), "kvx-model"
SECRET_NAME, SECRET_FOLDER = "kvx-secret", "/run/kvx"
_PROBE_S = 5


def manifests(options: ServeOptions) -> str:
    """YAML of everything that the deployment needs, for `kubectl apply -f -`.

    Triggers of EngineError: no model is named, or hosts are, which the cluster chooses.
    """
    if options.model is None:
        raise EngineError("--k8s needs --model: a name that pods can download, or a folder for the volume claim")
    if options.prefill_hosts:
        raise EngineError("--k8s and hosts exclude each other: the cluster chooses where pods run")
    roles = {PREFILL: options.prefill, DECODE: options.decode}
    found: list[dict[str, Any]] = []
    for role, count in roles.items():
        found += [_service(role, None, ENGINE_PORT), _engines(options, role, count)]
    if options.router is not False:
        found += [_service("router", options.port or DEFAULT_PORT, options.port or DEFAULT_PORT), _router(options)]
    found.append(_policy())
    return _heading(options) + documents(found)


def _heading(options: ServeOptions) -> str:
    lines = [
        f"Made by kvx {kvx.__version__}: kvx serve --k8s.",
        f"The image {_image(options)} must have vLLM, kvx and vllm-router: pip install 'kvx[vllm,nixl,router]'.",
        "Its user must own the secret's file, which Kubernetes gives to root: run it as root, without fsGroup.",
        f"Before: kubectl create secret generic {SECRET_NAME} --from-file=secret=kvx.secret (docs/security.md).",
        "The NetworkPolicy protects the engines only where the cluster's network plug-in enforces it.",
    ]
    if _is_folder(options):
        lines.insert(2, f"Before: a PersistentVolumeClaim {MODEL_CLAIM} with the files of {options.model} at its root.")
    return "".join(f"# {line}\n" for line in lines)


def _image(options: ServeOptions) -> str:
    return options.image or f"kvx:{kvx.__version__}"


def _is_folder(options: ServeOptions) -> bool:
    return options.model is not None and (options.model.startswith(("/", ".", "~")) or Path(options.model).is_dir())


def _settings(options: ServeOptions, role: str) -> EngineSettings:
    """Pods differ in $(POD_NAME) and $(POD_IP), which Kubernetes fills in."""
    assert options.model is not None
    extra = {
        "connectors": list(options.connectors),
        "side_channel_host": "$(POD_IP)",
        "side_channel_port": SIDE_PORT,
        "allow_unauthenticated_data_plane": True,
        **options.handoff,
    }
    secret = {SECRET_FILE: f"{SECRET_FOLDER}/secret"}
    return engine_settings(
        options,
        role,
        device=require_vllm(options.device, only_printed=True),
        model=MODEL_FOLDER if _is_folder(options) else options.model,
        served_name=options.served_model_name or (Path(options.model).name if _is_folder(options) else options.model),
        name=f"kvx-{role}",
        host="0.0.0.0",
        port=ENGINE_PORT,
        one_host=False,
        kv_transfer=bridge("$(POD_NAME)", extra),
        environment={**environment_of(options, 1), **secret},
    )


def _engines(options: ServeOptions, role: str, count: int) -> dict[str, Any]:
    settings = _settings(options, role)
    ranks = world_size(words_of(options, role))
    # Kubernetes expands $(NAME) in words; where the user's own have some, they are meant as they are.
    own = [word.replace("$(", "$$(") for word in settings.arguments]
    ports = [{"name": "http", "containerPort": ENGINE_PORT}]
    ports += [{"name": f"side-{rank}", "containerPort": SIDE_PORT + rank} for rank in range(ranks)]
    mounts = [{"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True}]
    mounts += [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "secret", "secret": {"secretName": SECRET_NAME, "defaultMode": 0o400}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if _is_folder(options):
        mounts.append({"name": "model", "mountPath": str(MODEL_FOLDER), "readOnly": True})
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": MODEL_CLAIM, "readOnly": True}})
    container = {
        "name": "engine",
        "image": _image(options),
        "command": ["python3", *replace(settings, arguments=own).command()[1:]],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *_variables(settings.added_environment()),
        ],
        "ports": ports,
        "volumeMounts": mounts,
        **_probes("/health", "/health", options.start_timeout),
    }
    if settings.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": ranks}}
    spec = {
        "serviceName": f"kvx-{role}",
        "replicas": count,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(role)},
        "template": _template(role, container, volumes),
    }
    return _object("apps/v1", "StatefulSet", role, spec)


def _router(options: ServeOptions) -> dict[str, Any]:
    port = options.port or DEFAULT_PORT
    router = RouterSettings(
        host="0.0.0.0",
        port=port,
        metrics_port=METRICS_PORT,
        prefill_urls=_pod_urls(PREFILL, options.prefill),
        decode_urls=_pod_urls(DECODE, options.decode),
        arguments=["--worker-startup-check-interval", str(_PROBE_S), *options.router_args],
    )
    container = {
        "name": "router",
        "image": _image(options),
        "command": ["python3", *(word.replace("$(", "$$(") for word in router.command()[1:])],
        "ports": [{"name": "http", "containerPort": port}],
        # It listens only when all engines are ready, so it may take as long as they do, and a little more.
        **_probes("/readiness", "/liveness", 2 * options.start_timeout),
    }
    spec = {"replicas": 1, "selector": {"matchLabels": _labels("router")}, "template": _template("router", container)}
    return _object("apps/v1", "Deployment", "router", spec)


def _pod_urls(role: str, count: int) -> list[str]:
    return [f"http://kvx-{role}-{number}.kvx-{role}:{ENGINE_PORT}" for number in range(count)]


def _service(role: str, port: int | None, target: int) -> dict[str, Any]:
    """`port`: of a Service with an address of its own; without one, it only gives names to pods."""
    spec: dict[str, Any] = {"selector": _labels(role), "ports": [{"name": "http", "port": target}]}
    if port is None:
        spec["clusterIP"] = "None"
    return _object("v1", "Service", role, spec)


def _policy() -> dict[str, Any]:
    """Engines are reached by engines on every port, and by the router on theirs; by nobody else."""
    engines = {"app": "kvx", "kvx-engine": "yes"}
    spec = {
        "podSelector": {"matchLabels": engines},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": engines}}]},
            {"from": [{"podSelector": {"matchLabels": _labels("router")}}], "ports": [{"port": ENGINE_PORT}]},
        ],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", "engines", spec)


def _template(role: str, container: dict[str, Any], volumes: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    labels = _labels(role)
    if role != "router":
        labels["kvx-engine"] = "yes"
    spec: dict[str, Any] = {
        # Otherwise every Service named kvx-… sets variables KVX_…, which kvx would take for its own.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    if volumes:
        spec["volumes"] = list(volumes)
    return {"metadata": {"labels": labels}, "spec": spec}


def _probes(ready: str, alive: str, start_s: float) -> dict[str, Any]:
    def probe(path: str, failures: int) -> dict[str, Any]:
        ask = {"path": path, "port": "http"}
        return {"httpGet": ask, "periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S, "failureThreshold": failures}

    return {
        "startupProbe": probe(alive, max(1, round(start_s / _PROBE_S))),
        "readinessProbe": probe(ready, 2),
        "livenessProbe": probe(alive, 6),
    }


def _variables(environment: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in sorted(environment.items())]


def _labels(role: str) -> dict[str, str]:
    return {"app": "kvx", "kvx-role": role}


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": f"kvx-{name}", "labels": {"app": "kvx"}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
