"""The hand-off of one engine rank: `HandoffWorker`, called by the engine, working on one thread of its own.

The engine's thread only leaves notes (hold, drop, pull, cancel) and takes outcomes (`poll`). Sockets, connectors and
all state belong to the hand-off thread, which sleeps in ZeroMQ's poll; only while a transfer is in flight, or a peer
reads from us and may need our side of the library to progress, does it wake by time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import zmq

from kvx import inject
from kvx.connector import Connector, ConnectorState
from kvx.engine_side import EngineSide, HandoffEvents, HandoffSettings, Pull
from kvx.errors import ConnectorStateError, KVXError, LayoutError
from kvx.geometry import GroupGeometry
from kvx.handshake import (
    Claim,
    DigestPage,
    Digests,
    Hello,
    Message,
    Refused,
    RefusedMessage,
    Release,
    Request,
    StatusReply,
    welcome,
)
from kvx.holds import Hold, HoldTable, stale_covered
from kvx.peer import EngineInfo
from kvx.pulls import Puller
from kvx.sidechannel import Link, Server, reason_of

__all__ = ["EngineInfo", "HandoffEvents", "HandoffSettings", "HandoffWorker", "Pull"]

logger = logging.getLogger(__name__)

# While something is in flight, the thread looks this often, growing from the first to the second.
FASTEST_POLL_S = 50e-6
SLOWEST_POLL_S = 1e-3
# A connection is set up with the peer's first transfer: after a HELLO we progress the library for it.
SETUP_S = 1.0
SETUP_POLL_S = 200e-6


class HandoffWorker:
    """`status_extra` adds to `status`; it is called on the hand-off thread and must be quick."""

    def __init__(
        self,
        settings: HandoffSettings,
        info: EngineInfo,
        connectors: Sequence[Connector],
        status_extra: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._settings = settings
        self._status_extra = status_extra
        self._side = EngineSide(settings, info, connectors, self._post)
        self._table = HoldTable(self._side.instance, settings.grace_s, self._send)
        self._puller = Puller(self._side, self._open_link, self._close_link)
        self._pulling: set[str] = set()  # the engine's thread: pulls whose outcome it has not taken
        self._notes: deque[Callable[[], None]] = deque()
        self._waiting_digests: list[tuple[bytes, Digests]] = []
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake_fd = -1
        self._setup_until = 0.0
        self._poll_s = FASTEST_POLL_S
        self._stale: list[tuple[Hold, float]] = []

    # The engine's thread

    @property
    def port(self) -> int:
        """Where the side channel listens."""
        self._require_open()
        return self._server.port

    def open(
        self,
        groups: Sequence[GroupGeometry],
        views: Mapping[str, torch.Tensor],
        num_blocks: int,
        generation: int,
        layout: str,
    ) -> None:
        """Listen and start the thread; called again, take over a cache that has changed.

        `views`: layer name -> [B, H, N, C], or in kernel blocks. Connectors are opened by the cache they attach to.
        ConnectorError: the port is in use, or the host is not ours.
        """
        if self._thread is not None:
            self._post(lambda: self._update(groups, views, num_blocks, generation, layout))
            return
        self._update(groups, views, num_blocks, generation, layout)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._server = Server(self._context, self._settings.side_channel_host, self._settings.side_channel_port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._poller.register(self._server.socket, zmq.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvx-handoff", daemon=True)
        self._thread.start()

    def hold(
        self, request_id: str, blocks: Sequence[Sequence[int]], num_tokens: int, lease_s: float | None = None
    ) -> None:
        """Keep a request's blocks (per layer group, by position, -1 where there is none) for a reader.

        They may be freed when `poll` reports the request as released or expired. LayoutError: a block id that is not
        committed, or not one list for each layer group.
        """
        self._require_open()
        self._check_blocks(blocks)
        expires = time.monotonic() + (self._settings.lease_s if lease_s is None else lease_s)
        kept = tuple(tuple(int(block) for block in of_group) for of_group in blocks)
        hold = Hold(request_id, kept, num_tokens, expires)
        if self._side.verifies:
            hold.digests = self._side.take_digests(kept, 0, num_tokens)
        self._post(lambda: self._add_hold(hold))
        if hold.digests is not None:  # after the note above, so that it is also seen after it
            hold.digests.add_done_callback(lambda _: self._post(lambda: self._on_hold_digests(hold)))

    def drop(self, request_id: str) -> None:
        """Abort a hold; it is reported as released when no reader is at it any more."""
        self._require_open()
        self._post(lambda: self._released([request_id] if self._table.drop(request_id) else []))

    def pull(self, pull: Pull) -> None:
        """Fetch a request's KV; with no tokens to fetch, only tell the owner that it may free its blocks.

        LayoutError: a destination block that is not committed. ConnectorStateError: the request's pull has not been
        reported by `poll` yet.
        """
        self._require_open()
        self._check_blocks(pull.blocks)
        if pull.request_id in self._pulling:
            raise ConnectorStateError(f"request {pull.request_id} is being pulled already; take its outcome first")
        self._pulling.add(pull.request_id)
        self._post(lambda: self._puller.start(pull, time.monotonic()))

    def cancel(self, request_id: str) -> None:
        """Abort a pull; it is reported as failed when its blocks are safe."""
        self._require_open()
        self._post(lambda: self._puller.cancel(request_id))

    def poll(self) -> HandoffEvents:
        """What has ended since the last call, each request once."""
        events = self._side.outbox.take()
        self._pulling -= events.received | events.failed.keys()
        return events

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to say; False when it has not after `timeout_s`."""
        return self._side.outbox.wait(timeout_s)

    def status(self) -> dict[str, Any]:
        """Counters and digests' findings; the side channel serves the same."""
        status = {"engine_id": self._side.info.engine_id, **self._side.metrics.as_status(self._table.num_held)}
        if self._status_extra is not None:
            status.update(self._status_extra())
        return status

    def close(self) -> None:
        """End the thread, the sockets and what is on its way. Idempotent. Close before the cache is."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake()
        self._thread.join()
        self._thread = None
        self._side.close()
        self._context.destroy(linger=200)
        os.close(self._wake_fd)
        self._wake_fd = -1

    def _require_open(self) -> None:
        if self._thread is None:
            raise ConnectorStateError("the hand-off is not open; open it after the cache has grown")

    def _check_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        if len(blocks) != len(self._side.groups):
            raise LayoutError(f"block lists for {len(blocks)} layer groups given, there are {len(self._side.groups)}")
        for group, of_group in zip(self._side.groups, blocks, strict=True):
            ids = np.asarray(of_group, dtype=np.int64)
            if ids.size and int(ids.max()) >= self._side.num_blocks:
                raise LayoutError(
                    f"block {int(ids.max())} of layer group {group.name} is not committed; "
                    f"{self._side.num_blocks} blocks are"
                )

    def _post(self, note: Callable[[], None]) -> None:
        self._notes.append(note)
        self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # The hand-off thread

    def _run(self) -> None:
        while not self._stopping:
            self._guarded(self._turn)
        self._guarded(self._finish)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Whatever goes wrong in one step is logged and counted; the thread lives on."""
        try:
            step()
        except Exception:
            self._side.metrics.internal_errors += 1
            logger.exception("hand-off thread")

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._sleep_ms()))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        while self._notes:
            self._guarded(self._notes.popleft())
        if self._server.socket in ready:
            for sender, request in self._server.requests():
                self._guarded(partial(self._answer, sender, request))
        for link in self._puller.links:
            if link.socket in ready or link.monitor in ready:
                self._guarded(partial(self._read_link, link))
        self._guarded(self._poll_connectors)
        now = time.monotonic()
        self._guarded(partial(self._puller.tick, now))
        self._guarded(partial(self._expire, now))

    def _sleep_ms(self) -> int:
        """How long ZeroMQ may wait. With something in flight: a short sleep here and no wait there."""
        now = time.monotonic()
        if self._puller.is_moving or self._table.is_being_read or now < self._setup_until:
            time.sleep(self._poll_s)
            self._poll_s = min(self._poll_s * 1.5, SETUP_POLL_S if now < self._setup_until else SLOWEST_POLL_S)
            return 0
        self._poll_s = FASTEST_POLL_S
        moments = [self._puller.next_time(), self._table.next_time(), *(until for _, until in self._stale)]
        times = [moment for moment in moments if moment is not None]
        return max(1, min(60_000, round((min(times) - now) * 1000) + 1)) if times else 60_000

    def _read_link(self, link: Link) -> None:
        try:
            for on_reply, reply in link.replies():
                on_reply(reply)
        except RefusedMessage as error:
            self._side.metrics.messages_refused += 1
            logger.warning("unreadable reply from engine %s:%s: %s", link.host, link.port, error)
            self._puller.on_link_lost(link)
            return
        if link.is_lost():
            self._puller.on_link_lost(link)

    def _poll_connectors(self) -> None:
        """Also in CLOSED: what its closing ended still has to be told."""
        for connector in self._side.connectors:
            if connector.state is ConnectorState.NEW:
                continue
            for transfer in connector.poll().finished:
                self._puller.on_transfer(transfer)

    def _expire(self, now: float) -> None:
        for hold, until in [item for item in self._stale if now >= item[1]]:
            self._stale.remove((hold, until))
            if hold.is_awaiting_reuse:  # the engine has not reused a block of it by itself
                self._side.injected_reuse(hold.blocks)
                self._reused(hold)
        expired = self._table.expire(now)
        if expired:
            self._side.metrics.expired += len(expired)
            self._side.outbox.put(expired=expired)

    def _finish(self) -> None:
        deadline = time.monotonic() + self._settings.transfer_deadline_s
        self._puller.close()
        while self._puller.is_moving and time.monotonic() < deadline:
            self._poll_connectors()
            time.sleep(SLOWEST_POLL_S)
        self._server.close()

    # Holds

    def _update(
        self,
        groups: Sequence[GroupGeometry],
        views: Mapping[str, torch.Tensor],
        num_blocks: int,
        generation: int,
        layout: str,
    ) -> None:
        self._side.update(groups, views, num_blocks, generation, layout)
        self._table.generation = generation

    def _add_hold(self, hold: Hold) -> None:
        for freed in stale_covered(self._table.holds.values(), hold):
            self._reused(freed)
        hold.is_freed = hold.is_awaiting_reuse = self._side.injector.take(inject.Fault.STALE)
        self._table.add(hold, time.monotonic())

    def _on_hold_digests(self, hold: Hold) -> None:
        waiting, self._waiting_digests = self._waiting_digests, []
        for sender, ask in waiting:
            self._answer(sender, ask)
        if hold.is_freed:
            self._released([hold.request_id])
            self._stale.append((hold, time.monotonic() + inject.STALE_WAIT_S))

    def _released(self, request_ids: list[str]) -> None:
        self._side.metrics.released += len(request_ids)
        self._side.outbox.put(released=request_ids)

    def _reused(self, hold: Hold) -> None:
        """A hold that was freed early has other content now: let its reader read that."""
        hold.is_awaiting_reuse = False
        self._table.answer_parked(hold.request_id, time.monotonic())

    # Requests of readers

    def _send(self, receiver: bytes, message: Message) -> None:
        self._server.send(receiver, message)

    def _answer(self, sender: bytes, request: Request | RefusedMessage) -> None:
        if isinstance(request, RefusedMessage):
            self._side.metrics.messages_refused += 1
            logger.warning("refused a side channel message: %s", request)
            self._send(sender, Refused(sequence=request.sequence, reason=reason_of(request)))
            return
        try:
            self._answer_request(sender, request)
        except KVXError as error:
            self._send(sender, Refused(sequence=request.sequence, reason=reason_of(error)))

    def _answer_request(self, sender: bytes, request: Request) -> None:
        now = time.monotonic()
        self._poll_s = FASTEST_POLL_S
        match request:
            case Hello():
                self._setup_until = now + SETUP_S
                self._send(sender, welcome(request.sequence, self._side.describe()))
            case Claim():
                self._table.claim(sender, request, now)
            case Release():
                if self._table.release(request.request_id, request.reader):
                    self._released([request.request_id])
            case Digests():
                self._answer_digests(sender, request)
            case _:
                self._send(sender, StatusReply(sequence=request.sequence, status=self.status()))

    def _answer_digests(self, sender: bytes, ask: Digests) -> None:
        hold = self._table.holds.get(ask.request_id)
        if hold is not None and hold.digests is not None and not hold.digests.done():
            self._waiting_digests.append((sender, ask))
            return
        page: DigestPage = self._table.digest_page(ask)
        self._send(sender, page)

    # Links

    def _open_link(self, host: str, port: int) -> Link:
        link = Link(self._context, host, port)
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        return link

    def _close_link(self, link: Link) -> None:
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        link.close()
