"""Where this engine listens, and whether a peer's address leads to a side channel. No message of kvx's is sent yet."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvx.addresses import is_loopback, look_up, numeric_address
from kvx.doctor.findings import Finding, error, ok
from kvx.errors import HandshakeError

CONNECT_S = 3.0
GREETING_S = 4.0
# How ZMTP 3 begins: signature and version. The other side then says its mechanism, without waiting for ours.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
HOST, PORT = "side channel host", "side channel port"


@dataclass(frozen=True)
class Peer:
    """A peer's side channel as it was given on the command line."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Peer:
        """`host:port`, `[ipv6]:port`. ValueError with a sentence for anything else."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is no HOST:PORT; for example 10.0.0.7:5600")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_ours(host: str) -> bool:
    """Whether an address or name is this machine's."""
    try:
        address = numeric_address(host) or look_up(host)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (HandshakeError, OSError):
        return False
    return True


def is_local(host: str) -> bool:
    """Whether only this machine's processes reach an address or name."""
    try:
        return is_loopback(numeric_address(host) or look_up(host))
    except HandshakeError:
        return False


def check_host(host: str, elsewhere: Sequence[Peer]) -> Finding:
    """Whether peers can come back to where we listen. `elsewhere`: those on other machines."""
    try:
        address = numeric_address(host) or look_up(host)
    except HandshakeError as problem:
        return error(HOST, str(problem), "the engine cannot listen there, and ends at its start", _fix())
    if ipaddress.ip_address(address).is_unspecified:
        return error(
            HOST, f"{host} stands for every interface", "peers are told to connect to it, which leads to themselves",
            _fix(),
        )  # fmt: skip
    if not is_ours(host):
        return error(
            HOST, f"{host} ({address}) is no address of this machine", "the engine cannot listen there", _fix()
        )
    if is_loopback(address) and elsewhere:
        return error(
            HOST, f"{host} is loopback, but the peer {', '.join(map(str, elsewhere))} is on another machine",
            "it is told to connect to loopback, and looks for us on its own machine", _fix(),
        )  # fmt: skip
    alone = "; only engines of this machine reach it" if is_loopback(address) else ""
    return ok(HOST, f"{host}{alone}")


def _fix() -> str:
    return f"side_channel_host: the address of this machine that peers reach; it has {', '.join(own_addresses())}"


def own_addresses() -> list[str]:
    """IPv4 and IPv6 addresses of this machine that peers may reach."""
    import psutil

    found = {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(address for address in found if not ipaddress.ip_address(address).is_link_local)


def check_port(host: str, port: int, ranks: int) -> Finding:
    """Whether each of the ranks' ports is free. Not to be asked of a host that is not ours."""
    if port == 0 and ranks == 1:
        return ok(PORT, "0: a free one is taken at the start; routers pass it on")
    if port == 0:
        return error(
            PORT, f"0, with {ranks} ranks", "peers count the ranks' ports from the first one",
            "side_channel_port: the first of as many free ports",
        )  # fmt: skip
    address = numeric_address(host) or look_up(host)
    for wanted in range(port, port + ranks):
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, wanted))
        except (OSError, OverflowError) as problem:
            return error(
                PORT, f"{wanted} on {host} cannot be used: {problem}", "the engine ends at its start",
                "choose a free side_channel_port, or stop what listens there (ss -ltnp)",
            )  # fmt: skip
    return ok(PORT, f"{port} is free" if ranks == 1 else f"{port} to {port + ranks - 1} are free")


def reach(peer: Peer, has_curve: bool) -> Finding:
    """Whether a side channel listens at a peer's address: the name, the connection, ZeroMQ's first bytes, its keys."""
    check = f"peer {peer}"
    try:
        address = numeric_address(peer.host) or look_up(peer.host)
    except HandshakeError as problem:
        return error(
            check, str(problem), "nothing can be connected to", "correct the name in --peer, or DNS and /etc/hosts"
        )
    try:
        with socket.create_connection((address, peer.port), CONNECT_S) as link:
            greeting = _greeting(link)
    except OSError as problem:
        return _unreachable(check, peer, problem)
    if greeting is None:
        return error(
            check, f"something accepts connections, but said nothing for {GREETING_S:g} s",
            "every hand-off waits for its deadline",
            "the process is stopped or hangs: see its state (ps), start it again; or the port is another program's",
        )  # fmt: skip
    if not greeting.startswith(b"\xff"):
        return error(
            check, "something listens there that is no side channel of kvx", "the handshake cannot begin",
            "give the peer's side_channel_port, which is not its HTTP port",
        )  # fmt: skip
    theirs_is_curve = greeting[12:32].rstrip(b"\0") == b"CURVE"
    if len(greeting) >= 32 and theirs_is_curve != has_curve:
        return error(
            check, f"{'it' if theirs_is_curve else 'this side'} encrypts with CURVE, and the other one does not",
            "the handshake cannot begin", "give all engines one KVX_CURVE_DIR, or none",
        )  # fmt: skip
    return ok(check, "a side channel listens there")


def _greeting(link: socket.socket) -> bytes | None:
    """The first 32 bytes, or what came of them; None for silence. ZeroMQ speaks first, and goes on when we have.

    Most other programs want the end of a line before they complain.
    """
    link.settimeout(GREETING_S / 2)
    found = b""
    for ours in (_GREETING, b"\r\n\r\n"):
        with suppress(TimeoutError):
            try:
                link.sendall(ours)
                while len(found) < 32 and (data := link.recv(32 - len(found))):
                    found += data
            except ConnectionError:
                pass
            return found
        if found:
            return found
    return None


def _unreachable(check: str, peer: Peer, problem: OSError) -> Finding:
    if isinstance(problem, ConnectionRefusedError):
        return error(
            check, f"nothing listens on port {peer.port}: connection refused", "no hand-off with this engine can begin",
            "start the engine there, if it has ended; else give its side_channel_port, and the host that it listens on",
        )  # fmt: skip
    if isinstance(problem, TimeoutError) or problem.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return error(
            check, f"no way there: {problem}", "no hand-off with this engine can begin",
            f"open TCP port {peer.port} in firewalls and network policies between the hosts, or correct the address",
        )  # fmt: skip
    return error(check, str(problem), "no hand-off with this engine can begin", "see the error, and correct --peer")
