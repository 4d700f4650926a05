"""Network namespaces of this machine: two hosts for what runs in them, as far as the network goes."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

PEER_ADDRESS, READER_ADDRESS = "10.231.77.1", "10.231.77.2"
HERE = ("10.231.78.2", "10.231.78.6")
"""This namespace's end of the way to each side, whose own end is one below it."""
LINK = "kvx0"
_numbers = itertools.count()


class Network:
    """Two network namespaces joined by a pair of interfaces: the peer's, and that of the others."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.names = [f"kvx-{os.getpid()}-{number}-{side}" for side in ("peer", "reader")]

    def open(self) -> None:
        peer, reader = self.names
        for name in self.names:
            ip("netns", "add", name)
        ip("-n", peer, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", reader)
        for name, address in ((peer, PEER_ADDRESS), (reader, READER_ADDRESS)):
            ip("-n", name, "address", "add", f"{address}/30", "dev", LINK)
            for interface in ("lo", LINK):
                ip("-n", name, "link", "set", interface, "up")
        for name in self.names:  # an interface that does not run yet is none to UCX
            until(lambda name=name: "state UP" in ip("-n", name, "link", "show", LINK))

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", LINK, "down")

    def mend(self) -> None:
        ip("-n", self.names[0], "link", "set", LINK, "up")

    def close(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


class Hosts(Network):
    """The same two, and a way from here to each, which leads to no other place: for HTTP, and to ask for status.

    What the two say to each other goes over their link alone, whose bytes are counted and whose speed can be set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.http = tuple(f"10.231.78.{int(here.rpartition('.')[2]) - 1}" for here in HERE)

    def open(self) -> None:
        super().open()
        addresses = (PEER_ADDRESS, READER_ADDRESS)
        for name, http, here, address in zip(self.names, self.http, HERE, addresses, strict=True):
            way = f"kvx{os.getpid()}-{here.rpartition('.')[2]}"
            ip("link", "add", way, "type", "veth", "peer", "name", "http0", "netns", name)
            ip("address", "add", f"{here}/30", "dev", way)
            ip("-n", name, "address", "add", f"{http}/30", "dev", "http0")
            ip("link", "set", way, "up")
            ip("-n", name, "link", "set", "http0", "up")
            ip("route", "add", f"{address}/32", "via", http)

    def slow_down(self, bytes_per_s: int) -> None:
        """What either side sends over the link."""
        for name in self.names:
            tc(name, "replace", "dev", LINK, "root", "tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "256kb",
               "latency", "400ms")  # fmt: skip

    def speed_up(self) -> None:
        for name in self.names:
            tc(name, "delete", "dev", LINK, "root")

    def bytes_sent(self, side: int = 0) -> int:
        """By one of the two, over the link."""
        return int(ip("netns", "exec", self.names[side], "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes"))


def until(holds: Callable[[], Any], timeout_s: float = 5.0, why: Callable[[], str] = lambda: "") -> None:
    """States that another process comes to by itself."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, why() or "it did not come in time"
        time.sleep(0.01)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def tc(namespace: str, *words: str) -> None:
    ip("netns", "exec", namespace, "tc", "qdisc", *words)
