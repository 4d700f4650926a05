"""What an author's test class gives the kit: its hooks, and nothing of pytest, since second processes load it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvx.connector import Capabilities, Connector, Op
from kvx.drivers.base import Driver
from kvx.drivers.host import HostDriver

if TYPE_CHECKING:
    from kvx.testing.peers import Processes


class Kit:
    """Hooks of `ConnectorTests`. Only `make_connector` has to be written."""

    environ: ClassVar[Mapping[str, str]] = {}
    """Set in this process and in every peer's before a connector is made."""
    deadline_s: ClassVar[float] = 30.0
    """How long a transfer with a healthy peer may take."""
    stop_s: ClassVar[float] = 10.0
    """How long after its deadline a transfer, and a close with transfers in flight, may take to be drained."""

    def make_connector(self) -> Connector:
        """A new connector, not open. Called here and in every peer's process."""
        raise NotImplementedError("a subclass of ConnectorTests makes its connector")

    def driver(self) -> Driver:
        """Whose memory the connector under test is opened on; the host's by default."""
        return HostDriver()

    def peer_driver(self) -> Driver:
        """The same for the peer."""
        return self.driver()

    def make_peer(self, processes: Processes) -> Any:
        """A peer that is not open yet: in a second process, or in this one where the connector reaches no other.

        What it returns has the methods of `kvx.testing.peer_engine.PeerEngine`, and a `stop`.
        """
        if self.capabilities.reaches_processes:
            return processes.start()
        from kvx.testing.peer_engine import PeerEngine

        return PeerEngine(self)

    @property
    def capabilities(self) -> Capabilities:
        return self.make_connector().capabilities

    def operations(self) -> list[Op]:
        """Those declared, in a fixed order."""
        return [op for op in Op if op in self.capabilities.operations]
