"""One real server whose cache is too small for what it is asked: blocks leave for host memory and come back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx.handshake import request_status
from kvx.servers import Server, Servers
from kvx.verify import engines
from kvx.verify.client import Answer, Ask, Client
from kvx.verify.offload import block_bytes
from kvx.verify.report import EXTERNAL_HITS
from kvx.vllm.bridge_offload import refusal

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK_TOKENS = 128
CACHE_BLOCKS = 9
HOST_BLOCKS = 14
PREEMPTIONS = "vllm:num_preemptions_total"
PROMPT_TOKENS = 5 * BLOCK_TOKENS + 40


@dataclass(frozen=True)
class Engine:
    server: Server
    side_port: int
    client: Client

    def ask(self, name: str, seed: int, max_tokens: int = 4, prompt_tokens: int = PROMPT_TOKENS) -> Answer:
        prompt = random.Random(seed).choices(range(1000, 20000), k=prompt_tokens)
        found = self.client.ask_single(self.server.url, Ask(name, prompt, max_tokens, ignore_eos=True))
        assert not found.error, found.error
        return found

    def offload(self) -> dict[str, Any]:
        """The status when nothing is pinned any more, and the engine's last step has told its counters."""
        until, before = time.monotonic() + 10, None
        while True:
            found = request_status(engines.HOST, self.side_port)["offload"]
            if found == before and not found["pinned"] and not found["in_flight"]:
                return dict(found)
            assert time.monotonic() < until, found
            before = found
            time.sleep(0.2)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run = engines.RunSettings(
        model=model,
        connectors=("cpu_offload",),
        offloading=("cpu_offload",),
        max_model_len_tokens=7 * BLOCK_TOKENS,
        small_blocks=CACHE_BLOCKS,
    )
    run = replace(run, offload_bytes=HOST_BLOCKS * block_bytes(run))
    settings, port = engines.kvx_single(run, digests=True)
    with Servers(tmp_path_factory.mktemp("offload")) as servers:
        server = servers.start(settings)
        servers.wait_healthy()
        client = Client()
        try:
            yield Engine(server, port, client)
        finally:
            client.close()


def grown(engine: Engine, act: Callable[[], object]) -> dict[str, int]:
    """How much each counter grew; and nothing has failed or differed."""
    before = engine.offload()
    act()
    after = engine.offload()
    assert after["failed"] == after["digests"]["mismatched"] == 0
    return {key: after[key] - before[key] for key in before if isinstance(before[key], int)}


def test_blocks_leave_come_back_and_are_evicted(engine: Engine) -> None:
    first: list[Answer] = []
    counts = grown(engine, lambda: first.extend(engine.ask(f"first-{seed}", seed) for seed in range(3)))
    assert (counts["stores"], counts["reloads"]) == (15, 0)
    assert counts["evictions"] == 15 - HOST_BLOCKS
    before = engine.client.counters(engine.server.url).get(EXTERNAL_HITS, 0.0)
    again: list[Answer] = []
    # The last one but one: the cache has only the last, and host memory has both.
    counts = grown(engine, lambda: again.append(engine.ask("again-1", 1)))
    assert again[0].tokens == first[1].tokens
    assert counts["reloads"] > 0
    assert counts["loaded_tokens"] == counts["external_tokens"] == counts["reloads"] * BLOCK_TOKENS
    after = engine.client.counters(engine.server.url)[EXTERNAL_HITS]
    assert after - before == counts["external_tokens"]
    metrics_are_the_status(engine)


def metrics_are_the_status(engine: Engine) -> None:
    """vLLM's own /metrics tells what the side channel tells."""
    status, until = engine.offload(), time.monotonic() + 30
    wanted = {
        "kvx_offload_stores_total": status["stores"],
        "kvx_offload_hits_total": status["hits"],
        "kvx_offload_reloads_total": status["reloads"],
        "kvx_offload_evictions_total": status["evictions"],
        "kvx_offload_refused_total": status["refused"],
        "kvx_offload_failed_total": 0,
        "kvx_digests_checked_total": status["digests"]["checked"],
    }
    while True:
        counters = engine.client.counters(engine.server.url)
        found = {name: counters[name] for name in wanted}
        if found == wanted or time.monotonic() > until:
            break
        time.sleep(0.2)
    assert found == wanted
    assert wanted["kvx_offload_hits_total"] == wanted["kvx_offload_reloads_total"] > 0


def test_requests_that_preempt_each_other_answer_as_one_alone(engine: Engine) -> None:
    """Two requests of 4 blocks fit into 8, until each needs a fifth."""
    length = 4 * BLOCK_TOKENS - 12
    ask_one = lambda seed, name: engine.ask(f"{name}-{seed}", seed, 40, length).tokens  # noqa: E731
    alone = [ask_one(seed, "alone") for seed in (10, 11)]
    preemptions = engine.client.counters(engine.server.url)[PREEMPTIONS]
    found: list[tuple[int, ...]] = []

    def together() -> None:
        with ThreadPoolExecutor(2) as pool:
            found[:] = pool.map(ask_one, (10, 11), ("together", "together"))

    for _ in range(5):  # on a busy machine one may be over before the other has begun
        counts = grown(engine, together)
        assert found == alone
        if engine.client.counters(engine.server.url)[PREEMPTIONS] > preemptions:
            break
    assert engine.client.counters(engine.server.url)[PREEMPTIONS] > preemptions
    # None, where the other one needed no block that the preempted one had filled: then all are still in the cache.
    assert counts["hits"] == counts["reloads"]


def test_an_abort_leaves_nothing_pinned(engine: Engine) -> None:
    """A client that hangs up while its request loads, computes or stores."""
    impatient = Client(deadline_s=0.3)
    try:
        for seed in (1, 2, 11, 20):
            prompt = random.Random(seed).choices(range(1000, 20000), k=PROMPT_TOKENS)
            answer = impatient.ask_single(engine.server.url, Ask(f"abort-{seed}", prompt, 60, ignore_eos=True))
            assert answer.error, "it was to be too slow"
    finally:
        impatient.close()
    engine.ask("after", 30)
    assert engine.offload()["failed"] == 0


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
def test_a_model_that_cannot_be_offloaded_is_told_why() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=32)
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": window})

    def why(*specs: Any, caching: bool = True, context_ranks: int = 1, transferred: int = 9) -> str:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return refusal(
            SimpleNamespace(
                cache_config=SimpleNamespace(enable_prefix_caching=caching),
                parallel_config=SimpleNamespace(
                    decode_context_parallel_size=context_ranks, prefill_context_parallel_size=1
                ),
            ),
            SimpleNamespace(kv_cache_groups=groups, transfer_groups=groups[:transferred]),
        )

    assert why(full) == why(full, full) == ""
    assert "SlidingWindowSpec" in why(full, window)
    assert "SlidingWindowSpec" in why(mixed)
    assert "prefix caching is off" in why(full, caching=False)
    assert "context parallelism" in why(full, context_ranks=2)
    assert "may not be transferred" in why(full, full, transferred=1)
