"""Time a connector between two processes, beside its own library driven by a bare loop, and beside memcpy.

Each side of the comparison is a pair of processes of its own (a library's settings are a whole process's), which take
turns: an owner with memory full of numbers, and a reader that fetches all of it in blocks, in order or permuted, and
has checked once that every block arrived where it should.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import kvx
from kvx.bench_process import DEADLINE_S, Process, reading_class
from kvx.connector import Connector, Op, TransferState
from kvx.drivers.select import driver_for
from kvx.errors import TransferError
from kvx.plan import RUN_DTYPE, Runs
from kvx.region import MemoryRegion
from kvx.spread import spread
from kvx.tensor import tensor_over
from kvx.vmm import Reservation

RAW_GROUP = "kvx.raw_loops"
"""Entry points by connector name: classes of `RawLoop`, which drive the connector's library without kvx."""
CONNECTOR, RAW, MEMCPY = "connector", "raw library", "memcpy"
_LEAST_ROUND_S = 0.1
_OWNER_POLL_S = 100e-6

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """`total_bytes` a transfer, in blocks of each of `block_sizes_bytes`; `in_flight` transfers at a time."""

    connector: str
    device: str = "cpu"
    peer_device: str | None = None
    total_bytes: int = 128 << 20
    block_sizes_bytes: Sequence[int] = (4 << 10, 64 << 10, 1 << 20)
    in_flight: int = 1
    pairs: int = 7


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    block_bytes: int
    permuted: bool

    @property
    def name(self) -> str:
        return f"{self.block_bytes >> 10} KiB {'permuted' if self.permuted else 'in order'}"

    @lru_cache(maxsize=1)  # noqa: B019  (a case is a value) made by `check`, so that no timing has it
    def offsets(self, total_bytes: int) -> tuple[Int64s, Int64s]:
        """(source, destination) offset of every block."""
        starts = np.arange(total_bytes // self.block_bytes, dtype=np.int64) * self.block_bytes
        if not self.permuted:
            return starts, starts
        numbers = np.random.default_rng(self.block_bytes)
        return numbers.permutation(starts), numbers.permutation(starts)


class RawLoop(Protocol):
    """A library used as well as it can be, without kvx. Addresses and bytes; made and used in one process."""

    environment: Mapping[str, str]
    """The library's best settings, set before it is imported."""

    def serve(self, device: str, address: int, nbytes: int) -> bytes:
        """Owner: register the memory; what a reader needs."""

    def progress(self) -> None:
        """Owner: let the library work."""

    def prepare(self, metadata: bytes, device: str, address: int, nbytes: int) -> None:
        """Reader: register the memory and connect."""

    def read(self, remote: Int64s, local: Int64s, block_bytes: int) -> None:
        """Reader: fetch blocks at these addresses, and return when all have arrived."""

    def close(self) -> None: ...


def bench_transfer(
    settings: TransferSettings, as_it_comes: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """The report: GB/s of each side and its ratios, case by case; `as_it_comes` gets what there is after each.

    ConnectorError: as `reading_class`.
    """
    reading_class(settings.connector)
    sides = [CONNECTOR, *([RAW] if _raw_class(settings.connector) else []), MEMCPY]
    rows: list[dict[str, Any]] = []
    report = {
        "kvx": kvx.__version__,
        "torch": torch.__version__,
        **{key: getattr(settings, key) for key in ("connector", "device", "total_bytes", "in_flight", "pairs")},
        "peer_device": settings.peer_device or settings.device,
        "rows": rows,
    }
    with ExitStack() as undo:
        readers = {side: undo.enter_context(_reader(side, settings)) for side in sides}
        for case in (Case(size, permuted) for size in settings.block_sizes_bytes for permuted in (False, True)):
            rows.append(_measure(case, readers, settings))
            as_it_comes(report)
    return report


def _measure(case: Case, readers: Mapping[str, Process], settings: TransferSettings) -> dict[str, Any]:
    """Each side in turn; the first round of each is not counted, and says how often to repeat."""
    repeats = {}
    for side, reader in readers.items():
        reader.ask("check", case)
        repeats[side] = max(1, round(_LEAST_ROUND_S / reader.ask("time", case, 1, settings.in_flight)))
    seconds: dict[str, list[float]] = {side: [] for side in readers}
    for number in range(settings.pairs):
        for side in readers if number % 2 else reversed(list(readers)):
            seconds[side].append(readers[side].ask("time", case, repeats[side], settings.in_flight))
    alone = [readers[CONNECTOR].ask("time", case, 1, 1) for _ in range(settings.pairs)]
    row: dict[str, Any] = {"case": case.name, "block_bytes": case.block_bytes, "permuted": case.permuted}
    row["bytes_per_s"] = {
        side: spread([settings.total_bytes / value for value in values]) for side, values in seconds.items()
    }
    row["single_transfer_s"] = spread(alone)
    row["ratio"] = {
        side: _with_quartile([theirs / ours for ours, theirs in zip(seconds[CONNECTOR], seconds[side], strict=True)])
        for side in readers
        if side != CONNECTOR
    }
    return row


def _with_quartile(values: Sequence[float]) -> dict[str, float]:
    upper = statistics.quantiles(values, n=4, method="inclusive")[2] if len(values) > 1 else values[0]
    return {**spread(values), "upper_quartile": upper}


def _raw_class(connector: str) -> type[RawLoop] | None:
    for point in entry_points(group=RAW_GROUP, name=connector):
        loaded: type[RawLoop] = point.load()
        return loaded
    return None


# Processes


@contextmanager
def _reader(side: str, settings: TransferSettings) -> Iterator[Process]:
    """A side's two processes (memcpy needs one)."""
    raw = _raw_class(settings.connector)
    environment = dict(raw.environment) if side == RAW and raw is not None else {}
    with ExitStack() as undo:
        metadata = b""
        if side != MEMCPY:
            owner = Process(_Owner, side, settings, environment=environment)
            undo.callback(owner.stop)
            metadata = owner.first_answer
        reader = Process(_ROLES[side], settings, metadata, environment=environment)
        undo.callback(reader.stop)
        yield reader


def _memory(device: str, total_bytes: int, undo: ExitStack, *, shareable: bool) -> tuple[Reservation, torch.Tensor]:
    """Memory as a cache has it: one allocation behind reserved addresses."""
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    driver = driver_for(device, shareable=shareable)
    granules = -(-total_bytes // driver.granularity_bytes)
    reservation = Reservation(driver, granules * driver.granularity_bytes)
    reservation.reserve()
    undo.callback(reservation.release)
    reservation.commit_range(0, reservation.nbytes)
    return reservation, tensor_over(reservation)[:total_bytes]


def _plain_memory(device: str, total_bytes: int) -> torch.Tensor:
    return torch.zeros(total_bytes, dtype=torch.int8, device=device)


def _raw_memory(device: str, total_bytes: int, undo: ExitStack) -> torch.Tensor:
    """The same pages as the connector's on the host; torch's own on a GPU, where libraries like no other."""
    if device != "cpu":
        return _plain_memory(device, total_bytes)
    return _memory(device, total_bytes, undo, shareable=False)[1]


def _number(memory: torch.Tensor) -> None:
    """Every 8 bytes their own number, so that a block in a wrong place shows."""
    words = memory.view(torch.int64)
    torch.arange(len(words), out=words)


class _Owner:
    """Memory full of numbers that others read."""

    idle_s = _OWNER_POLL_S

    def __init__(self, side: str, settings: TransferSettings) -> None:
        self._undo = ExitStack()
        device = settings.peer_device or settings.device
        self._connector: Connector | None = None
        self._raw: RawLoop | None = None
        if side == CONNECTOR:
            self._connector, memory = _opened(settings.connector, device, settings.total_bytes, self._undo)
            self.first_answer = self._connector.metadata()
        else:
            raw = _raw_class(settings.connector)
            assert raw is not None, "the parent asked for it"
            memory = _raw_memory(device, settings.total_bytes, self._undo)
            self._raw = raw()
            self._undo.callback(self._raw.close)
            self.first_answer = self._raw.serve(device, memory.data_ptr(), settings.total_bytes)
        _number(memory)
        self._memory = memory
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)

    def idle(self) -> None:
        if self._connector is not None:
            self._connector.poll()
        if self._raw is not None:
            self._raw.progress()

    def close(self) -> None:
        del self._memory
        self._undo.close()


class _Reader:
    """What the three readers share: `read` fetches a case's blocks `repeats` times, `in_flight` at once."""

    idle_s = 3600.0
    first_answer: object = None
    memory: torch.Tensor

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._undo = ExitStack()

    def idle(self) -> None:
        return

    def read(self, case: Case, repeats: int, in_flight: int) -> None:
        raise NotImplementedError

    def check(self, case: Case) -> None:
        """TransferError when the first block that did not arrive, or arrived elsewhere, is found."""
        self.memory.zero_()
        self._synchronize()
        self.read(case, 1, 1)
        self._synchronize()
        source, destination = case.offsets(self._settings.total_bytes)
        firsts = self.memory.view(torch.int64)[torch.from_numpy(destination // 8).to(self.memory.device)].cpu()
        lasts = (destination + case.block_bytes) // 8 - 1
        found = self.memory.view(torch.int64)[torch.from_numpy(lasts).to(self.memory.device)].cpu()
        wrong = (firsts.numpy() != source // 8) | (found.numpy() != (source + case.block_bytes) // 8 - 1)
        if wrong.any():
            raise TransferError(f"{case.name}: block {int(wrong.argmax())} of {len(wrong)} did not arrive rightly")

    def time(self, case: Case, repeats: int, in_flight: int) -> float:
        """Seconds a transfer."""
        self._synchronize()
        started_s = time.perf_counter()
        self.read(case, repeats, in_flight)
        self._synchronize()
        return (time.perf_counter() - started_s) / repeats

    def close(self) -> None:
        del self.memory
        self._undo.close()

    def _synchronize(self) -> None:
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)


class _ConnectorReader(_Reader):
    def __init__(self, settings: TransferSettings, metadata: bytes) -> None:
        super().__init__(settings)
        self._connector, self.memory = _opened(settings.connector, settings.device, settings.total_bytes, self._undo)
        self._peer = self._connector.connect(metadata)

    def read(self, case: Case, repeats: int, in_flight: int) -> None:
        runs, started, ended = _runs(case, self._settings.total_bytes), 0, 0
        while ended < repeats:
            while started < repeats and started - ended < in_flight:
                self._connector.submit(Op.READ, self._peer, runs, deadline_s=DEADLINE_S)
                started += 1
            for transfer in self._connector.poll().finished:
                if transfer.state is not TransferState.DONE:
                    raise transfer.cause or TransferError(f"a transfer was {transfer.state.value}")
                ended += 1


class _RawReader(_Reader):
    def __init__(self, settings: TransferSettings, metadata: bytes) -> None:
        super().__init__(settings)
        self.memory = _raw_memory(settings.device, settings.total_bytes, self._undo)
        raw = _raw_class(settings.connector)
        assert raw is not None, "the parent asked for it"
        self._raw = raw()
        self._undo.callback(self._raw.close)
        self._raw.prepare(metadata, settings.device, self.memory.data_ptr(), settings.total_bytes)

    def read(self, case: Case, repeats: int, in_flight: int) -> None:
        del in_flight  # one at a time
        source, destination = case.offsets(self._settings.total_bytes)
        size = case.block_bytes if case.permuted else self._settings.total_bytes
        if not case.permuted:  # its best descriptors: neighbours are one
            source, destination = source[:1], destination[:1]
        for _ in range(repeats):
            self._raw.read(source, destination, size)


class _MemcpyReader(_Reader):
    """One call over everything, from ordinary memory to ordinary memory of this process."""

    def __init__(self, settings: TransferSettings, metadata: bytes) -> None:
        del metadata
        super().__init__(settings)
        self.memory = _plain_memory(settings.device, settings.total_bytes)
        self._source = _plain_memory(settings.peer_device or settings.device, settings.total_bytes)

    def check(self, case: Case) -> None:
        del case  # it copies no blocks

    def read(self, case: Case, repeats: int, in_flight: int) -> None:
        del case, in_flight
        for _ in range(repeats):
            if self.memory.is_cuda:
                self.memory.copy_(self._source)
            else:  # torch would take several threads
                ctypes.memmove(self.memory.data_ptr(), self._source.data_ptr(), self.memory.numel())


_ROLES: dict[str, type[_Reader]] = {CONNECTOR: _ConnectorReader, RAW: _RawReader, MEMCPY: _MemcpyReader}


def _opened(name: str, device: str, total_bytes: int, undo: ExitStack) -> tuple[Connector, torch.Tensor]:
    """An open connector over memory of its own, and the memory."""
    found = reading_class(name)
    reservation, memory = _memory(device, total_bytes, undo, shareable=found.capabilities.shares_memory)
    connector = found()
    connector.data_address = "127.0.0.1"  # the other end is on this host, whatever interfaces come and go
    connector.open([MemoryRegion(reservation.address, total_bytes, 0, reservation.mappings[0])], 1)
    undo.callback(connector.close)
    return connector, memory


@lru_cache(maxsize=1)
def _runs(case: Case, total_bytes: int) -> Runs:
    """As a plan gives them: neighbours on both sides are one run."""
    source, destination = case.offsets(total_bytes)
    rows = np.zeros(len(source) if case.permuted else 1, RUN_DTYPE)
    rows["source"], rows["destination"] = source[: len(rows)], destination[: len(rows)]
    rows["length"], rows["count"] = total_bytes // len(rows), 1
    return Runs(rows)
