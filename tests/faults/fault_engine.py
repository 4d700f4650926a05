"""An engine whose requests have answers: blocks from an allocator, KV that is a function of the request, a policy.

A request's KV is what its seed says, and its answer the digest of the KV that its blocks have in the end. So an answer
is right only where every byte came from the right place, or was computed here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_process import Engine, EngineConfig

PIECE_BYTES = 16 << 10
"""A hand-off of 8 blocks is read in six pieces: whatever happens after the first one meets the others."""
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_M_PERTURB = -6


@dataclass(frozen=True)
class FaultConfig(EngineConfig):
    """`shared_memory`: the folder to see as /dev/shm; `network`: the network namespace to live in.

    `offloads`: with a pool of blocks in host memory. `piece_bytes`: of a hand-off, read at once.
    `has_used_memory`: what its libraries allocate is full of something, as in a process that has run for long.
    """

    shared_memory: str | None = None
    network: str | None = None
    offloads: bool = False
    piece_bytes: int = PIECE_BYTES
    has_used_memory: bool = False


@dataclass(frozen=True)
class Place:
    """Where a request's KV is held, and the ticket for it."""

    remote_engine_id: str
    host: str
    port: int
    ticket: str


@dataclass
class Work:
    """One request of this engine."""

    blocks: list[int]
    num_tokens: int
    seed: int
    started: float = field(default_factory=time.monotonic)
    is_aborted: bool = False


class Gate:
    """Keeps one transfer's end to itself, until it is opened or the transfer is given up: the request stays in MOVE."""

    def __init__(self, connector: Any) -> None:
        self._poll, self._submit, self._cancel = connector.poll, connector.submit, connector.cancel
        connector.poll, connector.submit, connector.cancel = self.poll, self.submit, self.cancel
        self.is_armed, self.held, self._kept = False, None, []

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        transfer = self._submit(*args, **kwargs)
        if self.is_armed:
            self.is_armed, self.held = False, transfer
        return transfer

    def cancel(self, transfer: Any) -> None:
        if transfer is self.held:
            self.open()
        self._cancel(transfer)

    @property
    def has_end(self) -> bool:
        return bool(self._kept)

    def open(self) -> None:
        self.held = None

    def poll(self) -> Any:
        from kvx.connector import Events

        events = self._poll()
        finished = [*self._kept, *events.finished]
        self._kept = [transfer for transfer in finished if transfer is self.held]
        return Events(tuple(one for one in finished if one is not self.held), events.notifications)


class FaultEngine(Engine):
    """Runs in the child, as `Engine` does."""

    def __init__(self, config: FaultConfig) -> None:
        if config.has_used_memory:
            ctypes.CDLL(None).mallopt(_M_PERTURB, 0xA5)
        if config.shared_memory is not None:
            _see_as_shared_memory(config.shared_memory)
        if config.network is not None:
            _enter(config.network)
        import torch

        import kvx.pulls

        torch.set_num_threads(1)  # its pool of threads comes at some large copy, and stays
        kvx.pulls.MOVE_BYTES = config.piece_bytes
        super().__init__(config)
        self.policy = self.worker._settings.failure_policy
        self.free, self.total = list(range(config.num_blocks)), config.num_blocks
        self.held: dict[str, list[int]] = {}
        self.running: dict[str, Work] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.gate = Gate(self.connector)
        self._ask_late_where_gated()
        if config.offloads:
            self._open_offload()
        signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, number: int, frame: Any) -> None:
        """As vLLM ends its workers."""
        self.close()
        raise SystemExit

    def _ask_late_where_gated(self) -> None:
        """For the owner's digests, not before all has been read: so whatever comes to the owner comes before them."""
        checker = self.worker._puller._checker
        ask, start = checker.ask, checker.start

        def ask_unless_gated(pull: Any) -> None:
            if not self.gate.is_armed:
                ask(pull)

        def ask_and_start(pull: Any, now: float) -> None:
            if pull.check is None:
                ask(pull)
            start(pull, now)

        checker.ask, checker.start = ask_unless_gated, ask_and_start

    # Requests

    def compute(self, num_tokens: int, seed: int) -> str:
        """The answer of a request that nobody helps with."""
        work = self._work(num_tokens, seed)
        self.fill([work.blocks], num_tokens, seed)
        return self._answer(work)

    def prefill(self, name: str, num_tokens: int, seed: int, lease_s: float | None = None) -> Place:
        """Compute a prompt's KV and hold it; what a router would tell the reader of it."""
        work = self._work(num_tokens, seed)
        self.fill([work.blocks], num_tokens, seed)
        self.held[name] = work.blocks
        self.hold(name, [work.blocks], num_tokens, lease_s)
        host = self.worker._settings.side_channel_host
        return Place(self.config.engine_id, host, self.port(), self.ticket(name, num_tokens))

    def resume(
        self, name: str, place: Place, num_tokens: int, seed: int, gated: bool = False, cached_blocks: int = 0
    ) -> None:
        """Fetch a request's KV from where it is, but for the blocks that are cached here; `outcome` says what became
        of it. With no tokens, only tell the owner that nobody wants them."""
        work = self.running[name] = self._work(num_tokens, seed)
        self.gate.is_armed = gated
        first_token, absent = cached_blocks * self.config.block_size_tokens, [-1] * cached_blocks
        if cached_blocks:
            self.fill([work.blocks[:cached_blocks] + [-1] * (len(work.blocks) - cached_blocks)], num_tokens, seed)
        self.pull(
            request_id=name, remote_request_id=name, blocks=[absent + work.blocks[cached_blocks:]],
            first_token=first_token, num_tokens=num_tokens - first_token, **asdict(place),
        )  # fmt: skip

    def abort(self, name: str) -> None:
        self.running[name].is_aborted = True
        self.cancel(name)

    def outcome(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while name not in self.ended and time.monotonic() < deadline:
            self.worker.wait(0.02 if self.config.offloads else deadline - time.monotonic())
            self.step()
        return self.ended.pop(name, None)

    def step(self) -> None:
        """What an engine does between two steps of its model."""
        events = self.worker.poll()
        for name in events.released | events.expired:
            self.free += self.held.pop(name)
        for name in events.received:
            self._end(name, None)
        for name, failure in events.failed.items():
            self._end(name, failure)

    def num_used(self) -> int:
        self.step()
        assert len(set(self.free)) == len(self.free), "a block was freed twice"
        return self.total - len(self.free)

    def phase(self, name: str) -> str:
        """Where in the hand-off a request is."""
        joint = self.worker._puller._joints.get(name)
        return next((pull.phase.name.lower() for pull in joint.pulls), "") if joint is not None else ""

    def is_gated(self) -> bool:
        """The first piece has been read, and nobody knows."""
        return self.gate.has_end

    def open_gate(self) -> None:
        self.gate.open()

    def _work(self, num_tokens: int, seed: int) -> Work:
        """Blocks whose content is nobody's; those that were freed last, which somebody may still be using."""
        count = -(-num_tokens // self.config.block_size_tokens)
        blocks, self.free = self.free[len(self.free) - count :], self.free[: len(self.free) - count]
        assert len(blocks) == count, "no blocks left: some were lost"
        self.fill([blocks], num_tokens, 999_999)
        return Work(blocks, num_tokens, seed)

    def _end(self, name: str, failure: Any) -> None:
        """The failure policy: compute what did not come, or end the request with the cause."""
        work = self.running.pop(name)
        ended = {"answer": None, "error": "", "cause": "", "took_s": time.monotonic() - work.started}
        if failure is not None:
            ended |= {"error": str(failure), "cause": failure.cause}
        if failure is not None and (work.is_aborted or self.policy == "fail"):
            self.free += work.blocks
        else:
            if failure is not None:
                self.fill([work.blocks], work.num_tokens, work.seed)
            ended["answer"] = self._answer(work)
        self.ended[name] = ended

    def _answer(self, work: Work) -> str:
        content = b"".join(self.read([work.blocks], 0, work.num_tokens))
        self.free += work.blocks
        return hashlib.sha256(content).hexdigest()

    # Changes of the cache

    def grow(self) -> None:
        self._grow(self.total + 4)

    def grow_where_memory_ends(self) -> str:
        """The host fills up after the extend has begun: the error that it raises."""
        from kvx.drivers.base import MemoryInfo
        from kvx.errors import OutOfDeviceMemory

        driver = self.cache._driver
        asked, room = iter([1 << 40]), driver._memory_info
        driver._memory_info = lambda: MemoryInfo(next(asked, 0), 1 << 40)
        try:
            self._grow(self.total + 4)
        except OutOfDeviceMemory as error:
            return str(error)
        finally:
            driver._memory_info = room
        return ""

    def nap(self) -> None:
        self.cache.sleep()
        self.cache.wake()

    def _grow(self, num_blocks: int) -> None:
        self.extend(num_blocks)
        self.free += range(self.total, num_blocks)
        self.total = num_blocks

    # What the process holds

    def footprint(self) -> dict[str, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {
            "file descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": len(maps),
            "shared memory mappings": sum("/dev/shm" in line or "/memfd:" in line or "/SYSV" in line for line in maps),
        }

    # Offload

    def _open_offload(self) -> None:
        from kvx_connectors.cpu_offload import CpuOffloadConnector

        from kvx.drivers.base import MemoryInfo
        from kvx.drivers.host import HostDriver
        from kvx.drivers.host_memory import read_host_memory
        from kvx.offload import HostPool
        from kvx.offload_worker import OffloadWorker

        self.is_host_full = False
        driver = HostDriver(1 << 16, lambda: MemoryInfo(0, 1) if self.is_host_full else read_host_memory())
        self.host = CpuOffloadConnector(1 << 16, driver)
        self.gate = Gate(self.host)
        self.cache.attach(self.host)
        self.pool, self.pool_generation = HostPool(), 0
        self.offload = OffloadWorker(
            self.host, self.cache.table.segments, self.groups, self.views,
            tokens_per_block=self.config.block_size_tokens, verifies=True, deadline_s=3.0,
        )  # fmt: skip
        self.loads: dict[str, Any] = {}
        self.stores: dict[str, Any] = {}

    def offer(self) -> int:
        """The pool has what host memory has; after a change of it, nothing of what was there."""
        self.host.wait_ready(10)
        if self.pool_generation != self.offload.generation:
            self.pool.reset()
            self.pool_generation = self.offload.generation
        self.pool.offer(self.offload.ready_blocks)
        return self.pool.num_blocks

    def run_offloaded(self, name: str, num_tokens: int, seed: int, gated: bool = False) -> int:
        """Load what host memory has of the request, else compute it and store it: how many blocks are loaded."""
        from kvx.offload_worker import BlockCopy

        self.offer()
        work = self._work(num_tokens, seed)
        keys = [(seed, index) for index in range(len(work.blocks))]
        if self.pool.lookup(keys) == len(keys):
            self.running[name], self.gate.is_armed = work, gated
            self.loads[name] = ticket = self.pool.load(keys)
            blocks = tuple((block,) for block in work.blocks)
            self.offload.load(BlockCopy(name, self.pool_generation, ticket.host_blocks, blocks))
            return len(keys)
        self.fill([work.blocks], num_tokens, seed)
        ticket = self.pool.store(keys)
        self.running[name] = work
        if ticket is None:  # no room: the request does not need any
            self._end(name, None)
        else:
            self.stores[name] = ticket
            blocks = tuple((work.blocks[index],) for _, index in ticket.keys)
            self.offload.store(BlockCopy(name, self.pool_generation, ticket.host_blocks, blocks))
        return 0

    def offload_outcome(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        from kvx.engine_side import Failure

        deadline = time.monotonic() + timeout_s
        while name not in self.ended and time.monotonic() < deadline:
            events = self.offload.poll()
            for one in events.stored | events.unstored:
                self.pool.finish(self.stores.pop(one), ok=one in events.stored)
                self._end(one, None)
            for one in events.loaded | events.unloaded.keys():
                ticket = self.loads.pop(one)
                is_lost = self.pool_generation != self.offload.generation or not self.pool.is_current(ticket)
                text = events.unloaded.get(one, "the cache changed under the load" if is_lost else "")
                self.pool.finish(ticket, ok=not text)
                failure = Failure("transfer_failed", "host memory", text) if text else None
                if self.running[one].is_aborted:
                    failure = Failure("cancelled", "host memory", "aborted by the engine")
                self._end(one, failure)
            time.sleep(0.001)
        self.pool.check_integrity()
        return self.ended.pop(name, None)

    def abort_offloaded(self, name: str) -> None:
        """Its blocks are freed when the load has ended."""
        self.running[name].is_aborted = True

    def fill_host(self, is_full: bool) -> None:
        """From its next opening on, host memory gives nothing, or gives again."""
        self.is_host_full = is_full
        self.nap()

    def pool_counts(self) -> dict[str, int]:
        return {**self.pool.counters.as_status(), "in_use": self.pool.num_in_use, "blocks": self.pool.num_blocks}


def _see_as_shared_memory(folder: str) -> None:
    """From here on this process's /dev/shm is that folder: whoever ends it can see what it left there."""
    _mount_apart()
    _call("mount", folder.encode(), b"/dev/shm", None, _MS_BIND, None)


def _enter(network: str) -> None:
    with open(f"/run/netns/{network}") as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)
    _mount_apart()
    _call("mount", b"kvx", b"/sys", b"sysfs", 0, None)  # libraries look there for the interfaces that they may use


def _mount_apart() -> None:
    """What is mounted from here on, this process alone sees."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def _call(name: str, *arguments: Any) -> None:
    """A call of libc's that Python has from 3.12 on, or has not."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}; are we root?")
