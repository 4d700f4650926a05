"""The Mooncake connector (TransferEngine, peer to peer): one-sided READ and WRITE between registered memory.

One *serving* engine, which peers connect to, from open to close; and for each peer one *moving* engine, which starts
our own transfers with it. They are apart because only the end of an engine is a proven drain: the library cannot stop
a transfer, and after a failure other pieces went on landing. The end joins its threads and closes its sockets.

Every copy is a batch of its own. Only for such a batch does the library answer "not yet" without waiting, and that
made it faster than the library's own batches too (docs/adr/0009-mooncake.md).

The library listens on every interface of the machine, whatever KVX_MOONCAKE_HOST says, and knows no authentication:
keep its ports (15000 to 17000) inside a trusted network.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from kvx.addresses import numeric_address
from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.errors import ConnectorError, HandshakeError, TransferError
from kvx.peer import Peer
from kvx.region import MemoryRegion
from kvx_connectors.mooncake_engine import (
    IDENTITY_BYTES,
    READ,
    WRITE,
    Engine,
    end,
    give_up_reaching,
    register,
    start_engine,
)
from kvx_connectors.mooncake_settings import Settings, settings_of_environment

__all__ = ["MooncakeConnector"]

# Copies given to the library at once, for each peer. It refuses more than 1024 that wait.
WINDOW = 960
# How long a transfer that was asked to stop may end by itself before its engine is ended.
DRAIN_S = 0.25
# The library's threads move the bytes; a caller that polls without a pause would take their core.
YIELD_S = 100e-6


class MooncakeMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library's part of a peer's metadata. At `identity_address` it keeps `identity`, new with every opening."""

    address: str
    protocol: str
    identity_address: int
    identity: bytes


@dataclass(eq=False)
class _Remote:
    """A peer's own metadata, and the engine that moves bytes to and from it; None when that has ended."""

    wire: MooncakeMetadata
    engine: Engine | None
    opening: threading.Thread | None = None
    reached: bool = False
    in_flight: int = 0


@dataclass(eq=False)
class _Move:
    """How far a transfer is. `batches` are the library's, oldest first; `identified`: the peer is who it was."""

    local: list[int]
    remote: list[int]
    length: list[int]
    given: int = 0
    batches: deque[int] = field(default_factory=deque)
    identifying: bool = False
    identified: bool = False

    @property
    def all_given(self) -> bool:
        return self.given == len(self.length)


_DECODER = msgspec.msgpack.Decoder(MooncakeMetadata)


class MooncakeConnector(Connector):
    """Over TCP, or RDMA by configuration. It cannot notify: the library's notes arrive without their sender."""

    name: ClassVar[str] = "mooncake"
    capabilities: ClassVar[Capabilities] = Capabilities(
        operations=frozenset(Op),
        notify=False,
        memory=frozenset({"cpu"}),
        ports="two TCP ports of Mooncake's choice, on every interface",
        ports_everywhere=True,
    )

    def __init__(self) -> None:
        super().__init__()
        self._serving: Engine | None = None
        self._settings = Settings()
        self._memory: list[tuple[int, int]] = []

    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        self._settings = settings_of_environment(self.data_address)
        self._memory = [(region.address, region.nbytes) for region in regions]
        self._serving = start_engine(self._settings)
        failure = register(self._serving, self._memory)
        if failure:
            self._end_serving()
            raise ConnectorError(failure)

    def _metadata(self) -> bytes:
        assert self._serving is not None, "an open connector serves"
        return msgspec.msgpack.encode(
            MooncakeMetadata(
                address=f"{self._settings.host}:{self._serving.library.get_rpc_port()}",
                protocol=self._settings.protocol,
                identity_address=self._serving.identity.ctypes.data,
                identity=self._serving.identity.tobytes(),
            )
        )

    def _connect(self, library_metadata: bytes) -> Peer:
        wire = _checked(library_metadata, self._settings)
        known = self._peers.get(wire.address)
        if known is not None:  # it restarted at its old address: the library keeps the dead one's ports until told
            self.disconnect(known)
        remote = _Remote(wire, start_engine(self._settings))
        remote.opening = threading.Thread(
            target=_reach, args=(remote, remote.engine), name=f"kvx-mooncake-{wire.address}", daemon=True
        )
        remote.opening.start()
        return Peer(name=wire.address, generation=0, regions=self._regions, library=remote)

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        assert not notify, "the base class refuses it"
        transfer.handle = _Move(copies.local.tolist(), copies.remote.tolist(), copies.length.tolist())
        self._look_at(transfer)

    def _progress(self) -> list[tuple[str, bytes]]:
        finished = len(self._finished)
        for transfer in list(self._pending):
            if transfer.state is TransferState.PENDING:
                self._look_at(transfer)
        if self._pending and len(self._finished) == finished:
            time.sleep(YIELD_S)
        return []

    def _cancel(self, transfer: Transfer) -> None:
        """No more is given to the library. It has no call to stop what it was given: `_look_at` waits, then drains."""

    def _disconnect(self, peer: Peer) -> None:
        self._drain(peer, "the peer was disconnected")

    def _close(self) -> None:
        for peer in self._peers.values():
            self._drain(peer, f"connector {self.name} was closed")
        self._end_serving()

    # Transfers

    def _look_at(self, transfer: Transfer) -> None:
        remote, move = _remote_of(transfer), _move_of(transfer)
        if not self._is_reached(transfer, remote):
            return
        failure = _settle(remote, move)
        if not failure and transfer.stop_cause is None:
            failure = _give(remote, move, transfer.op)
        if failure:
            self._fail(transfer, failure)
        elif not move.batches:
            if transfer.stop_cause is not None:
                self._finish(transfer, TransferState.FAILED)
            elif move.all_given and move.identified:
                self._finish(transfer, TransferState.DONE)
        elif transfer.stop_cause is not None and time.monotonic() > transfer.stop_time + DRAIN_S:
            self._drain(transfer.peer, "another transfer with this peer did not stop, so all had to; ask again")

    def _is_reached(self, transfer: Transfer, remote: _Remote) -> bool:
        """Until the peer has answered, nothing is given to the library, and so nothing has to be drained."""
        if remote.opening is None:
            return True
        if remote.opening.is_alive():
            if transfer.stop_cause is not None:
                self._finish(transfer, TransferState.FAILED)
            return False
        assert remote.engine is not None, "a connected peer has an engine"
        remote.opening = None
        failure = register(remote.engine, self._memory) if remote.reached else "no answer, or another engine's"
        if failure:
            self._fail(transfer, failure)
        return not failure

    def _fail(self, transfer: Transfer, failure: str) -> None:
        text = f"Mooncake {transfer.op.value} with peer {transfer.peer.name} failed: {failure}"
        if transfer.stop_cause is None:
            transfer.stop_cause, transfer.stop_time = TransferError(text), time.monotonic()
        if transfer not in self._pending:
            self._pending.append(transfer)
        self._drain(transfer.peer, text)

    def _drain(self, peer: Peer, why: str) -> None:
        """End the peer's engine: after that nothing of its transfers arrives. It has to shake hands again."""
        remote = peer.library
        assert isinstance(remote, _Remote)
        engine, remote.engine = remote.engine, None
        opening, remote.opening = remote.opening, None
        if opening is not None:
            give_up_reaching(opening, remote.wire.address)
        # Where even that did not help, it has none of our memory, and ends with its thread.
        if engine is not None and (opening is None or not opening.is_alive()):
            end(engine)
        peer.connected = False
        for transfer in [item for item in self._pending if item.peer is peer]:
            transfer.handle = None
            self._finish(transfer, TransferState.FAILED, TransferError(why))

    # Engines

    def _end_serving(self) -> None:
        engine, self._serving = self._serving, None
        if engine is not None:
            end(engine)


def _reach(remote: _Remote, engine: Engine) -> None:
    """Ask the peer who it is, in a thread: the library's first call for a stopped peer takes a minute.

    The only memory of ours that this can touch is the engine's own.
    """
    with contextlib.suppress(Exception):  # the library has no types of its own; what counts is `reached`
        rows = [engine.identity.ctypes.data], [remote.wire.identity_address], [IDENTITY_BYTES]
        batch = engine.library.batch_transfer_async(remote.wire.address, *rows, READ)
        while remote.engine and batch > 0 and engine.library.transfer_check_status(batch) == 0:
            time.sleep(0.0005)
        remote.reached = batch > 0 and engine.identity.tobytes() == remote.wire.identity


# What can fail says so by its text, "" for success: an exception would hold frames, these the engine, and so its end.


def _settle(remote: _Remote, move: _Move) -> str:
    """Take what has ended, oldest first. After a failed copy nothing says which of the others will land."""
    assert remote.engine is not None, "a connected peer has an engine"
    while move.batches:
        status = remote.engine.library.transfer_check_status(move.batches[0])
        if status == 0:
            return ""
        if status != 1:
            return f"the library reports status {status}; the peer is gone or refused it"
        move.batches.popleft()
        remote.in_flight -= 1
    if move.identifying:
        move.identifying, move.identified = False, remote.engine.identity.tobytes() == remote.wire.identity
        return "" if move.identified else "another engine answers at its address; shake hands again"
    return ""


def _give(remote: _Remote, move: _Move, op: Op) -> str:
    """Give the library as many copies as it may have. The peer is identified before a WRITE and after a READ.

    The library connects again by itself, and would read from whoever listens at the address by then.
    """
    assert remote.engine is not None, "a connected peer has an engine"
    identify = not move.identified and (op is Op.WRITE or (move.all_given and not move.batches))
    while remote.in_flight < WINDOW and not move.identifying and (identify or not move.all_given):
        at = move.given
        if identify:
            local, theirs, nbytes = remote.engine.identity.ctypes.data, remote.wire.identity_address, IDENTITY_BYTES
        else:
            local, theirs, nbytes = move.local[at], move.remote[at], move.length[at]
        opcode = READ if identify or op is Op.READ else WRITE
        batch = remote.engine.library.batch_transfer_async(remote.wire.address, [local], [theirs], [nbytes], opcode)
        if batch <= 0:
            return "the library takes no copies for this peer any more"
        move.batches.append(batch)
        remote.in_flight += 1
        move.identifying, move.given = identify, at + (not identify)
    return ""


def _checked(library_metadata: bytes, settings: Settings) -> MooncakeMetadata:
    try:
        wire = _DECODER.decode(library_metadata)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"unreadable Mooncake metadata of a peer: {error}") from error
    host, _, port = wire.address.rpartition(":")
    if numeric_address(host) is None or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise HandshakeError(f"Mooncake address {wire.address[:80]!r} of a peer is not a numeric address and a port")
    if len(wire.identity) != IDENTITY_BYTES or wire.identity_address <= 0:
        raise HandshakeError(f"Mooncake peer {wire.address} does not say how to identify it")
    if wire.protocol != settings.protocol:
        raise HandshakeError(
            f"Mooncake peer {wire.address} speaks {wire.protocol[:80]!r}, we speak {settings.protocol!r}; "
            "set KVX_MOONCAKE_PROTOCOL alike"
        )
    return wire


def _remote_of(transfer: Transfer) -> _Remote:
    remote = transfer.peer.library
    assert isinstance(remote, _Remote)
    return remote


def _move_of(transfer: Transfer) -> _Move:
    assert isinstance(transfer.handle, _Move)
    return transfer.handle
