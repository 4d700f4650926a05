"""Hand-offs between two real processes: the bytes are right, whatever the geometry of either side."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import pytest
from doctor_helpers import unused_port
from engine_process import EngineConfig, Remote, StartEngines

from kvx.errors import EngineError
from kvx.ranks import heads_of_rank, shares
from kvx.servers import require_free_port

pytestmark = pytest.mark.transfer

VERIFY = {"verify": "all", "transfer_deadline_s": 20.0}


def block_ids(config: EngineConfig, num_tokens: int, seed: int) -> list[int]:
    count = -(-num_tokens // config.block_size_tokens)
    return random.Random(seed).sample(range(config.num_blocks), count)


def pull(
    reader: Remote, owner: Remote, request_id: str, blocks: list[list[int]], first: int, count: int, ticket: str = ""
) -> None:
    reader.pull(
        ticket=ticket,
        request_id=request_id,
        remote_request_id=request_id,
        remote_engine_id=owner.config.engine_id,
        host="127.0.0.1",
        port=owner.port,
        blocks=blocks,
        first_token=first,
        num_tokens=count,
    )


def hand_off(owner: Remote, reader: Remote, num_tokens: int, seed: int, first_token: int = 0) -> None:
    """Fill, hold, pull, compare all bytes, and see both sides end."""
    request = f"request-{seed}"
    theirs, ours = block_ids(owner.config, num_tokens, seed), block_ids(reader.config, num_tokens, seed + 1)
    owner.fill([theirs], num_tokens, seed)
    owner.hold(request, [theirs], num_tokens)
    held = first_token // reader.config.block_size_tokens
    wanted = [-1] * held + ours[held:]
    before = reader.read([ours], 0, first_token)
    ticket = owner.ticket(request, num_tokens)
    pull(reader, owner, request, [wanted], first_token, num_tokens - first_token, ticket)
    events = reader.events(20)
    assert events["received"] == {request}, events
    assert reader.read([ours], first_token, num_tokens - first_token) == owner.read(
        [theirs], first_token, num_tokens - first_token
    )
    assert reader.read([ours], 0, first_token) == before, "what the reader had already was overwritten"
    assert owner.events(20)["released"] == {request}


def await_parked(owner: Remote, request_id: str, count: int = 1) -> None:
    """So many claims of this request wait for its hold there."""
    give_up = time.monotonic() + 20
    while owner.num_parked(request_id) < count:
        assert time.monotonic() < give_up
        time.sleep(0.01)


PAIRS = {
    "one block size, float32": ({"layout": "LBHNC"}, {"layout": "LBHNC"}),
    "16 to 32, other layout, float32": ({"layout": "LBHNC"}, {"layout": "LBNHC", "block_size_tokens": 32}),
    "32 to 16, kernel blocks, bfloat16": (
        {"layout": "LBHNC", "block_size_tokens": 32, "kernel_block_size_tokens": 8, "dtype": "bfloat16"},
        {"layout": "BLHNC", "dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_prompt_length_arrives_byte_for_byte(start_engines: StartEngines, name: str) -> None:
    first, second = PAIRS[name]
    owner, reader = start_engines(
        EngineConfig("prefill", settings=VERIFY, **first), EngineConfig("decode", settings=VERIFY, **second)
    )
    size = reader.config.block_size_tokens
    for seed, num_tokens in enumerate([1, size, size + 1, 1000]):
        hand_off(owner, reader, num_tokens, seed * 10)
    for seed, (num_tokens, held_blocks) in enumerate([(size + 1, 1), (1000, 7)]):
        hand_off(owner, reader, num_tokens, 1000 + seed * 10, held_blocks * size)
    status = reader.status()
    assert status["digests"]["checked"] == 2 * (1 + size + size + 1 + 1000 + 1 + 1000 - 7 * size)
    assert status["digests"]["mismatched"] == 0
    content = status["transfer"]["bytes"] // (status["digests"]["checked"] // 2)
    assert content == 3 * 2 * 2 * 8 * (2 if reader.config.dtype == "bfloat16" else 4), "only the wanted tokens moved"
    assert owner.status()["handoff"] == {"holds": 0, "released": 6, "expired": 0, "renewed": 0}
    reader.close()
    owner.close()


def test_a_sample_is_bounded_and_finds_what_changed_under_a_hold(start_engines: StartEngines) -> None:
    sample = {**VERIFY, "verify": "sample"}
    owner, reader = start_engines(
        EngineConfig("prefill", settings=sample, layout="LBNHC"),
        EngineConfig("decode", settings=sample, block_size_tokens=32),
    )
    hand_off(owner, reader, 1000, 1)
    digests = reader.status()["digests"]
    assert digests["checked"] == digests["expected"] <= 4 * 16 * 2, "4 blocks of 16 tokens, 2 heads"
    hand_off(owner, reader, 40, 10, first_token=32)
    assert reader.status()["digests"]["checked"] >= digests["checked"] + 8 * 2, "the last block is always in it"

    owner.fill([[1, 2, 3]], 48, 5)
    owner.hold("r", [[1, 2, 3]], 48)
    owner.await_digests()
    owner.fill([[3]], 16, 6)
    pull(reader, owner, "r", [[7, 8]], 0, 48)
    events = reader.events(20)
    assert events["causes"] == {"r": "digest_mismatch"}
    assert "in layer group full, first at position 32" in events["failed"]["r"]
    assert reader.status()["transfer"]["failures"] == {"digest_mismatch": 1}
    assert owner.events(20)["released"] == {"r"}
    hand_off(owner, reader, 100, 3)


def test_groups_with_absent_blocks_move_what_is_wanted(start_engines: StartEngines) -> None:
    """A sliding window group keeps only the last blocks of a prompt, on both sides."""
    owner, reader = start_engines(
        EngineConfig("prefill", settings=VERIFY, sliding_layers=2),
        EngineConfig("decode", settings=VERIFY, sliding_layers=2, layout="BLNHC"),
    )
    held, wanted = [[1, 2, 3, 4], [-1, -1, 40, 41]], [[9, 8, 7, 6], [-1, -1, 50, 51]]
    owner.fill(held, 60, 5)
    owner.hold("r", held, 60)
    pull(reader, owner, "r", wanted, 0, 60)
    assert reader.events(20)["received"] == {"r"}
    assert reader.read([wanted[0]], 0, 60) == owner.read([held[0]], 0, 60)
    tail_ours, tail_theirs = (reader.read(wanted, 32, 28), owner.read(held, 32, 28))
    assert tail_ours == tail_theirs
    assert owner.events(20)["released"] == {"r"}
    pull(reader, owner, "r", [[9, 8, 7, 6], [-1, 49, 50, 51]], 0, 60)
    assert "was released" in reader.events(20)["failed"]["r"]


def test_a_rank_reads_its_heads_from_an_owner_of_all(start_engines: StartEngines) -> None:
    """One prefill rank, two decode ranks: each of them finds all of its heads there."""
    owner, *ranks = start_engines(
        EngineConfig("prefill", settings=VERIFY, num_kv_heads=4),
        *(
            EngineConfig(
                "decode", settings=VERIFY, num_kv_heads=2, total_heads=4, first_head=first, tp_size=2, layout="LBNHC"
            )
            for first in (0, 2)
        ),
    )
    owner.fill([[5, 3]], 20, 1)
    (everything,) = owner.read([[5, 3]], 0, 20)
    size = len(everything) // (3 * 4)
    for index, rank in enumerate(ranks):
        owner.hold(f"r{index}", [[5, 3]], 20)
        pull(rank, owner, f"r{index}", [[7, 8]], 0, 20)
        assert rank.events(20)["received"] == {f"r{index}"}
        mine = b"".join(everything[(4 * layer + 2 * index) * size :][: 2 * size] for layer in range(3))
        assert rank.read([[7, 8]], 0, 20) == [mine]
        assert rank.status()["digests"]["checked"] == 2 * 20


def two_free_ports() -> int:
    """The first of two that follow one another, as an engine's ranks have them."""
    while True:
        port = unused_port()
        with contextlib.suppress(EngineError):
            require_free_port("127.0.0.1", port + 1)
            return port


@pytest.mark.parametrize(("reader_size", "owner_size"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("total", [4, 1])
def test_ranks_read_ranks(start_engines: StartEngines, reader_size: int, owner_size: int, total: int) -> None:
    """Tensor parallel sizes that differ, also with one KV head, which every rank holds: each head arrives once."""

    def rank(name: str, number: int, size: int, **fields: Any) -> EngineConfig:
        heads = heads_of_rank(total, number, size)
        return EngineConfig(
            name, num_kv_heads=heads.count, first_head=heads.start, total_heads=total, tp_rank=number, tp_size=size,
            **fields,
        )  # fmt: skip

    first_port = two_free_ports()
    engines = start_engines(
        *(
            rank("prefill", number, owner_size, settings={**VERIFY, "side_channel_port": first_port + number})
            for number in range(owner_size)
        ),
        *(
            rank("decode", number, reader_size, settings=VERIFY, layout="LBNHC", block_size_tokens=32)
            for number in range(reader_size)
        ),
    )
    owners, readers = engines[:owner_size], engines[owner_size:]
    heads: dict[int, list[bytes]] = {}  # each head's content by layer, as an owner has it
    for number, owner in enumerate(owners):
        owner.fill([[5, 3, 9]], 40, number if total > 1 else 0)
        owner.hold("r", [[5, 3, 9]], 40)
        (content,), held = owner.read([[5, 3, 9]], 0, 40), heads_of_rank(total, number, owner_size)
        size = len(content) // (3 * held.count)
        for index, head in enumerate(range(held.start, held.end)):
            heads[head] = [content[(layer * held.count + index) * size :][:size] for layer in range(3)]
    for number, reader in enumerate(readers):
        reader.pull(
            request_id="mine", remote_request_id="r", remote_engine_id="prefill", host="127.0.0.1", port=first_port,
            blocks=[[7, 2]], first_token=0, num_tokens=40,
            shares=tuple(shares([total], number, reader_size, owner_size)),
        )  # fmt: skip
        events = reader.events(20)
        assert events["received"] == {"mine"}, f"also the last one, long after the first has released: {events}"
    for owner in owners:
        assert owner.events(20)["released"] == {"r"}
    for number, reader in enumerate(readers):
        ours = heads_of_rank(total, number, reader_size)
        expected = [heads[head][layer] for layer in range(3) for head in range(ours.start, ours.end)]
        assert reader.read([[7, 2]], 0, 40) == [b"".join(expected)]
        digests = reader.status()["digests"]
        assert digests["checked"] == digests["expected"] == 40 * ours.count
        assert digests["mismatched"] == 0


def test_several_pulls_of_one_hold_all_read_it(start_engines: StartEngines) -> None:
    """As the samples of one request do: each has its own blocks, and the owner frees its own after the last."""
    owner, reader, second = start_engines(*(EngineConfig(name, settings=VERIFY) for name in ("prefill", "a", "b")))
    owner.fill([[1, 2, 3]], 48, 7)
    pulls = [(engine, f"{engine.config.engine_id}{n}", n * 4) for engine in (reader, second) for n in range(3)]
    for engine, name, first in pulls:  # all claims wait for the hold, so that none comes after the last release
        engine.pull(
            request_id=name, remote_request_id="r", remote_engine_id="prefill", host="127.0.0.1", port=owner.port,
            blocks=[[first, first + 1, first + 2]], first_token=0, num_tokens=48,
        )  # fmt: skip
    await_parked(owner, "r", len(pulls))
    owner.hold("r", [[1, 2, 3]], 48)
    ended: dict[str, set[str]] = {"a": set(), "b": set()}
    while sum(map(len, ended.values())) < 6:
        for engine in (reader, second):
            events = engine.events(20)
            assert not events["failed"], events
            ended[engine.config.engine_id] |= events["received"]
    for engine, _, first in pulls:
        assert engine.read([[first, first + 1, first + 2]], 0, 48) == owner.read([[1, 2, 3]], 0, 48)
    assert owner.events(20)["released"] == {"r"}
    assert owner.status()["handoff"] == {"holds": 0, "released": 1, "expired": 0, "renewed": 0}


def test_many_at_once(start_engines: StartEngines) -> None:
    owner, reader = start_engines(EngineConfig("prefill", settings=VERIFY), EngineConfig("decode", settings=VERIFY))
    for index in range(12):
        blocks = [[index * 3, index * 3 + 1, index * 3 + 2]]
        owner.fill(blocks, 40, index)
        owner.hold(f"r{index}", blocks, 40)
        pull(reader, owner, f"r{index}", [[index * 4 + 2, index * 4, index * 4 + 1]], 0, 40)
    received: set[str] = set()
    while len(received) < 12:
        events: dict[str, Any] = reader.events(20)
        assert events["received"], events
        assert not events["received"] & received, "reported twice"
        received |= events["received"]
    for index in range(12):
        ours, theirs = [index * 4 + 2, index * 4, index * 4 + 1], [index * 3, index * 3 + 1, index * 3 + 2]
        assert reader.read([ours], 0, 40) == owner.read([theirs], 0, 40)


def test_an_idle_pair_uses_no_processor_time(start_engines: StartEngines) -> None:
    owner, reader = start_engines(EngineConfig("prefill"), EngineConfig("decode"))
    hand_off(owner, reader, 100, 1)
    owner.events(1.1), reader.events(0.1)  # past the time in which the owner helps to set up a connection
    before = owner.cpu_s(), reader.cpu_s()
    owner.hold("unread", [[1]], 16)
    assert not any(owner.events(0.5).values())
    assert not any(reader.events(0.5).values())
    assert owner.cpu_s() - before[0] < 0.05
    assert reader.cpu_s() - before[1] < 0.05


def test_over_a_transport_that_needs_the_owners_help(start_engines: StartEngines) -> None:
    """Over TCP the owner's side of the library takes part in every READ: it progresses while it is being read."""
    environ = {"UCX_TLS": "tcp,self"}
    owner, reader = start_engines(
        EngineConfig("prefill", settings=VERIFY, environ=environ), EngineConfig("decode", environ=environ)
    )
    for seed in (1, 2):
        hand_off(owner, reader, 1000, seed)
