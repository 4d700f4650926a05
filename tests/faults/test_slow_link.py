"""READs over plain TCP that do not come to their end, of an owner that is well: it stays so.

UCX ended such owners (docs/adr/0007-nixl.md): always, where what it allocates has been used before, and so it is here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_process import Remote, running_fork_server
from fault_engine import FaultConfig, FaultEngine
from network import LINK, Hosts, until

pytestmark = [pytest.mark.faults, pytest.mark.transfer]

ROUNDS = 2
TOKENS, FEW_TOKENS = 1000, 64
SPEED, SOME_BYTES = 6_000_000, 4_000_000
LEASE_S, GRACE_S, DEADLINE_S, CUT_S, RECOVERY_S = 3.0, 1.0, 5.0, 6.0, 30.0
ASKS_S = 21.0
"""UCX, left to itself, asks each peer every 20 s whether it is there."""
LARGE, SMALL = 128, 16
"""Tokens of a block; of the first, a request is 30 descriptors of 1.5 MB, of the other one 2,000 of 24 KB."""


class Pair:
    """An owner and a reader with a real model's geometry, on two hosts."""

    def __init__(self, hosts: Hosts, shared_memory: Path, block_size_tokens: int, lease_s: float) -> None:
        self.hosts, self._shared_memory = hosts, str(shared_memory)
        self._block_size_tokens, self._lease_s = block_size_tokens, lease_s
        self._undo = ExitStack()
        self.owner, self.reader = self._start(0), self._start(1)
        self._seed = 0

    def close(self) -> None:
        self._undo.close()

    def begin(self) -> str:
        """The name of a request some of whose bytes have come over a slow link."""
        self.hosts.slow_down(SPEED)
        before = self.hosts.bytes_sent()
        name = self._hand_off(TOKENS)
        until(lambda: self.hosts.bytes_sent() > before + SOME_BYTES, 20.0)
        return name

    def require_next(self) -> None:
        """The same owner hands off, rightly, as soon as what was lost has been sent again."""
        self.hosts.speed_up()
        deadline = time.monotonic() + RECOVERY_S
        while (ended := self.outcome(self._hand_off(FEW_TOKENS)))["error"]:
            assert time.monotonic() < deadline, ended
        assert ended["answer"] == self.reader.compute(FEW_TOKENS, self._seed)
        until(lambda: not self.owner.num_used() and not self.reader.num_used(), self._lease_s + GRACE_S + DEADLINE_S)

    def outcome(self, name: str) -> dict[str, Any]:
        ended: dict[str, Any] | None = self.reader.outcome(name, 4 * DEADLINE_S)
        assert ended is not None
        return ended

    def restart_reader(self) -> None:
        self.reader.stop()
        self.reader = self._start(1)

    def _hand_off(self, num_tokens: int) -> str:
        self._seed += 1
        name = f"request {self._seed}"
        place = self.owner.prefill(name, num_tokens, self._seed)
        self.owner_port = place.port
        self.reader.resume(name, place, num_tokens, self._seed)
        return name

    def _start(self, side: int) -> Remote:
        settings = {
            "transfer_deadline_s": DEADLINE_S, "lease_s": self._lease_s, "grace_s": GRACE_S, "failure_policy": "fail",
            "max_hold_s": self._lease_s, "side_channel_host": self.hosts.addresses[side],
            "allow_unauthenticated_data_plane": True,
        }  # fmt: skip
        environ = {"KVX_SECRET": "a link that is slow", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
        tokens = self._block_size_tokens
        config = FaultConfig(
            ("owner", "reader")[side], agent_name=("owner", "reader")[side], settings=settings, environ=environ,
            num_blocks=5120 // tokens, capacity_blocks=8192 // tokens, num_layers=30, num_kv_heads=3, head_size=64,
            block_size_tokens=tokens, granularity_bytes=2 << 20, network=self.hosts.names[side],
            shared_memory=self._shared_memory, piece_bytes=64 << 20, has_used_memory=True,
        )  # fmt: skip
        remote = Remote(config, FaultEngine)
        self._undo.callback(remote.stop)
        return remote.ready()


@pytest.fixture
def pairs(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    with running_fork_server(), ExitStack() as undo:

        def make(block_size_tokens: int = LARGE, lease_s: float = 4 * DEADLINE_S) -> Pair:
            made = Pair(hosts, tmp_path, block_size_tokens, lease_s)
            undo.callback(made.close)
            return made

        yield make


def lease_that_ends(pair: Pair) -> None:
    name = pair.begin()
    assert pair.outcome(name)["cause"] == "lease_expired"


def cut_link(pair: Pair) -> None:
    name = pair.begin()
    began = time.monotonic()
    pair.hosts.cut()
    assert pair.outcome(name)["cause"] in {"timeout", "transfer_failed"}
    time.sleep(max(0.0, began + CUT_S - time.monotonic()))
    pair.hosts.mend()


def killed_reader(pair: Pair) -> None:
    pair.begin()
    pair.restart_reader()


def stopped_owner(pair: Pair) -> None:
    name = pair.begin()
    pair.owner.signal(signal.SIGSTOP)
    assert pair.outcome(name)["cause"] == "timeout"
    pair.owner.signal(signal.SIGCONT)


def aborted_request(pair: Pair) -> None:
    name = pair.begin()
    pair.reader.abort(name)
    ended = pair.outcome(name)
    assert ended["cause"] == "cancelled"
    assert ended["took_s"] < DEADLINE_S, "it waits for the piece that is on its way, and for no other one"


@pytest.mark.parametrize("fault", [lease_that_ends, cut_link, killed_reader, stopped_owner, aborted_request])
def test_an_owner_survives(pairs: Callable[..., Pair], fault: Callable[[Pair], None]) -> None:
    pair = pairs(lease_s=LEASE_S) if fault is lease_that_ends else pairs()
    for _ in range(ROUNDS):
        fault(pair)
        pair.require_next()


def test_an_owner_asks_nothing_of_a_reader_that_may_be_gone(pairs: Callable[..., Pair]) -> None:
    """Where the reader's last request comes late, what was asked ends the connection before the reply (ADR 7)."""
    pair = pairs(lease_s=2 * ASKS_S)  # as long it looks
    name = pair.begin()
    pair.hosts.cut()
    assert pair.outcome(name)["cause"] in {"timeout", "transfer_failed"}
    before = pair.hosts.bytes_unanswered(0, pair.owner_port)
    time.sleep(ASKS_S)
    assert pair.hosts.bytes_unanswered(0, pair.owner_port) == before
    assert pair.owner.num_used(), "it still holds the blocks, and so it has looked"
