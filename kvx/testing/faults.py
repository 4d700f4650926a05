"""Faults that a connector may have, each of which the kit must find: a connector is given one by `with_fault`.

They show that the kit can fail. `pytest --kvx-kit-fault NAME` runs any test of a connector with one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvx.connector import Connector, Copies, Events, Transfer, TransferState
from kvx.errors import KVXError
from kvx.region import MemoryRegion

LATE_S: Final = 0.3
"""How long after its report an early completion's bytes move."""
AFTER_CLOSE_S: Final = 0.1


class _Faulty(Connector):
    """Base of the faults, so that they may call `super()`; a real connector stands behind them."""

    def begin(self) -> None:
        """Called once, when an existing connector gets the fault."""


class DroppedRun(_Faulty):
    """The last copy of a transfer is forgotten; of a transfer of one copy, its second half."""

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        if len(copies.length) > 1:
            copies = Copies(copies.local[:-1], copies.remote[:-1], copies.length[:-1])
        elif copies.length[0] > 1:
            copies = replace(copies, length=copies.length // 2)
        super()._submit(transfer, copies, notify)  # type: ignore[safe-super]


class OffByOne(_Faulty):
    """The last copy goes one byte too far on our side."""

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        if copies.length[-1] > 1:
            copies = Copies(copies.local.copy(), copies.remote, copies.length.copy())
            copies.local[-1] += 1
            copies.length[-1] -= 1
        super()._submit(transfer, copies, notify)  # type: ignore[safe-super]


class DuplicateCompletion(_Faulty):
    """Every transfer is reported by two polls. (`poll` is final for connectors that mean well.)"""

    _before: tuple[Transfer, ...]

    def begin(self) -> None:
        self._before = ()

    def poll(self) -> Events:  # type: ignore[misc]
        events = super().poll()
        self._before, again = events.finished, self._before
        return Events(again + events.finished, events.notifications)


class EarlyCompletion(_Faulty):
    """A transfer is reported as done when it was submitted, and moves later."""

    _late: list[tuple[float, Transfer, Copies, bytes]]
    _behind: set[Transfer]

    def begin(self) -> None:
        self._late, self._behind = [], set()

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        behind = replace(transfer)
        self._behind.add(behind)
        self._late.append((time.monotonic() + LATE_S, behind, copies, notify))
        self._finish(transfer, TransferState.DONE)

    def _progress(self) -> list[tuple[str, bytes]]:
        due = [item for item in self._late if item[0] < time.monotonic()]
        for item in due:
            self._late.remove(item)
            _, behind, copies, notify = item
            if behind.peer.connected:
                super()._submit(behind, copies, notify)  # type: ignore[safe-super]
                if behind.state is TransferState.PENDING and behind not in self._pending:
                    self._pending.append(behind)
        return super()._progress()  # type: ignore[safe-super]

    def _finish(self, transfer: Transfer, state: TransferState, cause: KVXError | None = None) -> None:
        super()._finish(transfer, state, cause)
        if transfer in self._behind:
            self._finished.remove(transfer)


class RegistrationBeyondCommitted(_Faulty):
    """The last region is registered up to the end of its segment and beyond, as a storage's size would have it."""

    def open(self, regions: Sequence[MemoryRegion], generation: int) -> None:  # type: ignore[misc]
        *others, last = regions
        longer = replace(last, nbytes=last.mapping.end - last.address + last.nbytes)
        super().open([*others, longer], generation)


class UseAfterClose(_Faulty):
    """Something goes on writing into registered memory after the close."""

    def close(self) -> None:  # type: ignore[misc]
        starts = (self._regions.starts + self._regions.base_address).tolist() if self.registered_bytes else []
        super().close()

        def touch() -> None:
            for _ in range(3):  # a busy machine may come to its look at the memory only after the first
                time.sleep(AFTER_CLOSE_S)
                for address in starts:
                    ctypes.memset(address, 0xA5, 1)

        threading.Thread(target=touch, daemon=True).start()


FAULTS: Final[dict[str, type[Any]]] = {
    "dropped-run": DroppedRun,
    "off-by-one": OffByOne,
    "duplicate-completion": DuplicateCompletion,
    "early-completion": EarlyCompletion,
    "registration-beyond-committed": RegistrationBeyondCommitted,
    "use-after-close": UseAfterClose,
}


def with_fault(connector: Connector, name: str | None) -> Connector:
    """The same connector, with a fault; without one where `name` is None."""
    if name is not None:
        fault, sound = FAULTS[name], type(connector)
        connector.__class__ = type(f"{fault.__name__}{sound.__name__}", (fault, sound), {})
        fault.begin(connector)
    return connector
