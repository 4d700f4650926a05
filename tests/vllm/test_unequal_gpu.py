"""Pairs of real vLLM engines on GPUs, decoding in captured graphs: unequal ranks, blocks and layouts; MLA; fp8.

16 of 16 as one stock server. The small models are made here, or lie in the folder that `KVX_TEST_MODELS` names;
`KVX_TEST_MODEL` names the checkpoint of SmolLM2.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from kvx.verify.client import Ask

from ..models import HEAD_SIZE, LAYERS, make
from .fleet import Fleet, Member, Moved, require_right
from .test_unequal import NEW_TOKENS, QUESTIONS

GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, torch finds {GPUS} here")
pytestmark = [
    pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS < 1, reason="torch finds no CUDA device here"),
]  # fmt: skip

# Without torch.compile, which would take most of the time: decode steps are captured whole. Of one size, so that all
# engines may start at once.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
COMMON = (
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(512 << 20), "--compilation-config",
    json.dumps(GRAPHS), "--disable-custom-all-reduce",
)  # fmt: skip
TRITON = ("--attention-backend", "TRITON_ATTN")  # takes float32
LAYOUT = "VLLM_KV_CACHE_LAYOUT"


def on_gpu(number: int, **given: object) -> Member:
    """One rank there; it sees the other GPU too, whose memory it may map."""
    seen = dict.fromkeys((number % max(1, GPUS), *range(GPUS)))
    return Member(gpus=tuple(seen), **given)  # type: ignore[arg-type]


def on_two(**given: object) -> Member:
    return Member(tp_size=2, gpus=(0, 1), **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan:
    """A fleet to be. `arguments`: of all its engines."""

    model: str
    arguments: tuple[str, ...]
    members: Mapping[str, Member]
    dtype: str = "float32"
    stock: Member = field(default_factory=lambda: on_gpu(0))

    def with_arguments(self, member: Member) -> Member:
        return replace(member, arguments=(*COMMON, *self.arguments, *member.arguments))


PLANS = {
    "blocks": Plan("dense", TRITON, {
        "b32": on_gpu(0, block_size_tokens=32, environment={LAYOUT: "LBNHC"}),
        "b64": on_gpu(1),
        "b128": on_gpu(0, block_size_tokens=128),
        "blnhc": on_gpu(1, block_size_tokens=32, environment={LAYOUT: "BLNHC"}, connectors=("nixl", "ipc")),
        "b32-ipc": on_gpu(0, block_size_tokens=32, environment={LAYOUT: "LBNHC"}, connectors=("ipc",)),
    }),
    "ranks": Plan("dense", TRITON, {
        "one": on_gpu(1, block_size_tokens=32, connectors=("nixl", "ipc")),
        "two": on_two(),
        "two-more": on_two(block_size_tokens=32),
        "two-ipc": on_two(connectors=("ipc",)),
    }),
    "one-kv-head": Plan("one-kv-head", TRITON, {"one": on_gpu(1), "two": on_two()}),
    "mla": Plan("mla", ("--attention-backend", "TRITON_MLA"), {"a": on_gpu(0), "b": on_gpu(1)}, "bfloat16"),
    "fp8": Plan(
        "", ("--attention-backend", "FLASH_ATTN", "--kv-cache-dtype", "fp8"),
        {"a": on_gpu(0, block_size_tokens=32), "b": on_gpu(1)}, "bfloat16",
    ),
    "sliding": Plan("sliding", TRITON, {"a": on_gpu(0, block_size_tokens=32), "b": on_gpu(1, block_size_tokens=32)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[dict[str, Fleet]]:
    """Those that the chosen tests name: all engines of all of them start at once."""
    wanted = {item.callspec.params["fleet"] for item in request.session.items if item.module is request.module}
    started = {}
    with ExitStack() as undo:
        for name in PLANS:
            if name not in wanted or (GPUS < 2 and any(member.tp_size > 1 for member in PLANS[name].members.values())):
                continue
            plan, folder = PLANS[name], tmp_path_factory.mktemp(name)
            members = {key: plan.with_arguments(member) for key, member in plan.members.items()}
            fleet = Fleet(
                checkpoint(plan.model, folder), folder, members, plan.with_arguments(plan.stock), dtype=plan.dtype,
                in_turn=plan.dtype != "float32",
            )  # fmt: skip
            undo.enter_context(fleet)
            fleet.begin_stock()
            for key in members:
                fleet.begin(key)
            started[name] = fleet
        yield started


def checkpoint(model: str, folder: Path) -> Path:
    if not model:
        if "KVX_TEST_MODEL" not in os.environ:
            pytest.skip("KVX_TEST_MODEL names no checkpoint of SmolLM2")
        return Path(os.environ["KVX_TEST_MODEL"])
    return make(model, Path(os.environ.get("KVX_TEST_MODELS", folder)))


def questions(name: str) -> list[Ask]:
    """Of every row its own: whole blocks of every size and one token more, as `Fleet.in_turn` needs it."""
    generator = random.Random(name)
    lengths = [1 + 128 * generator.randint(1, 6) for _ in range(QUESTIONS)]
    return [
        Ask(f"{name}-{number}", generator.choices(range(1000, 20000), k=length), NEW_TOKENS, ignore_eos=True)
        for number, length in enumerate(lengths)
    ]


def answers_as_one(fleets: dict[str, Fleet], fleet: str, prefill: str, decode: str) -> Moved:
    chosen = fleets[fleet]
    return require_right(chosen, *chosen.get(prefill, decode), questions(f"{fleet}: {prefill} to {decode}"))


@needs_two
@pytest.mark.parametrize(("fleet", "prefill", "decode"), [("one-kv-head", "two", "one"), ("one-kv-head", "one", "two")])
def test_a_head_that_two_ranks_hold_is_read_once(
    fleets: dict[str, Fleet], fleet: str, prefill: str, decode: str
) -> None:
    moved = answers_as_one(fleets, fleet, prefill, decode)
    keys_and_values_bytes = 2 * HEAD_SIZE * 4  # float32
    readers = PLANS[fleet].members[decode].ranks  # each has the head, and reads it once
    assert moved.num_bytes == moved.external_tokens * readers * LAYERS * keys_and_values_bytes > 0
    print(moved)


@pytest.mark.parametrize(
    ("fleet", "prefill", "decode"),
    [
        pytest.param("ranks", "two", "one", marks=needs_two),
        pytest.param("ranks", "one", "two", marks=needs_two),
        pytest.param("ranks", "two", "two-more", marks=needs_two),
        pytest.param("ranks", "one", "two-ipc", marks=needs_two),
        ("blocks", "b32", "b64"),
        ("blocks", "b64", "b32"),
        ("blocks", "b128", "b32"),
        ("mla", "a", "b"),
        ("fp8", "a", "b"),
        ("sliding", "a", "b"),
    ],
)
def test_unequal_engines_answer_as_one(fleets: dict[str, Fleet], fleet: str, prefill: str, decode: str) -> None:
    print(answers_as_one(fleets, fleet, prefill, decode))


@pytest.mark.parametrize(
    ("fleet", "prefill", "decode"),
    [("blocks", "b32", "blnhc"), ("blocks", "blnhc", "b32"), ("blocks", "b32-ipc", "blnhc")],
)
def test_layers_may_lie_inside_blocks_on_one_side_alone(
    fleets: dict[str, Fleet], fleet: str, prefill: str, decode: str
) -> None:
    moved = answers_as_one(fleets, fleet, prefill, decode)
    segments = {name: len(fleets[fleet].get(name)[0].statuses()[0]["cache"]["segments"]) for name in (prefill, decode)}
    assert sorted(segments.values()) == [1, LAYERS], segments
    print(moved)
