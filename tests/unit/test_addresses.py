"""Hosts and ports, from HTTP bodies too: addresses at once, names off the thread, nonsense as an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from kvx import addresses
from kvx.addresses import Resolver, endpoint, endpoint_of, look_up, numeric_address
from kvx.errors import HandshakeError


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
