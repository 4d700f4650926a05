"""What both halves of the hand-off need of their own engine: its geometry, memory, settings and outcomes."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch

from kvx import inject
from kvx.addresses import AllowedHosts, network_of
from kvx.connector import Connector, ConnectorState
from kvx.digest import DIGEST_NAME, GroupDigests, digester_of, request_digests
from kvx.errors import ConnectorError, ConnectorStateError, KVXError
from kvx.geometry import GroupGeometry
from kvx.inject import Fault, Injector
from kvx.metrics import HandoffMetrics, is_logged
from kvx.offload import Eviction
from kvx.peer import EngineInfo, PeerDescriptor, VerifyMode
from kvx.ranks import Share
from kvx.seal import DEFAULT_WINDOW_S
from kvx.secret import Secret
from kvx.tracing import HandoffTracer

logger = logging.getLogger(__name__)
FailurePolicy = Literal["recompute", "fail"]


@dataclass(frozen=True)
class HandoffSettings:
    """Everything a user may set. `verify` takes and compares digests, of all or of a sample of
    each pull's blocks; `inject` is for negative controls only.

    `lease_s`: how long blocks are kept unless renewed; `grace_s`: how long after that at most where a reader has
    claimed them; `max_hold_s`: no renewal keeps them longer. `failure_policy`: what becomes of a request whose hand-off
    failed; the engine, not the hand-off, acts on it.
    `offload_bytes`: host memory of each rank for connectors that offload. `auth_window_s`: how old a signed message may
    be, and how far the engines' clocks may be apart. `allowed_hosts`: names, addresses and networks that hand-offs may
    lead to; none given: loopback, where the side channel is there, or else wherever a ticket leads.
    """

    connectors: tuple[str, ...] = ("nixl",)
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    lease_s: float = 30.0
    grace_s: float = 5.0
    max_hold_s: float = 300.0
    transfer_deadline_s: float = 10.0
    failure_policy: FailurePolicy = "recompute"
    verify: VerifyMode = "off"
    inject: str | None = None
    offload_bytes: int = 1 << 30
    offload_eviction: Eviction = "lru"
    auth_window_s: float = DEFAULT_WINDOW_S
    allowed_hosts: tuple[str, ...] = ()
    allow_unauthenticated_data_plane: bool = False
    otlp_traces_endpoint: str = ""

    def __post_init__(self) -> None:
        names = self.connectors
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
            raise ConnectorError(f"connectors is {names!r}; it needs a tuple of at least one name")
        if not isinstance(self.side_channel_host, str) or not self.side_channel_host.strip():
            raise ConnectorError(
                f"side_channel_host is {self.side_channel_host!r}; it needs an address of this machine"
            )
        hosts = self.allowed_hosts
        if not isinstance(hosts, tuple) or not all(isinstance(host, str) for host in hosts):
            raise ConnectorError(f"allowed_hosts is {hosts!r}; it needs a tuple of names, addresses and networks")
        for host in hosts:
            network_of(host)
        if not isinstance(self.allow_unauthenticated_data_plane, bool):
            raise ConnectorError(
                f"allow_unauthenticated_data_plane is {self.allow_unauthenticated_data_plane!r}; it needs true or false"
            )
        if not isinstance(self.otlp_traces_endpoint, str):
            raise ConnectorError(f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; it needs a URL, or nothing")
        port = self.side_channel_port
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536:
            raise ConnectorError(f"side_channel_port is {port!r}; it needs a port, or 0 for any")
        for name, least in (
            ("lease_s", "more than 0"),
            ("grace_s", "0 or more"),
            ("max_hold_s", "more than 0"),
            ("transfer_deadline_s", "more than 0"),
            ("auth_window_s", "more than 0"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 3600 or (value == 0 and least == "more than 0"):
                raise ConnectorError(f"{name} is {value!r}; it needs seconds, {least}, at most 3600")
        size = self.offload_bytes
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConnectorError(f"offload_bytes is {size!r}; it needs a whole number of bytes, at least 1")
        if self.offload_eviction not in get_args(Eviction):
            known = " or ".join(repr(name) for name in get_args(Eviction))
            raise ConnectorError(f"offload_eviction is {self.offload_eviction!r}; it needs {known}")
        if self.failure_policy not in get_args(FailurePolicy):
            raise ConnectorError(f"failure_policy is {self.failure_policy!r}; it needs 'recompute' or 'fail'")
        if self.verify not in get_args(VerifyMode):
            raise ConnectorError(f"verify is {self.verify!r}; it needs 'off', 'sample' or 'all'")
        if self.inject is not None and not isinstance(self.inject, str):
            raise ConnectorError(f"inject is {self.inject!r}; it needs the name of a fault, or nothing")
        if self.inject is not None and self.verify != "all":
            raise ConnectorError(
                f"inject is {self.inject!r} but verify is {self.verify!r}: nobody may notice; set verify to 'all'"
            )
        Injector(self.inject)


@dataclass(frozen=True, kw_only=True)
class Pull:
    """What the engine asks for. `blocks`: per layer group, by position; -1 where nothing is wanted.

    `ticket`: the owner's, which a pull needs where there is a secret. `shares`: what is read of which rank of the owner
    (`kvx.ranks.shares`), whose first rank listens at `port` and the others after it; without, all of the one at `port`.
    """

    request_id: str
    remote_request_id: str
    remote_engine_id: str
    host: str
    port: int
    blocks: Sequence[Sequence[int]]
    first_token: int
    num_tokens: int
    ticket: str = ""
    shares: tuple[Share, ...] = ()

    def of(self, share: Share) -> Pull:
        """The pull of that share alone. Of a rank of which nothing is read, no tokens: it is only told."""
        blocks = [
            blocks if heads is not None else [-1] * len(blocks)
            for blocks, heads in zip(self.blocks, share.heads, strict=False)
        ]
        num_tokens = self.num_tokens if share.reads else 0
        return replace(self, port=self.port + share.owner_rank, blocks=blocks, num_tokens=num_tokens, shares=(share,))


@dataclass(frozen=True)
class Waiting:
    """A request that will be pulled when its turn comes: its hold is renewed until then.

    `ranks`: those of the owner whose holds are renewed from here; they listen at `port` and after it.
    """

    request_id: str
    remote_request_id: str
    remote_engine_id: str
    host: str
    port: int
    ticket: str = ""
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Failure:
    """Why a pull failed: the word that it is counted under, the engine that it read from, and the whole story."""

    cause: str
    peer: str
    text: str

    def __str__(self) -> str:
        return f"{self.cause}, engine {self.peer}: {self.text}"

    @classmethod
    def of(cls, pull: Pull, error: KVXError) -> Failure:
        return cls(error.cause, f"{pull.remote_engine_id} at {pull.host}:{pull.port}", str(error))


@dataclass(frozen=True)
class HandoffEvents:
    """Request ids, each once. `released` and `expired`: the owner may free the blocks. `failed`: with the cause."""

    released: frozenset[str] = frozenset()
    expired: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: Mapping[str, Failure] = field(default_factory=dict)


class Outbox:
    """Outcomes on their way from the hand-off thread to the engine's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._released: set[str] = set()
        self._expired: set[str] = set()
        self._received: set[str] = set()
        self._failed: dict[str, Failure] = {}

    def put(
        self, *, released: Sequence[str] = (), expired: Sequence[str] = (), received: Sequence[str] = (),
        failed: Mapping[str, Failure] | None = None,
    ) -> None:  # fmt: skip
        with self._changed:
            self._released.update(released)
            self._expired.update(expired)
            self._received.update(received)
            self._failed.update(failed or {})
            self._changed.notify_all()

    def take(self) -> HandoffEvents:
        with self._changed:
            events = HandoffEvents(
                frozenset(self._released), frozenset(self._expired), frozenset(self._received), dict(self._failed)
            )
            for kept in (self._released, self._expired, self._received, self._failed):
                kept.clear()
            return events

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self._has_any, timeout_s)

    def _has_any(self) -> bool:
        return bool(self._released or self._expired or self._received or self._failed)


class EngineSide:
    """One rank's own side. `post` runs a callable on the hand-off thread. `clock`: monotonic seconds."""

    def __init__(
        self,
        settings: HandoffSettings,
        info: EngineInfo,
        connectors: Sequence[Connector],
        post: Callable[[Callable[[], None]], None],
        secret: Secret | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.info, self.connectors, self.post = settings, info, tuple(connectors), post
        self.secret, self.clock = secret, clock
        self.allowed = AllowedHosts.loopback()  # until the hand-off opens
        self.instance = uuid.uuid4().hex
        self.metrics = HandoffMetrics()
        self.tracer: HandoffTracer | None = None  # while the hand-off is open, where traces are configured
        self.outbox = Outbox()
        self.injector = Injector(settings.inject)
        self.groups: tuple[GroupGeometry, ...] = ()
        self.views: Mapping[str, torch.Tensor] = {}
        self.num_blocks = 0
        self.generation = 0
        self.layout = ""
        self.is_suspended = False
        self._digester: ThreadPoolExecutor | None = None
        self._digester_lock = threading.Lock()  # both threads take digests
        self._pull_numbers = itertools.count()

    @property
    def verifies(self) -> bool:
        return self.settings.verify != "off"

    def new_reader_name(self) -> str:
        """A name for one pull, which no other pull of any engine has."""
        return f"{self.info.engine_id}/{self.info.tp_rank}/{self.instance}/{next(self._pull_numbers)}"

    def update(
        self, groups: Sequence[GroupGeometry], views: Mapping[str, torch.Tensor], num_blocks: int, generation: int,
        layout: str,
    ) -> None:  # fmt: skip
        """The cache as it is from now on; only before the hand-off starts, or while it is suspended.

        DriverUnavailable: digests are wanted, and kvx has no way to take them on this device.
        """
        self.groups, self.views, self.num_blocks = tuple(groups), dict(views), num_blocks
        self.generation, self.layout = generation, layout
        if self.verifies:
            digester_of(self.views)  # an engine that cannot take digests should not start

    def describe(self) -> PeerDescriptor:
        """ConnectorStateError while the cache is changing or the connectors are closed."""
        self.require_cache()
        opened = [connector for connector in self.connectors if connector.state is ConnectorState.OPEN]
        if not opened:
            raise ConnectorStateError(f"engine {self.info.engine_id} has no open connector; its cache is not ready")
        return PeerDescriptor(
            info=self.info,
            instance=self.instance,
            generation=self.generation,
            layout=self.layout,
            groups=self.groups,
            num_blocks=self.num_blocks,
            verify=self.settings.verify,
            digest=DIGEST_NAME,
            connectors={connector.name: connector.metadata() for connector in opened},
        )

    def mark(self) -> object:
        """What the calling thread's stream has queued by now, for digests that must come after it."""
        return digester_of(self.views).mark()

    def take_digests(
        self, blocks: Sequence[Sequence[int]], first_token: int, num_tokens: int, *, after: object = None
    ) -> Future[list[GroupDigests]]:
        """Digests of every layer group, taken on a thread of their own. `after`: a `mark`; without, reads at once."""
        take = partial(request_digests, self.views, self.groups, blocks, first_token, num_tokens, after=after)
        with self._digester_lock:
            self.require_cache()
            if self._digester is None:
                self._digester = ThreadPoolExecutor(1, thread_name_prefix="kvx-digests")
            return self._digester.submit(take)

    def count_blocks(self, spec: Pull) -> int:
        """Our blocks that a pull fills."""
        return sum(
            block >= 0
            for group, blocks in zip(self.groups, spec.blocks, strict=True)
            for block in blocks[
                spec.first_token // group.block_size_tokens : -(
                    -(spec.first_token + spec.num_tokens) // group.block_size_tokens
                )
            ]
        )

    def internal_error(self, where: str) -> None:
        """What must not happen, while it is handled: counted, and logged now and then, since it may come every turn."""
        self.metrics.internal_errors += 1
        if is_logged(self.metrics.internal_errors):
            logger.exception("%s (internal error no. %d)", where, self.metrics.internal_errors)

    def fail(self, pull: Pull, error: KVXError) -> None:
        self.outbox.put(failed={pull.request_id: Failure.of(pull, error)})

    def receive(self, request_id: str) -> None:
        self.outbox.put(received=[request_id])

    def require_cache(self) -> None:
        """ConnectorStateError while the cache may have no memory."""
        if self.is_suspended:
            raise ConnectorStateError(
                f"the cache of engine {self.info.engine_id} is asleep or changing; hand off when it is ready again"
            )

    def end_digests(self) -> None:
        """Wait for digests being taken: they read the cache's memory. Those not begun are cancelled."""
        with self._digester_lock:
            digester, self._digester = self._digester, None
        if digester is not None:
            digester.shutdown(wait=True, cancel_futures=True)

    # Faults

    def injected_swap(
        self,
        sources: list[list[int]],
        theirs: PeerDescriptor,
        wanted: Sequence[Sequence[int]],
        first_token: int,
        num_tokens: int,
    ) -> list[list[int]]:
        """The owner's block lists, with two ids exchanged when that fault is configured."""
        result = list(sources)
        place = self._first_wanted(wanted, first_token, num_tokens)
        if place is not None and self.injector.take(Fault.SWAP_BLOCKS):
            index, positions = place
            ours, owners = self.groups[index].block_size_tokens, theirs.groups[index].block_size_tokens
            source_positions = sorted({max(first_token, position * ours) // owners for position in positions})
            result[index] = inject.swapped(result[index], source_positions, theirs.num_blocks)
        return result

    def injected_flip(self, wanted: Sequence[Sequence[int]], first_token: int, num_tokens: int) -> None:
        """Change a byte of what has arrived, when that fault is configured."""
        place = self._first_wanted(wanted, first_token, num_tokens)
        if place is not None and self.injector.take(Fault.FLIP_BYTE):
            index, positions = place
            group = self.groups[index]
            token = max(first_token, positions[0] * group.block_size_tokens)
            inject.flip_byte(self.views, group, wanted[index][positions[0]], token)

    def injected_reuse(self, blocks: Sequence[Sequence[int]]) -> None:
        """Reuse the first block of a hold that was freed early."""
        for group, of_group in zip(self.groups, blocks, strict=True):
            for block in of_group:
                if block >= 0:
                    inject.overwrite(self.views, group, block)
                    return

    def _first_wanted(
        self, wanted: Sequence[Sequence[int]], first_token: int, num_tokens: int
    ) -> tuple[int, list[int]] | None:
        """(layer group, positions) of the first group with a wanted block in the range."""
        for index, blocks in enumerate(wanted):
            size = self.groups[index].block_size_tokens
            positions = range(first_token // size, -(-(first_token + num_tokens) // size))
            found = [position for position in positions if position < len(blocks) and blocks[position] >= 0]
            if found:
                return index, found
        return None
