"""Hand-offs of models of which some layers keep a state: which tokens decode is left with, and where a state is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_door import vllm_config

from kvx.errors import EngineError
from kvx.vllm import allocation
from kvx.vllm.bridge_scheduler import ABSENT, NULL_BLOCK, BridgeScheduler

PARAMS = {
    "do_remote_prefill": True, "remote_engine_id": "prefill", "remote_request_id": "there", "remote_host": "127.0.0.1",
    "remote_port": 5600,
}  # fmt: skip


class CacheConfig:
    """Attention in blocks of 16 tokens, and a state with two blocks for drafts behind it."""

    transfer_groups = (
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16)),
        SimpleNamespace(
            kv_cache_spec=SimpleNamespace(
                block_size=1024, kv_cache_specs={"m": SimpleNamespace(block_size=1024, num_speculative_blocks=2)}
            )
        ),
    )

    def select_transfer_block_ids(self, blocks: list[list[int]]) -> list[list[int]]:
        return blocks


class Request(SimpleNamespace):
    """As vLLM's, as far as the bridge reads it."""

    def __init__(self, tokens: int, params: dict[str, Any] | None, skips_cache: bool = False) -> None:
        prompt = list(range(100, 100 + tokens))
        super().__init__(
            request_id="r", kv_transfer_params=params, num_prompt_tokens=tokens, prompt_token_ids=prompt,
            prompt_embeds=None, prompt_is_token_ids=None, _all_token_ids=prompt.copy(), max_tokens=7,
            num_computed_tokens=0, status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
            get_skip_reading_prefix_cache=lambda: skips_cache, resumable=False,
        )  # fmt: skip


@pytest.fixture
def scheduler() -> BridgeScheduler:
    made = BridgeScheduler(vllm_config(side_channel_host="127.0.0.1", side_channel_port=5600), CacheConfig())
    made.listens_at(5600, ["first"])
    return made


def taken(scheduler: BridgeScheduler) -> Any:
    return scheduler.take_work(SimpleNamespace(total_num_scheduled_tokens=1))


def test_prefill_stops_before_the_last_token_and_holds_the_state_of_those_before_it(scheduler: BridgeScheduler) -> None:
    request = Request(20, {"do_remote_decode": True})
    scheduler.added(request)
    assert request.prompt_token_ids == request._all_token_ids == list(range(100, 119))
    assert (request.num_prompt_tokens, request.max_tokens) == (19, 1)
    request.num_computed_tokens = 19
    is_kept, params = scheduler.finished(request, [[3, 4], [NULL_BLOCK, 7, 8, 9]])
    assert is_kept
    assert params is not None
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[3, 4], [7]], 19)
    (hold,) = taken(scheduler).holds
    assert (hold.blocks, hold.num_tokens) == (((3, 4), (*[ABSENT] * 18, 7)), 19)


@pytest.mark.parametrize("cached", [0, 16])
def test_decode_asks_for_all_but_the_last_token_and_for_one_state(scheduler: BridgeScheduler, cached: int) -> None:
    request = Request(20, dict(PARAMS))
    assert scheduler.match(request, cached) == (19 - cached, True)
    scheduler.blocks_allocated(request, [[3, 4], [7, 8, 9]], 19 - cached)
    (pull,) = taken(scheduler).pulls
    assert (pull.first_token, pull.num_tokens) == (cached, 19 - cached)
    assert pull.blocks == ((3, 4), (*[ABSENT] * 18, 7))
    assert request.num_prompt_tokens == 20, "decode computes the last one itself"


def test_before_vllm_has_blocks_for_drafts_the_first_one_is_the_state(scheduler: BridgeScheduler) -> None:
    request = Request(3, dict(PARAMS))
    scheduler.blocks_allocated(request, [[3], [7]], 2)
    (pull,) = taken(scheduler).pulls
    assert pull.blocks == ((3,), (ABSENT, 7))


def test_of_one_token_nothing_is_loaded_and_prefill_is_told(scheduler: BridgeScheduler) -> None:
    asked = Request(1, {"do_remote_decode": True})
    scheduler.added(asked)
    assert (asked.prompt_token_ids, asked.num_prompt_tokens) == ([100], 1)
    request = Request(1, dict(PARAMS))
    assert scheduler.match(request, 0) == (0, False)
    scheduler.blocks_allocated(request, [[3], [7]], 0)
    (pull,) = taken(scheduler).pulls
    assert pull.num_tokens == 0


def test_a_state_of_more_tokens_is_at_another_position_and_never_taken_for_one_of_fewer(
    scheduler: BridgeScheduler,
) -> None:
    """Prefill computes the whole prompt where it must say something of each of its tokens."""
    request = Request(20, {"do_remote_decode": True}, skips_cache=True)
    scheduler.added(request)
    assert request.num_prompt_tokens == 20
    request.num_computed_tokens = 20
    scheduler.finished(request, [[3, 4], [7]])
    (hold,) = taken(scheduler).holds
    decode = Request(20, dict(PARAMS))
    scheduler.blocks_allocated(decode, [[5, 6], [8]], 19)
    (pull,) = taken(scheduler).pulls
    wanted = [position for position, block in enumerate(pull.blocks[1]) if block != ABSENT]
    assert [hold.blocks[1][position] for position in wanted] == [ABSENT]


def test_a_state_without_a_block_is_an_error_and_no_hand_off_of_the_rest(scheduler: BridgeScheduler) -> None:
    with pytest.raises(EngineError, match="no block for a state"):
        scheduler.blocks_allocated(Request(20, dict(PARAMS)), [[3, 4], [NULL_BLOCK, 8, 9]], 19)
    assert taken(scheduler).pulls == []


def test_a_request_that_is_not_handed_off_or_has_more_to_come_keeps_its_prompt(scheduler: BridgeScheduler) -> None:
    for params, resumable in ((None, False), ({}, False), (dict(PARAMS), False), ({"do_remote_decode": True}, True)):
        request = Request(20, params)
        request.resumable = resumable
        scheduler.added(request)
        assert (request.num_prompt_tokens, len(request._all_token_ids), request.max_tokens) == (20, 20, 7)


def test_models_without_states_leave_nothing_to_decode() -> None:
    config = SimpleNamespace(transfer_groups=CacheConfig.transfer_groups[:1])
    assert allocation.scratch_blocks(config) == (None,)
    assert allocation.left_tokens(config) == 0
    assert allocation.left_tokens(CacheConfig()) == 1
