"""Pairs of real vLLM engines that differ in tensor parallel ranks and block sizes: 16 of 16 as one stock server."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvx.errors import EngineError
from kvx.verify.client import Ask
from kvx.verify.questions import own_problems, own_shots, prompt

from ..models import ARGUMENTS, HEAD_SIZE, LAYERS, make
from .fleet import CACHE_TOKENS, Fleet, Member, require_right

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = ("nixl", "mooncake", "ipc")
MEMBERS = {
    "b32": Member(block_size_tokens=32, connectors=ALL),
    "b64": Member(block_size_tokens=64),
    "b128": Member(block_size_tokens=128),
    "two": Member(tp_size=2),
    "two-more": Member(tp_size=2),
    "b64-mooncake": Member(connectors=("mooncake",)),
    "stages": Member(stages=2),
    "stages-too": Member(stages=2, block_size_tokens=32),
    "two-ipc": Member(tp_size=2, connectors=("ipc",)),
}
HELD_MIB = 96
UNEVEN = Member(tp_size=2, measures=True, environment={"KVX_INJECT_HOLD_MIB": f"0,{HELD_MIB}"})
QUESTIONS = 16
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def dense(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("dense")
    with Fleet(make("dense", folder), folder, MEMBERS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def one_kv_head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("one-kv-head")
    with Fleet(make("one-kv-head", folder), folder, {"one": Member(), "two": Member(tp_size=2)}) as fleet:
        yield fleet


def questions(name: str) -> list[Ask]:
    """Of every row its own, so that no engine knows them from the row before; with a beginning in common."""
    shots = own_shots()[:4]
    problems = (own_problems() * QUESTIONS)[:QUESTIONS]
    return [
        Ask(f"{name}-{number}", f"Row {name}.\n\n{prompt(problem, shots)} ({number})", NEW_TOKENS, ignore_eos=True)
        for number, problem in enumerate(problems)
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "ended"),
    [
        ("two", "b32", ()),
        pytest.param("b32", "two", (), marks=pytest.mark.pairs),
        pytest.param("two", "two-more", ("two-more", "two"), marks=pytest.mark.pairs),
        pytest.param("b32", "two-ipc", ("two-ipc",), marks=pytest.mark.pairs),
        pytest.param("b32", "b64", (), marks=pytest.mark.pairs),
        pytest.param("b64", "b32", (), marks=pytest.mark.pairs),
        pytest.param("b32", "b64-mooncake", ("b64-mooncake",), marks=pytest.mark.pairs),
        pytest.param("b128", "b32", ("b128",), marks=pytest.mark.pairs),
        pytest.param("stages", "stages-too", ("stages", "stages-too"), marks=pytest.mark.pairs),
    ],
    ids=lambda value: value if isinstance(value, str) else "then" if value else "",
)
def test_unequal_engines_answer_as_one(dense: Fleet, prefill: str, decode: str, ended: tuple[str, ...]) -> None:
    require_right(dense, *dense.get(prefill, decode), questions(f"{prefill} to {decode}"))
    dense.stop(*ended)


@pytest.mark.pairs
def test_a_tail_is_appended_to_what_decode_has_already(dense: Fleet) -> None:
    """2,048 + 1 tokens, of which decode has the first 31 of 33 blocks from the request before."""
    prefill, decode = dense.get("b32", "b64")
    tokens = tuple(random.Random(5).choices(range(1000, 20000), k=2049))
    require_right(dense, prefill, decode, [Ask("before", tokens[: 31 * 64 + 1], 8, ignore_eos=True)])
    moved = require_right(dense, prefill, decode, [Ask("tail", tokens, NEW_TOKENS, ignore_eos=True)])
    assert moved.external_tokens == 2049 - 31 * 64
    assert moved.num_blocks == 2


@pytest.mark.pairs
def test_conversations_that_share_beginnings_are_right_while_blocks_are_evicted(dense: Fleet) -> None:
    prefill, decode = dense.get("b32", "b64")
    prompts = conversations(200)
    for size in (prefill.member.block_size_tokens, decode.member.block_size_tokens):
        distinct = {prompt[:end] for prompt in prompts for end in range(size, len(prompt), size)}
        assert len(distinct) > 2 * CACHE_TOKENS // size, "most blocks have to go before the end"
    asks = [Ask(f"turn-{number}", prompt, 8, ignore_eos=True) for number, prompt in enumerate(prompts)]
    moved = require_right(dense, prefill, decode, asks)
    assert moved.external_tokens < sum(map(len, prompts)), "what is shared was not brought each time"


def conversations(count: int) -> list[tuple[int, ...]]:
    """Each goes on from a beginning of an earlier one, or from nothing."""
    numbers, prompts = random.Random(11), [()]
    for _ in range(count):
        before: tuple[int, ...] = numbers.choice(prompts[-40:])
        kept = before[: numbers.randint(0, len(before))] if numbers.random() < 0.5 else before
        tail = numbers.choices(range(1000, 20000), k=numbers.randint(1, 400))
        prompts.append((*kept[:1600], *tail))
    return prompts[1:]


@pytest.mark.pairs
def test_a_cache_in_fp8_goes_between_unequal_engines(model: Path, tmp_path: Path) -> None:
    """The single server has it too: what is compared is the hand-off, not the precision. Ranks alike: other sums of two
    ranks would be rounded to other numbers of eight bits."""
    in_fp8 = ("--kv-cache-dtype", "fp8")
    members = {f"b{size}": Member(block_size_tokens=size, arguments=in_fp8) for size in (32, 64)}
    with Fleet(make("dense", tmp_path), tmp_path, members, stock=Member(arguments=in_fp8)) as fleet:
        require_right(fleet, *fleet.get("b32", "b64"), questions("fp8"))


@pytest.mark.pairs
@pytest.mark.parametrize(("prefill", "decode"), [("two", "one"), ("one", "two")])
def test_a_head_that_two_ranks_hold_is_read_once(one_kv_head: Fleet, prefill: str, decode: str) -> None:
    asks = questions(f"{prefill} to {decode}")
    moved = require_right(one_kv_head, *one_kv_head.get(prefill, decode), asks)
    keys_and_values_bytes = 2 * HEAD_SIZE * 4  # float32
    assert moved.num_bytes == moved.num_blocks * LAYERS * 64 * keys_and_values_bytes > 0


@pytest.mark.pairs
def test_each_rank_hands_off_its_part_of_a_state_and_to_other_parts_none(model: Path, tmp_path: Path) -> None:
    one = Member(arguments=ARGUMENTS["hybrid"])
    members = {"two": replace(one, tp_size=2), "two-more": replace(one, tp_size=2), "one": one}
    with Fleet(make("hybrid", tmp_path), tmp_path, members, stock=one) as fleet:
        require_right(fleet, *fleet.get("two", "two-more"), questions("states"), left_tokens=1)
        fleet.stop("two")
        asks = questions("parts")[:2]
        right = [answer.tokens for answer in fleet.stock_answers(asks)]
        alone, two_more = fleet.get("one", "two-more")
        assert [answer.tokens for answer in fleet.hand_off(alone, two_more, asks)] == right, "computed by decode"
        assert [status["transfer"]["failures"] for status in two_more.statuses()] == [{"refused": len(asks)}] * 2


@pytest.mark.pairs
def test_ranks_with_unequal_free_memory_end_with_the_same_count(model: Path, tmp_path: Path) -> None:
    with Fleet(make("dense", tmp_path), tmp_path, {"uneven": UNEVEN}) as fleet:
        (running,) = fleet.get("uneven")
        first, second = (status["cache"] for status in running.statuses())
    assert first["blocks_final"] == second["blocks_final"] > first["blocks_at_warmup"]
    grown = [
        sum(row["bytes"] for row in cache["ledger"] if row["consumer"] == "growth of resident memory in warm-up")
        for cache in (first, second)
    ]
    assert grown[1] - grown[0] > (HELD_MIB - 16) << 20, "the second had less"
    assert first["committed_bytes"] == second["committed_bytes"]
    assert first["reserved_bytes"] - first["committed_bytes"] > (HELD_MIB - 16) << 20, "and the first took no more"


@pytest.mark.pairs
def test_a_rank_that_cannot_open_its_side_channel_stops_the_engine_with_one_sentence(
    model: Path, tmp_path: Path
) -> None:
    with Fleet(make("dense", tmp_path), tmp_path, {"two": Member(tp_size=2)}) as fleet, socket.socket() as stranger:
        port = fleet.begin("two").first_side_port + 1
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        with pytest.raises(EngineError) as raised:
            fleet.get("two")
    assert f"side channel port {port} on 127.0.0.1 is in use; choose a free one with side_channel_port" in str(
        raised.value
    )
    assert len(str(raised.value).splitlines()) <= 12
