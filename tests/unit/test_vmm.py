"""Ownership: every acquire has its undo, whatever call fails, and a reservation outlives the tensors on it."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
from memory_helpers import MIB, FaultyDriver, Footprint, each_fault

from kvx.drivers.host import HostDriver
from kvx.errors import CacheStateError, DriverError
from kvx.vmm import Reservation, Transaction

GRANULE = 4 * MIB


@pytest.fixture
def driver() -> FaultyDriver:
    return FaultyDriver(HostDriver(GRANULE))


@pytest.fixture
def reservation(driver: FaultyDriver) -> Reservation:
    reservation = Reservation(driver, 8 * GRANULE)
    reservation.reserve()
    return reservation


def test_a_transaction_undoes_last_first_unless_committed() -> None:
    done: list[int] = []
    with contextlib.suppress(KeyError), Transaction() as transaction:
        transaction.callback(done.append, 1)
        transaction.callback(done.append, 2)
        raise KeyError
    assert done == [2, 1]
    with Transaction() as transaction:
        transaction.callback(done.append, 3)
        transaction.commit()
    assert done == [2, 1]


def test_a_committed_range_is_one_mapping(driver: FaultyDriver, reservation: Reservation) -> None:
    reservation.commit_range(4 * GRANULE, 2 * GRANULE)
    reservation.commit_range(0, GRANULE)
    first, second = reservation.mappings
    assert (first.address, first.nbytes, first.device) == (reservation.address, GRANULE, "cpu")
    assert (second.address, second.nbytes) == (reservation.address + 4 * GRANULE, 2 * GRANULE)
    assert first.allocation_id != second.allocation_id
    assert reservation.committed_bytes == 3 * GRANULE
    reservation.drop(4 * GRANULE)
    assert reservation.committed_bytes == GRANULE
    reservation.release()
    assert driver.books() == ({}, [], {})


def test_a_second_reserve_is_refused(reservation: Reservation) -> None:
    with pytest.raises(CacheStateError, match="already"):
        reservation.reserve()
    reservation.release()


@pytest.mark.parametrize("act", ["commit_range", "drop"])
def test_a_failed_commit_or_drop_changes_nothing(driver: FaultyDriver, reservation: Reservation, act: str) -> None:
    reservation.commit_range(0, GRANULE)
    ctypes.memset(reservation.address, 3, GRANULE)
    before, books, mappings = Footprint.now(), driver.books(), reservation.mappings
    arguments = (2 * GRANULE, GRANULE) if act == "commit_range" else (0,)
    failed = []
    for call in each_fault(driver, lambda: getattr(reservation, act)(*arguments)):
        failed.append(call)
        Footprint.now().assert_close(before)
        assert (driver.books(), reservation.mappings) == (books, mappings)
        assert ctypes.string_at(reservation.address, GRANULE) == b"\3" * GRANULE
    assert failed == (["create", "map"] if act == "commit_range" else ["unmap", "release"])
    reservation.release()


@pytest.mark.parametrize("fail_at", range(1, 6))
def test_a_release_that_failed_half_way_can_be_called_again(driver: FaultyDriver, fail_at: int) -> None:
    reservation = Reservation(driver, 8 * GRANULE)
    reservation.reserve()
    for offset in (0, 4 * GRANULE):
        reservation.commit_range(offset, GRANULE)
    driver.arm(fail_at)
    with pytest.raises(DriverError, match="INJECTED"):
        reservation.release()
    driver.arm(0)
    reservation.release()
    assert driver.books() == ({}, [], {})
    reservation.release()  # and once more does nothing


def test_a_parked_allocation_is_released_later(driver: FaultyDriver, reservation: Reservation) -> None:
    reservation.commit_range(0, GRANULE)
    reservation.park(reservation.unbind(0))
    assert (reservation.mappings, reservation.committed_bytes) == ((), GRANULE)
    driver.arm(1)
    with pytest.raises(DriverError):
        reservation.release_parked()
    driver.arm(0)
    assert reservation.committed_bytes == GRANULE
    reservation.release_parked()
    assert reservation.committed_bytes == 0
    reservation.release()


def test_a_release_waits_for_the_last_tensor(driver: FaultyDriver, reservation: Reservation) -> None:
    reservation.commit_range(0, GRANULE)
    reservation.hold()
    reservation.hold()
    reservation.release()
    reservation.let_go()
    assert ctypes.string_at(reservation.address, 4) == bytes(4)
    assert reservation.tensors == 1
    reservation.let_go()
    assert driver.books() == ({}, [], {})
