"""Who owns which memory: a reservation owns its mappings, a mapping its allocation, and every acquire has its undo.

    Reservation.reserve        undone by   Reservation.release
    Reservation.commit_range   undone by   Reservation.drop
    Reservation.unbind         undone by   Reservation.bind      (exact: the allocation kept its content)

A reservation outlives every tensor on it: `hold` counts a tensor in, `let_go` counts it out, and a release that
comes while tensors live waits for the last of them. Until then their memory stays committed, because touching an
address without memory ends the process.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from kvx.drivers.base import Allocation, Driver
from kvx.errors import CacheStateError
from kvx.region import Mapping


class Transaction(ExitStack):
    """Undoes what was pushed on it, last first, unless `commit` was called. Push each undo right after its acquire."""

    def commit(self) -> None:
        """What was done stays done."""
        self.pop_all()


class Reservation:
    """An address range of `nbytes` and the memory bound into it. One thread uses it; tensors may die on any."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self.address = 0
        self._bound: dict[int, tuple[Mapping, Allocation]] = {}  # by offset
        self._parked: list[Allocation] = []  # unmapped, but their release failed: tried again at the next chance
        self._tensors = 0
        self._release_wanted = False
        self._lock = threading.RLock()  # of the two above; an RLock, because a tensor may die while it is held

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """What is mapped now, in the order of addresses."""
        return tuple(self._bound[offset][0] for offset in sorted(self._bound))

    @property
    def committed_bytes(self) -> int:
        """Bytes of physical memory that this reservation holds, parked ones included."""
        return sum(m.nbytes for m, _ in self._bound.values()) + sum(a.nbytes for a in self._parked)

    @property
    def tensors(self) -> int:
        """How many tensors (each with all its views) are on this range."""
        return self._tensors

    def reserve(self) -> None:
        """Takes the address range."""
        if self.address:
            raise CacheStateError("this reservation has its addresses already; make another one")
        self.address = self.driver.reserve(self.nbytes)

    def release(self) -> None:
        """Gives memory and addresses back: now, or when the last tensor on them dies. May be called again."""
        with self._lock:
            self._release_wanted = True
            if self._tensors == 0:
                self._release_now()

    def commit_range(self, offset_bytes: int, nbytes: int) -> None:
        """Backs a part of the range by one new allocation."""
        with Transaction() as transaction:
            allocation = self.driver.create(nbytes)
            transaction.callback(self.driver.release, allocation)
            self.bind(offset_bytes, allocation)
            transaction.commit()

    def drop(self, offset_bytes: int) -> None:
        """Takes the memory at an offset away and gives it back; a failed drop leaves it mapped, content and all."""
        with Transaction() as transaction:
            allocation = self.unbind(offset_bytes)
            transaction.callback(self.bind, offset_bytes, allocation)
            self.driver.release(allocation)
            transaction.commit()

    def bind(self, offset_bytes: int, allocation: Allocation) -> None:
        """Maps an allocation at an offset."""
        address = self.address + offset_bytes
        self.driver.map(address, allocation)
        mapping = Mapping(address, allocation.nbytes, allocation.id, self.driver.device, allocation)
        self._bound[offset_bytes] = (mapping, allocation)

    def unbind(self, offset_bytes: int) -> Allocation:
        """Unmaps what is mapped at an offset and hands its allocation, content and all, to the caller."""
        mapping, allocation = self._bound[offset_bytes]
        self.driver.unmap(mapping.address, allocation)
        del self._bound[offset_bytes]
        return allocation

    def park(self, allocation: Allocation) -> None:
        """Takes an unmapped allocation whose release failed; `release_parked` and `release` try again."""
        self._parked.append(allocation)

    def release_parked(self) -> None:
        """Gives parked allocations back."""
        while self._parked:
            self.driver.release(self._parked[-1])
            self._parked.pop()

    def hold(self) -> None:
        """Counts a tensor in."""
        with self._lock:
            self._tensors += 1

    def let_go(self) -> None:
        """Counts a tensor out; the last one out of a range that nobody wants any more releases it."""
        with self._lock:
            self._tensors -= 1
            if self._tensors == 0 and self._release_wanted:
                self._release_now()

    def _release_now(self) -> None:
        if self._bound:
            self.driver.synchronize()  # a tensor may die before the work that was queued on it has run
        for offset in sorted(self._bound):
            self.drop(offset)
        self.release_parked()
        if self.address:
            self.driver.release_reservation(self.address, self.nbytes)
            self.address = 0
