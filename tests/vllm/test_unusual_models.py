"""Hand-offs of models that are not plain full attention: all answers those of one stock server, no digest differs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvx.verify
from kvx.servers import Server, Servers
from kvx.verify import engines
from kvx.verify.client import Answer, Ask, Client
from kvx.verify.engines import RunSettings
from kvx.verify.model import cache_folder, checkpoint_of
from kvx.verify.report import EXTERNAL_HITS, LOCAL_HITS

from ..models import ARGUMENTS, HEAD_SIZE, LAYERS, SLIDING_WINDOW_TOKENS, download_gemma, make
from .conftest import RunningPair, start_pair
from .fleet import Fleet, Member, require_right
from .test_verify import DEADLINE_S, run_verify

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.pairs, pytest.mark.timeout(DEADLINE_S)]

QUESTIONS = 16
NEW_TOKENS = 16
ABSENT = -1
#: The small models, and the block size that each is run with. vLLM on a CPU has MLA in blocks of 16 tokens alone.
BLOCK_TOKENS = {"sliding": 32, "shared": 32, "mla": 16, "hybrid": 32}
#: Models of which some layers keep a state: decode computes each prompt's last token itself.
WITH_STATES = {"hybrid"}
GEMMA_QUESTIONS, GEMMA_WINDOW_TOKENS = 8, 512
GIB = 1 << 30
PROBLEMS = Path(kvx.verify.__file__).with_name("word_problems.jsonl")
#: Prefill takes several steps for most prompts, so that windows move on before a prompt is at its end.
STEP_TOKENS = 128


@dataclass(frozen=True)
class Compared:
    """The same questions to one stock server and to a pair, which is still there."""

    name: str
    stock: list[Answer]
    handed_off: list[Answer]
    pair: RunningPair
    counted: dict[str, float]
    status: dict[str, Any]


def questions() -> list[Ask]:
    """Prompts of two tokens, of about one block, and of several windows; the last four share a long beginning.

    Of one token alone vLLM forgets that it was loaded, and computes it again: no external hit.
    """
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return generator.choices(range(1000, 20000), k=count)

    shared = tokens(200)
    lengths = [2, 31, 32, 33, 64, 65, *(generator.randrange(150, 480) for _ in range(6))]
    prompts = [tokens(count) for count in lengths] + [shared + tokens(100 * number) for number in range(1, 5)]
    return [Ask(f"q{number}", prompt, NEW_TOKENS, ignore_eos=True) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=BLOCK_TOKENS)
def compared(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("unusual")
    name = request.param
    run = RunSettings(
        model=make(name, folder),
        max_model_len_tokens=1024,
        block_size_tokens=BLOCK_TOKENS[name],
        arguments=ARGUMENTS.get(name, ()),
    )
    with Servers(folder) as servers:
        server = servers.start(engines.baseline(run))
        servers.wait_healthy()
        stock = ask_all(lambda client, ask: client.ask_single(server.url, ask))
    for pair in start_pair(run, folder, batched_tokens=STEP_TOKENS):
        handed_off = ask_all(partial(ask_the_pair, pair))
        yield Compared(name, stock, handed_off, pair, pair.client.counters(pair.decode.url), pair.decode_status())


def ask_the_pair(pair: RunningPair, client: Client, ask: Ask) -> Answer:
    return client.ask_pair(pair.prefill.url, pair.decode.url, ask)


def ask_all(ask_one: Callable[[Client, Ask], Answer]) -> list[Answer]:
    client = Client()
    try:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(partial(ask_one, client), questions()))
    finally:
        client.close()


def test_every_answer_is_that_of_one_stock_server(compared: Compared) -> None:
    assert [answer.error for answer in compared.stock + compared.handed_off] == [""] * 2 * QUESTIONS
    assert [answer.tokens for answer in compared.handed_off] == [answer.tokens for answer in compared.stock]


def test_every_block_moved_has_the_digest_of_its_owner(compared: Compared) -> None:
    digests = compared.status["digests"]
    assert digests["checked"] == digests["expected"] > 0
    assert digests["mismatched"] == 0, digests["mismatches"]
    assert compared.status["transfer"]["count"] == QUESTIONS
    assert compared.status["transfer"]["failed"] == 0


def test_every_prompt_token_that_decode_had_not_cached_was_loaded(compared: Compared) -> None:
    left = int(compared.name in WITH_STATES)
    asked = sum(len(answer.prompt_tokens) - left for answer in compared.handed_off)
    hits = compared.counted[EXTERNAL_HITS]
    assert hits == asked - compared.counted.get(LOCAL_HITS, 0) > 0
    assert compared.status["external_hits"]["received_tokens"] == hits


@pytest.mark.parametrize("compared", ["sliding"], indirect=True, scope="module")
def test_of_a_sliding_window_its_tail_alone_is_held_and_moved(compared: Compared) -> None:
    """A window of 64 tokens is in three blocks of 32 at most, whatever the prompt's length."""
    pair, prompt = compared.pair, random.Random(1).choices(range(1000, 20000), k=480)
    held = pair.held(pair.prefill.url, wanted := Ask("held", prompt, NEW_TOKENS, ignore_eos=True))
    present = sorted(sum(block != ABSENT for block in group) for group in held["remote_block_ids"])
    window_blocks = SLIDING_WINDOW_TOKENS // 32 + 1
    assert present[0] < present[1] == len(prompt) // 32, held["remote_block_ids"]
    moved = pair.moves(pair.decode.url)
    answer = pair.client.ask_pair(pair.prefill.url, pair.decode.url, wanted)
    assert answer.tokens == pair.single(wanted).tokens
    assert present[1] < moved("kvx_transfer_blocks_total") <= present[1] + window_blocks


def test_what_a_drafter_keeps_is_handed_off_too(model: Path, tmp_path: Path) -> None:
    """Decode accepts as many of its drafts as one server that has computed all by itself: the drafter is the model."""
    folder = make("dense", tmp_path)
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    drafting = Member(arguments=("--speculative-config", json.dumps(speculation)))
    numbers = random.Random(2)
    asks = [
        Ask(f"draft-{number}", numbers.choices(range(1000, 20000), k=64 * number + 1), NEW_TOKENS, ignore_eos=True)
        for number in range(1, 6)
    ]
    with Fleet(folder, tmp_path, {"a": drafting, "b": drafting}, drafting, in_turn=True) as fleet:
        fleet.stock_answers(asks)
        accepted = accepted_drafts(fleet, fleet.begin_stock().url)
        alone = [fleet.client.ask_single(fleet.begin_stock().url, ask).error for ask in asks]
        assert alone == [""] * len(asks)
        accepted_alone = accepted_drafts(fleet, fleet.begin_stock().url) - accepted
        prefill, decode = fleet.get("a", "b")
        moved = require_right(fleet, prefill, decode, asks)
        assert accepted_drafts(fleet, decode.url) == accepted_alone > 0
    keys_and_values_bytes = 2 * 2 * HEAD_SIZE * 4  # two heads, float32
    assert moved.num_bytes == moved.num_blocks * 2 * LAYERS * 64 * keys_and_values_bytes, "two models' layers"


def accepted_drafts(fleet: Fleet, url: str) -> float:
    return fleet.client.counters(url)["vllm:spec_decode_num_accepted_tokens_total"]


def test_a_model_that_keeps_a_state_answers_right_and_verify_says_so(model: Path, tmp_path: Path) -> None:
    """What its layers keep is no entry for each token: a state, which must not include the prompt's last."""
    folder = make("hybrid", tmp_path / "models")
    arguments = ("--engine-args", " ".join(ARGUMENTS["hybrid"]), "--limit", "2", "--max-tokens", "4")
    code, report, text = run_verify(tmp_path, "--model", str(folder), *arguments)
    assert code == 0, text
    hits = report["external_hits"]
    assert hits["observed"] == hits["expected"] == hits["prompt_tokens"] - hits["local"] - 2


@pytest.fixture(scope="module")
def gemma(model: Path) -> Path:
    """A real model: in every six layers one of full attention, and five with a window of 512 tokens."""
    return download_gemma(cache_folder() / "downloads")


@pytest.mark.timeout(2 * DEADLINE_S)
def test_gemma_answers_as_a_stock_server_does_in_a_cache_as_large(gemma: Path, tmp_path: Path) -> None:
    """Its prompts are longer than its window. Where a connector switches hybrid groups off, as many bytes hold less."""
    run = RunSettings(model=checkpoint_of(gemma), block_size_tokens=32, kv_space_gib=1)
    with Servers(tmp_path / "stock") as servers:
        stock = servers.start(engines.baseline(run))
        servers.wait_healthy()
        blocks, size = blocks_of(stock), size_in_log(stock.log)
    asked, shots = tmp_path / "asked.jsonl", tmp_path / "shots.jsonl"
    lines = PROBLEMS.read_text().splitlines(keepends=True)
    asked.write_text("".join(lines[:GEMMA_QUESTIONS]))
    shots.write_text("".join(lines[GEMMA_QUESTIONS:]))
    code, report, text = run_verify(
        tmp_path, "--model", str(gemma), "--block-size", "32", "--explicit-size", str(blocks), "--dataset", str(asked),
        "--few-shot", str(shots), "--shots", str(len(lines) - GEMMA_QUESTIONS), "--max-tokens", "32",
    )  # fmt: skip
    assert code == 0, text[-3000:]
    assert report["identical"] == report["questions"] == GEMMA_QUESTIONS
    assert report["digests"]["checked"] == report["digests"]["expected"] > 0 == report["digests"]["mismatched"]
    hits = report["external_hits"]
    assert hits["expected"] == hits["observed"] > 0
    assert hits["prompt_tokens"] > 2 * GEMMA_WINDOW_TOKENS * GEMMA_QUESTIONS
    for role, engine in report["engines"].items():
        assert size_in_log(tmp_path / f"{role}.log") == size
        block_bytes = sum(stride for _, stride in engine["cache"]["segments"])
        assert blocks == engine["cache"]["blocks_final"] == GIB // block_bytes
        assert engine["cache"]["layer_groups"] == 6, "three layers each, of one kind"


def blocks_of(server: Server) -> int:
    """How many blocks a server has, by its own metrics."""
    found = re.search(r'vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', httpx.get(f"{server.url}/metrics").text)
    assert found is not None
    return int(found[1])


def size_in_log(log: Path) -> str:
    """What vLLM says of its cache: how many tokens, and how many of the longest requests at a time."""
    found = re.search(
        r"KV cache size: [\d,]+ tokens, Maximum concurrency for [\d,]+ tokens per request: [\d.]+x", log.read_text()
    )
    assert found is not None
    return found[0]
