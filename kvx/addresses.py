"""Where a side channel is: hosts and ports to ZeroMQ's addresses. Both may come from an HTTP body."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable

from kvx.errors import HandshakeError

# Names being looked up at once; one that nobody answers for takes its thread along for up to half a minute.
MOST_LOOKUPS = 32
SHOWN_CHARACTERS = 255
Then = Callable[[str | HandshakeError], None]


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
