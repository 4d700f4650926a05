"""CPU offload on real memory: the connector by itself, and the worker that copies whole blocks with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fake_connector import region
from kvx_connectors import cpu_offload
from kvx_connectors.cpu_offload import CpuOffloadConnector
from memory_helpers import opened_cache, small_geometry

from kvx.cache import ExtensibleKVCache
from kvx.connector import Connector, Op, Transfer, TransferState
from kvx.drivers.base import Allocation, MemoryInfo
from kvx.drivers.copier import DONE, Copying, HostCopier, Int64s
from kvx.drivers.host import HostDriver
from kvx.errors import ConnectorStateError, DriverError, HandshakeError, LayoutError
from kvx.geometry import group_geometry
from kvx.layout import KVCacheLayout
from kvx.offload_worker import BlockCopy, OffloadEvents, OffloadWorker
from kvx.plan import RUN_DTYPE, Runs

DEADLINE_S = 10.0
PAGE = 4096


@dataclass
class World:
    """A small cache in READY with the connector attached, and the worker over it."""

    cache: ExtensibleKVCache
    views: dict[str, torch.Tensor]
    connector: CpuOffloadConnector
    worker: OffloadWorker

    def fill(self, block: int, value: float) -> None:
        for index, view in enumerate(self.views.values()):
            numbers = torch.arange(view[block].numel(), dtype=view.dtype).view_as(view[block])
            view[block] = numbers + value + index

    def read(self, *blocks: int) -> list[torch.Tensor]:
        return [view[block].clone() for block in blocks for view in self.views.values()]

    def store(self, name: str, host_blocks: list[int], blocks: list[int], **more: Any) -> OffloadEvents:
        self.worker.store(self.copy(name, host_blocks, blocks, **more))
        return self.events()

    def load(self, name: str, host_blocks: list[int], blocks: list[int], **more: Any) -> OffloadEvents:
        self.worker.load(self.copy(name, host_blocks, blocks, **more))
        return self.events()

    def copy(self, name: str, host_blocks: list[int], blocks: list[int], generation: int = 0) -> BlockCopy:
        return BlockCopy(
            name, generation or self.worker.generation, tuple(host_blocks), tuple((block,) for block in blocks)
        )

    def events(self) -> OffloadEvents:
        until = time.monotonic() + DEADLINE_S
        while (found := self.worker.poll()) == OffloadEvents():
            assert time.monotonic() < until, "nothing ended"
        return found


def make_world(layout: KVCacheLayout = KVCacheLayout.LBHNC, host_blocks: int = 8, **worker: Any) -> Iterator[World]:
    geometry = small_geometry(layout)
    cache, views = opened_cache(HostDriver(PAGE), geometry)
    connector = CpuOffloadConnector(host_blocks * geometry.block_bytes, HostDriver(PAGE))
    cache.commit(1)
    cache.extend_kv_cache(geometry.capacity_blocks)
    cache.attach(connector)
    connector.wait_ready(DEADLINE_S)
    made = OffloadWorker(
        connector, cache.table.segments, [group_geometry(geometry, 0)], views, tokens_per_block=4, **worker
    )
    yield World(cache, views, connector, made)
    cache.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvx-offload")]


@pytest.fixture
def world() -> Iterator[World]:
    yield from make_world()


@pytest.fixture
def verifying() -> Iterator[World]:
    yield from make_world(verifies=True)


# --- the worker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC])
def test_blocks_leave_and_come_back_elsewhere(layout: KVCacheLayout) -> None:
    for world in make_world(layout):
        for block in range(3):
            world.fill(block, 1000.0 * (block + 1))
        wanted, beside = world.read(0, 1, 2), world.read(6, 10)
        assert world.store("s", [7, 0, 3], [0, 1, 2]).stored == {"s"}
        world.cache.committed_range(0, 3 * world.cache.table.segments[0].block_stride_bytes).zero_()
        assert world.load("r", [7, 0, 3], [9, 8, 7]).loaded == {"r"}
        assert all(map(torch.equal, world.read(9, 8, 7), wanted))
        assert all(map(torch.equal, world.read(6, 10), beside))
        nbytes = 3 * world.worker.host_block_bytes
        status = world.worker.status()
        assert (status["stored_bytes"], status["loaded_bytes"], status["loaded_tokens"]) == (nbytes, nbytes, 12)
        assert (status["failed"], status["in_flight"]) == (0, 0)


def test_as_many_blocks_as_were_paid_for(world: World) -> None:
    assert 8 <= world.worker.ready_blocks <= 8 + PAGE // world.worker.host_block_bytes
    assert world.worker.status()["host_blocks"] == world.worker.ready_blocks


def test_a_host_block_that_does_not_exist_fails_its_own_copy(world: World) -> None:
    events = world.load("r", [1000], [1])
    assert "not registered" in events.unloaded["r"]
    assert world.store("s", [1000], [1]).unstored == {"s"}
    assert world.store("t", [0], [1]).stored == {"t"}
    assert world.worker.metrics.failed == 2


def test_blocks_of_an_older_memory_are_refused(world: World) -> None:
    world.store("s", [0], [1])
    before = world.worker.generation
    world.cache.sleep()
    asleep = world.load("r", [0], [1], generation=before)
    assert "closed" in asleep.unloaded["r"]
    world.cache.wake()
    assert world.worker.generation > before
    assert f"generation {before} is asked for" in world.load("r", [0], [1], generation=before).unloaded["r"]
    assert world.store("s", [0], [1]).stored == {"s"}


def test_a_load_of_nothing_fails_its_own_request(world: World) -> None:
    """What the engine core asks for when host memory was given up under a request."""
    world.worker.load(BlockCopy("r", -1, (), ()))
    assert "generation -1 is asked for" in world.events().unloaded["r"]


def test_a_store_that_ended_with_the_cache_is_not_digested_any_more(verifying: World) -> None:
    """The cache's addresses have no memory: reading them would end the process."""
    verifying.worker.store(verifying.copy("s", [0], [1]))
    (transfer,) = verifying.connector._pending
    until = time.monotonic() + DEADLINE_S
    while not cpu_offload._job_of(transfer).is_over():
        assert time.monotonic() < until
    verifying.cache.sleep()
    assert verifying.events().stored == {"s"}
    verifying.worker.load(verifying.copy("r", [0], [1]))
    assert "closed" in verifying.events().unloaded["r"]
    verifying.cache.wake()


def test_a_block_list_of_another_shape_is_refused(world: World) -> None:
    world.worker.load(BlockCopy("r", world.worker.generation, (0,), ((1, 2),)))
    assert "each host block holds 1 cache blocks" in world.events().unloaded["r"]


def test_digests_agree_when_nothing_happened(verifying: World) -> None:
    verifying.fill(1, 5.0)
    verifying.store("s", [2], [1])
    verifying.load("r", [2], [4])
    digests = verifying.worker.status()["digests"]
    assert (digests["expected"], digests["checked"], digests["mismatched"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("fault", "host_blocks", "bad"),
    [("flip-byte", [2, 3], 1), ("swap-blocks", [2, 3], 2), ("swap-blocks", [2], 1), ("stale", [2, 3], 1)],
)
def test_a_fault_on_purpose_is_found_once_and_named(fault: str, host_blocks: list[int], bad: int) -> None:
    for world in make_world(verifies=True, injected=fault):
        for block in range(4):
            world.fill(block, 100.0 * block)
        world.store("s", [0, 1, 2, 3], [0, 1, 2, 3])
        ended = world.load("r", host_blocks, [7, 8][: len(host_blocks)])
        assert (ended.loaded, set(ended.unloaded)) == (frozenset(), {"r"})
        assert "digests differ in layer group g, first at position 0" in ended.unloaded["r"]
        assert world.worker.status()["failed"] == 1
        found = world.worker.status()["digests"]
        assert found["mismatched"] == bad
        assert found["mismatches"][0] == {"request": "r", "layer_group": "g", "position": 0}
        assert world.load("again", host_blocks, [7, 8][: len(host_blocks)]).loaded == {"again"}
        assert world.worker.status()["digests"]["mismatched"] == bad


def test_what_differs_is_used_where_that_is_asked_for() -> None:
    for world in make_world(verifies=True, injected="stale-used"):
        for block in range(4):
            world.fill(block, 100.0 * block)
        world.store("s", [0, 1, 2, 3], [0, 1, 2, 3])
        assert world.load("r", [2, 3], [7, 8]).loaded == {"r"}
        found = world.worker.status()
        assert (found["failed"], found["digests"]["mismatched"]) == (0, 1)


# --- the connector --------------------------------------------------------------------------------------------------


class HeldCopier(HostCopier):
    """Copies when the test lets it."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.entered = threading.Event()
        self.sizes: list[int] = []
        self.fails = False

    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        self.entered.set()
        assert self.may_go.wait(DEADLINE_S)
        if self.fails:
            raise DriverError("copy", 1, "BROKEN")
        self.sizes.append(int(nbytes.sum()))
        super().start(destination, source, nbytes, after=after)
        return DONE


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> HeldCopier:
    held = HeldCopier()
    monkeypatch.setattr(cpu_offload, "copier_for", lambda device: held)
    return held


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    return np.arange(16 * PAGE, dtype=np.uint64).view(np.uint8)[: 16 * PAGE].copy()


@pytest.fixture
def connector(memory: np.ndarray[Any, Any]) -> Iterator[CpuOffloadConnector]:
    made = CpuOffloadConnector(driver=HostDriver(PAGE))
    made.open([region(0, memory.nbytes, base=memory.ctypes.data)], 1)
    yield made
    made.close()


def runs(*rows: tuple[int, int, int]) -> Runs:
    array = np.zeros(len(rows), RUN_DTYPE)
    for index, row in enumerate(rows):
        array[index] = (*row, 0, 0, 1)
    return Runs(array)


def ended(connector: Connector, count: int = 1) -> list[Transfer]:
    found: list[Transfer] = []
    until = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} ended"
        found += connector.poll().finished
    return found


def test_its_peer_mirrors_the_cache_by_default(connector: CpuOffloadConnector, memory: np.ndarray[Any, Any]) -> None:
    assert not connector.capabilities.reaches_processes
    peer = connector.connect(connector.metadata())
    before = memory.copy()
    connector.submit(Op.WRITE, peer, runs((0, 0, memory.nbytes)), deadline_s=DEADLINE_S)
    assert ended(connector)[0].state is TransferState.DONE
    memory[:] = 0
    connector.submit(Op.READ, peer, runs((100, 200, 5000)), deadline_s=DEADLINE_S)
    ended(connector)
    assert (memory[200:5200] == before[100:5100]).all()
    assert not memory[:200].any()
    assert not memory[5200:].any()


def test_only_its_own_metadata_connects(connector: CpuOffloadConnector, memory: np.ndarray[Any, Any]) -> None:
    other = CpuOffloadConnector(driver=HostDriver(PAGE))
    other.open([region(0, memory.nbytes, base=memory.ctypes.data)], 1)
    with pytest.raises(HandshakeError, match="metadata of other host memory"):
        connector.connect(other.metadata())
    other.close()
    first = connector.connect(connector.metadata())
    second = connector.connect(connector.metadata())
    assert (first.connected, second.connected) == (False, True)


def test_bytes_outside_either_side_are_refused(connector: CpuOffloadConnector, memory: np.ndarray[Any, Any]) -> None:
    peer = connector.connect(connector.metadata())
    for row in ((memory.nbytes - 10, 0, 20), (0, memory.nbytes - 10, 20)):
        with pytest.raises(LayoutError, match="not registered"):
            connector.submit(Op.WRITE, peer, runs(row), deadline_s=1)


def test_loads_go_before_stores_and_a_cancelled_one_never_begins(
    copier: HeldCopier, connector: CpuOffloadConnector
) -> None:
    peer = connector.connect(connector.metadata())
    submit = lambda op, size: connector.submit(op, peer, runs((0, 0, size)), deadline_s=DEADLINE_S)  # noqa: E731
    first = submit(Op.WRITE, 1)
    assert copier.entered.wait(DEADLINE_S)
    store, dropped, load = submit(Op.WRITE, 2), submit(Op.WRITE, 3), submit(Op.READ, 4)
    connector.cancel(dropped)
    connector.cancel(first)  # it has begun, and ends as it would have
    copier.may_go.set()
    states = {transfer: transfer.state for transfer in ended(connector, 4)}
    assert copier.sizes == [1, 4, 2]
    assert states[dropped] is TransferState.CANCELLED
    assert states[first] is states[store] is states[load] is TransferState.DONE


def test_close_waits_for_what_has_begun_and_drops_the_rest(copier: HeldCopier, connector: CpuOffloadConnector) -> None:
    peer = connector.connect(connector.metadata())
    running = connector.submit(Op.WRITE, peer, runs((0, 0, 10)), deadline_s=DEADLINE_S)
    assert copier.entered.wait(DEADLINE_S)
    waiting = connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=DEADLINE_S)
    threading.Timer(0.05, copier.may_go.set).start()
    connector.close()
    assert copier.sizes == [10]
    assert set(connector.poll().finished) == {running, waiting}
    assert (running.state, waiting.state) == (TransferState.DONE, TransferState.FAILED)
    assert connector.ready_bytes == 0
    with pytest.raises(ConnectorStateError):
        connector.metadata()


def test_a_copy_that_fails_is_one_transfer_that_fails(copier: HeldCopier, connector: CpuOffloadConnector) -> None:
    peer = connector.connect(connector.metadata())
    copier.may_go.set()
    copier.fails = True
    connector.submit(Op.WRITE, peer, runs((0, 0, 10)), deadline_s=DEADLINE_S)
    failed = ended(connector)[0]
    assert failed.state is TransferState.FAILED
    assert "BROKEN" in str(failed.cause)
    copier.fails = False
    connector.submit(Op.WRITE, peer, runs((0, 0, 10)), deadline_s=DEADLINE_S)
    assert ended(connector)[0].state is TransferState.DONE


class QueuingCopier(HostCopier):
    """Says of itself what a GPU's copier says, and remembers who called it."""

    only_queues = True

    def __init__(self) -> None:
        self.threads: list[str] = []

    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        self.threads.append(threading.current_thread().name)
        return super().start(destination, source, nbytes, after=after)


def test_what_is_only_a_launch_is_made_by_the_caller_once_the_memory_is_there(
    monkeypatch: pytest.MonkeyPatch, memory: np.ndarray[Any, Any]
) -> None:
    copier, driver = QueuingCopier(), SlowDriver()
    monkeypatch.setattr(cpu_offload, "copier_for", lambda device: copier)
    monkeypatch.setattr(cpu_offload, "LEAST_PIECE_BYTES", 4 * PAGE)
    made = CpuOffloadConnector(driver=driver)
    made.open([region(0, memory.nbytes, base=memory.ctypes.data)], 1)
    try:
        peer = made.connect(made.metadata())
        early = made.submit(Op.WRITE, peer, runs((0, 0, 10)), deadline_s=DEADLINE_S)
        assert copier.threads == []
        for _ in range(4):
            driver.may_take.release()
        assert ended(made) == [early]
        assert made.wait_ready(DEADLINE_S) == memory.nbytes
        late = made.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=DEADLINE_S)
        assert ended(made) == [late]
        assert copier.threads == ["kvx-offload-copies", threading.current_thread().name]
    finally:
        made.close()


class SlowDriver(HostDriver):
    """Takes one piece of memory for each time that the test says so."""

    def __init__(self) -> None:
        super().__init__(PAGE)
        self.may_take = threading.Semaphore(0)

    def create(self, nbytes: int) -> Allocation:
        assert self.may_take.acquire(timeout=DEADLINE_S)
        return super().create(nbytes)


def test_memory_that_is_not_there_yet_is_not_offered_and_waited_for(
    memory: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_offload, "LEAST_PIECE_BYTES", PAGE)
    driver = SlowDriver()
    connector = CpuOffloadConnector(3 * PAGE, driver)
    connector.open([region(0, memory.nbytes, base=memory.ctypes.data)], 1)
    assert connector.ready_bytes == 0
    peer = connector.connect(connector.metadata())
    connector.submit(Op.WRITE, peer, runs((0, PAGE, 10)), deadline_s=DEADLINE_S)
    driver.may_take.release()
    assert not connector.poll().finished
    driver.may_take.release()
    assert ended(connector)[0].state is TransferState.DONE
    assert connector.ready_bytes == 2 * PAGE
    driver.may_take.release()
    assert connector.wait_ready(DEADLINE_S) == 3 * PAGE
    connector.close()


def test_a_host_without_room_offers_what_there_is(
    memory: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_offload, "LEAST_PIECE_BYTES", PAGE)
    room = iter([1 << 40, 1 << 40, 0])
    driver = HostDriver(PAGE, lambda: MemoryInfo(next(room), 1 << 40))
    connector = CpuOffloadConnector(5 * PAGE, driver)
    connector.open([region(0, memory.nbytes, base=memory.ctypes.data)], 1)
    assert connector.wait_ready(DEADLINE_S) == 2 * PAGE
    peer = connector.connect(connector.metadata())
    connector.submit(Op.WRITE, peer, runs((0, 2 * PAGE - 5, 10)), deadline_s=DEADLINE_S)
    failed = ended(connector)[0]
    assert failed.state is TransferState.FAILED
    assert f"only {2 * PAGE} of {5 * PAGE} bytes" in str(failed.cause)
    assert "ask for fewer blocks" in caplog.text
    connector.close()
