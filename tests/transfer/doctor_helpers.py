"""What tests of `kvx doctor` look at, and the peers that they meet it with."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine_process import Engine, EngineConfig, Remote

SECRET = "a secret for the doctor's tests"


@dataclass(frozen=True)
class Report:
    status: int
    findings: dict[str, dict[str, str]]
    said: str

    @property
    def troubles(self) -> set[str]:
        return {name for name, found in self.findings.items() if found["level"] in ("warning", "error")}

    def require(self, check: str, level: str, found: str, fix: str) -> None:
        """This finding and no other trouble. `found` and `fix`: regular expressions."""
        assert self.troubles == {check}, self.said
        self.require_among(check, level, found, fix)
        assert self.status == {"warning": 1, "error": 2}[level]

    def require_among(self, check: str, level: str, found: str, fix: str) -> None:
        finding = self.findings[check]
        assert finding["level"] == level
        assert re.search(found, finding["found"])
        assert re.search(fix, finding["fix"])
        assert finding["why"]


def report_of(status: int, output: str) -> Report:
    return Report(status, {found["check"]: found for found in json.loads(output)["findings"]}, output)


Doctor = Callable[..., Report]
Start = Callable[..., Remote]


def trips_of(found: Report) -> set[str]:
    return {name.removeprefix("round trip by ") for name in found.findings if name.startswith("round trip by ")}


def doctor_in_a_child(script: str, *words: object, prefix: tuple[str, ...] = ()) -> Report:
    """The same in a process of its own, in which a script runs first."""
    code = f"import sys\n{script}\nsys.argv = ['kvx', 'doctor', *sys.argv[1:]]\nfrom kvx.cli.main import main\nmain()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVX_", "UCX_"))}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, "--json", "-", *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return report_of(done.returncode, done.stdout)


# Peers


class HalfInAProcess:
    """The half that waits, in a process that a test may do anything to."""

    def __init__(self, config: EngineConfig) -> None:
        from kvx.doctor.half import Half
        from kvx.engine_side import HandoffSettings
        from kvx.secret import read_secret

        self._half = Half(HandoffSettings(connectors=config.connectors), read_secret())
        self._half.open()

    def port(self) -> int:
        return self._half.port

    def engine_id(self) -> str:
        return self._half.engine_id

    def round_trip(self, port: int, engine_id: str) -> Any:
        return self._half.round_trip("127.0.0.1", port, engine_id)

    def serve(self) -> str | None:
        return self._half.serve(60)

    def serve_and_change_a_bit(self) -> str | None:
        """After it has arrived, and before it is held: digests of what is held agree on both sides."""
        import torch

        pull = self._half._pull

        def change(*args: Any) -> None:
            pull(*args)
            view = self._half._views["layer.2"]
            view.view(torch.uint8)[100, 1, 2, 3] ^= 1

        self._half._pull = change  # type: ignore[method-assign]
        return self._half.serve(60)

    def die_when_asked(self) -> None:
        """In the middle of the trip: when it has been asked to pull, and has not."""
        self._half._pull = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        self._half.serve(60)

    def close(self) -> None:
        self._half.close()


class PackedEngine(Engine):
    """Its kernels pack a page in an order of their own, as vLLM's on a CPU."""

    def __init__(self, config: EngineConfig) -> None:
        import kvx.plan

        plain = kvx.plan.group_geometry
        kvx.plan.group_geometry = lambda *args: replace(plain(*args), page_format="CPU_ATTN")
        super().__init__(config)


class EngineOfAnotherTime(Engine):
    """Its clock is as many seconds ahead as its name says, and its side channel as many seconds old."""

    def __init__(self, config: EngineConfig) -> None:
        import kvx.handoff

        ahead_s, age_s = map(float, config.engine_id.split())

        class Seal(kvx.handoff.ReplySeal):
            def __init__(self, secret: Any, window_s: float) -> None:
                super().__init__(secret, window_s, lambda: time.time() + ahead_s)
                self._started -= age_s

        kvx.handoff.ReplySeal = Seal
        super().__init__(config)


def address(remote: Remote) -> str:
    return f"127.0.0.1:{remote.port}"


def unused_port() -> int:
    """Below those that the kernel gives to everybody who asks for any: it stays unused until it is wanted."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
