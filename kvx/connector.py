"""The interface to one transfer library.

Public methods are concrete: they hold the lock and check state, arguments and capabilities, so that a subclass only
writes the eight hooks. A connector knows byte offsets, registered regions and peers; no layouts, blocks or requests.

State: NEW -> OPEN <-> CLOSED. A transfer: PENDING -> DONE | FAILED | CANCELLED, terminal only once the library
provably touches the memory no more.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, final

import msgspec

from kvx.errors import (
    ConnectorError,
    ConnectorStateError,
    HandshakeError,
    KVXError,
    LayoutError,
    TransferError,
    TransferTimeout,
)
from kvx.peer import Int64s, Peer, RegionTable
from kvx.plan import Runs, split_rows
from kvx.region import MemoryRegion

METADATA_VERSION = 1
# Registered regions of one peer: one a segment and mapping, so thousands at the most.
MOST_REGIONS = 1 << 18


class Op(StrEnum):
    READ = "read"
    WRITE = "write"


class ConnectorState(StrEnum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class TransferState(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a connector can do. `memory` holds the device kinds ("cpu", "cuda") whose bytes it can move.

    `shares_memory`: it needs memory that other processes can map (a `Driver` with `can_export`).
    `reaches_processes`: its peers are other processes; False where the peer is this process's own host memory.
    `opens_ports`: its library listens on the network, at `ports`; `ports_everywhere`: whatever interface it is given.
    """

    operations: frozenset[Op]
    notify: bool
    memory: frozenset[str]
    shares_memory: bool = False
    reaches_processes: bool = True
    opens_ports: bool = True
    ports: str = "network ports of its library"
    ports_everywhere: bool = False


@dataclass(eq=False)
class Transfer:
    """One operation in flight. `handle` belongs to the connector; `stop_cause` says why it was asked to stop."""

    op: Op
    peer: Peer
    nbytes: int
    num_descriptors: int
    deadline: float
    deadline_s: float
    state: TransferState = TransferState.PENDING
    cause: KVXError | None = None
    stop_cause: KVXError | None = None
    stop_time: float = 0.0
    cancelled: bool = False
    handle: object = field(default=None, repr=False)


@dataclass(frozen=True)
class Copies:
    """Flat copies by address, each inside one region on either side: what the library gets."""

    local: Int64s
    remote: Int64s
    length: Int64s


@dataclass(frozen=True)
class Events:
    """Transfers that became terminal since the last poll, each once; (peer name, message) notifications."""

    finished: tuple[Transfer, ...] = ()
    notifications: tuple[tuple[str, bytes], ...] = ()


class ConnectorMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `metadata` sends: strict, so that a peer's bytes never reach the library unchecked."""

    version: int
    connector: str
    generation: int
    base_address: int
    regions: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MOST_REGIONS)]
    library: bytes


class Connector(ABC):
    """One transfer library. Subclasses set `name` and `capabilities`; their constructors do no I/O."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    data_address: str = ""
    """Where the side channel listens, when set: ports should be opened there alone, where the library can do that."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clock = time.monotonic
        self._state = ConnectorState.NEW
        self._generation = 0
        self._regions = RegionTable.of(0, [])
        self._pending: list[Transfer] = []
        self._finished: list[Transfer] = []
        self._peers: dict[str, Peer] = {}

    # Public calls, from any thread.

    @property
    def state(self) -> ConnectorState:
        return self._state

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def registered_bytes(self) -> int:
        return self._regions.registered_bytes if self._state is ConnectorState.OPEN else 0

    @final
    def open(self, regions: Sequence[MemoryRegion], generation: int) -> None:
        """Register `regions`, and nothing else. `generation` must grow from one opening to the next."""
        with self._lock:
            if self._state is ConnectorState.OPEN:
                raise ConnectorStateError(f"connector {self.name} is open already; close it before opening it again")
            if self._state is ConnectorState.CLOSED and generation <= self._generation:
                raise ConnectorStateError(
                    f"connector {self.name} was open with generation {self._generation}; {generation} is not newer"
                )
            table = _table_of(regions)
            self._check_memory_kinds(regions)
            self._open(regions)
            self._regions = table
            self._generation = generation
            self._state = ConnectorState.OPEN

    @final
    def metadata(self) -> bytes:
        """What a peer's `connect` needs, valid for this generation."""
        with self._lock:
            self._require_open("metadata")
            table = self._reachable()
            return msgspec.msgpack.encode(
                ConnectorMetadata(
                    version=METADATA_VERSION,
                    connector=self.name,
                    generation=self._generation,
                    base_address=table.base_address,
                    regions=list(zip(table.starts.tolist(), (table.ends - table.starts).tolist(), strict=True)),
                    library=self._metadata(),
                )
            )

    @final
    def why_unreachable(self, metadata: bytes) -> str | None:
        """Why the peer of this metadata cannot be connected to from here; None when nothing speaks against it."""
        with self._lock:
            self._require_open("why_unreachable")
            return self._why_unreachable(self._decoded(metadata)[0].library)

    @final
    def connect(self, metadata: bytes) -> Peer:
        """A peer from its metadata. One known under the same name (it restarted) is disconnected."""
        with self._lock:
            self._require_open("connect")
            wire, table = self._decoded(metadata)
            peer = self._connect(wire.library)
            if (known := self._peers.get(peer.name)) is not None:
                self.disconnect(known)
            peer.generation, peer.regions = wire.generation, table
            self._peers[peer.name] = peer
            return peer

    @final
    def submit(self, op: Op, peer: Peer, runs: Runs, *, deadline_s: float, notify: bytes = b"") -> Transfer:
        """Start copying: READ from the peer's `source` to our `destination`, WRITE the other way round.

        LayoutError, before the library sees anything, when a byte is not registered on its side.
        """
        with self._lock:
            self._require_open("submit")
            self._require_peer(peer)
            if op not in self.capabilities.operations:
                raise ConnectorError(f"connector {self.name} cannot {op.value}; choose one that can")
            if notify and not self.capabilities.notify:
                raise ConnectorError(f"connector {self.name} cannot notify; use the side channel")
            copies = self._copies(op, peer, runs)
            if not len(copies.length):
                raise TransferError("a transfer needs at least one byte; none was planned")
            transfer = Transfer(
                op=op,
                peer=peer,
                nbytes=int(copies.length.sum()),
                num_descriptors=len(copies.length),
                deadline=self._clock() + deadline_s,
                deadline_s=deadline_s,
            )
            self._submit(transfer, copies, notify)
            if transfer.state is TransferState.PENDING:
                self._pending.append(transfer)
            return transfer

    @final
    def poll(self) -> Events:
        """Progress the library. In CLOSED it hands out what the closing ended."""
        with self._lock:
            notifications: list[tuple[str, bytes]] = []
            if self._state is ConnectorState.OPEN:
                now = self._clock()
                for transfer in self._pending:
                    if now > transfer.deadline and transfer.stop_cause is None:
                        self._stop(transfer, TransferTimeout(self._timeout_text(transfer)))
                notifications = self._progress()
            finished, self._finished = self._finished, []
            return Events(tuple(finished), tuple(notifications))

    @final
    def cancel(self, transfer: Transfer) -> None:
        """Ask a transfer to stop. The memory is safe only when `poll` reports it as terminal."""
        with self._lock:
            if transfer.state is TransferState.PENDING and transfer.stop_cause is None:
                transfer.cancelled = True
                self._stop(transfer, TransferError("cancelled"))

    @final
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; its transfers in flight are cancelled. Harmless when it is gone already."""
        with self._lock:
            for transfer in [item for item in self._pending if item.peer is peer]:
                self.cancel(transfer)
            if peer.connected and self._state is ConnectorState.OPEN:
                self._disconnect(peer)
            peer.connected = False
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]

    @final
    def close(self) -> None:
        """Drain, deregister, forget the peers. Idempotent; `poll` still hands out the last terminal transfers."""
        with self._lock:
            if self._state is not ConnectorState.OPEN:
                return
            self._close()
            for transfer in list(self._pending):
                self._finish(transfer, TransferState.FAILED, TransferError(f"connector {self.name} was closed"))
            for peer in self._peers.values():
                peer.connected = False
            self._peers.clear()
            self._state = ConnectorState.CLOSED

    # Hooks: called with the lock held, in a state and with arguments that were checked.

    @abstractmethod
    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        """Start the library and register the regions; on failure leave nothing behind."""

    @abstractmethod
    def _metadata(self) -> bytes:
        """The library's own part of the metadata."""

    @abstractmethod
    def _connect(self, library_metadata: bytes) -> Peer:
        """A Peer with its name; the base fills in generation and regions."""

    @abstractmethod
    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        """Start it. TransferError only when nothing was started; otherwise leave it PENDING or call `_finish`."""

    @abstractmethod
    def _progress(self) -> list[tuple[str, bytes]]:
        """Look at `self._pending`, call `_finish` for what is terminal, return new (peer name, notification)."""

    @abstractmethod
    def _cancel(self, transfer: Transfer) -> None:
        """Ask the library to stop it; `_progress` finishes it once it is drained."""

    @abstractmethod
    def _disconnect(self, peer: Peer) -> None: ...

    @abstractmethod
    def _close(self) -> None:
        """Stop touching memory, deregister all of it, end the library."""

    def _why_unreachable(self, library_metadata: bytes) -> str | None:
        """Where a connector reaches some peers only; most reach all."""
        del library_metadata
        return None

    def _reachable(self) -> RegionTable:
        """What a peer that has our metadata may read and write: what is registered, unless a subclass has another."""
        return self._regions

    # For hooks.

    def _finish(self, transfer: Transfer, state: TransferState, cause: KVXError | None = None) -> None:
        """Make a transfer terminal. One that was asked to stop and did not complete takes the reason for that."""
        assert transfer.state is TransferState.PENDING
        if state is not TransferState.DONE and transfer.stop_cause is not None:
            state = TransferState.CANCELLED if transfer.cancelled else TransferState.FAILED
            cause = transfer.stop_cause
        transfer.state, transfer.cause = state, cause
        if transfer in self._pending:
            self._pending.remove(transfer)
        self._finished.append(transfer)

    def _stop(self, transfer: Transfer, cause: KVXError) -> None:
        transfer.stop_cause, transfer.stop_time = cause, self._clock()
        self._cancel(transfer)

    def _timeout_text(self, transfer: Transfer) -> str:
        return (
            f"no end of a {transfer.op.value} of {transfer.nbytes} bytes with peer {transfer.peer.name} "
            f"within {transfer.deadline_s:g} s"
        )

    def _decoded(self, metadata: bytes) -> tuple[ConnectorMetadata, RegionTable]:
        try:
            wire = _METADATA_DECODER.decode(metadata)
            table = RegionTable.of(wire.base_address, wire.regions)
        except (msgspec.MsgspecError, LayoutError, OverflowError) as error:
            raise HandshakeError(f"unreadable metadata of a {self.name} peer: {error}") from error
        if (wire.version, wire.connector) != (METADATA_VERSION, self.name):
            raise HandshakeError(
                f"metadata of connector {wire.connector} version {wire.version} found, "
                f"{self.name} version {METADATA_VERSION} needed; start both engines alike"
            )
        return wire, table

    def _copies(self, op: Op, peer: Peer, runs: Runs) -> Copies:
        source, destination = (peer.regions, self._regions) if op is Op.READ else (self._regions, peer.regions)
        rows = runs.expand()
        if not (source.holds(rows[:, 0], rows[:, 2]) and destination.holds(rows[:, 1], rows[:, 2])):
            # Runs coalesce over touching segments; registrations, and so single copies, do not.
            rows = split_rows(rows, source.starts.tolist(), destination.starts.tolist())
            source.require_inside(rows[:, 0], rows[:, 2], "source")
            destination.require_inside(rows[:, 1], rows[:, 2], "destination")
        local, remote = (rows[:, 1], rows[:, 0]) if op is Op.READ else (rows[:, 0], rows[:, 1])
        local += self._regions.base_address  # in place: nobody else has these rows
        remote += peer.regions.base_address
        return Copies(local=local, remote=remote, length=rows[:, 2])

    def _require_open(self, call: str) -> None:
        if self._state is not ConnectorState.OPEN:
            raise ConnectorStateError(f"{call} needs an open connector; {self.name} is {self._state.value}")

    def _require_peer(self, peer: Peer) -> None:
        if not peer.connected or self._peers.get(peer.name) is not peer:
            raise ConnectorStateError(f"peer {peer.name} is not connected any more; shake hands again")

    def _check_memory_kinds(self, regions: Sequence[MemoryRegion]) -> None:
        kinds = {region.mapping.device.partition(":")[0] for region in regions} - self.capabilities.memory
        if kinds:
            raise ConnectorError(
                f"connector {self.name} cannot move {', '.join(sorted(kinds))} memory, only "
                f"{', '.join(sorted(self.capabilities.memory))}; choose another connector"
            )


_METADATA_DECODER = msgspec.msgpack.Decoder(ConnectorMetadata)


def _table_of(regions: Sequence[MemoryRegion]) -> RegionTable:
    bases = {region.address - region.offset_bytes for region in regions}
    if len(bases) != 1:
        raise LayoutError(f"a connector opens on the regions of one reservation, found {len(bases)}")
    return RegionTable.of(bases.pop(), [(region.offset_bytes, region.nbytes) for region in regions])
