"""A connector without a library, for tests of what is above and below it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.errors import ConnectorError
from kvx.peer import Peer
from kvx.plan import RUN_DTYPE, Runs
from kvx.region import Mapping, MemoryRegion

BASE = 1 << 30


class FakeConnector(Connector):
    """A library that remembers what it was told and finishes what a test tells it to."""

    name = "fake"
    capabilities = Capabilities(operations=frozenset({Op.READ}), notify=False, memory=frozenset({"cpu"}))

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.copies: list[Copies] = []
        self.done: set[Transfer] = set()
        self.fails_to_open = False

    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        self.calls.append(f"open {len(regions)}")
        if self.fails_to_open:
            raise ConnectorError("no")

    def _metadata(self) -> bytes:
        return b"library"

    def _connect(self, library_metadata: bytes) -> Peer:
        return Peer(name=library_metadata.decode(), generation=0, regions=self._regions)

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        self.copies.append(copies)
        transfer.handle = copies

    def _progress(self) -> list[tuple[str, bytes]]:
        for transfer in [item for item in self._pending if item in self.done]:
            self._finish(transfer, TransferState.FAILED if transfer.stop_cause else TransferState.DONE)
        return []

    def _cancel(self, transfer: Transfer) -> None:
        self.calls.append("cancel")

    def _disconnect(self, peer: Peer) -> None:
        self.calls.append(f"disconnect {peer.name}")

    def _close(self) -> None:
        self.calls.append("close")


def region(offset: int, nbytes: int, device: str = "cpu", base: int = BASE) -> MemoryRegion:
    return MemoryRegion(base + offset, nbytes, offset, Mapping(base, 1 << 20, 1, device))


def runs(*rows: tuple[int, int, int]) -> Runs:
    array = np.zeros(len(rows), RUN_DTYPE)
    for index, (source, destination, length) in enumerate(rows):
        array[index] = (source, destination, length, 0, 0, 1)
    return Runs(array)
