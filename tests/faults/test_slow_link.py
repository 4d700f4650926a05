"""A lease that ends in the middle of a READ over plain TCP, whose owner is well: it stays so.

UCX ended about half of such owners while they did not look (docs/adr/0007-nixl.md), so one round is not enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_process import Remote, running_fork_server
from fault_engine import FaultConfig, FaultEngine
from network import LINK, Hosts, until

pytestmark = [pytest.mark.faults, pytest.mark.transfer]

ROUNDS = 4
TOKENS, FEW_TOKENS = 1000, 64
SPEED, SOME_BYTES = 6_000_000, 4_000_000
LEASE_S, GRACE_S, DEADLINE_S = 3.0, 1.0, 5.0


@pytest.fixture
def engines(hosts: Hosts, tmp_path: Path) -> Iterator[list[Remote]]:
    """An owner and a reader with a real model's geometry: a request is 30 descriptors of 1.5 MB."""
    with running_fork_server(), ExitStack() as undo:
        started = []
        for name, address, network in zip(("owner", "reader"), hosts.addresses, hosts.names, strict=True):
            settings = {
                "transfer_deadline_s": DEADLINE_S, "lease_s": LEASE_S, "grace_s": GRACE_S, "max_hold_s": LEASE_S,
                "failure_policy": "fail", "side_channel_host": address, "allow_unauthenticated_data_plane": True,
            }  # fmt: skip
            environ = {"KVX_SECRET": "a link that is slow", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
            config = FaultConfig(
                name, agent_name=name, settings=settings, environ=environ, num_blocks=40, capacity_blocks=64,
                num_layers=30, num_kv_heads=3, head_size=64, block_size_tokens=128, granularity_bytes=2 << 20,
                network=network, shared_memory=str(tmp_path), piece_bytes=64 << 20,
            )  # fmt: skip
            started.append(Remote(config, FaultEngine))
            undo.callback(started[-1].stop)
        yield [engine.ready() for engine in started]


def hand_off(owner: Remote, reader: Remote, name: str, num_tokens: int, seed: int) -> None:
    reader.resume(name, owner.prefill(name, num_tokens, seed), num_tokens, seed)


def test_an_owner_survives_readers_that_give_up(hosts: Hosts, engines: list[Remote]) -> None:
    owner, reader = engines
    for seed in range(ROUNDS):
        hosts.slow_down(SPEED)
        before = hosts.bytes_sent()
        hand_off(owner, reader, f"slow {seed}", TOKENS, seed)
        until(lambda sent=before: hosts.bytes_sent() > sent + SOME_BYTES, 20.0)
        ended = reader.outcome(f"slow {seed}", 4 * DEADLINE_S)
        assert ended is not None
        assert ended["cause"] == "lease_expired", ended
        hosts.speed_up()
        hand_off(owner, reader, f"next {seed}", FEW_TOKENS, seed)
        ended = reader.outcome(f"next {seed}", 4 * DEADLINE_S)
        assert ended is not None
        assert ended["error"] == ""
        assert ended["answer"] == reader.compute(FEW_TOKENS, seed)
    until(lambda: not owner.num_used() and not reader.num_used(), LEASE_S + GRACE_S + DEADLINE_S)
