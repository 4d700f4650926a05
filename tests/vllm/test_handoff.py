"""Hand-offs between two real servers: the same tokens as one engine alone, and no digest that differs."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch

from kvx.verify.client import Ask
from kvx.verify.engines import RunSettings

from .conftest import RunningPair, start_pair, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL_BLOCKS = 24
CHUNK_TOKENS = 64
SEQUENCES = 8
PROMPTS = ["one token", "one block", "one block and one", "a thousand"]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    run = RunSettings(model=model, max_model_len_tokens=1536, explicit_blocks=POOL_BLOCKS, max_num_seqs=SEQUENCES)
    yield from start_pair(run, tmp_path_factory.mktemp("pair"), batched_tokens=CHUNK_TOKENS)


def prompt_of(name: str, block_size: int) -> list[int]:
    lengths = dict(zip(PROMPTS, (1, block_size, block_size + 1, 1000), strict=True))
    return tokens(lengths[name], seed=PROMPTS.index(name))


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 20000), k=count)


def ask(name: str, prompt: list[int], max_tokens: int = 8) -> Ask:
    return Ask(request_id=name.replace(" ", "-"), prompt=prompt, max_tokens=max_tokens, ignore_eos=True)


def require_same(pair: RunningPair, wanted: Ask) -> None:
    before = pair.decode_status()
    handed_off, single = pair.handed_off(wanted), pair.single(wanted)
    assert not handed_off.error, handed_off.error
    assert not single.error, single.error
    assert handed_off.tokens == single.tokens
    after = pair.decode_status()
    assert after["digests"]["checked"] > before["digests"]["checked"]
    assert after["digests"]["mismatched"] == 0, after["digests"]["mismatches"]
    assert after["transfer"]["failed"] == 0


@pytest.mark.parametrize("name", PROMPTS)
def test_a_handed_off_request_answers_as_one_engine_does(pair: RunningPair, name: str) -> None:
    require_same(pair, ask(f"plain {name}", prompt_of(name, 128)))


def test_an_explicit_count_is_honoured_in_the_metrics_the_log_and_the_cache(pair: RunningPair) -> None:
    """The front end's own record (another process than the engine core) comes out as `vllm:cache_config_info`."""
    metrics = httpx.get(f"{pair.decode.url}/metrics").text
    info = next(line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert f'num_gpu_blocks="{POOL_BLOCKS}"' in info
    log = pair.decode.log.read_text()
    assert f"KV cache size: {POOL_BLOCKS * 128:,} tokens" in log
    cache = pair.decode_status()["cache"]
    assert cache["blocks_final"] == POOL_BLOCKS
    assert cache["explicit_size"]
    assert cache["blocks_at_warmup"] < POOL_BLOCKS


def test_the_metrics_of_one_request(pair: RunningPair) -> None:
    """700 new tokens are 6 blocks of 128, which the CPU's packed pages move whole: 46,080 bytes a token."""

    def both() -> tuple[dict[str, float], dict[str, float]]:
        prefill, decode = (pair.client.counters(server.url) for server in (pair.prefill, pair.decode))
        return prefill, decode

    before = both()
    answer = pair.handed_off(ask("measured", tokens(700, seed=333)))
    assert not answer.error, answer.error
    wait_until(lambda: both()[0]["kvx_holds_released_total"] > before[0].get("kvx_holds_released_total", 0))
    wait_until(lambda: both()[0]["kvx_held_blocks"] == 0)
    prefill, decode = both()

    def moved(name: str) -> float:
        return decode[name] - before[1].get(name, 0)

    assert moved("kvx_transfer_bytes_total") == 6 * 128 * 46080
    assert moved("kvx_transfer_blocks_total") == 6
    assert moved("kvx_transfer_descriptors_total") >= 30
    assert moved("kvx_handoffs_received_total{connector=nixl}") == 1
    assert moved("kvx_handoff_seconds_count") == moved("kvx_handoff_phase_seconds_count{phase=move}") == 1
    assert 0 < moved("kvx_handoff_phase_seconds_sum{phase=move}") <= moved("kvx_handoff_seconds_sum") < 60
    assert moved("kvx_digests_checked_total") > 0 == moved("kvx_digests_mismatched_total")
    assert prefill["kvx_holds_released_total"] - before[0]["kvx_holds_released_total"] == 1
    assert prefill["kvx_transfer_bytes_total"] == prefill["kvx_holds"] == 0
    cache = pair.decode_status()["cache"]
    for state in ("reserved", "committed", "registered"):
        assert decode[f"kvx_cache_bytes{{state={state}}}"] == cache[f"{state}_bytes"]
    assert decode["kvx_cache_blocks{state=final}"] == POOL_BLOCKS
    assert decode["kvx_generation"] == 1


def test_the_metrics_of_hand_offs_that_wait_for_their_turn(pair: RunningPair) -> None:
    """Decode has as many requests as it runs at a time. Of two hand-offs that wait, one is given up and one is read.

    A hold is renewed after a second of waiting, and the next time after a third of its lease, which is 30 s.
    """
    url = pair.decode.url
    prefill, decode = pair.moves(pair.prefill.url), pair.moves(url)
    with httpx.Client(timeout=120) as http, ExitStack() as others:

        def stream(wanted: Ask, **more: object) -> Iterator[str]:
            body = wanted.body(stream=True, **more)
            with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                yield str(response.status_code)
                yield from response.iter_lines()

        for index in range(SEQUENCES):
            other = stream(ask(f"runs {index}", tokens(8, seed=400 + index), max_tokens=360))
            others.callback(other.close)
            assert next(other) == "200"
        wait_until(lambda: pair.client.counters(url)["vllm:num_requests_running"] == SEQUENCES)
        given_up, read = (
            stream(wanted, kv_transfer_params=pair.held(pair.prefill.url, wanted))
            for wanted in (ask(f"waits {seed}", tokens(200, seed=seed)) for seed in (411, 412))
        )
        assert next(given_up) == next(read) == "200"
        wait_until(lambda: prefill("kvx_leases_renewed_total") == 2)
        given_up.close()
        wait_until(lambda: decode("kvx_handoffs_unneeded_total") == 1)
        wait_until(lambda: prefill("kvx_holds_released_total") == 1)
        others.close()
        assert "data: [DONE]" in list(read)
    wait_until(lambda: prefill("kvx_holds_released_total") == 2)
    assert (prefill("kvx_leases_renewed_total"), prefill("kvx_holds_expired_total")) == (2, 0)
    assert (decode("kvx_handoffs_unneeded_total"), decode("kvx_transfer_blocks_total")) == (1, 2)
    assert decode("kvx_handoffs_received_total{connector=nixl}") == 1


def test_promtool_has_nothing_to_say_against_the_metrics(pair: RunningPair) -> None:
    promtool = shutil.which("promtool") or Path(sys.executable).with_name("promtool")
    text = httpx.get(f"{pair.decode.url}/metrics").text
    ours = "".join(f"{line}\n" for line in text.splitlines() if re.match(r"(# (HELP|TYPE) )?kvx_", line))
    assert "kvx_transfer_bytes_total" in ours
    checked = subprocess.run([promtool, "check", "metrics"], input=ours, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_what_decode_already_holds_is_not_read_again(pair: RunningPair) -> None:
    prompt = tokens(700, seed=77)
    warm = pair.client.ask_single(pair.decode.url, ask("prefix", prompt[:300], max_tokens=1))
    assert not warm.error
    before = pair.decode_status()
    require_same(pair, ask("prefix hit", prompt))
    after = pair.decode_status()
    received = after["external_hits"]["received_tokens"] - before["external_hits"]["received_tokens"]
    assert received == 700 - 2 * 128


def test_a_request_that_prefill_preempted_is_handed_off_right(pair: RunningPair) -> None:
    """Three generations are at 620 of 640 tokens, five blocks each, and the hand-off takes the eight that are left.

    Its prefill needs 16 steps, so the first generation that reaches its sixth block preempts it, as the last to come.
    """
    longs = [ask(f"long {index}", tokens(620, seed=100 + index), max_tokens=60) for index in range(3)]
    preempted = ask("preempted", tokens(1000, seed=200))
    preemptions = pair.client.counters(pair.prefill.url)["vllm:num_preemptions_total"]
    with ThreadPoolExecutor(4) as pool:
        generations = [pool.submit(pair.single, request) for request in longs]
        wait_until(lambda: requests_inside(pair) == len(longs))
        answer = pool.submit(pair.handed_off, preempted)
        assert [future.result().error for future in generations] == [""] * len(longs)
        handed_off = answer.result()
    assert pair.client.counters(pair.prefill.url)["vllm:num_preemptions_total"] > preemptions
    assert not handed_off.error, handed_off.error
    assert handed_off.tokens == pair.single(preempted).tokens
    assert pair.decode_status()["digests"]["mismatched"] == 0


def requests_inside(pair: RunningPair) -> float:
    counters = pair.client.counters(pair.prefill.url)
    return counters["vllm:num_requests_running"] + counters["vllm:num_requests_waiting"]


def test_every_hold_was_freed(pair: RunningPair) -> None:
    status = pair.prefill_status()
    assert status["handoff"]["holds"] == 0
    assert status["handoff"]["expired"] == 0
    assert status["handoff"]["released"] > 0


@pytest.mark.matrix
@pytest.mark.parametrize(("block_size", "dtype"), [(32, "float32"), (32, "bfloat16"), (128, "bfloat16")])
def test_the_other_block_sizes_and_types(model: Path, tmp_path: Path, block_size: int, dtype: str) -> None:
    """In bfloat16 a token may flip without a wrong byte (another batch shape), so there digests are the judge."""
    run = RunSettings(model=model, max_model_len_tokens=1536, block_size_tokens=block_size, dtype=dtype)
    for running in start_pair(run, tmp_path, batched_tokens=CHUNK_TOKENS):
        for name in PROMPTS:
            wanted = ask(f"{dtype} {block_size} {name}", prompt_of(name, block_size))
            if dtype == "float32":
                require_same(running, wanted)
            else:
                answer = running.handed_off(wanted)
                assert not answer.error
                assert len(answer.tokens) == wanted.max_tokens
        digests = running.decode_status()["digests"]
        assert digests["checked"] > 0
        assert digests["mismatched"] == 0


@pytest.mark.matrix
def test_a_model_with_sliding_windows_hands_off_two_layer_groups(model: Path, tmp_path: Path) -> None:
    """Random weights: a hybrid of windowed and full attention, whose windowed blocks are gone once they are passed."""
    run = RunSettings(model=hybrid_model(model, tmp_path / "model"), max_model_len_tokens=1536, block_size_tokens=32)
    for running in start_pair(run, tmp_path, batched_tokens=CHUNK_TOKENS):
        for name in PROMPTS:
            require_same(running, ask(f"hybrid {name}", prompt_of(name, 32)))
        groups = running.decode_status()["cache"]["layer_groups"]
        assert groups > 1


def hybrid_model(tokenizer_from: Path, folder: Path) -> Path:
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=128,
        layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
    return folder
