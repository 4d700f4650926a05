"""Where a side channel is: hosts and ports to ZeroMQ's addresses. Both may come from an HTTP body."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from kvx.errors import ConnectorError, HandshakeError

logger = logging.getLogger(__name__)

# Names being looked up at once; one that nobody answers for takes its thread along for up to half a minute.
MOST_LOOKUPS = 32
SHOWN_CHARACTERS = 255
Then = Callable[[str | HandshakeError], None]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
EVERYTHING: tuple[Network, ...] = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))


def numeric_address(host: str) -> str | None:
    """The address that `host` is, or None when it is a name, which has to be looked up."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def look_up(host: str) -> str:
    """An address of a host; may take as long as the resolver likes. HandshakeError when it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:  # UnicodeError, of a name that is no name, is a ValueError
        shown = host[:SHOWN_CHARACTERS]
        raise HandshakeError(
            f"side channel host {shown!r} has no address: {error}; use an address of a host"
        ) from error


def endpoint(address: str, port: int) -> str:
    """ZeroMQ's name of a numeric address and a port; it binds to no other kind. HandshakeError: not a port."""
    if not 0 <= port < 65536:
        raise HandshakeError(f"side channel port {port} of host {address} is no port; use one of 1 to 65535")
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def endpoint_of(host: str, port: int) -> str:
    """The same for any host; a name is looked up here and now."""
    return endpoint(numeric_address(host) or look_up(host), port)


def is_loopback(address: str) -> bool:
    """Of a numeric address: whether only this host's processes reach it."""
    return _plain(address).is_loopback


def network_of(entry: str) -> Network | None:
    """The addresses that an entry of an allow-list stands for; None for a name.

    ConnectorError: neither a name nor an address nor a network.
    """
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        if "/" in entry or ":" in entry or not entry.strip(". "):
            raise ConnectorError(
                f"allowed_hosts has {entry[:SHOWN_CHARACTERS]!r} ({error}); it needs names, addresses, and networks "
                "such as 10.1.0.0/16"
            ) from error
        return None


class AllowedHosts:
    """Where links may lead. Judged by the address that is connected to, so that a name cannot lead elsewhere.

    An allowed name stands for the addresses that it has when the engine starts, and for whatever it leads to later
    when a hand-off asks for that very name: engines restart under new addresses.
    """

    def __init__(self, networks: tuple[Network, ...], names: frozenset[str] = frozenset()) -> None:
        self._networks, self._names = networks, names

    @classmethod
    def loopback(cls) -> AllowedHosts:
        return cls(LOOPBACK)

    @classmethod
    def anywhere(cls) -> AllowedHosts:
        return cls(EVERYTHING)

    @classmethod
    def of(cls, entries: Sequence[str]) -> AllowedHosts:
        """Looks names up, which may take a while. ConnectorError as in `network_of`."""
        networks: list[Network] = []
        names = set()
        for entry in entries:
            network = network_of(entry)
            if network is not None:
                networks.append(network)
                continue
            names.add(_folded(entry))
            try:
                networks += [ipaddress.ip_network(address) for address in look_up_all(entry)]
            except HandshakeError as error:
                logger.warning(
                    "allowed_hosts: %s; until it has one, only hand-offs that name it are let through", error
                )
        return cls(tuple(networks), frozenset(names))

    def require(self, host: str, address: str) -> None:
        """HandshakeError: a link to `host`, which is at `address`, is not allowed."""
        found = _plain(address)
        if _folded(host) not in self._names and not any(found in network for network in self._networks):
            raise HandshakeError(
                f"host {host[:SHOWN_CHARACTERS]!r} ({address}) is not among allowed_hosts; nothing was connected to"
            )


def look_up_all(host: str) -> list[str]:
    """Every address of a host, as `look_up`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise HandshakeError(f"{host[:SHOWN_CHARACTERS]!r} has no address: {error}") from error
    return sorted({str(item[4][0]).partition("%")[0] for item in found})


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address in IPv6's clothes is the IPv4 address."""
    found = ipaddress.ip_address(address)
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _folded(name: str) -> str:
    return name.rstrip(".").casefold()


class Resolver:
    """Looks names up on threads of its own, so that a slow answer keeps nothing else waiting.

    `ask` is called, and answers, on the thread that `post` runs things on.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[str, list[Then]] = {}

    def ask(self, host: str, then: Then) -> None:
        """`then` gets an address of the host, or why there is none; never, when the resolver never answers."""
        if host in self._waiting:
            self._waiting[host].append(then)
        elif len(self._waiting) >= MOST_LOOKUPS:
            then(HandshakeError(f"{MOST_LOOKUPS} names are being looked up already; use an address of a host"))
        else:
            self._waiting[host] = [then]
            threading.Thread(target=self._run, args=(host,), name="kvx-lookup", daemon=True).start()

    def _run(self, host: str) -> None:
        found: str | HandshakeError
        try:
            found = look_up(host)
        except HandshakeError as error:
            found = error
        self._post(lambda: self._answer(host, found))

    def _answer(self, host: str, found: str | HandshakeError) -> None:
        for then in self._waiting.pop(host):
            then(found)
