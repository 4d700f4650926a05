"""The extensible KV cache: reserve -> warm up -> extend -> sleep and wake -> close.

    NEW -open-> RESERVED -commit-> WARMING -extend_kv_cache-> READY <-sleep/wake-> ASLEEP      close: from anywhere

One thread (the engine's) calls; reading a property from another thread is fine. Rules that callers rely on:

- base address and strides never change; only the committed prefix of each segment may be touched. Touching anything
  else, or anything at all while ASLEEP, ends the process (SIGSEGV; on a GPU the context dies).
- A call that fails leaves everything as it was before it: memory, mappings, count, state, connectors open again.
  Two failures cannot be undone, and say so where they are: a device that refuses to take memory back (`sleep`), and
  a connector that will not close after another would not open (`_open_connectors`: the cache is READY then).
- Connectors are open only in READY, and never while a mapping changes. Each time they open, the generation grows.
- `close` ends the cache at once, but its memory and addresses live until the last tensor on them has died.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvx.drivers.base import Driver
from kvx.errors import CacheStateError, LayoutError, OutOfDeviceMemory
from kvx.region import Mapping, MemoryRegion, regions_of
from kvx.spec import Segment, SegmentTable
from kvx.tensor import resize_mapping, tensor_over
from kvx.vmm import Reservation, Transaction


class CacheState(StrEnum):
    """Where in its life a cache is."""

    NEW = "NEW"
    RESERVED = "RESERVED"
    WARMING = "WARMING"
    READY = "READY"
    ASLEEP = "ASLEEP"
    CLOSED = "CLOSED"


class RegionUser(Protocol):
    """What the cache needs of a connector."""

    def open(self, regions: Sequence[MemoryRegion], generation: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Event:
    """One step of a cache's life: when it began (monotonic clock) and how long it took."""

    name: str
    start_s: float
    duration_s: float


class ExtensibleKVCache:
    """A KV cache of `table.capacity_blocks` blocks of address space, as many of them committed as were asked for."""

    def __init__(self, driver: Driver, table: SegmentTable) -> None:
        self.table = table
        self.state = CacheState.NEW
        self.committed_blocks = 0
        self.final_blocks = 0
        self.generation = 0
        self.events: list[Event] = []
        self._driver = driver
        self._reservation = Reservation(driver, table.total_bytes)
        self._buffer: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._connectors: list[RegionUser] = []
        self._opened: list[RegionUser] = []

    # -- what it is now --------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> torch.Tensor:
        """The flat int8 tensor [reserved_bytes] over the whole reservation."""
        if self._buffer is None:
            raise CacheStateError(f"the cache is {self.state} and has no addresses; call open() first")
        return self._buffer

    @property
    def base_address(self) -> int:
        """The reservation's first address; 0 before open() and after close()."""
        return self._reservation.address if self._buffer is not None else 0

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the reservation holds."""
        return self.table.capacity_blocks

    @property
    def reserved_bytes(self) -> int:
        """Bytes of address space."""
        return self.table.total_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes of physical memory behind the reservation."""
        return self._reservation.committed_bytes

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """What is mapped now, in the order of addresses; one per segment."""
        return self._reservation.mappings

    def regions(self) -> tuple[MemoryRegion, ...]:
        """What a connector may register now: derived from the views, never from the buffer's size."""
        if not self._views:
            raise CacheStateError("regions come from views, and the cache has none; call set_views() first")
        return regions_of(
            self._views, self.committed_blocks, self.mappings,
            base_address=self.base_address, capacity_blocks=self.capacity_blocks,
        )  # fmt: skip

    def committed_range(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Bytes of the buffer, int8 [nbytes], that a copy may touch: `LayoutError` unless one mapping holds them all.

        For copies that are not by block. A queued copy that meets an address without memory ends the process.
        """
        start = self.base_address + offset_bytes
        if nbytes <= 0 or not any(m.address <= start and start + nbytes <= m.end for m in self.mappings):
            raise LayoutError(
                f"{nbytes} bytes at {offset_bytes} are not inside one mapping of a cache that is {self.state} with "
                f"{self.committed_blocks} committed blocks; touching them would end the process"
            )
        return self.buffer[offset_bytes : offset_bytes + nbytes]

    def check_block_ids(self, block_ids: Iterable[int] | NDArray[np.integer]) -> None:
        """Raises `LayoutError` with the first id outside the committed blocks. For every list that enters a copy."""
        ids = np.asarray(block_ids if isinstance(block_ids, np.ndarray) else list(block_ids))
        if ids.size and ids.dtype.kind not in "iu":  # also whole numbers too large for 64 bits
            raise LayoutError(f"block ids must be whole numbers of at most 64 bits, found {ids.reshape(-1)[0]!r}, ...")
        if (bad := (ids < 0) | (ids >= self.committed_blocks)).any():
            at = int(np.flatnonzero(bad.reshape(-1))[0])
            raise LayoutError(
                f"block id {int(ids.reshape(-1)[at])} (at index {at}) is outside the {self.committed_blocks} committed "
                f"blocks of a cache that is {self.state}; touching it would end the process"
            )

    def check_integrity(self) -> None:
        """Asserts what must hold between two calls, whatever happened before."""
        committed = self.state in (CacheState.WARMING, CacheState.READY)
        assert (self.committed_blocks > 0) == committed, (self.state, self.committed_blocks)
        assert self.committed_blocks <= self.capacity_blocks
        assert bool(self._opened) <= (self.state is CacheState.READY), "a connector is open outside READY"
        if self.state in (CacheState.NEW, CacheState.CLOSED):
            assert self._buffer is None
            assert not self._views
        else:
            assert self.buffer.data_ptr() == self.base_address
            assert self.base_address % self.table.granularity_bytes == 0
        if self.state is CacheState.CLOSED:
            return  # what is still mapped belongs to the tensors that still live
        wanted = [(s.offset_bytes, self._committed(s, self.committed_blocks)) for s in self._segments() if committed]
        found = [(m.address - self.base_address, m.nbytes) for m in self.mappings]
        assert found == wanted, f"mappings {found} are not one per segment {wanted}"

    # -- its life --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Reserves the address range; takes no memory."""
        self._require("open", CacheState.NEW)
        if self.table.granularity_bytes % self._driver.granularity_bytes:
            raise LayoutError(
                f"segments on granules of {self.table.granularity_bytes} bytes do not fit the driver's granularity of "
                f"{self._driver.granularity_bytes} bytes; make the table with the driver's"
            )
        with Transaction() as transaction, self._timed("reserve"):
            self._reservation.reserve()
            transaction.callback(self._reservation.release)
            self._buffer = tensor_over(self._reservation)
            transaction.commit()
        self.state = CacheState.RESERVED

    def set_views(self, views: MappingOf[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Gives the cache the views [B, H, N, C] that its regions are derived from."""
        self._require("set_views", CacheState.RESERVED, CacheState.WARMING, CacheState.READY, CacheState.ASLEEP)
        if self._opened:
            raise CacheStateError(
                "connectors are open on regions of the present views; give views before attaching any"
            )
        found = tuple(views.values() if isinstance(views, MappingOf) else views)
        end = self.base_address + self.reserved_bytes
        if outside := [view for view in found if not self.base_address <= view.data_ptr() < end]:
            raise LayoutError(f"{len(outside)} of {len(found)} views are not on this cache; take views of its buffer")
        self._views = found

    def attach(self, connector: RegionUser) -> None:
        """Adds a connector. It is opened now if the cache is READY, else when it next becomes READY."""
        self._require(
            "attach", CacheState.NEW, CacheState.RESERVED, CacheState.WARMING, CacheState.READY, CacheState.ASLEEP
        )
        if self.state is CacheState.READY:
            self._open_one(connector)
        self._connectors.append(connector)

    def detach(self, connector: RegionUser) -> None:
        """Closes a connector if it is open, and forgets it."""
        if connector in self._opened:
            connector.close()
            self._opened.remove(connector)
        self._connectors.remove(connector)

    def commit(self, num_blocks: int) -> None:
        """Backs the first blocks of each segment with memory, for warm-up."""
        self._require("commit", CacheState.RESERVED)
        self._require_blocks(num_blocks, 1)
        self._require_room(num_blocks)
        with Transaction() as transaction, self._timed("commit"):
            self._map_all(transaction, num_blocks)
            self._zero(num_blocks)
            transaction.commit()
        self.committed_blocks = num_blocks
        self.state = CacheState.WARMING

    def extend_kv_cache(self, num_blocks: int, *, live: bool = False) -> None:
        """Backs `num_blocks` blocks, one allocation a segment, and opens the connectors on them.

        Out of WARMING the blocks so far are warm-up's garbage and read as zeros afterwards, unless they are `live`.
        In READY they are always kept. New blocks read as zeros.
        """
        self._require("extend_kv_cache", CacheState.WARMING, CacheState.READY)
        self._require_blocks(num_blocks, max(1, self.committed_blocks))
        if self.state is CacheState.READY and num_blocks == self.committed_blocks:
            return
        keep = live or self.state is CacheState.READY
        self._require_room(num_blocks, copying=keep)
        with Transaction() as transaction:
            self._close_connectors(transaction)
            self._push_state(transaction)
            self._driver.synchronize()
            with self._timed("extend"):
                for segment in self._segments():
                    self._resize(transaction, segment, self.committed_blocks, num_blocks, keep=keep)
            if not keep:
                self._zero(num_blocks)
            self.committed_blocks = self.final_blocks = num_blocks
            self.state = CacheState.READY
            self._open_connectors(transaction)
            transaction.commit()

    def sleep(self) -> None:
        """Gives all memory back; content is discarded, addresses stay reserved. Nothing may touch the cache now.

        A device that refuses to take an unmapped allocation back is the one failure that is not undone: content is
        gone by then, so the cache is ASLEEP, the error is raised, and wake() and close() try again.
        """
        self._require("sleep", CacheState.READY)
        freed = []
        with Transaction() as transaction:
            self._close_connectors(transaction)
            self._push_state(transaction)
            self._driver.synchronize()
            for segment in self._segments():
                allocation = self._reservation.unbind(segment.offset_bytes)
                transaction.callback(self._reservation.bind, segment.offset_bytes, allocation)
                freed.append(allocation)
            transaction.commit()
        self.committed_blocks = 0
        self.state = CacheState.ASLEEP
        for allocation in freed:
            self._reservation.park(allocation)
        with self._timed("sleep"):
            self._reservation.release_parked()

    def wake(self) -> None:
        """Backs the final count of blocks again, at the same addresses, all zeros, and opens the connectors."""
        self._require("wake", CacheState.ASLEEP)
        self._reservation.release_parked()
        self._require_room(self.final_blocks)
        with Transaction() as transaction:
            self._push_state(transaction)
            with self._timed("wake"):
                self._map_all(transaction, self.final_blocks)
            self._zero(self.final_blocks)
            self.committed_blocks = self.final_blocks
            self.state = CacheState.READY
            self._open_connectors(transaction)
            transaction.commit()

    def close(self) -> None:
        """Ends the cache. Closes connectors, then gives memory and addresses back, at the latest when the last tensor
        on them dies (a view that somebody kept stays readable until then). Idempotent; after an error, call it again.
        """
        self._close_opened()
        self.state = CacheState.CLOSED
        self.committed_blocks = 0
        self._views = ()
        self._buffer = None
        self._reservation.release()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _segments(self) -> tuple[Segment, ...]:
        return tuple(sorted(self.table.segments, key=lambda segment: segment.offset_bytes))

    def _committed(self, segment: Segment, num_blocks: int) -> int:
        return segment.committed_bytes(num_blocks, self.table.granularity_bytes)

    def _map_all(self, transaction: Transaction, num_blocks: int) -> None:
        for segment in self._segments():
            self._reservation.commit_range(segment.offset_bytes, self._committed(segment, num_blocks))
            transaction.callback(self._reservation.drop, segment.offset_bytes)

    def _resize(
        self, transaction: Transaction, segment: Segment, old_blocks: int, new_blocks: int, *, keep: bool
    ) -> None:
        """Puts one allocation that holds `new_blocks` where one held `old_blocks`; the undo does the reverse.

        With `keep`, the old content is copied: the most that is taken on top is one segment's old memory.
        """
        old_bytes, new_bytes = self._committed(segment, old_blocks), self._committed(segment, new_blocks)
        if keep:
            kept = self.buffer[segment.offset_bytes : segment.offset_bytes + old_blocks * segment.block_stride_bytes]
            resize_mapping(self._reservation, segment.offset_bytes, kept, new_bytes)
            transaction.callback(resize_mapping, self._reservation, segment.offset_bytes, kept, old_bytes)
            return
        self._reservation.drop(segment.offset_bytes)
        transaction.callback(self._reservation.commit_range, segment.offset_bytes, old_bytes)
        self._reservation.commit_range(segment.offset_bytes, new_bytes)
        transaction.callback(self._reservation.drop, segment.offset_bytes)

    def _require_room(self, num_blocks: int, *, copying: bool = False) -> None:
        """Asks for memory before anything is touched, so that too large a count costs no time and needs no undo.

        An extend that copies, and its undo, hold one segment's old memory on top of the growth: without room for that
        the undo of a failed extend could itself run out of memory.
        """
        before = [self._committed(segment, self.committed_blocks) for segment in self._segments()]
        needed = self.table.committed_bytes(num_blocks) - sum(before) + (max(before) if copying else 0)
        if needed > (free := self._driver.memory_info().free_bytes):
            what = "more while they are copied" if copying else "more"
            raise OutOfDeviceMemory(
                "commit", errno.ENOMEM, "ENOMEM",
                f"{num_blocks} blocks need {needed} bytes {what}, but {free} are free; ask for fewer blocks, or stop "
                "something",
            )  # fmt: skip

    def _zero(self, num_blocks: int) -> None:
        """Writes zeros over the committed part of every segment, where the driver has not done so."""
        if self._driver.allocations_are_zero:
            return
        with self._timed("zero"):
            try:
                for segment in self._segments():
                    part = slice(segment.offset_bytes, segment.offset_bytes + self._committed(segment, num_blocks))
                    self.buffer[part].view(torch.int64).zero_()  # a GPU fills wide elements faster than bytes
            finally:
                self._driver.synchronize()  # also after an error: what is queued must not find its memory unmapped

    def _push_state(self, transaction: Transaction) -> None:
        before = (self.state, self.committed_blocks, self.final_blocks)

        def restore() -> None:
            self.state, self.committed_blocks, self.final_blocks = before

        transaction.callback(restore)

    def _close_connectors(self, transaction: Transaction) -> None:
        """Closes the open connectors; the undo opens those again that were closed, on the regions of that moment."""
        closed: list[RegionUser] = []
        transaction.callback(self._reopen, closed)
        while self._opened:
            self._opened[-1].close()
            closed.insert(0, self._opened.pop())

    def _reopen(self, connectors: Sequence[RegionUser]) -> None:
        if connectors:
            self.generation += 1
        with contextlib.ExitStack() as all_of_them:  # one that fails does not keep the others closed
            for connector in reversed(connectors):
                all_of_them.callback(self._open_one, connector)

    def _open_connectors(self, transaction: Transaction) -> None:
        """Opens all connectors, or none: those that did open are closed again before memory is taken back from them."""
        self.generation += 1
        try:
            for connector in self._connectors:
                self._open_one(connector)
        except BaseException:
            try:
                self._close_opened()
            except BaseException:
                transaction.commit()  # one that does not drain may still touch the memory: nothing is taken back
                raise
            raise

    def _close_opened(self) -> None:
        while self._opened:
            self._opened[-1].close()
            self._opened.pop()

    def _open_one(self, connector: RegionUser) -> None:
        with self._timed("open"):
            connector.open(self.regions(), self.generation)
        self._opened.append(connector)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.events.append(Event(name, start, time.monotonic() - start))

    def _require(self, call: str, *states: CacheState) -> None:
        if self.state not in states:
            raise CacheStateError(f"{call} in state {self.state}: needs {' or '.join(states)}")

    def _require_blocks(self, num_blocks: int, least: int) -> None:
        if not least <= num_blocks <= self.capacity_blocks:
            raise LayoutError(
                f"{num_blocks} blocks: needs at least {least} (a cache never shrinks) and at most the capacity of "
                f"{self.capacity_blocks}"
            )
