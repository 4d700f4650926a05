"""The tiny engine answers as `transformers` does, on memory that came after warm-up, alone and by a hand-off."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
import typer
from tiny_engine import Settings, TinyEngine
from tiny_paging import NULL_BLOCK, BlockAllocator
from tiny_process import Remote
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from kvx.errors import DriverUnavailable, TransferError

pytest.importorskip("nixl", reason="the engines hand off by NIXL")
QUESTIONS = ("What is the capital of France?", "A baker sells 12 rolls at 3 dollars each. How much is that?", "Hi!")


def reference(folder: Path, device: str, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """What `transformers` answers by itself, greedy, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def random_prompts(*lengths: int) -> list[list[int]]:
    chosen = random.Random(5)
    return [[chosen.randrange(3, 97) for _ in range(length)] for length in lengths]


def settings_for(model: Path, device: str, **changes: Any) -> Settings:
    """A small budget on either device."""
    return Settings(**{"model": model, "device": device, "cache_mib": 64, "utilization": 0.1, **changes})


@pytest.fixture
def start_engine() -> Iterator[Callable[[Settings], TinyEngine]]:
    """Engines in this process; closed, whatever happens."""
    with ExitStack() as stack:

        def start(settings: Settings) -> TinyEngine:
            engine = TinyEngine(settings)
            stack.callback(engine.close)
            engine.start()
            return engine

        yield start


StartEngine = Callable[[Settings], TinyEngine]


@pytest.mark.parametrize(("layout", "block_size"), [("LBHNC", 16), ("LBNHC", 32), ("BLNHC", 16)])
def test_answers_are_those_of_transformers(
    start_engine: StartEngine, random_model: Path, device: str, layout: str, block_size: int
) -> None:
    engine = start_engine(settings_for(random_model, device, layout=layout, block_size_tokens=block_size))
    prompts = random_prompts(1, 15, 16, 17, 64, 150)  # more than one decode step takes
    assert engine.generate(prompts, 24) == reference(random_model, device, prompts, 24)
    assert engine.allocator.num_free == engine.cache.final_blocks - 1


def test_the_cache_grows_in_place_after_warm_up(start_engine: StartEngine, random_model: Path, device: str) -> None:
    engine = start_engine(settings_for(random_model, device))
    cache, status = engine.cache, engine.status()["cache"]
    assert status["warm_up_blocks"] < status["final_blocks"] <= status["capacity_blocks"]
    steps = [event.name for event in cache.events if event.name != "zero"]
    assert steps == ["reserve", "commit", "extend", "open", "open"], (
        "connector and hand-off open on the grown cache only"
    )
    assert [view.data_ptr() for view in engine.views.values()] == [
        cache.base_address + segment.offset_bytes for segment in cache.table.segments
    ]
    assert 0 < engine.connectors[0].registered_bytes <= cache.committed_bytes
    assert min(engine.allocator.take(40)) >= status["warm_up_blocks"], "requests run on blocks that came after warm-up"
    assert "KV cache" in engine.sizing.ledger.table()
    cache.check_integrity()


def test_answers_are_the_same_after_sleep_and_wake(start_engine: StartEngine, random_model: Path, device: str) -> None:
    engine = start_engine(settings_for(random_model, device))
    prompts = random_prompts(5, 40)
    before, base = engine.generate(prompts, 16), engine.cache.base_address
    engine.sleep()
    assert engine.cache.committed_bytes == 0
    engine.wake()
    assert engine.cache.base_address == base
    assert engine.generate(prompts, 16) == before
    engine.prefill(prompts[0])
    with pytest.raises(RuntimeError, match="still have blocks"):
        engine.sleep()


def test_a_hand_off_whose_owner_is_gone_fails_with_the_cause(start_engine: StartEngine, random_model: Path) -> None:
    settings = settings_for(random_model, "cpu", engine_id="prefill")
    prompt = random_prompts(20)[0]
    owner = TinyEngine(settings)
    owner.start()
    ticket = owner.prefill(prompt)
    owner.close()
    reader = start_engine(replace(settings, engine_id="decode", transfer_deadline_s=0.5))
    with pytest.raises(TransferError, match=ticket.host):
        reader.resume(prompt, ticket, 4)
    assert reader.allocator.num_free == reader.cache.final_blocks - 1


def test_a_request_that_does_not_fit_is_refused_and_leaves_nothing(
    start_engine: StartEngine, random_model: Path
) -> None:
    engine = start_engine(settings_for(random_model, "cpu", max_tokens=128))
    free = engine.allocator.num_free
    for prompt, new_tokens in (([], 1), ([5], 0), ([5] * 128, 1)):
        with pytest.raises(ValueError, match="needs at least 1 of each and at most 128"):
            engine.generate([[4, 5], prompt], new_tokens)
    taken = engine.allocator.take(free - 1)
    with pytest.raises(RuntimeError, match="2 blocks needed, 1 of"):
        engine.generate([[5] * 17], 1)
    engine.allocator.give_back(taken)
    assert engine.allocator.num_free == free


def test_a_budget_that_warm_up_used_up_is_told_and_the_proven_blocks_are_kept(
    start_engine: StartEngine, random_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(settings_for(random_model, "cpu", cache_mib=1))
    assert engine.status()["cache"]["final_blocks"] == engine.status()["cache"]["warm_up_blocks"]
    assert "raise the budget" in caplog.text


def test_the_allocator_keeps_the_null_block_and_sees_a_block_twice() -> None:
    allocator = BlockAllocator(5)
    taken = allocator.take(4)
    assert NULL_BLOCK not in taken
    assert allocator.num_free == 0
    with pytest.raises(RuntimeError, match="1 blocks needed, 0 of 5"):
        allocator.take(1)
    allocator.give_back(taken)
    with pytest.raises(AssertionError, match="given back twice"):
        allocator.give_back(taken[:1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_error_says_what_is_missing(random_model: Path) -> None:
    with pytest.raises(DriverUnavailable):
        TinyEngine(settings_for(random_model, "cuda")).start()
    with pytest.raises(DriverUnavailable, match=r"'meta'.*no memory driver"):
        TinyEngine(settings_for(random_model, "meta")).start()


@pytest.mark.slow
def test_smollm2_answers_are_those_of_transformers(start_engine: StartEngine, smollm2: Path, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(question).input_ids for question in QUESTIONS]
    engine = start_engine(settings_for(smollm2, device, cache_mib=256, max_tokens=128))
    assert engine.generate(prompts, 20) == reference(smollm2, device, prompts, 20)


@pytest.fixture(scope="module")
def engines(smollm2: Path, device: str) -> Iterator[dict[str, Remote]]:
    """Engine processes: one that prefills in blocks of 16 tokens, and decoders with 16 and 32."""
    common = settings_for(smollm2, device, cache_mib=160, max_tokens=256)
    wanted = {
        "prefill": replace(common, engine_id="prefill"),
        "decode-16": replace(common, engine_id="decode-16"),
        "decode-32": replace(common, engine_id="decode-32", block_size_tokens=32),
    }
    with ExitStack() as stack:
        started = {name: stack.enter_context(Remote(TinyEngine, settings)) for name, settings in wanted.items()}
        if device == "cpu":
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda engine: engine.call("start"), started.values()))
        else:
            for engine in started.values():  # each measures what the device has left
                engine.call("start")
        yield started


@pytest.mark.slow
@pytest.mark.transfer
@pytest.mark.parametrize("decoder", ["decode-16", "decode-32"])
def test_a_hand_off_between_processes_gives_the_answer_of_one_engine(
    engines: dict[str, Remote], smollm2: Path, decoder: str
) -> None:
    """Decode first: when the single engine answers, decode's cache has never held the prompt but by the hand-off."""
    prefill, decode = engines["prefill"], engines[decoder]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(question).input_ids for question in QUESTIONS]
    prompts += [prompts[0][:1], (prompts[1] * 9)[:32], (prompts[1] * 9)[:100]]
    free = [engine.call("status")["cache"]["free_blocks"] for engine in (prefill, decode)]
    for prompt in prompts:
        ticket = prefill.call("prefill", prompt)
        by_two = decode.call("resume", prompt, ticket, 12)
        assert prefill.call("collect", 20.0) == 0
        assert [by_two] == prefill.call("generate", [prompt], 12)
    status = decode.call("status")
    assert status["digests"]["checked"] == 3 * sum(map(len, prompts)), "one for each token and KV head"
    assert status["digests"]["mismatched"] == 0
    assert status["transfer"]["failed"] == 0
    assert [engine.call("status")["cache"]["free_blocks"] for engine in (prefill, decode)] == free


@pytest.mark.slow
@pytest.mark.transfer
def test_engine_processes_end_cleanly_and_report_errors(random_model: Path, device: str) -> None:
    with Remote(TinyEngine, settings_for(random_model, device)) as engine:
        engine.call("start")
        with pytest.raises(RuntimeError, match="needs at least 1 of each"):
            engine.call("generate", [[]], 1)
        assert len(engine.call("generate", [[5]], 3)[0]) <= 3
    assert engine.process.exitcode == 0


@pytest.mark.slow
@pytest.mark.transfer
def test_the_command_by_two_compares_with_one(
    random_model: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    by_two, alone, clean = tiny_engine.answer_by_two(settings_for(random_model, device), 32, random_prompts(70)[0], 20)
    assert clean
    assert by_two == alone
    assert capsys.readouterr().out == "digests: 140 checked, 0 differ; requests still held: 0\n"


@pytest.mark.slow
def test_the_command_shows_how_the_cache_came_about(smollm2: Path, device: str) -> None:
    app = typer.Typer()
    app.command()(tiny_engine.main)
    arguments = ["--model", str(smollm2), "--device", device, "--max-new-tokens", "6", "--prompt", "What is 2 + 2?"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "extend" in done.output
    assert "KV cache" in done.output
    assert done.output.splitlines()[-1].strip()
