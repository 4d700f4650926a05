"""A hand-off that fails on real servers: one computes the prompt itself, one ends the request, both go on.

And the metrics of what must not happen, for each thing that is brought about once.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvx.engine_settings import EngineSettings
from kvx.handshake import Renew, Renewed, decode_reply, encode, exchange, request_status
from kvx.servers import Servers
from kvx.verify import engines
from kvx.verify.client import Ask, Client
from kvx.verify.offload import block_bytes

from .conftest import RunningPair, wait_until
from .test_handoff import ask, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEADLINE_S = 2.0
LEASE_S = 3.0
HOST_BLOCKS = 1
FAULTY = {"connectors": ["nixl", "cpu_offload"], "inject": "flip-byte"}


def with_policy(engine: EngineSettings, policy: str, **more: Any) -> EngineSettings:
    assert engine.kv_transfer is not None
    extra = engine.kv_transfer["kv_connector_extra_config"]
    extra = {**extra, "failure_policy": policy, "transfer_deadline_s": DEADLINE_S, "lease_s": LEASE_S, **more}
    return replace(engine, kv_transfer={**engine.kv_transfer, "kv_connector_extra_config": extra})


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    """Decode recomputes; prefill, of which the tests ask for hand-offs too, fails.

    Prefill offloads to one host block, and changes a byte of the first hand-off that it gets.
    """
    run = engines.RunSettings(model=model, max_model_len_tokens=1536, explicit_blocks=24)
    sides = engines.kvx_pair(run, digests=True)
    with Servers(tmp_path_factory.mktemp("policies")) as servers:
        prefill = servers.start(
            with_policy(sides.prefill, "fail", **FAULTY, offload_bytes=HOST_BLOCKS * block_bytes(run))
        )
        decode = servers.start(with_policy(sides.decode, "recompute"))
        servers.wait_healthy()
        client = Client()
        try:
            yield RunningPair(prefill, decode, sides, client)
        finally:
            client.close()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Somebody listens there, and never says a word."""
    with socket.create_server((engines.HOST, 0)) as server:
        yield server.getsockname()[1]


def from_nobody(url: str, wanted: Ask, port: int) -> httpx.Response:
    params: dict[str, Any] = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "nobody",
        "remote_request_id": "gone", "remote_host": "127.0.0.1", "remote_port": port, "remote_block_ids": [[1]],
    }  # fmt: skip
    return httpx.post(f"{url}/v1/completions", json=wanted.body(kv_transfer_params=params), timeout=60)


def while_others_go_on(pair: RunningPair, url: str, wanted: Ask, port: int) -> httpx.Response:
    """The failing request's answer; meanwhile hand-offs arrive and answer as one engine does."""
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(from_nobody, url, wanted, port)
        for index in range(3):
            other = ask(f"other {port} {index}", tokens(200, seed=port + index))
            handed_off = pair.handed_off(other)
            assert not handed_off.error
            assert handed_off.tokens == pair.single(other).tokens
        return failing.result()


def nothing_is_left(pair: RunningPair, url: str, side_port: int) -> None:
    counters = pair.client.counters(url)
    assert counters["vllm:kv_cache_usage_perc"] == 0.0
    assert counters["kvx_handoffs_failed_total{cause=timeout}"] == 1
    assert counters["kvx_internal_errors_total"] == 0
    status = request_status(engines.HOST, side_port)
    assert status["transfer"]["failures"] == {"timeout": 1}
    assert status["side_channel"]["internal_errors"] == 0
    assert status["handoff"]["holds"] == 0


def test_recompute_answers_right_and_says_why_it_computed(pair: RunningPair, silent_port: int) -> None:
    wanted = ask("recomputed", tokens(300, seed=1))
    answer = while_others_go_on(pair, pair.decode.url, wanted, silent_port)
    assert answer.status_code == 200
    found = answer.json()
    assert tuple(found["choices"][0]["token_ids"]) == pair.single(wanted).tokens
    peer = f"nobody at 127.0.0.1:{silent_port}"
    assert found["kv_transfer_params"] == {"kvx_failure": {"cause": "timeout", "peer": peer}}
    nothing_is_left(pair, pair.decode.url, pair.sides.decode_side_port)
    assert f"timeout, engine {peer}" in pair.decode.log.read_text()


def test_fail_ends_the_request_with_vllms_error_and_the_engine_lives(pair: RunningPair, silent_port: int) -> None:
    answer = while_others_go_on(pair, pair.prefill.url, ask("failed", tokens(300, seed=2)), silent_port)
    assert answer.status_code == 500, answer.text
    nothing_is_left(pair, pair.prefill.url, pair.sides.prefill_side_port)
    assert not pair.single(ask("afterwards", tokens(100, seed=3))).error


def test_params_that_lead_nowhere_end_as_the_policy_says(pair: RunningPair) -> None:
    """A client or router changed them: never a prompt that is computed here without a word."""
    for url, status_code in ((pair.decode.url, 200), (pair.prefill.url, 500)):
        wanted = ask(f"nowhere {status_code}", tokens(300, seed=status_code))
        answer = from_nobody(url, wanted, port=0)
        assert answer.status_code == status_code, answer.text
        if status_code == 200:
            found = answer.json()
            assert tuple(found["choices"][0]["token_ids"]) == pair.single(wanted).tokens
            assert found["kv_transfer_params"]["kvx_failure"]["cause"] == "malformed_params"
    for status in (pair.decode_status(), pair.prefill_status()):
        assert status["transfer"]["failures"]["malformed_params"] == 1
    assert "kv_transfer_params.remote_port is empty, needs int" in pair.decode.log.read_text()


def test_the_metrics_of_a_hold_that_nobody_reads(pair: RunningPair) -> None:
    """It is renewed as often as it is asked for, and expires; a message that is none is refused."""
    moved, port = pair.moves(pair.prefill.url), pair.sides.prefill_side_port
    name = pair.held(pair.prefill.url, ask("unread", tokens(200, seed=4)))["remote_request_id"]
    wait_until(lambda: (moved("kvx_holds"), moved("kvx_held_blocks")) == (1, 2))
    asked = [encode(Renew(sequence=number, request_id=name)) for number in range(3)]
    answers = exchange(engines.HOST, port, [*asked, b"garbage"], None, 5.0)
    assert [type(decode_reply(answer)) for answer in answers[:3]] == [Renewed] * 3
    wait_until(lambda: moved("kvx_holds_expired_total") == 1)
    wait_until(lambda: moved("kvx_holds") == moved("kvx_held_blocks") == 0)
    assert moved("kvx_leases_renewed_total") == 3
    assert moved("kvx_side_channel_refused_total{cause=malformed}") == 1
    assert moved("kvx_holds_released_total") == 0


def test_the_metrics_of_a_digest_that_differs(pair: RunningPair) -> None:
    """One byte of one head of one token, and the policy that ends the request."""
    moved = pair.moves(pair.prefill.url)
    wanted = ask("changed", tokens(130, seed=5))
    assert "500" in pair.client.ask_pair(pair.decode.url, pair.prefill.url, wanted).error
    wait_until(lambda: moved("kvx_handoffs_failed_total{cause=digest_mismatch}") == 1)
    assert moved("kvx_digests_mismatched_total") == 1
    assert moved("kvx_handoffs_received_total{connector=nixl}") == 0
    again = ask("unchanged", tokens(130, seed=6))
    assert pair.client.ask_pair(pair.decode.url, pair.prefill.url, again).tokens == pair.single(again).tokens
    wait_until(lambda: moved("kvx_handoffs_received_total{connector=nixl}") == 1)
    assert moved("kvx_digests_mismatched_total") == 1


def test_the_metrics_of_blocks_that_host_memory_has_no_room_for(pair: RunningPair) -> None:
    """Three full blocks at once, of which host memory takes as many as it has, in place of all that it had."""
    assert not pair.single(ask("before", tokens(HOST_BLOCKS * 128 + 1, seed=7))).error
    moved = pair.moves(pair.prefill.url)
    assert not pair.single(ask("stored", tokens(385, seed=8))).error
    wait_until(lambda: moved("kvx_offload_stores_total") == HOST_BLOCKS)
    assert moved("kvx_offload_evictions_total") == HOST_BLOCKS
    assert moved("kvx_offload_refused_total") == 385 // 128 - HOST_BLOCKS
    assert moved("kvx_offload_failed_total") == 0
