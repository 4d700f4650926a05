"""The NIXL connector (UCX back end): one-sided READ and WRITE between registered memory.

Two agents. The *serving* agent is the one peers connect to; it lives from open to close. The *moving* agent starts
our own transfers. They are apart because only the destruction of an agent is a proven drain: over UCX's TCP transport,
bytes of a released or disconnected READ were seen to land in our memory after the stopped peer went on. Replacing the
moving agent ends them without breaking the peers that read from us.

Descriptors are given per transfer: making them took 0.2 ms for 240 and 2-6 ms for 46,000, less than it takes to look
up indices in prepared lists of a geometry that differs from peer to peer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from kvx.connector import Capabilities, Connector, Copies, Op, Transfer, TransferState
from kvx.errors import ConnectorError, HandshakeError, TransferError
from kvx.peer import Int64s, Peer
from kvx.region import MemoryRegion

# How long a transfer that was asked to stop may end by itself before the moving agent is replaced.
DRAIN_S = 0.25
_MEMORY_TYPES = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library's part of a peer's metadata."""

    agent: str
    agent_metadata: bytes
    memory_type: str
    device_id: int


_DECODER = msgspec.msgpack.Decoder(NixlMetadata)


class NixlConnector(Connector):
    """`name` is the serving agent's name: unique by default, and seen by peers in notifications."""

    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        operations=frozenset(Op), notify=True, memory=frozenset(_MEMORY_TYPES)
    )

    def __init__(self, agent_name: str | None = None) -> None:
        super().__init__()
        self._agent_name = agent_name or f"kvx-{uuid.uuid4().hex[:16]}"
        self._serving: Any = None
        self._moving: Any = None
        self._registrations: list[tuple[Any, Any]] = []
        self._rows: list[tuple[int, int, int, str]] = []
        self._memory_type, self._device_id = "DRAM", 0

    def _open(self, regions: Sequence[MemoryRegion]) -> None:
        kind, _, index = regions[0].mapping.device.partition(":")
        if len({region.mapping.device for region in regions}) != 1:
            raise ConnectorError("one connector registers the memory of one device; use one rank for each device")
        self._memory_type, self._device_id = _MEMORY_TYPES[kind], int(index or 0)
        self._rows = [(region.address, region.nbytes, self._device_id, "") for region in regions]
        try:
            self._serving = self._start_agent(self._agent_name)
            self._moving = self._start_agent(f"{self._agent_name}/moving")
        except BaseException:
            self._end_agents()
            raise

    def _metadata(self) -> bytes:
        with _as_connector_error("export metadata"):
            metadata = self._serving.get_agent_metadata()
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
        with _as_connector_error(f"connect to {wire.agent}"):
            _load_peer(self._moving, wire)
        return Peer(name=wire.agent, generation=0, regions=self._regions, library=wire)

    def _submit(self, transfer: Transfer, copies: Copies, notify: bytes) -> None:
        wire = transfer.peer.library
        assert isinstance(wire, NixlMetadata)
        moving = self._moving
        with _as_connector_error("prepare a transfer", TransferError):
            local = moving.get_xfer_descs(_rows(copies.local, copies.length, self._device_id), self._memory_type)
            remote = moving.get_xfer_descs(_rows(copies.remote, copies.length, wire.device_id), wire.memory_type)
            transfer.handle = moving.initialize_xfer(transfer.op.name, local, remote, transfer.peer.name, notify)
        try:
            state = moving.transfer(transfer.handle)
        except Exception as error:  # noqa: BLE001  NIXL reports a dead peer here, by exceptions of its own
            self._drain_failed(transfer, error)
            return
        if state == "DONE":
            self._end(transfer, TransferState.DONE)
        elif state != "PROC":
            self._drain_failed(transfer, None)

    def _progress(self) -> list[tuple[str, bytes]]:
        with _as_connector_error("progress"):
            arrived = self._serving.get_new_notifs()
        for transfer in list(self._pending):
            if transfer.state is TransferState.PENDING:
                self._look_at(transfer)
        sender = "/moving"
        return [(name.removesuffix(sender), message) for name, messages in arrived.items() for message in messages]

    def _look_at(self, transfer: Transfer) -> None:
        try:
            state = self._moving.check_xfer_state(transfer.handle)
        except Exception as error:  # noqa: BLE001  as above
            self._drain_failed(transfer, error)
            return
        if state == "DONE":
            self._end(transfer, TransferState.DONE)
        elif state != "PROC":
            self._drain_failed(transfer, None)
        elif transfer.stop_cause is not None and time.monotonic() - transfer.stop_time > DRAIN_S:
            self._replace_moving_agent()

    def _cancel(self, transfer: Transfer) -> None:
        """Nothing to ask of NIXL: a release frees the handle and lets the bytes go on. `_look_at` drains."""

    def _disconnect(self, peer: Peer) -> None:
        if any(transfer.peer is peer for transfer in self._pending):
            self._replace_moving_agent(without=peer)
        else:
            _forget_peer(self._moving, peer.name)

    def _close(self) -> None:
        self._end_moving(f"connector {self.name} was closed")
        self._end_agents()

    # Agents

    def _start_agent(self, name: str) -> Any:
        """An agent with every region registered. No progress thread: it would spin on a core."""
        with _as_connector_error("start an agent and register memory"):
            agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            self._registrations.append((agent, agent.register_memory(self._rows, self._memory_type)))
        return agent

    def _end_agents(self) -> None:
        registrations, self._registrations = self._registrations, []
        for agent, registered in registrations:
            with _as_connector_error("deregister memory"):
                agent.deregister_memory(registered)
        self._serving = self._moving = None

    def _replace_moving_agent(self, without: Peer | None = None) -> None:
        """Drain by ending the moving agent; all of its transfers fail, its peers are known to the new one."""
        self._end_moving("the connector had to drain another transfer that did not stop; ask again")
        self._moving = self._start_agent(f"{self._agent_name}/moving")
        for peer in self._peers.values():
            if peer is not without and peer.connected:
                try:
                    _load_peer(self._moving, peer.library)
                except Exception:  # noqa: BLE001  this peer has to shake hands again, the others stay
                    peer.connected = False

    def _end_moving(self, why: str) -> None:
        ended, self._moving = self._moving, None
        transfers = list(self._pending)
        for transfer in transfers:
            transfer.handle = None  # released by its destructor, before the agent that it belongs to
        for registration in [item for item in self._registrations if item[0] is ended]:
            self._registrations.remove(registration)
            with _as_connector_error("deregister memory"):
                ended.deregister_memory(registration[1])
            del registration
        del ended
        for transfer in transfers:
            self._finish(transfer, TransferState.FAILED, TransferError(why))

    def _drain_failed(self, transfer: Transfer, error: Exception | None) -> None:
        """A transfer that NIXL gave up: its other pieces may still move until the connection is gone."""
        text = f"NIXL {transfer.op.value} with peer {transfer.peer.name} failed"
        cause = TransferError(f"{text}: {error or 'status ERR'}")
        if transfer.stop_cause is None:
            transfer.stop_cause, transfer.stop_time = cause, time.monotonic()
        if transfer not in self._pending:
            self._pending.append(transfer)
        if error is not None and "REMOTE_DISCONNECT" in str(error):
            # The connection has ended, so nothing can arrive over it any more.
            self._end(transfer, TransferState.FAILED)
            _forget_peer(self._moving, transfer.peer.name)
            transfer.peer.connected = False
        else:
            self._replace_moving_agent()

    def _end(self, transfer: Transfer, state: TransferState) -> None:
        handle, transfer.handle = transfer.handle, None
        try:
            self._moving.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001  its destructor tries again; the agent keeps what it cannot free
            pass
        self._finish(transfer, state)


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
