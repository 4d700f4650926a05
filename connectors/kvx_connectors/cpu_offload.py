"""CPU offload: a connector whose peer is host memory of its own process.

WRITE stores cache bytes there, READ loads them. The peer is made of the connector's own metadata, which nobody else
can use. Host memory is taken by a thread, piece by piece (a big one takes seconds), and `ready_bytes` says how much of
it is there; a transfer that needs more waits for it.

Copies run on one thread of the connector, loads before stores: a request waits for a load. On a GPU they begin when
what the caller's stream had queued at `submit` has run, so that a store sees the step that wrote its blocks.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvx.connector import Capabilities, Copies, Op, Transfer, TransferState
from kvx.drivers.base import Driver
from kvx.drivers.copier import Copier, Copying, copier_for
from kvx.drivers.host import HostDriver
from kvx.errors import ConnectorError, HandshakeError, KVXError, TransferError
from kvx.offload_worker import OffloadConnector
from kvx.peer import Peer, RegionTable
from kvx.region import MemoryRegion
from kvx.vmm import Reservation

logger = logging.getLogger(__name__)

# Host memory is taken in pieces, so that the first blocks can be used soon, and few enough to look up quickly.
LEAST_PIECE_BYTES = 64 << 20
MOST_PIECES = 64


class CpuOffloadConnector(OffloadConnector):
    """`host_bytes`: as many as the cache's registered memory spans, unless given. `driver` takes the host memory."""

    name: ClassVar[str] = "cpu_offload"
    capabilities: ClassVar[Capabilities] = Capabilities(
        operations=frozenset(Op),
        notify=False,
        memory=frozenset({"cpu", "cuda"}),
        reaches_processes=False,
        opens_ports=False,
    )

    def __init__(self, host_bytes: int | None = None, driver: Driver | None = None) -> None:
        super().__init__()
        self.host_bytes = host_bytes
        self._driver = driver
        self._instance = ""
        self._host: HostMemory | None = None
        self._copier: Copier | None = None
        self._thread: CopyThread | None = None

    @property
    def ready_bytes(self) -> int:
        host = self._host
        return 0 if host is None else host.ready_bytes

    def wait_ready(self, timeout_s: float | None = None) -> int:
        """Wait until all host memory is there, or will not come; returns `ready_bytes`."""
        if self._host is not None:
            self._host.wait_settled(timeout_s)
        return self.ready_bytes

    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        devices = {region.mapping.device for region in regions}
        if len(devices) != 1:
            raise ConnectorError("one connector offloads the memory of one device; use one rank for each device")
        device = devices.pop()
        span = max(region.offset_bytes + region.nbytes for region in regions)
        self._copier = copier_for(device)
        self._host = HostMemory(self._driver or HostDriver(), self._copier, self.host_bytes or span)
        try:
            self._host.open()
        except BaseException:
            self._copier.close()
            self._host = self._copier = None
            raise
        self._thread = CopyThread(device, self._copier, self._host)
        self._thread.start()
        self._instance = uuid.uuid4().hex

    def _reachable(self) -> RegionTable:
        assert self._host is not None, "an open connector has host memory"
        return self._host.table

    def _metadata(self) -> bytes:
        return self._instance.encode()

    def _connect(self, library_metadata: bytes) -> Peer:
        if library_metadata != self._instance.encode():
            raise HandshakeError(
                "this is the metadata of other host memory; cpu_offload reaches its own only: connect(metadata())"
            )
        name = f"host-{self._instance}"
        if known := self._peers.get(name):
            self.disconnect(known)
        return Peer(name=name, generation=0, regions=self._reachable())

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        del notify
        assert self._thread is not None, "an open connector copies"
        transfer.handle = self._thread.add(transfer.op, copies)

    def _progress(self) -> list[tuple[str, bytes]]:
        for transfer in list(self._pending):
            job = _job_of(transfer)
            if not job.is_over():
                continue
            if job.error is None and not job.is_dropped:
                self._finish(transfer, TransferState.DONE)
            else:
                text = str(job.error or "the copy was dropped before it began")
                self._finish(transfer, TransferState.FAILED, TransferError(f"{transfer.op.value}: {text}"))
        return []

    def _cancel(self, transfer: Transfer) -> None:
        _job_of(transfer).drop()

    def _disconnect(self, peer: Peer) -> None:
        """Its transfers have been cancelled; there is no connection."""

    def _close(self) -> None:
        assert self._thread is not None, "an open connector copies"
        assert self._host is not None
        assert self._copier is not None
        self._host.stop()
        self._thread.close()
        self._progress()
        self._host.close()
        self._copier.close()
        self._thread = self._host = self._copier = None


class HostMemory:
    """Host memory that a thread of its own takes and registers, piece by piece from the first address on."""

    def __init__(self, driver: Driver, copier: Copier, nbytes: int) -> None:
        self._driver, self._copier = driver, copier
        granule = driver.granularity_bytes
        self._nbytes = _whole(nbytes, granule)
        self._piece_bytes = _whole(max(LEAST_PIECE_BYTES, self._nbytes // MOST_PIECES), granule)
        self._reservation = Reservation(driver, self._nbytes)
        self._changed = threading.Condition()
        self._ready_bytes = 0
        self._is_settled = False
        self._is_stopping = False
        self._registered: list[int] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvx-offload-memory", daemon=True)

    @property
    def ready_bytes(self) -> int:
        """The first so many bytes may be copied to and from."""
        return self._ready_bytes

    @property
    def table(self) -> RegionTable:
        """All of it, ready or not; one region for each piece."""
        starts = range(0, self._nbytes, self._piece_bytes)
        return RegionTable.of(
            self._reservation.address, [(at, min(self._piece_bytes, self._nbytes - at)) for at in starts]
        )

    def open(self) -> None:
        """Take the addresses now, and the memory behind them on a thread."""
        self._reservation.reserve()
        self._thread.start()

    def wait_settled(self, timeout_s: float | None = None) -> None:
        """Until all of it is ready, or no more will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled, timeout_s)

    def is_ready(self, end_address: int) -> bool:
        """Whether all bytes below an address may be copied to and from."""
        return end_address - self._reservation.address <= self._ready_bytes

    def require_ready(self, end_address: int) -> None:
        """Wait until all bytes below an address are ready. ConnectorError when they will not be, and why."""
        wanted = end_address - self._reservation.address
        with self._changed:
            self._changed.wait_for(lambda: self._ready_bytes >= wanted or self._is_settled)
            if self._ready_bytes < wanted:
                raise ConnectorError(
                    f"only {self._ready_bytes} of {self._nbytes} bytes of host memory are there "
                    f"({self._error or 'closed'}); offload less"
                )

    def stop(self) -> None:
        """Take no more memory; whoever waits for some hears of it."""
        self._is_stopping = True
        self._thread.join()

    def close(self) -> None:
        """Give all of it back; nothing may be copying there."""
        self.stop()
        while self._registered:
            self._copier.unregister_host(self._registered.pop())
        self._ready_bytes = 0
        self._reservation.release()

    def _run(self) -> None:
        try:
            for at in range(0, self._nbytes, self._piece_bytes):
                if self._is_stopping:
                    break
                self._take(at, min(self._piece_bytes, self._nbytes - at))
        except KVXError as error:
            self._error = error
            logger.warning("cpu_offload has %d of %d bytes of host memory: %s", self._ready_bytes, self._nbytes, error)
        finally:
            with self._changed:
                self._is_settled = True
                self._changed.notify_all()

    def _take(self, offset_bytes: int, nbytes: int) -> None:
        self._reservation.commit_range(offset_bytes, nbytes)
        address = self._reservation.address + offset_bytes
        self._copier.register_host(address, nbytes)
        self._registered.append(address)
        with self._changed:
            self._ready_bytes = offset_bytes + nbytes
            self._changed.notify_all()


@dataclass(eq=False)
class Job:
    """One transfer's copies. `is_over` when no byte of it moves any more."""

    copies: Copies
    op: Op
    fence: torch.cuda.Event | None
    copying: Copying | None = None
    error: Exception | None = None
    is_dropped: bool = False
    _is_taken: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def drop(self) -> None:
        """Do not begin it; one that has begun ends by itself, soon."""
        with self._lock:
            self.is_dropped = not self._is_taken

    def take(self) -> bool:
        """Begin it, unless it was dropped."""
        with self._lock:
            self._is_taken = not self.is_dropped
            return self._is_taken

    def is_over(self) -> bool:
        with self._lock:  # a copier's answer is for one thread at a time
            if self.is_dropped or self.error is not None:
                return True
            try:
                return self.copying is not None and self.copying.is_done()
            except KVXError as error:
                self.error = error
                return True


class CopyThread:
    """Starts jobs one after the other, loads first. On the host a copy ends in its start; a GPU has many under way."""

    def __init__(self, device: str, copier: Copier, host: HostMemory) -> None:
        self._device, self._copier, self._host = device, copier, host
        self._numbers = itertools.count()
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._thread = threading.Thread(target=self._run, name="kvx-offload-copies", daemon=True)
        self._fence_stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._started: list[Job] = []
        self._is_stopping = False

    def start(self) -> None:
        if self._is_cuda:
            self._fence_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._thread.start()

    def add(self, op: Op, copies: Copies) -> Job:
        """Queue a transfer's copies; they begin after what this thread's stream has queued now.

        Where that takes no more than a launch, it is made here: the copying thread would have to wait for the
        interpreter, which the caller goes on using.
        """
        job = Job(copies, op, self._fence())
        if self._copier.only_queues and self._host.is_ready(_end_of(copies)) and job.take():
            _guarded(job, self._launch)
        else:
            self._jobs.put((int(op is Op.WRITE), next(self._numbers), job))
        return job

    def close(self) -> None:
        """Drop what has not begun, wait for what has."""
        self._is_stopping = True
        self._jobs.put((-1, next(self._numbers), None))
        self._thread.join()
        for job in self._started:
            _guarded(job, _wait)
        while not self._jobs.empty():
            left = self._jobs.get_nowait()[2]
            if left is not None:
                left.drop()

    @property
    def _is_cuda(self) -> bool:
        return torch.device(self._device).type == "cuda"

    def _fence(self) -> torch.cuda.Event | None:
        """What the caller's stream has queued, where its device has streams."""
        if not self._is_cuda:
            return None
        fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        fence.record(torch.cuda.current_stream(self._device))
        return fence

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None and not self._is_stopping:
            if job.take():
                _guarded(job, self._begin)
        if job is not None:
            job.drop()

    def _begin(self, job: Job) -> None:
        self._host.require_ready(_end_of(job.copies))
        self._launch(job)

    def _launch(self, job: Job) -> None:
        copies, after = job.copies, None
        to, at = (copies.local, copies.remote) if job.op is Op.READ else (copies.remote, copies.local)
        with self._lock:
            if job.fence is not None and self._fence_stream is not None:
                self._fence_stream.wait_event(job.fence)
                after = self._fence_stream.cuda_stream
            self._started = [one for one in self._started if not one.is_over()]
            job.copying = self._copier.start(to, at, copies.length, after=after)
            self._started.append(job)


def _end_of(copies: Copies) -> int:
    """The address behind the last byte of host memory that they touch."""
    return int((copies.remote + copies.length).max())


def _wait(job: Job) -> None:
    if job.copying is not None:
        job.copying.wait()


def _guarded(job: Job, step: Callable[[Job], None]) -> None:
    """What goes wrong is the job's failure; the thread lives on."""
    try:
        step(job)
    except Exception as error:  # noqa: BLE001  told to whoever polls
        job.error = error


def _job_of(transfer: Transfer) -> Job:
    assert isinstance(transfer.handle, Job)
    return transfer.handle


def _whole(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
