"""What becomes of a failed hand-off: vLLM's policy set from kvx's, and the cause on its way to the request."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_offload import bridge, request

from kvx.errors import ConnectorError, HandshakeError, KVXError, LeaseExpired, StaleGeneration, TicketRefused
from kvx.handoff import Failure, HandoffSettings
from kvx.handshake import Refused, Welcome, expect
from kvx.metrics import HandoffMetrics
from kvx.vllm import activation
from kvx.vllm.bridge_scheduler import FAILURE, RemotePrefill, WaitWork


def configured(theirs: str) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy=theirs))


@pytest.mark.parametrize(
    ("arguments", "theirs", "ours", "warns"),
    [
        ([], "fail", "recompute", False),
        ([], "fail", "fail", False),
        ([], "recompute", "recompute", False),
        ([], "recompute", "fail", True),
        (['--kv-transfer-config={"kv_load_failure_policy": "fail"}'], "fail", "recompute", True),
        (["--kv-transfer-config.kv_load_failure_policy", "fail"], "fail", "fail", False),
    ],
)
def test_vllms_policy_becomes_kvxs_and_a_contradiction_is_said(
    arguments: list[str], theirs: str, ours: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (activation.POLICY_ENVIRONMENT, activation.UTILIZATION_ENVIRONMENT):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "argv", ["api_server", *arguments])
    engine = SimpleNamespace(gpu_memory_utilization=0.5)
    assert activation.note_given(lambda arguments: arguments, engine) is engine
    config = configured(theirs)
    said = activation.set_failure_policy(config, ours)
    assert config.kv_transfer_config.kv_load_failure_policy == ours
    assert (said is not None) is warns
    if said is not None:
        assert f"{theirs!r} but kvx's failure_policy is {ours!r}" in said


def test_the_policy_is_checked() -> None:
    assert HandoffSettings().failure_policy == "recompute"
    with pytest.raises(ConnectorError, match="failure_policy is 'retry'; it needs 'recompute' or 'fail'"):
        HandoffSettings(failure_policy="retry")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("lease_expired", LeaseExpired),
        ("stale_generation", StaleGeneration),
        ("ticket_refused", TicketRefused),
        ("", HandshakeError),
        ("x", HandshakeError),
    ],
)
def test_a_refusal_is_counted_by_the_owners_cause_if_it_is_one_of_ours(cause: str, kind: type[Exception]) -> None:
    with pytest.raises(KVXError, match="no more") as caught:
        expect(Refused(sequence=1, reason="no more", cause=cause), Welcome)
    assert type(caught.value) is kind


def test_failures_are_counted_by_cause() -> None:
    metrics = HandoffMetrics()
    for cause in ("timeout", "peer_dead", "timeout"):
        metrics.failure(cause)
    transfer = metrics.as_status(0)["transfer"]
    assert (transfer["failed"], transfer["failures"]) == (3, {"timeout": 2, "peer_dead": 1})


def a_request() -> Any:
    asked = request("r", 20)
    asked.kv_transfer_params = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "x", "remote_host": "h",
        "remote_port": 1, FAILURE: "said by the client",
    }  # fmt: skip
    asked.status = SimpleNamespace(name="FINISHED_STOPPED")  # type: ignore[attr-defined]
    return asked


def test_cause_and_peer_end_up_in_the_answer_and_the_hand_off_is_not_offered_again() -> None:
    scheduler, asked = bridge(), a_request()
    assert scheduler.match(asked, 0) == (20, True)
    scheduler.blocks_allocated(asked, [[1, 2]], 20)
    assert FAILURE not in asked.kv_transfer_params
    scheduler.failed({"r": Failure("timeout", "p at h:1", "no answer"), "unknown": Failure("timeout", "", "")})
    scheduler.arrived(["r"], ["r"], None)
    assert scheduler.match(asked, 0) == (0, False)
    scheduler.blocks_allocated(asked, [[1, 2]], 0)
    assert scheduler.finished(asked, [[1, 2]]) == (False, {FAILURE: {"cause": "timeout", "peer": "p at h:1"}})


def test_an_answer_that_came_by_a_hand_off_says_nothing() -> None:
    scheduler, asked = bridge(), a_request()
    scheduler.blocks_allocated(asked, [[1, 2]], 20)
    scheduler.arrived(["r"], [], None)
    assert scheduler.finished(asked, [[1, 2]]) == (False, None)


def test_the_hold_of_a_request_that_does_not_begin_at_once_is_renewed() -> None:
    scheduler, asked, plain = bridge(), a_request(), request("plain", 20)
    nothing = SimpleNamespace(
        num_scheduled_tokens={}, kv_connector_block_state=SimpleNamespace(), total_num_scheduled_tokens=0
    )
    scheduler.added(asked)
    scheduler.added(plain)
    assert scheduler.take_work(nothing).waits == [WaitWork("r", RemotePrefill("p", "x", "h", 1))]
    scheduler.added(asked)
    scheduler.blocks_allocated(asked, [[1, 2]], 20)
    work = scheduler.take_work(nothing)
    assert (work.waits, len(work.pulls)) == ([], 1), "its pull begins in the same step"
