"""Halves in processes of their own: what a transfer library does to its process must not end the diagnosis.

A child gets its settings as a line of JSON, says what it does in lines of JSON, then waits: for an address to make a
round trip with, or for somebody's question, until its input ends. What libraries print goes to a file that is read
afterwards: UCX says there which transports it took.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from kvx.curve import read_curve
from kvx.doctor.half import Half, Trip
from kvx.engine_side import HandoffSettings
from kvx.errors import ConnectorUnavailable, KVXError
from kvx.secret import read_secret
from kvx.vllm.settings import from_options

# Importing torch and a transfer library, on a machine that does other things.
OPEN_S, TRIP_S, STOP_S = 300.0, 180.0, 10.0
LOOK_S = 0.05


@dataclass(frozen=True)
class Failed:
    """Where a half ended, and why. `hint`: what to install, where it is known. `cause`: as of a KVXError."""

    stage: str
    text: str
    hint: str = ""
    cause: str = ""


@dataclass(frozen=True)
class Opened:
    """Where a half listens, and who it is. `connectors`: those that move bytes between engines."""

    host: str
    port: int
    engine_id: str
    connectors: Sequence[str] = ()


class HalfProcess:
    """A half in a child process, used as a context manager."""

    def __init__(self, settings: HandoffSettings, device: str) -> None:
        self._job = {"settings": asdict(settings), "device": device}
        self._host = settings.side_channel_host
        self._environment = {"NIXL_LOG_LEVEL": "WARN", **os.environ, "UCX_LOG_LEVEL": "info"}
        self._environment.pop("UCX_LOG_FILE", None)
        self._stage, self._unread = "start", b""

    def __enter__(self) -> Self:
        self._words = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvx.doctor.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=self._environment,
        )  # fmt: skip
        self._send(self._job)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._words.close()

    def opened(self) -> Opened | Failed:
        found = self._answer("opened", OPEN_S)
        return found if isinstance(found, Failed) else Opened(self._host, **found)

    def round_trip(self, peer: Opened) -> Trip | Failed:
        self._send({"peer": asdict(peer)})
        found = self._answer("trip", TRIP_S)
        return found if isinstance(found, Failed) else Trip(**found)

    def words(self) -> str:
        """What the libraries have printed so far."""
        return os.pread(self._words.fileno(), 1 << 22, 0).decode(errors="replace")

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: the next answer says so

    def _answer(self, key: str, timeout_s: float) -> dict[str, Any] | Failed:
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._line(deadline)
            if line is None:
                return Failed(self._stage, f"no answer for {timeout_s:g} s")
            if not line:
                return Failed(self._stage, self._how_it_ended())
            found = json.loads(line)
            self._stage = found.get("stage", self._stage)
            if "failed" in found:
                return Failed(self._stage, **found["failed"])
            if key in found:
                value: dict[str, Any] = found[key]
                return value

    def _line(self, deadline: float) -> bytes | None:
        """None when the time is over; empty when the child has ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
        last = [line.strip() for line in self.words().splitlines() if line.strip()][-1:]
        return ": ".join([how, *last])


# The child


def main() -> None:
    """Speak JSON with the parent; whatever else is printed goes to standard error."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=output)

    def on_stage(stage: str) -> None:
        say(stage=stage)

    source = os.fdopen(0, "rb", buffering=0)  # `select` must see what is unread
    job = json.loads(source.readline())
    try:
        secret = read_secret()
        half = Half(from_options(job["settings"]), secret, read_curve(secret), job["device"], on_stage)
        half.open()
    except KVXError as error:
        say(failed=_told(error))
        return
    try:
        say(opened={"port": half.port, "engine_id": half.engine_id, "connectors": half.connectors})
        while True:
            half.serve(LOOK_S)
            if select.select([source], [], [], 0)[0]:
                line = source.readline()
                if not line:
                    return
                peer = json.loads(line)["peer"]
                try:
                    say(trip=asdict(half.round_trip(peer["host"], peer["port"], peer["engine_id"])))
                except KVXError as error:
                    say(failed=_told(error))
    finally:
        half.close()


def _told(error: KVXError) -> dict[str, str]:
    """For a `Failed`."""
    hint = error.hint if isinstance(error, ConnectorUnavailable) else ""
    return {"text": str(error), "hint": hint, "cause": error.cause}


if __name__ == "__main__":
    main()
