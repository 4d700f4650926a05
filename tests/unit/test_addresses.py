"""Hosts and ports, from HTTP bodies too: addresses at once, names off the thread, nonsense as an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from kvx import addresses
from kvx.addresses import AllowedHosts, Resolver, endpoint, endpoint_of, is_loopback, look_up, numeric_address
from kvx.errors import ConnectorError, HandshakeError


def test_endpoints() -> None:
    assert endpoint_of("127.0.0.1", 80) == "tcp://127.0.0.1:80"
    assert endpoint_of("::1", 80) == "tcp://[::1]:80"
    assert endpoint_of("localhost", 80) in {"tcp://127.0.0.1:80", "tcp://[::1]:80"}
    with pytest.raises(HandshakeError, match="'no such host' has no address"):
        endpoint_of("no such host", 80)


@pytest.mark.parametrize("host", ["a" * 64, "a" * 10_000, "nul\0", ".", "ü" * 70, "\ud800", "a..b", "[::1]"])
def test_what_is_no_host_is_a_handshake_error(host: str) -> None:
    assert numeric_address(host) is None
    with pytest.raises(HandshakeError, match="has no address") as raised:
        look_up(host)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize("port", [-1, 65536, 2**70])
def test_what_is_no_port_is_a_handshake_error(port: int) -> None:
    with pytest.raises(HandshakeError, match="is no port"):
        endpoint("127.0.0.1", port)


def test_names_are_looked_up_elsewhere_each_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = threading.Event(), []

    def slow(host: str) -> str:
        asked.append(host)
        assert answer.wait(20)
        if host == "bad":
            raise HandshakeError("no address")
        return "10.0.0.1"

    monkeypatch.setattr(addresses, "look_up", slow)
    monkeypatch.setattr(addresses, "MOST_LOOKUPS", 2)
    notes: SimpleQueue[Callable[[], None]] = SimpleQueue()
    found: list[object] = []
    resolver = Resolver(notes.put)
    for host in ("good", "bad", "good", "third"):
        resolver.ask(host, found.append)
    assert len(found) == 1, "two names are enough; their answers are not waited for"
    assert "2 names are being looked up" in str(found.pop())
    answer.set()
    notes.get(timeout=20)()
    notes.get(timeout=20)()
    assert sorted(map(str, found)) == ["10.0.0.1", "10.0.0.1", "no address"]
    assert sorted(asked) == ["bad", "good"]
    resolver.ask("third", found.append)
    notes.get(timeout=20)()
    assert asked[-1] == "third"


def is_allowed(hosts: AllowedHosts, address: str, host: str = "") -> bool:
    try:
        hosts.require(host or address, address)
    except HandshakeError as error:
        assert f"({address}) is not among allowed_hosts" in str(error)  # noqa: PT017  either way is an answer
        return False
    return True


def test_only_loopback_unless_more_is_allowed() -> None:
    for address in ("127.0.0.1", "127.255.0.9", "::1", "::ffff:127.0.0.1"):
        assert is_allowed(AllowedHosts.loopback(), address)
        assert is_loopback(address)
    for address in ("10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "128.0.0.1", "fe80::1"):
        assert not is_allowed(AllowedHosts.loopback(), address)
        assert is_allowed(AllowedHosts.anywhere(), address)
        assert not is_loopback(address)


def test_networks_and_addresses_are_what_they_say() -> None:
    hosts = AllowedHosts.of(["10.1.0.0/16", "192.0.2.7", "fd00::/8"])
    assert all(is_allowed(hosts, found) for found in ("10.1.255.9", "192.0.2.7", "fd00::5", "::ffff:10.1.2.3"))
    assert not any(is_allowed(hosts, found) for found in ("10.2.0.1", "192.0.2.8", "127.0.0.1", "fe00::1"))


def test_a_name_is_judged_by_where_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"prefill-0": "10.0.0.5"}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise OSError("no such host")
        return [(0, 0, 0, "", (known[host], 0))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    hosts = AllowedHosts.of(["prefill-0", "not-up-yet"])
    assert is_allowed(hosts, "10.0.0.5")
    assert not is_allowed(hosts, "10.0.0.6", host="evil.example"), "whatever it calls itself"
    assert is_allowed(hosts, "10.0.0.6", host="Prefill-0."), "restarted elsewhere, and asked for by its name"
    assert is_allowed(hosts, "10.0.0.7", host="not-up-yet")
    assert not is_allowed(hosts, "10.0.0.7")


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0.1/8", "::1::", "a/b", "", " ", "."])
def test_what_is_no_entry_of_an_allow_list_is_named(entry: str) -> None:
    with pytest.raises(ConnectorError, match="it needs names, addresses, and networks"):
        AllowedHosts.of([entry])
