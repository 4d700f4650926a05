"""Network namespaces of this machine: two hosts for what runs in them, as far as the network goes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

LINK = "kvx0"
_numbers = itertools.count(os.getpid())


class Network:
    """Two network namespaces joined by a pair of interfaces: the peer's, and that of the others."""

    def __init__(self) -> None:
        self.number = next(_numbers) % 250
        self.names = [f"kvx-{os.getpid()}-{self.number}-{side}" for side in ("peer", "reader")]
        self.addresses = [f"10.231.{self.number}.{side}" for side in (1, 2)]

    def open(self) -> None:
        peer, reader = self.names
        for name in self.names:
            ip("netns", "add", name)
        ip("-n", peer, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", reader)
        for name, address in zip(self.names, self.addresses, strict=True):
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
        self.http = [f"10.232.{self.number}.{end}" for end in (1, 5)]
        self._is_slow = False

    def open(self) -> None:
        super().open()
        for side, (name, http, address) in enumerate(zip(self.names, self.http, self.addresses, strict=True)):
            way, here = f"kvx{os.getpid()}-{self.number}{'ab'[side]}", f"10.232.{self.number}.{2 + 4 * side}"
            ip("link", "add", way, "type", "veth", "peer", "name", "http0", "netns", name)
            ip("address", "add", f"{here}/30", "dev", way)
            ip("-n", name, "address", "add", f"{http}/30", "dev", "http0")
            ip("link", "set", way, "up")
            ip("-n", name, "link", "set", "http0", "up")
            ip("route", "add", f"{address}/32", "via", http)

    def slow_down(self, bytes_per_s: int) -> None:
        """What either side sends over the link."""
        self._is_slow = True
        for name in self.names:
            tc(name, "replace", "dev", LINK, "root", "tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "256kb",
               "latency", "400ms")  # fmt: skip

    def speed_up(self) -> None:
        names, self._is_slow = self.names if self._is_slow else (), False
        for name in names:
            tc(name, "delete", "dev", LINK, "root")

    def bytes_unanswered(self, side: int, but_port: int) -> int:
        """What one of the two has written to its connections, but those of one port, and the other's host not seen."""
        found = _run("ip", "netns", "exec", self.names[side], "ss", "-Htn", "sport", "!=", f":{but_port}")
        return sum(int(line.split()[2]) for line in found.splitlines() if f" {self.addresses[side]}:" in line)

    def bytes_sent(self, side: int = 0) -> int:
        """By one of the two, over the link."""
        [found] = json.loads(ip("-n", self.names[side], "-json", "-statistics", "link", "show", LINK))
        return int(found["stats64"]["tx"]["bytes"])


def until(holds: Callable[[], Any], timeout_s: float = 5.0, why: Callable[[], str] = lambda: "") -> None:
    """States that another process comes to by itself."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, why() or "it did not come in time"
        time.sleep(0.01)


def ip(*words: str) -> str:
    return _run("ip", *words)


def tc(namespace: str, *words: str) -> str:
    return _run("tc", "-n", namespace, "qdisc", *words)


def _run(*words: str) -> str:
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise subprocess.CalledProcessError(ended.returncode, f"{' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout
