"""What an author's test class gives the kit: its hooks, and nothing of pytest, since second processes load it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvx.connector import Capabilities, Connector, Op
from kvx.drivers.base import Driver
from kvx.drivers.host import HostDriver
from kvx.drivers.shared_host import SharedHostDriver

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
        """Whose memory the connector under test is opened on; by default the host's, shareable where it must be."""
        return SharedHostDriver() if self.capabilities.shares_memory else HostDriver()

    def peer_driver(self) -> Driver:
        """The same for the peer."""
        return self.driver()

    def make_peer(self, processes: Processes, connector: Connector) -> Any:
        """A peer for `connector`, not open yet: in a second process, or its own where it reaches no other process.

        What it returns has the methods `open`, `fill`, `poke`, `peek`, `snapshot`, `notifications`, `close_connector`
        and `stop` of `kvx.testing.peer_engine.PeerEngine`.
        """
        if self.capabilities.reaches_processes:
            return processes.start()
        from kvx.testing.own_memory import OwnMemory

        return OwnMemory(self, connector)

    def wait_for_own_memory(self, connector: Connector) -> None:
        """For a connector that reaches no other process: until all memory of its own is there and may be touched."""

    @property
    def capabilities(self) -> Capabilities:
        return self.make_connector().capabilities

    def operations(self) -> list[Op]:
        """Those declared, in a fixed order."""
        return [op for op in Op if op in self.capabilities.operations]
