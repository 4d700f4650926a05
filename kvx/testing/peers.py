"""Peers in processes of their own, as the tests hold them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

from kvx.testing.kit import Kit
from kvx.testing.peer_engine import wait_until

ANSWER_S = 60.0
"""No call of a peer takes so long; a process that died says so at once."""


class PeerGone(Exception):
    """The peer's process ended or gave no answer; its own output says why."""


class PeerRaised(Exception):
    """A call raised in the peer's process: `kinds` are the names of the error's classes."""

    def __init__(self, kinds: list[str], text: str) -> None:
        super().__init__(f"{kinds[0]}: {text}")
        self.kinds = kinds


class ProcessPeer:
    """A `PeerEngine` in another process: every method of it can be called here."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self.pid = pid
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: object) -> Any:
            try:
                self._pipe.send((name, arguments))
                if not self._pipe.poll(ANSWER_S):
                    raise PeerGone(f"peer process {self.pid} gave no answer to {name} within {ANSWER_S:g} s")
                worked, answer = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise PeerGone(f"peer process {self.pid} ended in {name}") from error
            if not worked:
                raise PeerRaised(*answer)
            return answer

        return call

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """As a crash does: no clean-up of any kind."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
        assert wait_until(lambda: not self.is_alive, 10), f"process {self.pid} does not end"

    def pause(self) -> None:
        """SIGSTOP, until every thread stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        assert wait_until(
            lambda: all(f.read_text().rpartition(")")[2].split()[0] == "T" for f in tasks.glob("*/stat")), 10
        )

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.kill()
        self._pipe.close()


class Processes:
    """Starts peers for one test class, and ends all that are left."""

    def __init__(self, kit: type[Kit]) -> None:
        self._kit = kit
        self._zygote: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._peers: list[ProcessPeer] = []

    def start(self) -> ProcessPeer:
        """A new process with memory and a connector, neither of them open."""
        if self._zygote is None:
            self._start_zygote()
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        assert self._folder is not None
        address = f"{self._folder.name}/{len(self._peers)}"
        with Listener(address, family="AF_UNIX") as listener:
            try:
                self._zygote.stdin.write(address.encode() + b"\n")
                self._zygote.stdin.flush()
                pipe = self._accepted(listener, self._zygote)
                pid: int = pipe.recv()
            except (OSError, EOFError) as error:
                raise PeerGone("no second process could be started; its own output says why") from error
        peer = ProcessPeer(pipe, pid)
        self._peers.append(peer)
        return peer

    def _accepted(self, listener: Listener, zygote: subprocess.Popen[bytes]) -> Connection:
        """The new peer's connection; OSError when there is none because the zygote could not import the test."""
        deadline = time.monotonic() + ANSWER_S
        listener._listener._socket.settimeout(0.1)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                if zygote.poll() is not None or time.monotonic() > deadline:
                    raise

    def _start_zygote(self) -> None:
        module = sys.modules[self._kit.__module__]
        assert module.__file__ is not None
        paths = os.pathsep.join(path for path in sys.path if path)
        self._folder = tempfile.TemporaryDirectory(prefix="kvx-kit-")
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "kvx.testing.zygote", module.__name__, module.__file__, self._kit.__qualname__],
            stdin=subprocess.PIPE,
            env={**os.environ, **self._kit.environ, "PYTHONPATH": paths},
        )

    def close(self) -> None:
        for peer in self._peers:
            peer.stop()
        self._peers.clear()
        if self._zygote is not None:
            assert self._zygote.stdin is not None
            self._zygote.stdin.close()
            self._zygote.wait(ANSWER_S)
            self._zygote = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
