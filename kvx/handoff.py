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

from kvx import door
from kvx.connector import Connector, ConnectorState
from kvx.curve import Curve
from kvx.digest_check import sampled_blocks, sampled_ranges
from kvx.engine_side import EngineSide, Failure, HandoffEvents, HandoffSettings, Pull, Waiting
from kvx.errors import ConnectorStateError, Crowded, HandshakeError, KVXError, LayoutError, PeerDead
from kvx.geometry import GroupGeometry
from kvx.handshake import Message, RefusedMessage
from kvx.holder import Holder, OnFetch
from kvx.holds import Hold
from kvx.metrics import HandoffMetrics
from kvx.peer import EngineInfo
from kvx.pulls import Puller
from kvx.region import MemoryRegion
from kvx.seal import ReplySeal, RequestSeal
from kvx.secret import Secret
from kvx.sidechannel import Link, Server, reason_of
from kvx.ticket import Ticket, write_ticket
from kvx.tracing import open_tracer

__all__ = [
    "CacheFollower",
    "EngineInfo",
    "Failure",
    "HandoffEvents",
    "HandoffSettings",
    "HandoffWorker",
    "Pull",
    "Waiting",
]

logger = logging.getLogger(__name__)

# While something is in flight, the thread looks this often, growing from the first to the second; anew for each pull
# that begins to read, or pulls that never all rest, as those that are checked in between, would be looked at late.
FASTEST_POLL_S = 50e-6
SLOWEST_POLL_S = 1e-3
# The same while a peer's first transfer may set up its connection.
SETUP_POLL_S = 200e-6
# The same after a reader has gone.
PARTING_POLL_S = 0.02
# Holds and pulls whose outcome the engine has not taken; more are refused, and fail or free their own request.
MOST_HOLDS = MOST_PULLS = 16384
# Notes that the hand-off thread has not read; renewals are left out from here on.
MOST_NOTES = 4 * MOST_PULLS


class HandoffWorker:
    """`status_extra` adds to `status`; it is called on the hand-off thread and must be quick.

    `secret`: what its engines share (`kvx.secret.read_secret`). With one, nobody else is talked to.
    `curve`: the key pair that they share (`kvx.curve.read_curve`), to encrypt what they say. `clock` is monotonic.
    `on_fetch`: for a diagnosis only (`kvx.handshake.Fetch`); called on the hand-off thread, and must be quick.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        info: EngineInfo,
        connectors: Sequence[Connector],
        status_extra: Callable[[], dict[str, Any]] | None = None,
        secret: Secret | None = None,
        curve: Curve | None = None,
        on_fetch: OnFetch | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._status_extra = status_extra
        self._curve = curve
        self._side = EngineSide(settings, info, connectors, self._post, secret, clock)
        self._holder = Holder(self._side, self._reply, self.status, on_fetch)
        self._puller = Puller(self._side, self._open_link, self._close_link)
        self._pulling: set[str] = set()  # the engine's thread: pulls whose outcome it has not taken
        self._holding: set[str] = set()  # the same of holds
        self._notes: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake_fd, self._wake_lock = -1, threading.Lock()
        self._is_noted = threading.Event()
        self._poll_s = FASTEST_POLL_S
        self._suspending: tuple[threading.Event, float] | None = None

    # The engine's thread

    @property
    def port(self) -> int:
        """Where the side channel listens."""
        self._require_open()
        return self._server.port

    @property
    def instance(self) -> str:
        """New with every start of the process."""
        return self._side.instance

    def open(
        self,
        groups: Sequence[GroupGeometry],
        views: Mapping[str, torch.Tensor],
        num_blocks: int,
        generation: int,
        layout: str,
    ) -> None:
        """Listen and start the thread; called again, after `suspend`, take over a cache that has changed.

        `views`: layer name -> [B, H, N, C], or in kernel blocks. Connectors are opened by the cache they attach to;
        a `CacheFollower` attached after them suspends and resumes the hand-off whenever the memory changes.
        ConnectorError: the port is in use, the host is not ours, or nothing says whom to talk to (`kvx.door`).
        DriverUnavailable: digests are wanted, and kvx has no way to take them on this device.
        """
        self._side.update(groups, views, num_blocks, generation, layout)
        self._side.is_suspended = False
        self._post(lambda: self._holder.resume(generation))
        if self._thread is not None:
            return
        self._side.allowed = door.allowed_hosts(self._settings, self._side.secret)
        door.warn_of_strangers(self._settings, self._side.secret)
        self._side.tracer = open_tracer(self._side.info.engine_id, self._settings.otlp_traces_endpoint)
        self._listen()
        self._start()

    # A simulation replaces these two: it has sockets of its own, and takes the thread's turns itself.

    def _new_sockets(self) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Poller]:
        return zmq.Context(), zmq.Poller()

    def _start(self) -> None:
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvx-handoff", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        self._context, self._poller = self._new_sockets()
        try:
            self._server = Server(
                self._context,
                self._settings.side_channel_host,
                self._settings.side_channel_port,
                ReplySeal(self._side.secret, self._settings.auth_window_s),
                self._curve,
            )
        except BaseException:
            self._context.destroy(linger=0)
            self._end_tracer()
            raise
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._poller.register(self._server.socket, zmq.POLLIN)

    def hold(
        self, request_id: str, blocks: Sequence[Sequence[int]], num_tokens: int, lease_s: float | None = None
    ) -> None:
        """Keep a request's blocks (per layer group, by position, -1 where there is none) for a reader.

        They may be freed when `poll` reports the request as released or expired. LayoutError: a block id that is not
        committed, or not one list for each layer group. ConnectorStateError: the cache is asleep or changing.
        Crowded: MOST_HOLDS are held.
        """
        self._require_cache()
        self._check_blocks(blocks)
        if len(self._holding) >= MOST_HOLDS:
            raise Crowded(f"{MOST_HOLDS} requests are held already; read them faster, or shorten lease_s")
        now, lease_s = self._clock(), self._settings.lease_s if lease_s is None else lease_s
        kept = tuple(tuple(int(block) for block in of_group) for of_group in blocks)
        latest = now + max(lease_s, self._settings.max_hold_s)
        hold = Hold(request_id, kept, num_tokens, now + lease_s, lease_s, latest)
        if self._side.verifies:
            hold.digests = self._side.take_digests(self._digested(hold), 0, num_tokens, after=self._side.mark())
        self._holding.add(request_id)
        self._post(lambda: self._holder.add(hold))
        if hold.digests is not None:  # after the note above, so that it is also seen after it
            hold.digests.add_done_callback(lambda _: self._post(lambda: self._holder.on_digests(hold)))

    def ticket(self, request_id: str, num_tokens: int, lease_s: float | None = None) -> str:
        """What a reader needs to pull a hold of this engine's one rank; empty without a secret."""
        if self._side.secret is None:
            return ""
        longest_s = max(self._settings.lease_s, self._settings.max_hold_s)  # renewals count
        ticket = Ticket(
            request_id=request_id,
            engine_id=self._side.info.engine_id,
            instances=(self.instance,),
            host=self._settings.side_channel_host,
            port=self.port,
            num_tokens=num_tokens,
            expires_s=time.time() + (longest_s if lease_s is None else lease_s),
        )
        return write_ticket(self._side.secret, ticket)

    def drop(self, request_id: str) -> None:
        """Abort a hold; it is reported as released when no reader is at it any more."""
        self._require_open()
        self._post(lambda: self._holder.drop(request_id))

    def keep(self, waiting: Waiting) -> None:
        """Renew the lease of a request's hold until its pull begins, which one of no tokens does as well.

        Behind MOST_NOTES others it is left out: the hand-off thread would come too late for it.
        """
        self._require_open()
        if len(self._notes) >= MOST_NOTES:
            return
        self._post(lambda: self._puller.keep(waiting, self._clock()))

    def pull(self, pull: Pull) -> None:
        """Fetch a request's KV; with no tokens to fetch, only tell the owner that it may free its blocks.

        LayoutError: a destination block that is not committed. ConnectorStateError: the request's pull has not been
        reported by `poll` yet, or the cache is asleep or changing. Crowded: MOST_PULLS are on their way.
        """
        self._require_cache()
        self._check_blocks(pull.blocks)
        if pull.request_id in self._pulling:
            raise ConnectorStateError(f"request {pull.request_id} is being pulled already; take its outcome first")
        if len(self._pulling) >= MOST_PULLS:
            raise Crowded(f"{MOST_PULLS} pulls are on their way already; ask again when some have ended")
        self._pulling.add(pull.request_id)
        self._post(lambda: self._puller.start(pull, self._clock()))

    def count_failure(self, error: KVXError) -> None:
        """A pull that `pull` refused, so that the metrics have it too."""
        self._post(lambda: self._side.metrics.failure(error.cause))

    def cancel(self, request_id: str) -> None:
        """Abort a pull; it is reported as failed when its blocks are safe."""
        self._require_open()
        self._post(lambda: self._puller.cancel(request_id))

    def poll(self) -> HandoffEvents:
        """What has ended since the last call, each request once."""
        events = self._side.outbox.take()
        self._pulling -= events.received | events.failed.keys()
        self._holding -= events.released | events.expired
        return events

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to say; False when it has not after `timeout_s`."""
        return self._side.outbox.wait(timeout_s)

    @property
    def metrics(self) -> HandoffMetrics:
        """The counters that the hand-off thread writes."""
        return self._side.metrics

    @property
    def num_held(self) -> int:
        """Requests whose blocks are kept now."""
        return self._holder.num_held

    @property
    def num_blocks_held(self) -> int:
        """Blocks that are kept now."""
        return self._holder.num_blocks_held

    def status(self) -> dict[str, Any]:
        """Counters and digests' findings; the side channel serves the same."""
        status = {"engine_id": self._side.info.engine_id, **self._side.metrics.as_status(self._holder.num_held)}
        status["held"] = {"blocks": self._holder.num_blocks_held}
        if self._status_extra is not None:
            status.update(self._status_extra())
        return status

    def suspend(self) -> None:
        """Return when nothing of the hand-off touches the cache any more, and start nothing that would.

        Holds that nobody reads end as expired, pulls as failed; both are reported by `poll`. Readers that have claimed
        a hold may finish, which takes as long as its lease and grace at most: their library reads our memory whether
        we like it or not. Idempotent, and harmless before `open` and after `close`.
        """
        ended = self._begin_suspending()
        if self._thread is None:
            return
        while not ended.wait(1.0) and self._thread.is_alive():
            pass
        self._side.end_digests()

    def _begin_suspending(self) -> threading.Event:
        """Set when nothing of the hand-off's thread touches the cache any more."""
        self._side.is_suspended = True
        ended = threading.Event()
        if self._thread is not None:
            self._post(lambda: self._suspend(ended))
        return ended

    def resume(self, num_blocks: int, generation: int) -> None:
        """Go on with the same views and a new generation, `num_blocks` of them committed."""
        side = self._side
        if self._thread is not None:
            self.open(side.groups, side.views, num_blocks, generation, side.layout)

    def close(self) -> None:
        """End the thread, the sockets and what is on its way. Idempotent. Close before the cache is."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake()
        self._thread.join()
        self._thread = None
        self._side.end_digests()
        self._context.destroy(linger=200)
        self._end_tracer()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _end_tracer(self) -> None:
        tracer, self._side.tracer = self._side.tracer, None
        if tracer is not None:
            tracer.close()

    def _digested(self, hold: Hold) -> Sequence[Sequence[int]]:
        """The blocks of a hold that digests are taken of."""
        if self._settings.verify == "all":
            return hold.blocks
        return [
            sampled_blocks(of_group, group, sampled_ranges(hold.request_id, group, hold.num_tokens))
            for group, of_group in zip(self._side.groups, hold.blocks, strict=True)
        ]

    def _require_open(self) -> None:
        if self._thread is None:
            raise ConnectorStateError("the hand-off is not open; open it after the cache has grown")

    def _require_cache(self) -> None:
        self._require_open()
        self._side.require_cache()

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
        self._is_noted.set()
        with self._wake_lock:  # a name look-up may outlive the hand-off
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # The hand-off thread

    def _run(self) -> None:
        self._guarded(self._enter_device)
        while not self._stopping:
            self._guarded(self._turn)
        self._guarded(self._finish)

    def _enter_device(self) -> None:
        """Transfer libraries look for the device's context on the thread that calls them."""
        for device in {view.device for view in self._side.views.values() if view.is_cuda}:
            torch.cuda.set_device(device)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Whatever goes wrong in one step is logged and counted; the thread lives on."""
        try:
            step()
        except Exception:  # noqa: BLE001  as above
            self._side.internal_error("hand-off thread")

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._sleep_ms()))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        self._take_notes()
        if self._server.socket in ready:
            for sender, request in self._server.requests():
                self._poll_s = FASTEST_POLL_S
                self._guarded(partial(self._holder.answer, sender, request))
        for link in self._puller.links:
            if link.socket in ready or link.monitor in ready:
                self._guarded(partial(self._read_link, link))
        self._guarded(self._poll_connectors)
        if self._puller.take_begun():
            self._poll_s = FASTEST_POLL_S
        now = self._clock()
        self._guarded(partial(self._puller.tick, now))
        self._guarded(partial(self._holder.expire, now))
        self._end_suspending(now)

    def _take_notes(self) -> None:
        while self._notes:
            self._guarded(self._notes.popleft())

    def _sleep_ms(self) -> int:
        """How long ZeroMQ may wait. With something in flight: no wait there, but a shorter one here, until a note."""
        now = self._clock()
        if self._puller.is_moving or self._holder.is_being_read or now < self._holder.setup_until:
            if self._is_noted.wait(self._poll_s):
                self._is_noted.clear()
            self._poll_s = min(self._poll_s * 1.5, SETUP_POLL_S if now < self._holder.setup_until else SLOWEST_POLL_S)
            return 0
        self._poll_s = FASTEST_POLL_S
        times = [moment for moment in (self._puller.next_time(), self._holder.next_time()) if moment is not None]
        if now < self._holder.parting_until:
            times.append(now + PARTING_POLL_S)
        return max(1, min(60_000, round((min(times) - now) * 1000) + 1)) if times else 60_000

    def _reply(self, receiver: bytes, message: Message) -> None:
        if not self._server.send(receiver, message):
            self._side.metrics.refuse("unread")

    def _read_link(self, link: Link) -> None:
        try:
            for on_reply, reply in link.replies():
                on_reply(reply)
        except RefusedMessage as error:
            self._side.metrics.refuse(error.cause)
            logger.warning("a reply of engine %s:%s is not taken: %s", link.host, link.port, reason_of(error))
            self._puller.on_link_lost(link, HandshakeError(f"engine {link.host}:{link.port}: {reason_of(error)}"))
            return
        if why := link.why_lost():
            self._puller.on_link_lost(link, PeerDead(why))

    def _poll_connectors(self) -> None:
        """Also in CLOSED: what its closing ended still has to be told."""
        for connector in self._side.connectors:
            if connector.state is ConnectorState.NEW:
                continue
            for transfer in connector.poll().finished:
                self._puller.on_transfer(transfer)

    def _suspend(self, ended: threading.Event) -> None:
        self._suspending = ended, self._clock() + self._settings.transfer_deadline_s
        self._holder.suspend()
        self._puller.suspend()

    def _end_suspending(self, now: float) -> None:
        """A transfer that does not stop in time is left to its connector, which drains when the cache closes it."""
        if self._suspending is None:
            return
        ended, until = self._suspending
        if self._holder.is_empty and (not self._puller.is_moving or now >= until):
            self._suspending = None
            ended.set()

    def _finish(self) -> None:
        deadline = self._clock() + self._settings.transfer_deadline_s
        self._take_notes()  # what was asked for in the last moment has an outcome too
        self._puller.close()
        while self._puller.is_moving and self._clock() < deadline:
            self._poll_connectors()
            time.sleep(SLOWEST_POLL_S)
        self._server.close()

    # Links

    def _open_link(self, host: str, port: int, address: str) -> Link:
        seal = RequestSeal(self._side.secret, self._settings.auth_window_s)
        link = Link(self._context, host, port, address, seal, self._curve)
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        return link

    def _close_link(self, link: Link) -> None:
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        link.close()


class CacheFollower:
    """Attach it to the cache after the connectors: the hand-off then stops before any memory goes, and goes on after.

    `committed_blocks` tells the cache's count of that moment, as in `lambda: cache.committed_blocks`.
    """

    def __init__(self, worker: HandoffWorker, committed_blocks: Callable[[], int]) -> None:
        self._worker, self._committed_blocks = worker, committed_blocks

    def open(self, regions: Sequence[MemoryRegion], generation: int) -> None:  # noqa: ARG002  the views say as much
        self._worker.resume(self._committed_blocks(), generation)

    def close(self) -> None:
        self._worker.suspend()
