"""One half of a diagnosis: a small engine without a model, whose memory goes through the ordinary hand-off.

The half that is started with `--serve` waits. The other one fills 64 MiB, asks it to pull them (FETCH), pulls the same
bytes back out of its memory, and compares them with what it had filled in.
"""

from __future__ import annotations

import hashlib
import queue
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from kvx import door, registry
from kvx.cache import ExtensibleKVCache
from kvx.curve import Curve
from kvx.drivers.select import driver_for
from kvx.errors import KVXError, TransferError, VerificationError
from kvx.geometry import group_geometry
from kvx.handoff import CacheFollower, EngineInfo, Failure, HandoffSettings, HandoffWorker, Pull
from kvx.handshake import Fetch, Fetched, ask, expect
from kvx.layout import KVCacheLayout
from kvx.seal import RequestSeal
from kvx.secret import Secret
from kvx.sidechannel import reason_of
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.tensor import views_of

MODEL = "kvx doctor"
"""The model that a half names in its handshake; no engine in service has it."""
BLOCK_TOKENS, LAYERS, HEADS, HEAD_SIZE, DTYPE = 128, 4, 4, 64, "float16"
TRIP_BLOCKS = 128
TRIP_TOKENS = TRIP_BLOCKS * BLOCK_TOKENS
TRIP_BYTES = TRIP_TOKENS * LAYERS * HEADS * 2 * HEAD_SIZE * 2
TRIP_S = 60.0
LEASE_S = 60.0


@dataclass(frozen=True)
class Trip:
    """A round trip that came back as it went. Seconds there and back: the whole hand-off, digests included."""

    connector: str
    nbytes: int
    there_s: float
    back_s: float
    digest: str
    digests_compared: int


class Half:
    """`open` acts: memory, connectors, side channel. `on_stage` is told what is being done, in case of a crash."""

    def __init__(
        self,
        settings: HandoffSettings,
        secret: Secret | None = None,
        curve: Curve | None = None,
        device: str = "cpu",
        on_stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        deadline_s = max(settings.transfer_deadline_s, TRIP_S / 2)
        self._settings = replace(
            settings, verify="all", inject=None, transfer_deadline_s=deadline_s, otlp_traces_endpoint=""
        )
        self._secret, self._curve, self._device, self._on_stage = secret, curve, device, on_stage
        self.engine_id = f"kvx-doctor-{uuid.uuid4().hex[:8]}"
        self._asked: queue.Queue[tuple[Fetch, Callable[[Fetched], None]]] = queue.Queue()
        self._undo = ExitStack()
        self.connectors: list[str] = []
        self._released: set[str] = set()
        self._expired: set[str] = set()
        self._received: set[str] = set()
        self._failed: dict[str, Failure] = {}

    def open(self) -> None:
        """Errors as of the registry, the connectors and `HandoffWorker.open`."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._on_stage("library")
        classes = registry.connector_classes(self._settings.connectors)
        classes = [found for found in classes if found.capabilities.reaches_processes]
        self._on_stage("memory")
        driver = driver_for(self._device, shareable=any(found.capabilities.shares_memory for found in classes))
        geometry = _geometry(driver.granularity_bytes)
        cache = ExtensibleKVCache(driver, geometry.segment_table)
        cache.open()
        self._undo.callback(cache.close)
        self._views = views_of(cache.buffer, geometry)
        cache.set_views(self._views)
        cache.commit(1)
        self._on_stage("open")
        connectors = [found() for found in classes]
        self.connectors = [connector.name for connector in connectors]
        door.prepare(self._settings, connectors)
        for connector in connectors:
            cache.attach(connector)
        cache.extend_kv_cache(2 * TRIP_BLOCKS)
        self._on_stage("listen")
        info = EngineInfo(engine_id=self.engine_id, model=MODEL, dtype=DTYPE, kv_cache_dtype=DTYPE)
        self._worker = HandoffWorker(
            self._settings, info, connectors, secret=self._secret, curve=self._curve,
            on_fetch=lambda fetch, answer: self._asked.put((fetch, answer)),
        )  # fmt: skip
        self._undo.callback(self._worker.close)
        groups = (group_geometry(geometry, 0),)
        self._worker.open(groups, self._views, 2 * TRIP_BLOCKS, cache.generation, geometry.layout.name)
        cache.attach(CacheFollower(self._worker, lambda: cache.committed_blocks))

    @property
    def port(self) -> int:
        return self._worker.port

    def close(self) -> None:
        """Idempotent."""
        self._undo.close()

    # The half that waits

    def serve(self, timeout_s: float) -> str | None:
        """Take part in one diagnosis, if one begins within so long; what came of it, in a sentence."""
        try:
            fetch, answer = self._asked.get(timeout=timeout_s)
        except queue.Empty:
            return None
        request_id, tokens = fetch.request_id, fetch.num_tokens
        who = f"{fetch.engine_id} at {fetch.host}:{fetch.port}"
        blocks = [list(range(-(-min(tokens, TRIP_TOKENS) // BLOCK_TOKENS)))]
        try:
            if not 0 < tokens <= TRIP_TOKENS:
                raise TransferError(f"{tokens} tokens are no trip; one has 1 to {TRIP_TOKENS}")
            self._pull(request_id, fetch.engine_id, fetch.host, fetch.port, blocks, tokens, fetch.ticket)
            self._worker.hold(request_id, blocks, tokens, LEASE_S)
        except KVXError as error:
            answer(Fetched(sequence=fetch.sequence, request_id=request_id, failure=reason_of(error)))
            return f"{who} could not be read: {error}"
        host, ticket = self._settings.side_channel_host, self._worker.ticket(request_id, tokens)
        answer(Fetched(sequence=fetch.sequence, request_id=request_id, host=host, port=self.port, ticket=ticket))
        over = self._wait(lambda: request_id in self._released | self._expired, LEASE_S + TRIP_S)
        return f"{who}: {'64 MiB there and back' if over and request_id in self._released else 'never fetched it back'}"

    # The half that asks

    def round_trip(self, host: str, port: int, engine_id: str) -> Trip:
        """Send 64 MiB to the half at this address, fetch them back, and compare.

        TransferError or HandshakeError: something did not arrive. VerificationError: what came back is not what went.
        """
        here, back = list(range(TRIP_BLOCKS)), list(range(TRIP_BLOCKS, 2 * TRIP_BLOCKS))
        request_id = f"doctor-{uuid.uuid4().hex}"
        self._fill(here)
        self._on_stage("there")
        self._worker.hold(request_id, [here], TRIP_TOKENS, LEASE_S)
        began = time.monotonic()
        fetched = self._ask_to_fetch(request_id, host, port)
        there_s = time.monotonic() - began
        self._on_stage("back")
        began = time.monotonic()
        self._pull(request_id, engine_id, fetched.host, fetched.port, [back], TRIP_TOKENS, fetched.ticket)
        back_s = time.monotonic() - began
        self._on_stage("compare")
        digest, status = self._compare(here, back), self._worker.status()
        connectors = ", ".join(status["transfer"]["by_connector"])
        return Trip(connectors, TRIP_BYTES, there_s, back_s, digest, status["digests"]["checked"])

    def _ask_to_fetch(self, request_id: str, host: str, port: int) -> Fetched:
        fetch = Fetch(
            sequence=1, engine_id=self.engine_id, host=self._settings.side_channel_host, port=self.port,
            request_id=request_id, num_tokens=TRIP_TOKENS, ticket=self._worker.ticket(request_id, TRIP_TOKENS),
        )  # fmt: skip
        seal = RequestSeal(self._secret, self._settings.auth_window_s)
        fetched = expect(ask(host, port, fetch, seal, self._curve, TRIP_S), Fetched)
        if fetched.failure:
            raise TransferError(f"the peer could not fetch from us: {fetched.failure}")
        return fetched

    def _fill(self, blocks: list[int]) -> None:
        """Fresh numbers each time: memory that happens to hold an earlier trip's must not pass."""
        for view in self._views.values():
            numbers = view.view(torch.int16)
            numbers[blocks] = torch.randint(-(1 << 15), 1 << 15, numbers[blocks].shape, dtype=torch.int16).to(
                view.device
            )

    def _compare(self, here: list[int], back: list[int]) -> str:
        """VerificationError naming the first layer that differs; else the SHA-256 of all that went."""
        digest = hashlib.sha256()
        for layer, view in self._views.items():
            numbers = view.view(torch.int16)
            sent, received = numbers[here], numbers[back]
            if not torch.equal(sent, received):
                wrong = int((sent != received).sum())
                raise VerificationError(f"{wrong} of {sent.numel()} numbers of {layer} came back changed")
            digest.update(sent.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    # Both

    def _pull(
        self, request_id: str, engine_id: str, host: str, port: int, blocks: list[list[int]], tokens: int, ticket: str
    ) -> None:
        """TransferError: it did not arrive."""
        self._worker.pull(
            Pull(
                request_id=request_id, remote_request_id=request_id, remote_engine_id=engine_id, host=host, port=port,
                blocks=blocks, first_token=0, num_tokens=tokens, ticket=ticket,
            )
        )  # fmt: skip
        if not self._wait(lambda: request_id in self._received | self._failed.keys(), TRIP_S):
            raise TransferError(f"{host}:{port}: no end of the transfer after {TRIP_S:g} s")
        if request_id in self._failed:
            raise TransferError(str(self._failed[request_id]))

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Take outcomes until `done`; False when that has not come after so long."""
        deadline = time.monotonic() + timeout_s
        while True:
            events = self._worker.poll()
            self._released |= events.released
            self._expired |= events.expired
            self._received |= events.received
            self._failed |= events.failed
            if done():
                return True
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            self._worker.wait(left_s)


def _geometry(granularity_bytes: int) -> CacheGeometry:
    spec = KVCacheSpec.full_attention(
        block_size_tokens=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=DTYPE
    )
    group = LayerGroup("doctor", tuple(f"layer.{index}" for index in range(LAYERS)), spec)
    return CacheGeometry(
        layout=KVCacheLayout.LBHNC,
        groups=(group,),
        capacity_blocks=2 * TRIP_BLOCKS,
        granularity_bytes=granularity_bytes,
    )
