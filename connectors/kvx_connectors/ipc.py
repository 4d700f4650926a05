"""The connector `ipc`: engines on one host map each other's committed memory, and copy directly.

Each side hands out file descriptors of its allocations over a Unix socket (memory files on the host, POSIX handles on
a GPU; `ipc_listener`). The other maps them, all at the offsets that they have at home, and a transfer is one call of a
copier. A mapping keeps the memory alive, so neither a peer that dies nor one that goes to sleep can pull it away under
a copy; but it is the peer's memory of that moment, and is dropped as soon as the peer closes its side.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.drivers.base import Allocation, Driver
from kvx.drivers.copier import Copier, Copying, copier_for
from kvx.drivers.select import driver_for
from kvx.errors import ConnectorError, DriverError, HandshakeError, KVXError, TransferError
from kvx.peer import Peer, RegionTable
from kvx.region import MemoryRegion
from kvx.vmm import Reservation

from .ipc_listener import Listener, ask

MOST_ALLOCATIONS = 4096


class IpcMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library's part of a peer's metadata. `allocations`: (offset, nbytes), in the order of the descriptors."""

    name: str
    boot_id: str
    network_namespace: int
    user: int
    device_kind: str
    allocations: list[tuple[int, int]]


_DECODER = msgspec.msgpack.Decoder(IpcMetadata)


class IpcConnector(Connector):
    """A peer's name is its listener's, new with every opening, so that an old one is never found again."""

    name: ClassVar[str] = "ipc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        operations=frozenset(Op), notify=False, memory=frozenset({"cpu", "cuda"}), shares_memory=True, opens_ports=False
    )

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._allocations: list[tuple[int, Allocation]] = []
        self._listener: Listener | None = None
        self._copier: Copier | None = None
        self._driver: Driver | None = None

    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        device = regions[0].mapping.device
        if len({region.mapping.device for region in regions}) != 1:
            raise ConnectorError("one connector shares the memory of one device; use one rank for each device")
        self._allocations = _allocations_of(regions)
        self._name = uuid.uuid4().hex
        with ExitStack() as undo:
            try:
                driver, copier = driver_for(device, shareable=True), copier_for(device, goes_first=True)
            except DriverError as error:
                raise ConnectorError(f"connector {self.name} cannot copy on {device}: {error}") from error
            undo.callback(copier.close)
            self._try_export(driver)
            listener = Listener(self._name, lambda: self._export(driver))
            listener.start()
            undo.pop_all()
        self._driver, self._copier, self._listener = driver, copier, listener

    def _metadata(self) -> bytes:
        return msgspec.msgpack.encode(
            IpcMetadata(
                name=self._name,
                boot_id=_boot_id(),
                network_namespace=_network_namespace(),
                user=os.geteuid(),
                device_kind=self._device_kind,
                allocations=[(offset, allocation.nbytes) for offset, allocation in self._allocations],
            )
        )

    def _why_unreachable(self, library_metadata: bytes) -> str | None:
        theirs = _decode(library_metadata)
        for what, ours, found in (
            ("boot id", _boot_id(), theirs.boot_id),
            ("network namespace", _network_namespace(), theirs.network_namespace),
            ("user", os.geteuid(), theirs.user),
            ("device kind", self._device_kind, theirs.device_kind),
        ):
            if ours != found:
                return f"its {what} is {found}, ours {ours}"
        return None

    def _connect(self, library_metadata: bytes) -> Peer:
        wire = _decode(library_metadata)
        why = self._why_unreachable(library_metadata)
        if why is not None:
            raise ConnectorError(f"memory can be shared inside one host only: {why}; use another connector")
        assert self._driver is not None
        assert self._listener is not None
        listener = self._listener
        connection, fds = ask(wire.name, len(wire.allocations))
        try:
            memory = _PeerMemory(self._driver, wire.allocations, fds)
        except KVXError as error:
            connection.close()
            raise ConnectorError(f"the memory of peer {wire.name} cannot be mapped: {error}") from error
        except BaseException:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        memory.when_unmapped = lambda: listener.let_go(connection)
        listener.watch(connection, memory.retire)
        return Peer(name=wire.name, generation=0, regions=self._regions, library=memory)

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        del notify  # not among our capabilities
        assert self._copier is not None
        memory = _memory_of(transfer.peer)
        memory.require_mapped(transfer.peer.regions)
        if not memory.use():
            raise TransferError(f"peer {transfer.peer.name} has ended or changed its memory; shake hands again")
        remote = copies.remote + (memory.base_address - transfer.peer.regions.base_address)
        to, at = (copies.local, remote) if transfer.op is Op.READ else (remote, copies.local)
        try:
            transfer.handle = self._copier.start(to, at, copies.length)
        except KVXError as error:
            memory.done()
            raise TransferError(f"copy of {transfer.nbytes} bytes failed: {error}") from error
        except BaseException:
            memory.done()
            raise
        self._look_at(transfer)

    def _progress(self) -> list[tuple[str, bytes]]:
        for transfer in list(self._pending):
            self._look_at(transfer)
        return []

    def _look_at(self, transfer: Transfer) -> None:
        copying: Copying = transfer.handle  # type: ignore[assignment]
        try:
            if not copying.is_done():
                return
        except KVXError as error:  # the device has failed; nothing copies there any more
            self._finish(transfer, TransferState.FAILED, TransferError(f"the device failed under a copy: {error}"))
        else:
            self._finish(transfer, TransferState.DONE)
        _memory_of(transfer.peer).done()

    def _cancel(self, transfer: Transfer) -> None:
        """A copy that was queued runs to its end, within milliseconds; `_progress` finishes it then."""

    def _disconnect(self, peer: Peer) -> None:
        _memory_of(peer).retire()

    def _close(self) -> None:
        if self._copier is None or self._listener is None:  # an earlier close failed on its way
            return
        with ExitStack() as steps:  # last first; each runs, whatever becomes of the others
            steps.callback(self._copier.close)
            steps.callback(self._listener.stop)
            for peer in self._peers.values():
                steps.callback(_memory_of(peer).retire)
            steps.callback(self._wait_for_copies)
            self._listener = self._copier = self._driver = None
            self._allocations = []

    def _wait_for_copies(self) -> None:
        for transfer in list(self._pending):
            copying: Copying = transfer.handle  # type: ignore[assignment]
            with suppress(KVXError):  # `_look_at` says so
                copying.wait()
            self._look_at(transfer)

    @property
    def _device_kind(self) -> str:
        return "" if self._driver is None else self._driver.device.partition(":")[0]

    def _export(self, driver: Driver) -> list[int]:
        fds: list[int] = []
        try:
            for _, allocation in self._allocations:
                fds.append(driver.export_fd(allocation))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def _try_export(self, driver: Driver) -> None:
        """Memory that cannot be shared is found out now, and not by the first peer."""
        _, allocation = self._allocations[0]
        try:
            os.close(driver.export_fd(allocation))
        except (KVXError, OSError) as error:
            raise ConnectorError(f"connector {self.name} needs memory that other processes can map: {error}") from error


class _PeerMemory:
    """A peer's allocations, mapped here at the offsets that they have there. Any thread."""

    def __init__(self, driver: Driver, allocations: Sequence[tuple[int, int]], fds: Sequence[int]) -> None:
        self.when_unmapped: Callable[[], None] | None = None
        self._table = RegionTable.of(0, allocations)
        self._lock = threading.Lock()
        self._users, self._is_retired = 0, False
        self._known_regions: RegionTable | None = None
        self._reservation = Reservation(driver, int(self._table.ends.max(initial=0)))
        with ExitStack() as undo:
            self._reservation.reserve()
            undo.callback(self._reservation.release)
            for (offset, nbytes), fd in zip(allocations, fds, strict=True):
                allocation = driver.import_fd(fd, nbytes)
                undo_import = undo.enter_context(ExitStack())
                undo_import.callback(driver.release, allocation)
                self._reservation.bind(offset, allocation)
                undo_import.pop_all()  # it is the reservation's now
            undo.pop_all()
        self.base_address = self._reservation.address

    def require_mapped(self, regions: RegionTable) -> None:
        """HandshakeError when a peer calls memory registered that it did not share: a copy there would end us."""
        if self._known_regions is regions:
            return
        index = np.searchsorted(self._table.starts, regions.starts, side="right") - 1
        if (index < 0).any() or (regions.ends > self._table.ends[index]).any():
            raise HandshakeError("the peer registered memory that it did not share; shake hands again")
        self._known_regions = regions

    def use(self) -> bool:
        """Keep it mapped until `done`; False when it is going."""
        with self._lock:
            self._users += not self._is_retired
            return not self._is_retired

    def done(self) -> None:
        with self._lock:
            self._users -= 1
            if self._is_retired and not self._users:
                self._unmap()

    def retire(self) -> None:
        """Unmap it, at once or when the last copy is done. May be called again."""
        with self._lock:
            if not self._is_retired:
                self._is_retired = True
                if not self._users:
                    self._unmap()

    def _unmap(self) -> None:
        self._reservation.release()
        if self.when_unmapped is not None:
            self.when_unmapped()


def _memory_of(peer: Peer) -> _PeerMemory:
    memory = peer.library
    assert isinstance(memory, _PeerMemory)
    return memory


def _decode(library_metadata: bytes) -> IpcMetadata:
    try:
        wire = _DECODER.decode(library_metadata)
        RegionTable.of(0, wire.allocations)
    except (msgspec.MsgspecError, KVXError, OverflowError) as error:
        raise HandshakeError(f"unreadable metadata of a peer that shares memory: {error}") from error
    if not 0 < len(wire.allocations) <= MOST_ALLOCATIONS or not wire.name.isalnum() or len(wire.name) > 64:
        raise HandshakeError(
            f"a peer named {wire.name[:64]!r} shares {len(wire.allocations)} allocations; 1 to {MOST_ALLOCATIONS} "
            "and a name of letters and digits are needed"
        )
    return wire


def _allocations_of(regions: Sequence[MemoryRegion]) -> list[tuple[int, Allocation]]:
    """(offset from the reservation's base, allocation) of every mapping that the regions lie in."""
    base = regions[0].address - regions[0].offset_bytes
    found: dict[int, Allocation] = {}
    for region in regions:
        handle = region.mapping.handle
        if not isinstance(handle, Allocation):
            raise ConnectorError("memory without a driver's allocation cannot be shared; take a kvx cache's regions")
        found[region.mapping.address - base] = handle
    return sorted(found.items(), key=lambda item: item[0])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _network_namespace() -> int:
    return os.stat("/proc/self/ns/net").st_ino
