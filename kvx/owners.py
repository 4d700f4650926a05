"""The engines that we read from: one record each, from the first word to the last."""

from __future__ import annotations

from collections.abc import Callable

from kvx.connector import Connector, Op
from kvx.engine_side import EngineSide
from kvx.errors import PeerMismatch
from kvx.handshake import Welcome, descriptor
from kvx.peer import PeerDescriptor, require_compatible
from kvx.pull_state import Owner
from kvx.sidechannel import Link


class Owners:
    """By address. Records of engines that never answered are not kept: addresses come from outside."""

    def __init__(
        self, side: EngineSide, open_link: Callable[[str, int], Link], close_link: Callable[[Link], None]
    ) -> None:
        self._side = side
        self._open_link, self._close_link = open_link, close_link
        self._owners: dict[tuple[str, int], Owner] = {}

    @property
    def links(self) -> list[Link]:
        return [owner.link for owner in self._owners.values()]

    def get(self, host: str, port: int) -> Owner:
        """The record of the engine there, new when there is none. HandshakeError: the host has no address."""
        owner = self._owners.get((host, port))
        if owner is None:
            owner = self._owners[host, port] = Owner(self._open_link(host, port))
        return owner

    def of_link(self, link: Link) -> Owner | None:
        return self._owners.get((link.host, link.port))

    def is_kept(self, owner: Owner) -> bool:
        return self.of_link(owner.link) is owner

    def connect(self, owner: Owner, welcome: Welcome) -> None:
        """PeerMismatch or LayoutError when the two engines cannot exchange KV; HandshakeError on bad metadata."""
        theirs = descriptor(welcome)
        require_compatible(self._side.describe(), theirs)
        connector = self._choose_connector(theirs)
        self.disconnect(owner)
        owner.peer = connector.connect(theirs.connectors[connector.name])
        owner.connector, owner.descriptor = connector, theirs

    def disconnect(self, owner: Owner) -> None:
        """Forget what the engine said; its transfers in flight are cancelled."""
        if owner.connector is not None and owner.peer is not None:
            owner.connector.disconnect(owner.peer)
        owner.connector = owner.peer = owner.descriptor = None

    def remove(self, owner: Owner) -> None:
        """Forget the engine altogether."""
        if self.is_kept(owner):
            del self._owners[owner.link.host, owner.link.port]
            self.disconnect(owner)
            self._close_link(owner.link)

    def close(self) -> None:
        for owner in list(self._owners.values()):
            self.remove(owner)

    def _choose_connector(self, theirs: PeerDescriptor) -> Connector:
        for connector in self._side.connectors:
            if connector.name in theirs.connectors and Op.READ in connector.capabilities.operations:
                return connector
        names = [connector.name for connector in self._side.connectors]
        raise PeerMismatch("connectors", names, sorted(theirs.connectors), "configure one that both have")
