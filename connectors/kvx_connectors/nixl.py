"""The NIXL connector (UCX back end): one-sided READ and WRITE between registered memory.

One *serving* agent, which peers connect to, from open to close; and for each peer one *moving* agent, which starts our
own transfers with it. They are apart because only the destruction of an agent is a proven drain: over UCX's TCP
transport, bytes of a released or disconnected READ were seen to land in our memory after the stopped peer went on. The
end of a peer's moving agent ends its transfers, and touches neither other peers nor those that read from us.

Few copies are given as descriptors, thousands as numbers of cells of the registered regions (`nixl_cells.py`), which
takes NIXL half the time. Where the owner's UCX sends a READ in messages, it is made in pieces (`nixl_pieces.py`).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from kvx.addresses import is_loopback
from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.errors import ConnectorError, HandshakeError, TransferError
from kvx.peer import Int64s, Peer
from kvx.region import MemoryRegion
from kvx_connectors.nixl_cells import LEAST_COPIES, CellList, cell_list, most_common
from kvx_connectors.nixl_pieces import MESSAGE_BYTES, Pieces, pieces_of

logger = logging.getLogger(__name__)

# How long a transfer that was asked to stop may end by itself before its agent is ended. One that was only cancelled
# has its deadline as well: UCX may end a peer whose reader goes away in the middle of a READ (docs/adr/0007-nixl.md).
DRAIN_S = 0.25
# How often an agent is progressed before its end; some microseconds each.
PURGE_STEPS = 100
# Between two pieces both sides wait for each other. While a look found work, which takes a thread more than some
# microseconds, they look again after the first of these, until it was idle for the second, or poll took the third.
LOOK_AGAIN_S, IDLE_S, LONGEST_LOOK_S = 20e-6, 500e-6, 5e-3
WORK_S = 20e-6
# Over these alone, READs are sent by their owner's UCX.
_READS_ARE_SENT = frozenset(["self", "tcp", "cuda_copy", "gdr_copy"])
_MEMORY_TYPES = {"cpu": "DRAM", "cuda": "VRAM"}
_NOT_RDMA = frozenset(
    ["self", "tcp", "sm", "shm", "cma", "posix", "sysv", "xpmem", "knem", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"]
)


class NixlMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library's part of a peer's metadata."""

    agent: str
    agent_metadata: bytes
    memory_type: str
    device_id: int


@dataclass(eq=False)
class _Agent:
    """A NIXL agent with our regions registered. The only reference to it, so that its end is when we say."""

    library: Any
    registered: Any


@dataclass(eq=False)
class _Remote:
    """A peer's own metadata, and the agent that moves bytes to and from it; None when that has ended.

    `reads`: those in pieces, of which the first has one on its way.
    """

    wire: NixlMetadata
    agent: _Agent | None
    reads: deque[Transfer] = field(default_factory=deque)


_DECODER = msgspec.msgpack.Decoder(NixlMetadata)


class NixlConnector(Connector):
    """`name` is the serving agent's name: unique by default, and seen by peers in notifications."""

    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        operations=frozenset(Op),
        notify=True,
        memory=frozenset(_MEMORY_TYPES),
        ports="ports of UCX's choice on every interface of UCX_NET_DEVICES",
    )

    def __init__(self, agent_name: str | None = None) -> None:
        super().__init__()
        self._agent_name = agent_name or f"kvx-{uuid.uuid4().hex[:16]}"
        self._serving: _Agent | None = None
        self._spare: _Agent | None = None  # for the next peer: starting one takes some 40 ms
        self._rows: list[tuple[int, int, int, str]] = []
        self._memory_type, self._device_id = "DRAM", 0
        self._reads_in_pieces, self._last_work = False, 0.0

    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        kind, _, index = regions[0].mapping.device.partition(":")
        if len({region.mapping.device for region in regions}) != 1:
            raise ConnectorError("one connector registers the memory of one device; use one rank for each device")
        self._memory_type, self._device_id = _MEMORY_TYPES[kind], int(index or 0)
        _leave_rdma_out()
        self._reads_in_pieces = _has_only(_READS_ARE_SENT)
        _send_pieces_whole(self._reads_in_pieces)
        if self._reads_in_pieces:
            _say_nothing_unasked()
        if self.data_address and is_loopback(self.data_address):
            _listen_on_loopback()
        self._rows = [(region.address, region.nbytes, self._device_id, "") for region in regions]
        try:
            self._serving = self._start_agent(self._agent_name)
            self._spare = self._start_moving()
        except BaseException:
            self._end_idle_agents()
            raise

    def _metadata(self) -> bytes:
        assert self._serving is not None, "an open connector serves"
        with _as_connector_error("export metadata"):
            metadata = self._serving.library.get_agent_metadata()
        return msgspec.msgpack.encode(
            NixlMetadata(
                agent=self._agent_name,
                agent_metadata=metadata,
                memory_type=self._memory_type,
                device_id=self._device_id,
            )
        )

    def _connect(self, library_metadata: bytes) -> Peer:
        try:
            wire = _DECODER.decode(library_metadata)
        except msgspec.MsgspecError as error:
            raise HandshakeError(f"unreadable NIXL metadata of a peer: {error}") from error
        if wire.memory_type not in _MEMORY_TYPES.values():
            raise HandshakeError(f"peer {wire.agent} has memory of type {wire.memory_type!r}, which NIXL does not know")
        known = self._peers.get(wire.agent)
        if known is not None:  # it restarted under its old name: NIXL keeps the dead one's data until told
            self.disconnect(known)
        agent, self._spare = self._spare or self._start_moving(), None
        try:
            with _as_connector_error(f"connect to {wire.agent}"):
                _load_peer(agent.library, wire)
        except ConnectorError:
            self._keep_or_end(agent)
            raise
        return Peer(name=wire.agent, generation=0, regions=self._regions, library=_Remote(wire, agent))

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        remote = _remote_of(transfer)
        if self._reads_in_pieces and transfer.op is Op.READ:
            transfer.handle = Pieces(pieces_of(copies), notify)
            remote.reads.append(transfer)
            if remote.reads[0] is transfer:
                self._move_on(remote)
            return
        with _as_connector_error("prepare a transfer", TransferError):
            transfer.handle = self._prepare(_library_of(remote), remote.wire, transfer, copies, notify)
        self._follow(transfer, *_asked(lambda: _library_of(remote).transfer(transfer.handle)))

    def _prepare(self, library: Any, wire: NixlMetadata, transfer: Transfer, copies: Copies, notify: bytes) -> Any:
        lists = self._cell_lists(wire, transfer.peer, copies) if len(copies.length) >= LEAST_COPIES else None
        if lists is not None:
            ours, theirs = lists  # what is prepared of them may go when this returns: a transfer has copies
            local = library.prep_xfer_dlist("", ours.rows, self._memory_type)
            remote = library.prep_xfer_dlist(transfer.peer.name, theirs.rows, wire.memory_type)
            return library.make_prepped_xfer(transfer.op.name, local, ours.numbers, remote, theirs.numbers, notify)
        local = library.get_xfer_descs(_rows(copies.local, copies.length, self._device_id), self._memory_type)
        remote = library.get_xfer_descs(_rows(copies.remote, copies.length, wire.device_id), wire.memory_type)
        return library.initialize_xfer(transfer.op.name, local, remote, transfer.peer.name, notify)

    def _state_of_piece(self, transfer: Transfer, pieces: Pieces) -> Any:
        """Of the one on its way, or else of the next one, which is asked for."""
        remote = _remote_of(transfer)
        library = _library_of(remote)
        if pieces.on_way is not None:
            return library.check_xfer_state(pieces.on_way)
        copies = pieces.rest.popleft()
        notify = b"" if pieces.rest else pieces.notify
        pieces.on_way = self._prepare(library, remote.wire, transfer, copies, notify)
        return library.transfer(pieces.on_way)

    def _cell_lists(self, wire: NixlMetadata, peer: Peer, copies: Copies) -> tuple[CellList, CellList] | None:
        cell_bytes = most_common(copies.length)
        ours = cell_list(self._regions, copies.local, copies.length, cell_bytes, self._device_id)
        theirs = cell_list(peer.regions, copies.remote, copies.length, cell_bytes, wire.device_id)
        return None if ours is None or theirs is None else (ours, theirs)

    def _progress(self) -> list[tuple[str, bytes]]:
        begun, messages = time.monotonic(), self._look()
        while self._reads_in_pieces and not self._finished and self._is_busy(begun):
            time.sleep(LOOK_AGAIN_S)
            messages += self._look()
        return messages

    def _is_busy(self, begun: float) -> bool:
        now = time.monotonic()
        return now < min(self._last_work + IDLE_S, begun + LONGEST_LOOK_S)

    def _look(self) -> list[tuple[str, bytes]]:
        assert self._serving is not None, "an open connector serves"
        worked_s = time.thread_time()
        with _as_connector_error("progress"):
            arrived = self._serving.library.get_new_notifs()
        for transfer in list(self._pending):
            if transfer.state is TransferState.PENDING:
                self._look_at(transfer)
        if time.thread_time() - worked_s > WORK_S:
            self._last_work = time.monotonic()
        sender = "/moving"
        return [(name.removesuffix(sender), message) for name, messages in arrived.items() for message in messages]

    def _look_at(self, transfer: Transfer) -> None:
        if isinstance(transfer.handle, Pieces):
            self._look_at_pieces(transfer)
        else:
            self._follow(transfer, *_asked(lambda: _library_of(_remote_of(transfer)).check_xfer_state(transfer.handle)))
        if transfer.state is TransferState.PENDING and transfer.stop_cause is not None:
            stop = max(transfer.stop_time, transfer.deadline) if transfer.cancelled else transfer.stop_time
            if time.monotonic() > stop + DRAIN_S:
                self._drain(transfer.peer, "another transfer with this peer did not stop, so all had to; ask again")

    def _follow(self, transfer: Transfer, state: str, error: str) -> None:
        """What NIXL says of a transfer. One that it gave up may still move until its connection is gone."""
        if state == "DONE":
            self._end(transfer, TransferState.DONE)
        elif state != "PROC":
            text = f"NIXL {transfer.op.value} with peer {transfer.peer.name} failed: {error}"
            if transfer.stop_cause is None:
                transfer.stop_cause, transfer.stop_time = TransferError(text), time.monotonic()
            if transfer not in self._pending:
                self._pending.append(transfer)
            self._drain(transfer.peer, text)

    def _look_at_pieces(self, transfer: Transfer) -> None:
        remote = _remote_of(transfer)
        if remote.reads[0] is transfer:
            self._move_on(remote)
        elif transfer.stop_cause is not None:
            remote.reads.remove(transfer)
            self._finish(transfer, TransferState.FAILED)

    def _move_on(self, remote: _Remote) -> None:
        """One piece at a time is on its way from a peer, of each READ in turn; one that is stopped asks for no more."""
        while remote.reads:
            transfer = remote.reads[0]
            pieces = transfer.handle
            assert isinstance(pieces, Pieces)
            if pieces.on_way is not None or (pieces.rest and transfer.stop_cause is None):
                state, error = _asked(partial(self._state_of_piece, transfer, pieces))
                if state != "DONE":
                    self._follow(transfer, state, error)
                    return
                _release(transfer, pieces.on_way)
                pieces.on_way = None
            if pieces.rest and transfer.stop_cause is None:
                remote.reads.rotate(-1)
            else:
                remote.reads.popleft()
                self._finish(transfer, TransferState.FAILED if pieces.rest else TransferState.DONE)

    def _cancel(self, transfer: Transfer) -> None:
        """Nothing to ask of NIXL: a release frees the handle and lets the bytes go on. `_look_at` drains."""

    def _disconnect(self, peer: Peer) -> None:
        if any(transfer.peer is peer for transfer in self._pending):
            self._drain(peer, "the peer was disconnected")
            return
        remote = peer.library
        assert isinstance(remote, _Remote)
        agent, remote.agent = remote.agent, None
        if agent is not None:
            _forget_peer(agent.library, peer.name)
            self._keep_or_end(agent)

    def _close(self) -> None:
        for peer in self._peers.values():
            self._drain(peer, f"connector {self.name} was closed")
        self._end_idle_agents()

    # Agents

    def _start_moving(self) -> _Agent:
        return self._start_agent(f"{self._agent_name}/moving")

    def _start_agent(self, name: str) -> _Agent:
        """An agent with every region registered. No progress thread: it would spin on a core."""
        with _as_connector_error("start an agent and register memory"):
            agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            return _Agent(agent, agent.register_memory(self._rows, self._memory_type))

    def _drain(self, peer: Peer, why: str) -> None:
        """End the peer's agent: after that nothing of its transfers arrives. It has to shake hands again."""
        remote = peer.library
        assert isinstance(remote, _Remote)
        agent, remote.agent = remote.agent, None
        remote.reads.clear()
        transfers = [transfer for transfer in self._pending if transfer.peer is peer]
        for transfer in transfers:
            if isinstance(transfer.handle, Pieces):
                transfer.handle.on_way = None
            transfer.handle = None  # released by its destructor, before the agent that it belongs to
        if agent is not None:
            _purge(agent.library)
            _end_agent(agent)
        peer.connected = False
        for transfer in transfers:
            self._finish(transfer, TransferState.FAILED, TransferError(why))

    def _keep_or_end(self, agent: _Agent) -> None:
        if self._spare is None:
            self._spare = agent
        else:
            _end_agent(agent)

    def _end_idle_agents(self) -> None:
        idle = [agent for agent in (self._serving, self._spare) if agent is not None]
        self._serving = self._spare = None
        for agent in idle:
            _end_agent(agent)

    def _end(self, transfer: Transfer, state: TransferState) -> None:
        handle, transfer.handle = transfer.handle, None
        _release(transfer, handle)
        self._finish(transfer, state)


def _leave_rdma_out() -> None:
    """Where UCX_TLS names no RDMA transport, UCX need not load its RDMA modules, which it does all the same.

    They come with a libnl of their own; on a host that has another one (libibverbs1 brings it), the process ends with
    SIGSEGV at its exit (seen with the wheel of NIXL 1.5.1).
    """
    if _has_only(_NOT_RDMA):
        os.environ.setdefault("UCX_MODULES", "^ib")


def _has_only(transports: frozenset[str]) -> bool:
    return transports.issuperset(os.environ.get("UCX_TLS", "all").split(","))


def _send_pieces_whole(in_pieces: bool) -> None:
    """UCX would send a piece in messages of 8 KiB; after the first, the others may meet a connection that is gone.

    All have room to receive them: UCX writes past the end of what is shorter, and ends the reader with SIGSEGV.
    """
    os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", str(MESSAGE_BYTES))
    if in_pieces:
        os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", str(MESSAGE_BYTES))


def _say_nothing_unasked() -> None:
    """UCX would write to each peer every 20 s, to see whether it is there.

    To a reader that has given up, such a message ends the connection. Where that comes after the reader's last request
    and before the owner has read it, the reply fails, and UCX ends the owner.
    """
    os.environ.setdefault("UCX_KEEPALIVE_INTERVAL", "inf")


def _listen_on_loopback() -> None:
    """UCX would listen on every interface; peers of an engine whose side channel is on loopback are on this host."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _remote_of(transfer: Transfer) -> _Remote:
    remote = transfer.peer.library
    assert isinstance(remote, _Remote)
    return remote


def _library_of(remote: _Remote) -> Any:
    assert remote.agent is not None, "a connected peer has an agent"
    return remote.agent.library


def _release(transfer: Transfer, handle: object) -> None:
    try:
        _library_of(_remote_of(transfer)).release_xfer_handle(handle)
    except Exception:  # noqa: BLE001  its destructor tries again; the agent keeps what it cannot free
        pass


def _asked(call: Callable[[], Any]) -> tuple[str, str]:
    """(state, error) of a transfer. NIXL reports most failures, a dead peer too, by exceptions of its own.

    As text: an exception holds the frames that it came through, and so the agent, which must end when we say.
    """
    try:
        return str(call()), "status ERR"
    except Exception as error:  # noqa: BLE001  as above
        return "ERR", str(error)


def _end_agent(agent: _Agent) -> None:
    library, agent.library = agent.library, None
    registered, agent.registered = agent.registered, None
    try:
        library.deregister_memory(registered)
    except Exception as error:  # noqa: BLE001  its destruction, which is next, deregisters all the same
        logger.warning("NIXL could not deregister the memory of an agent that ends: %s", error)


def _rows(addresses: Int64s, lengths: Int64s, device_id: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, device_id
    return rows


def _load_peer(agent: Any, wire: Any) -> None:
    loaded = agent.add_remote_agent(wire.agent_metadata)
    name = loaded.decode() if isinstance(loaded, bytes) else loaded
    if name != wire.agent:
        agent.remove_remote_agent(name)
        raise HandshakeError(f"NIXL metadata of agent {name!r} came under the name {wire.agent!r}")
    agent.make_connection(name)


def _purge(agent: Any) -> None:
    """Let UCX take apart what it had with a peer that died: ended before it has, it aborts the process (ADR 7)."""
    for _ in range(PURGE_STEPS):
        try:
            agent.get_new_notifs()
        except Exception:  # noqa: BLE001  what a dead peer left behind; the agent ends now
            return


def _forget_peer(agent: Any, name: str) -> None:
    try:
        agent.remove_remote_agent(name)
    except Exception:  # noqa: BLE001  NIXL raises when it noticed the peer's end before us
        pass


@contextmanager
def _as_connector_error(what: str, kind: type[ConnectorError] = ConnectorError) -> Iterator[None]:
    """NIXL's exceptions have no common base; each becomes one of ours, saying what was tried."""
    try:
        yield
    except ConnectorError:
        raise
    except Exception as error:
        raise kind(f"NIXL could not {what}: {error}") from error
