"""A tiny engine in a process of its own: a real cache on host memory, a real connector, a real HandoffWorker.

The parent drives it by calling methods of `Engine` over a pipe; `Remote` is its handle there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, set_forkserver_preload
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class EngineConfig:
    engine_id: str
    layout: str = "LBHNC"
    block_size_tokens: int = 16
    kernel_block_size_tokens: int | None = None
    num_layers: int = 3
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: str = "float32"
    num_blocks: int = 96
    capacity_blocks: int = 128
    granularity_bytes: int = 1 << 16
    connectors: tuple[str, ...] = ("nixl",)
    agent_name: str | None = None
    model: str = "tiny"
    sliding_layers: int = 0
    total_heads: int | None = None  # of the model, when this engine is one rank of several
    first_head: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


class Engine:
    """Runs in the child."""

    def __init__(self, config: EngineConfig) -> None:
        from kvx_connectors.nixl import NixlConnector

        from kvx import door
        from kvx.cache import ExtensibleKVCache
        from kvx.curve import read_curve
        from kvx.drivers.host import HostDriver
        from kvx.drivers.shared_host import SharedHostDriver
        from kvx.handoff import CacheFollower, EngineInfo, HandoffSettings, HandoffWorker
        from kvx.plan import HeadRange, group_geometry
        from kvx.registry import connector_classes
        from kvx.secret import read_secret
        from kvx.tensor import views_of

        self.config = config
        self.geometry = make_geometry(config)
        classes = connector_classes(config.connectors)
        shared = any(found.capabilities.shares_memory for found in classes)
        driver = (SharedHostDriver if shared else HostDriver)(config.granularity_bytes)
        self.cache = ExtensibleKVCache(driver, self.geometry.segment_table)
        self.cache.open()
        self.views = views_of(
            self.cache.buffer, self.geometry, kernel_blocks=config.kernel_block_size_tokens is not None
        )
        self.block_views = views_of(self.cache.buffer, self.geometry) if not config.kernel_block_size_tokens else None
        self.cache.set_views(self.views.values())
        self.connectors = [
            found(config.agent_name) if issubclass(found, NixlConnector) else found() for found in classes
        ]
        self.connector = self.connectors[0]
        settings = HandoffSettings(**config.settings)
        door.prepare(settings, self.connectors)
        self.cache.commit(4)
        for connector in self.connectors:
            self.cache.attach(connector)
        self.cache.extend_kv_cache(config.num_blocks)
        heads = HeadRange(config.first_head, config.num_kv_heads, config.total_heads or config.num_kv_heads)
        self.groups = tuple(group_geometry(self.geometry, index, heads) for index in range(len(self.geometry.groups)))
        info = EngineInfo(
            engine_id=config.engine_id, model=config.model, dtype=config.dtype, kv_cache_dtype=config.dtype,
            tp_rank=config.tp_rank, tp_size=config.tp_size,
        )  # fmt: skip
        secret = read_secret()
        self.worker = HandoffWorker(settings, info, self.connectors, secret=secret, curve=read_curve(secret))
        self.worker.open(self.groups, self.views, config.num_blocks, self.cache.generation, config.layout)
        self.cache.attach(CacheFollower(self.worker, lambda: self.cache.committed_blocks))

    def port(self) -> int:
        return self.worker.port

    def fill(self, blocks: list[list[int]], num_tokens: int, seed: int) -> None:
        """Write content that is a function of (seed, layer, head, token) alone."""
        for index, of_group in enumerate(blocks):
            self._place(index, of_group, num_tokens, make_content(self.groups[index], num_tokens, seed + index))

    def read(self, blocks: list[list[int]], first_token: int, num_tokens: int) -> list[bytes]:
        """Canonical bytes [L, H, n, C] of each group, gathered through the views alone."""
        import torch

        out: list[bytes] = []
        for index, of_group in enumerate(blocks if num_tokens else []):
            group = self.groups[index]
            rows, slots = self._slots(group, of_group, torch.arange(first_token, first_token + num_tokens))
            views = [self.views[layer].view(torch.uint8) for layer in group.layers]
            content = torch.stack([view[rows, :, slots] for view in views])  # [L, n, H, C]
            out.append(content.transpose(1, 2).contiguous().numpy().tobytes())
        return out

    def hold(self, request_id: str, blocks: list[list[int]], num_tokens: int, lease_s: float | None = None) -> None:
        self.worker.hold(request_id, blocks, num_tokens, lease_s)

    def ticket(self, request_id: str, num_tokens: int, lease_s: float | None = None) -> str:
        return self.worker.ticket(request_id, num_tokens, lease_s)

    def drop(self, request_id: str) -> None:
        self.worker.drop(request_id)

    def pull(self, **fields: Any) -> None:
        from kvx.handoff import Pull

        self.worker.pull(Pull(**fields))

    def keep(self, **fields: Any) -> None:
        from kvx.handoff import Waiting

        self.worker.keep(Waiting(**fields))

    def cancel(self, request_id: str) -> None:
        self.worker.cancel(request_id)

    def events(self, timeout_s: float) -> dict[str, Any]:
        """The next events, waiting for them at most so long."""
        self.worker.wait(timeout_s)
        events = self.worker.poll()
        return {
            "released": set(events.released),
            "expired": set(events.expired),
            "received": set(events.received),
            "failed": {name: failure.text for name, failure in events.failed.items()},
            "causes": {name: failure.cause for name, failure in events.failed.items()},
        }

    def status(self) -> dict[str, Any]:
        return self.worker.status()

    def cpu_s(self) -> float:
        return time.process_time()

    def extend(self, num_blocks: int) -> None:
        """Grow while READY: the connectors close and open again under a new generation."""
        self.cache.extend_kv_cache(num_blocks, live=True)

    def sleep(self) -> None:
        self.cache.sleep()

    def wake(self) -> None:
        self.cache.wake()

    def num_parked(self, request_id: str) -> int:
        """Claims that wait here for this request's hold."""
        return sum(parked.claim.request_id == request_id for parked in list(self.worker._holder._table._parked))

    def await_digests(self) -> None:
        """All that have been asked for have been taken."""
        digesting = self.worker._side._digester
        assert digesting is not None
        digesting.submit(int).result(60)

    def await_reuse(self, seconds: float) -> None:
        """How long blocks that are freed early (`stale`) wait for the engine to use them again."""
        import kvx.inject as inject

        inject.STALE_WAIT_S = seconds

    def delay_digests(self, seconds: float) -> None:
        """As if there were much to digest before what is held next. Some have been taken already."""
        digesting = self.worker._side._digester
        assert digesting is not None
        digesting.submit(time.sleep, seconds)

    def hold_and_sleep(self, count: int, blocks: list[list[int]], num_tokens: int) -> None:
        """So that digests are on their way when the memory goes."""
        for index in range(count):
            self.worker.hold(f"h{index}", blocks, num_tokens)
        self.cache.sleep()

    # The connector alone

    def metadata(self) -> bytes:
        return self.connector.metadata()

    def registered(self) -> dict[str, Any]:
        return {
            "bytes": self.connector.registered_bytes,
            "regions": [(region.offset_bytes, region.nbytes) for region in self.cache.regions()],
        }

    def connect(self, metadata: bytes) -> str:
        self.peer = self.connector.connect(metadata)
        return self.peer.name

    def submit(
        self,
        op: str,
        source: list[int],
        destination: list[int],
        length: int | list[int],
        deadline_s: float,
        notify: bytes = b"",
    ) -> str:
        """Copy `length` bytes (each its own, or all the same) from each source to the destination of that index."""
        import numpy as np

        from kvx.connector import Op
        from kvx.plan import RUN_DTYPE, Runs

        rows = np.zeros(len(source), RUN_DTYPE)
        rows["source"], rows["destination"], rows["length"], rows["count"] = source, destination, length, 1
        self.transfer = self.connector.submit(Op(op), self.peer, Runs(rows), deadline_s=deadline_s, notify=notify)
        return self.transfer.state.value

    def set_aside(self) -> None:
        """Let others be submitted and finished before the present transfer."""
        self.aside = self.transfer

    def take_back(self) -> str:
        self.transfer = self.aside
        return self.transfer.state.value

    def cancel_transfer(self) -> None:
        self.connector.cancel(self.transfer)

    def finish(self, timeout_s: float) -> tuple[str, str, str, int]:
        """Poll until the transfer is terminal: (state, kind of its cause, its text, how often it was reported)."""
        deadline, reported = time.monotonic() + timeout_s, 0
        while time.monotonic() < deadline:
            reported += sum(transfer is self.transfer for transfer in self.connector.poll().finished)
            if reported:
                break
            time.sleep(0.0005)
        cause = self.transfer.cause
        return self.transfer.state.value, type(cause).__name__, str(cause), reported

    def progress(self, seconds: float) -> list[tuple[str, bytes]]:
        deadline, notifications = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            notifications += self.connector.poll().notifications
            time.sleep(0.0005)
        return notifications

    def progress_in_background(self) -> None:
        """As the hand-off thread does while a peer reads from us."""
        self.notified: list[tuple[str, bytes]] = []

        def run() -> None:
            while self.connector.state is ConnectorState.OPEN:
                self.notified += self.connector.poll().notifications
                time.sleep(0.0005)

        from kvx.connector import ConnectorState

        threading.Thread(target=run, daemon=True).start()

    def notifications(self, timeout_s: float) -> list[tuple[str, bytes]]:
        deadline = time.monotonic() + timeout_s
        while not self.notified and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.notified

    def poke(self, offset: int, nbytes: int, value: int) -> None:
        self.cache.buffer[offset : offset + nbytes] = value

    def fill_all(self, value: int) -> None:
        """The same byte everywhere, through committed bytes only."""
        for region in self.cache.regions():
            self.poke(region.offset_bytes, region.nbytes, value)

    def is_all(self, value: int, blocks: list[int]) -> bool:
        """Whether every byte of these blocks has that value."""
        import torch

        return all(bool((view[blocks].view(torch.uint8) == value).all()) for view in self.views.values())

    def put(self, offset: int, data: bytes) -> None:
        import numpy as np

        self.cache.buffer.numpy()[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def poke_address(self, address: int, data: bytes) -> None:
        import ctypes

        ctypes.memmove(address, data, len(data))

    def peek(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.cache.buffer[offset : offset + nbytes].numpy().tobytes())

    def disconnect(self) -> None:
        self.connector.disconnect(self.peer)

    def pretend_another_host(self) -> None:
        """From now on our metadata says so."""
        import kvx_connectors.ipc as ipc

        ipc._boot_id = lambda: "another"

    def stop_listening(self) -> None:
        """As if its process had no room for another peer: its metadata is still that of a healthy one."""
        self.connector._listener.stop()
        self.connector._listener.stop = lambda: None

    def maps(self, word: str) -> int:
        """How many mappings of this process have `word` in their line."""
        return sum(word in line for line in Path("/proc/self/maps").read_text().splitlines())

    def num_fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def close_connector(self) -> None:
        self.connector.close()

    def close_worker(self) -> dict[str, str]:
        self.worker.close()
        return {name: failure.text for name, failure in self.worker.poll().failed.items()}

    def close(self) -> None:
        self.worker.close()
        self.worker.close()
        self.cache.close()

    def _slots(self, group: Any, blocks: list[int], tokens: Any) -> tuple[Any, Any]:
        """Where tokens are: rows of the views, and slots in them."""
        import torch

        kernel, size = group.kernel_block_size_tokens, group.block_size_tokens
        ids, inside = torch.tensor(blocks, dtype=torch.int64)[tokens // size], tokens % size
        return ids * (size // kernel) + inside // kernel, inside % kernel

    def _place(self, index: int, blocks: list[int], num_tokens: int, content: Any) -> None:
        import torch

        group = self.groups[index]
        tokens = torch.arange(num_tokens)
        tokens = tokens[torch.tensor(blocks, dtype=torch.int64)[tokens // group.block_size_tokens] >= 0]
        rows, slots = self._slots(group, blocks, tokens)
        for layer_index, layer in enumerate(group.layers):
            self.views[layer].view(torch.uint8)[rows, :, slots] = content[layer_index][:, tokens].transpose(0, 1)


def make_content(group: Any, num_tokens: int, seed: int) -> Any:
    """[L, H, n, C bytes] uint8, the same for every layout and block size."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (len(group.layers), group.heads.count, num_tokens, group.content_bytes)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def make_geometry(config: EngineConfig) -> Any:
    from kvx.layout import KVCacheLayout
    from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup

    common: dict[str, Any] = {
        "block_size_tokens": config.block_size_tokens,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "dtype": config.dtype,
        "kernel_block_size_tokens": config.kernel_block_size_tokens,
    }
    layers = tuple(f"layer.{index}" for index in range(config.num_layers))
    groups = [LayerGroup("full", layers, KVCacheSpec.full_attention(**common))]
    if config.sliding_layers:
        names = tuple(f"sliding.{index}" for index in range(config.sliding_layers))
        spec = KVCacheSpec.sliding_window(**common, sliding_window_tokens=2 * config.block_size_tokens)
        groups.append(LayerGroup("sliding", names, spec))
    return CacheGeometry(
        layout=KVCacheLayout.parse(config.layout),
        groups=tuple(groups),
        capacity_blocks=config.capacity_blocks,
        granularity_bytes=config.granularity_bytes,
    )


def _serve(config: EngineConfig, make: Callable[[Any], Engine], pipe: Any) -> None:
    os.environ.update(config.environ)
    try:
        engine = make(config)
        pipe.send((True, engine.port()))
        while True:
            name, args, kwargs = pipe.recv()
            try:
                pipe.send((True, getattr(engine, name)(*args, **kwargs)))
            except Exception:  # noqa: BLE001  the parent raises it
                pipe.send((False, traceback.format_exc()))
            if name == "close":
                return
    except EOFError:
        pass
    except Exception:  # noqa: BLE001  as above
        pipe.send((False, traceback.format_exc()))


class Remote:
    """The parent's handle of an engine process: `remote.call.method(...)`."""

    def __init__(self, config: EngineConfig, make: Callable[[Any], Engine] = Engine) -> None:
        context = multiprocessing.get_context("forkserver")
        self.config = config
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(config, make, child), daemon=True)
        self.process.start()
        child.close()
        self.port = 0

    def ready(self) -> Remote:
        self.port = self._result(60)
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.begin(name, *args, **kwargs)()

        return call

    def begin(self, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call a method; its result is what the function that is returned waits for."""
        self._pipe.send((name, args, kwargs))
        return lambda: self._result(60)

    def has_answer(self) -> bool:
        """Whether the next result is there already, or the process has ended."""
        return self._pipe.poll(0)

    def _result(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"engine {self.config.engine_id} gave no answer")
        worked, result = self._pipe.recv()
        if not worked:
            raise RuntimeError(result)
        return result

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        while number is signal.SIGSTOP and not self._is_stopped():
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task")
        return all(f.read_text().rpartition(")")[2].split()[0] == "T" for f in tasks.glob("*/stat"))

    def stop(self) -> None:
        """End the process, whatever state it is in."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._pipe.close()


StartEngines = Callable[..., list[Remote]]


@contextlib.contextmanager
def running_fork_server() -> Iterator[None]:
    """Engine processes are forks of a process that has torch and NIXL imported: they start within a second."""
    # Python 3.11's fork server imports its preload modules without our sys.path.
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    with mock.patch.dict(os.environ, PYTHONPATH=path, UCX_TLS="tcp,self,cma", NIXL_LOG_LEVEL="WARN"):
        set_forkserver_preload(["preload"])
        forkserver.ensure_running()
        yield
