"""The engines that we read from: one record each, from the first word to the last."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from kvx.addresses import Resolver, numeric_address
from kvx.connector import Connector, Op
from kvx.engine_side import EngineSide
from kvx.errors import ConnectorError, Crowded, HandshakeError, KVXError, PeerMismatch
from kvx.handshake import Declined, Release, Welcome, descriptor
from kvx.peer import Peer, PeerDescriptor, require_compatible
from kvx.pull_state import ActivePull, Owner
from kvx.ranks import Share
from kvx.sidechannel import Link, reason_of

logger = logging.getLogger(__name__)
# How long an owner waits for its release after our engine has been told: on few cores, all that the release sets off
# over there (the owner's engine steps) would come before our engine's next step (2 cores: 1 to 2 ms of 10).
RELEASE_DELAY_S = 0.003
# Engines that are known at once, each with a link and a library's connection. Their names and ports come from HTTP
# clients, so one that nobody needs goes when another is asked for.
MOST_OWNERS = 256
# Host, port, and the host's address.
OpenLink = Callable[[str, int, str], Link]


class Owners:
    """By address. Records of engines that never answered are not kept: addresses come from outside."""

    def __init__(self, side: EngineSide, open_link: OpenLink, close_link: Callable[[Link], None]) -> None:
        self._side = side
        self._open_link, self._close_link = open_link, close_link
        self._owners: dict[tuple[str, int], Owner] = {}
        self._resolver = Resolver(side.post)
        self._to_release: deque[tuple[float, ActivePull]] = deque()  # when, ascending

    @property
    def links(self) -> list[Link]:
        return [owner.opened for owner in self._owners.values() if owner.opened is not None]

    def get(self, host: str, port: int) -> Owner:
        """The record of the engine there; a new one has no link yet, and takes the place of the longest unused one.

        Crowded: MOST_OWNERS are in use.
        """
        owner = self._owners.pop((host, port), None)
        if owner is None:
            self._make_room()
            owner = Owner((host, port))
        self._owners[owner.place] = owner  # the last one used comes last
        return owner

    def _make_room(self) -> None:
        if len(self._owners) < MOST_OWNERS:
            return
        idle = next((owner for owner in self._owners.values() if owner.is_idle), None)
        if idle is None:
            raise Crowded(
                f"{MOST_OWNERS} engines are being read from already; ask again when some hand-offs have ended"
            )
        self.remove(idle)

    def open(self, owner: Owner, then: Callable[[Owner, KVXError | None], None]) -> None:
        """Give it a link, and tell `then`, with what went wrong. At once for an address; a name is looked up first."""
        host, _ = owner.place
        address = numeric_address(host)
        if address is not None:
            then(owner, self._open(owner, address))
        elif not owner.is_looked_up:
            owner.is_looked_up = True
            self._resolver.ask(host, lambda found: self._on_address(owner, found, then))

    def _on_address(
        self, owner: Owner, found: str | HandshakeError, then: Callable[[Owner, KVXError | None], None]
    ) -> None:
        owner.is_looked_up = False
        if self.is_kept(owner):
            then(owner, self._open(owner, found) if isinstance(found, str) else found)

    def _open(self, owner: Owner, address: str) -> KVXError | None:
        try:
            self._side.allowed.require(owner.place[0], address)
            owner.opened = self._open_link(*owner.place, address)
        except KVXError as error:
            return error
        except Exception as error:  # noqa: BLE001  logged with its trace
            self._side.internal_error("link to engine {}:{}".format(*owner.place))
            return HandshakeError(f"internal error: {error!r}")
        return None

    def of_link(self, link: Link) -> Owner | None:
        return self._owners.get((link.host, link.port))

    def is_kept(self, owner: Owner) -> bool:
        return self._owners.get(owner.place) is owner

    def connect(self, owner: Owner, welcome: Welcome, share: Share | None = None) -> None:
        """PeerMismatch or LayoutError when the two engines cannot exchange KV; HandshakeError on bad metadata.

        `share`: what is to be read of it; without, all of our heads.
        """
        theirs = descriptor(welcome)
        bridged = require_compatible(self._side.describe(), theirs, None if share is None else share.heads)
        candidates = self._candidates(theirs)
        self.disconnect(owner)
        owner.connector, owner.peer = _connected(candidates, theirs)
        owner.descriptor = theirs
        if bridged:
            logger.info("engine %s differs: %s", theirs.info.engine_id, "; ".join(map(str, bridged)))

    def decline(self, owner: Owner, why: PeerMismatch) -> None:
        """Tell the engine why it is not read."""
        try:
            owner.link.tell(Declined(sequence=0, engine_id=self._side.info.engine_id, reason=reason_of(why)))
        except Crowded as error:
            logger.warning("engine %s:%s is not told why it is not read: %s", *owner.place, error)

    def disconnect(self, owner: Owner) -> None:
        """Forget what the engine said; its transfers in flight are cancelled."""
        if owner.connector is not None and owner.peer is not None:
            owner.connector.disconnect(owner.peer)
        owner.connector = owner.peer = owner.descriptor = None

    def release(self, pull: ActivePull) -> None:
        """It is over: tell the owner, so that it frees the blocks."""
        owner = pull.owner
        self._tell(pull)
        if owner.descriptor is None and owner.is_idle:
            self.remove(owner)

    def release_soon(self, pull: ActivePull, now: float) -> None:
        """The same, when our engine has had its turn."""
        self._to_release.append((now + RELEASE_DELAY_S, pull))

    def release_due(self, now: float) -> None:
        while self._to_release and self._to_release[0][0] <= now:
            self.release(self._to_release.popleft()[1])

    def release_times(self) -> list[float]:
        return [moment for moment, _ in self._to_release]

    def _tell(self, pull: ActivePull) -> None:
        if not pull.has_claimed or not self.is_kept(pull.owner):
            return
        release = Release(sequence=0, request_id=pull.spec.remote_request_id, reader=pull.reader)
        try:
            pull.owner.link.tell(release)
        except Crowded as error:
            logger.warning("request %s stays held until its lease ends: %s", release.request_id, error)

    def remove(self, owner: Owner) -> None:
        """Forget the engine altogether, when it has heard of all that is over."""
        if self.is_kept(owner):
            for pull in [pull for _, pull in self._to_release if pull.owner is owner]:
                self._tell(pull)
            self._to_release = deque(item for item in self._to_release if item[1].owner is not owner)
            del self._owners[owner.place]
            try:
                self.disconnect(owner)
            finally:
                if owner.opened is not None:
                    self._close_link(owner.opened)

    def close(self) -> None:
        for owner in list(self._owners.values()):
            self.remove(owner)

    def _candidates(self, theirs: PeerDescriptor) -> list[Connector]:
        """Ours, in the order in which they are configured, that they have too and that can read."""
        found = [
            connector
            for connector in self._side.connectors
            if connector.name in theirs.connectors and Op.READ in connector.capabilities.operations
        ]
        if not found:
            names = [connector.name for connector in self._side.connectors]
            raise PeerMismatch("connectors", names, sorted(theirs.connectors), "configure one that both have")
        return found


def _connected(candidates: Sequence[Connector], theirs: PeerDescriptor) -> tuple[Connector, Peer]:
    """The first connector that reaches the peer, and its connection; the log says which, and why not one before it."""
    why_not: list[str] = []
    for connector in candidates:
        metadata = theirs.connectors[connector.name]
        try:
            why = connector.why_unreachable(metadata)
            if why is None:
                peer = connector.connect(metadata)
                but = f" ({'; '.join(why_not)})" if why_not else ""
                logger.info("engine %s is read through %s%s", theirs.info.engine_id, connector.name, but)
                return connector, peer
        except ConnectorError as error:
            if len(candidates) == 1:
                raise
            why = str(error)
        why_not.append(f"not {connector.name}: {why}")
    raise ConnectorError(
        f"engine {theirs.info.engine_id} cannot be reached: {'; '.join(why_not)}; configure one more connector"
    )
