"""A network without sockets: stands in for ZeroMQ's, and a test decides what becomes of each message on its way.

`Link` and `Server` are the real ones, so what travels are the real bytes, sealed where there is a secret.
"""

from __future__ import annotations

import itertools
import select
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq


@dataclass(eq=False)
class Connection:
    """One link's way to whoever listens at its endpoint."""

    name: bytes
    endpoint: str
    dealer: Dealer
    server: Router | None = None


@dataclass(eq=False)
class InFlight:
    connection: Connection
    to_server: bool
    data: bytes


@dataclass
class Network:
    routers: dict[str, Router] = field(default_factory=dict)
    in_flight: list[InFlight] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    translate: Callable[[InFlight], bytes] = lambda message: message.data
    _numbers: Any = field(default_factory=itertools.count)

    def socket(self, kind: int) -> Any:
        """As a `zmq.Context`."""
        return Router(self) if kind == zmq.ROUTER else Dealer(self)

    def destroy(self, linger: int = 0) -> None:
        pass

    def deliver(self, message: InFlight, keep: bool = False) -> None:
        """Where nobody listens, what was said waits. `keep`: it will come again."""
        connection = message.connection
        if message.to_server:
            router = connection.server or self.routers.get(connection.endpoint)
            if router is None:
                return
            connection.server = router
            router.inbox.append([connection.name, self.translate(message)])
        elif not connection.dealer.closed:
            connection.dealer.inbox.append(self.translate(message))
        if not keep:
            self.in_flight.remove(message)

    def lose(self, message: InFlight) -> None:
        self.in_flight.remove(message)

    def hang_up(self, connection: Connection) -> None:
        """The connection breaks: what was on its way is lost, and the link hears of it."""
        self.in_flight = [message for message in self.in_flight if message.connection is not connection]
        connection.server = None
        if connection.dealer.closed:
            self.connections.remove(connection)
        else:
            connection.dealer.monitor.events.append(zmq.EVENT_DISCONNECTED)

    def die(self, router: Router | None, dealers: list[Dealer]) -> None:
        """A process ends, and its connections with it."""
        if router is not None:
            router.close()
        for dealer in dealers:
            dealer.closed = True
        for connection in list(self.connections):
            if connection.dealer in dealers or (router is not None and connection.server is router):
                self.hang_up(connection)


class _Socket:
    def __init__(self, network: Network) -> None:
        self.network, self.closed = network, False
        self.inbox: deque[Any] = deque()

    def setsockopt(self, option: int, value: object) -> None:
        pass

    def close(self, linger: int = 0) -> None:
        self.closed = True


class Router(_Socket):
    endpoint = ""

    def bind(self, endpoint: str) -> None:
        self.endpoint = endpoint
        assert endpoint not in self.network.routers
        self.network.routers[endpoint] = self

    def getsockopt_string(self, option: int) -> str:
        return self.endpoint

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        frames: list[bytes] = self.inbox.popleft()
        return frames

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        """To a link that is gone: nowhere."""
        for connection in self.network.connections:
            if connection.name == frames[0] and connection.server is self:
                self.network.in_flight.append(InFlight(connection, False, frames[1]))

    def close(self, linger: int = 0) -> None:
        super().close()
        self.network.routers.pop(self.endpoint, None)


class Dealer(_Socket):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.monitor = Monitor(network)

    def get_monitor_socket(self, events: int) -> Monitor:
        return self.monitor

    def disable_monitor(self) -> None:
        pass

    def connect(self, endpoint: str) -> None:
        self.connection = Connection(b"link %d" % next(self.network._numbers), endpoint, self)
        self.network.connections.append(self.connection)

    def send(self, data: bytes, flags: int = 0) -> None:
        self.network.in_flight.append(InFlight(self.connection, True, data))

    def recv(self, flags: int = 0) -> bytes:
        if not self.inbox:
            raise zmq.Again
        data: bytes = self.inbox.popleft()
        return data


class Monitor(_Socket):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.events: deque[int] = deque()

    def poll(self, timeout: int = 0) -> bool:
        return bool(self.events)

    def recv_multipart(self) -> list[bytes]:
        return [struct.pack("=hi", self.events.popleft(), 0), b""]


class Poller:
    """As a `zmq.Poller` that never waits."""

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def register(self, item: Any, flags: int) -> None:
        self.registered.append(item)

    def unregister(self, item: Any) -> None:
        self.registered.remove(item)

    def poll(self, timeout: float = 0) -> list[tuple[Any, int]]:
        return [(item, zmq.POLLIN) for item in self.registered if _is_ready(item)]


def _is_ready(item: Any) -> bool:
    if isinstance(item, int):
        return bool(select.select([item], [], [], 0)[0])
    return bool(item.events if isinstance(item, Monitor) else item.inbox)
