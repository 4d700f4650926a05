"""The peer of a connector that reaches no other process: the memory that its own metadata describes."""

from __future__ import annotations

import numpy as np

from kvx.connector import Connector, ConnectorState
from kvx.drivers.host import HostDriver
from kvx.testing.kit import Kit
from kvx.testing.memory import COMMITTED, RESERVED_BYTES, Bytes, pattern, read_bytes, write_bytes


class OwnMemory:
    """Host memory of this process. It must span what the connector was opened on, and is gone when that closes."""

    def __init__(self, kit: Kit, connector: Connector) -> None:
        self._kit = kit
        self._connector = connector
        self._driver = HostDriver()
        self._base_address = 0

    def open(self, generation: int = 1) -> bytes:
        """The memory came with the connector's opening: find out where it is."""
        assert self._connector.generation == generation
        self._kit.wait_for_own_memory(self._connector)
        metadata = self._connector.metadata()
        peer = self._connector.connect(metadata)
        self._base_address = peer.regions.base_address
        self._connector.disconnect(peer)
        return metadata

    @property
    def _is_there(self) -> bool:
        return self._connector.state is ConnectorState.OPEN

    def fill(self, seed: int) -> None:
        content = pattern(seed)
        for offset, nbytes in COMMITTED:
            self.poke(offset, content[offset : offset + nbytes].tobytes())

    def poke(self, offset: int, data: bytes) -> None:
        if self._is_there:
            write_bytes(self._driver, self._base_address + offset, data)

    def peek(self, offset: int, nbytes: int) -> bytes:
        return read_bytes(self._driver, self._base_address + offset, nbytes)

    def snapshot(self) -> Bytes | None:
        """All of it, but for the part that has no memory on the other side; None when it is gone."""
        if not self._is_there:
            return None
        found = np.zeros(RESERVED_BYTES, np.uint8)
        for offset, nbytes in COMMITTED:
            found[offset : offset + nbytes] = np.frombuffer(self.peek(offset, nbytes), np.uint8)
        return found

    def stop(self) -> None:
        """Nothing of it lives by itself."""
