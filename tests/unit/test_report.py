import copy
import dataclasses
import io

import pytest
from rich.console import Console

from kvx.cli.show import show_verify
from kvx.verify.client import Answer
from kvx.verify.questions import Problem
from kvx.verify.report import EXTERNAL_HITS, LOCAL_HITS, Findings, build, first_difference

ANSWER = Answer(prompt_tokens=(1, 2, 3), tokens=(7, 8), text=" 5", finish_reason="stop")


def engine(**transfer):
    counts = {"bytes": 0, "blocks": 0, "received": 0, "failed": 0, "descriptors": 0} | transfer
    counts["by_connector"] = {"nixl": counts["received"]} if counts["received"] else {}
    return {
        "engine_id": "e",
        "handoff": {"holds": 0, "released": 2, "expired": 0, "renewed": 0},
        "transfer": counts,
        "digests": {
            "checked": 6 if counts["received"] else 0,
            "expected": 6 if counts["received"] else 0,
            "mismatched": 0,
            "mismatches": [],
        },
        "cache": {
            "blocks_at_warmup": 16,
            "blocks_final": 180,
            "base_address_unchanged": True,
            "connector_opened_after_extend": True,
            "registered_bytes": 100,
            "committed_bytes": 100,
            "reserved_bytes": 200,
        },
    }


@pytest.fixture
def findings():
    return Findings(
        problems=[Problem("q", "a", "5"), Problem("r", "b", "6")],
        baseline=[ANSWER, ANSWER],
        rounds=[[ANSWER, ANSWER]],
        engines={"prefill": engine(), "decode": engine(bytes=800, blocks=2, received=2)},
        decode_counters={LOCAL_HITS: 2.0, EXTERNAL_HITS: 4.0},
    )


def failing(report):
    return [condition["name"] for condition in report["conditions"] if not condition["holds"]]


@pytest.mark.parametrize(("is_explicit", "passes"), [(True, True), (False, False)])
def test_only_an_explicit_size_may_be_all_that_is_reserved(findings, is_explicit, passes):
    findings.engines["decode"]["cache"].update(committed_bytes=200, explicit_size=is_explicit)
    assert build(findings)["passed"] is passes


def test_a_good_run_passes_with_every_promised_field(findings):
    report = build(findings)
    assert report["passed"]
    assert failing(report) == []
    assert report["questions"] == report["identical"] == 2
    assert report["accuracy"] == {"baseline": 0.5, "candidate": 0.5}
    assert report["transfer"] == {
        "bytes": 800, "blocks": 2, "count": 2, "failed": 0, "by_connector": {"nixl": 2}, "failures": {}, "fallbacks": 0,
    }  # fmt: skip
    assert report["external_hits"]["expected"] == report["external_hits"]["observed"] == 4
    assert report["digests"] == {"checked": 6, "expected": 6, "mismatched": 0, "mismatches": []}
    assert report["engines"]["decode"]["cache"]["blocks_final"] == 180


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("section", "change", "name"),
    [
        ("cache", {"blocks_at_warmup": 180}, "cache grew"),
        ("cache", {"blocks_final": 16}, "cache grew"),
        ("cache", {"base_address_unchanged": False}, "base address"),
        ("cache", {"base_address_unchanged": None}, "base address"),
        ("cache", {"connector_opened_after_extend": False}, "opened after"),
        ("cache", {"registered_bytes": 101}, "committed bytes registered"),
        ("cache", {"registered_bytes": 0}, "committed bytes registered"),
        ("cache", {"committed_bytes": 200}, "committed bytes registered"),
        ("handoff", {"expired": 1}, "no hold expired"),
        ("handoff", {"holds": 1}, "nothing held"),
        ("digests", {"mismatched": 1}, "digests agree"),
    ],
)
def test_each_condition_fails_the_run_though_all_answers_agree(findings, role, section, change, name):
    findings.engines[role][section].update(change)
    report = build(findings)
    assert report["identical"] == 2
    assert not report["passed"]
    assert [found for found in failing(report) if name in found]


def test_a_status_without_a_section_never_passes(findings):
    for section in ("cache", "handoff", "digests", "transfer"):
        poorer = {role: {k: v for k, v in status.items() if k != section} for role, status in findings.engines.items()}
        assert not build(dataclasses.replace(findings, engines=poorer))["passed"]
    assert "engines answered for themselves" in failing(build(dataclasses.replace(findings, engines={})))


def test_an_answer_without_its_hand_off_is_a_fallback(findings):
    findings.engines["decode"]["transfer"]["received"] = 1
    report = build(findings)
    assert report["transfer"]["fallbacks"] == 1
    assert failing(report) == ["no fallbacks"]


def test_a_request_of_several_ranks_counts_where_all_have_received_it(findings):
    decode = findings.engines["decode"]
    both = {"prefill": findings.engines["prefill"], "decode": decode, "decode rank 1": copy.deepcopy(decode)}
    report = build(dataclasses.replace(findings, engines=both))
    assert report["passed"]
    assert (report["transfer"]["bytes"], report["transfer"]["count"]) == (1600, 2)
    both["decode rank 1"]["transfer"].update(received=1, failed=1)
    report = build(dataclasses.replace(findings, engines=both))
    assert report["transfer"]["fallbacks"] == 1, "one request, whichever rank of it failed"
    both["decode rank 1"]["handoff"]["holds"] = 1
    assert "decode rank 1: nothing held at the end" in failing(build(dataclasses.replace(findings, engines=both)))


def test_a_failed_transfer_is_a_fallback(findings):
    findings.engines["decode"]["transfer"]["failed"] = 1
    assert failing(build(findings)) == ["no fallbacks"]


@pytest.mark.parametrize(("expected", "fails"), [(0, 2), (1, 0), (2, 1)])
def test_what_was_repaired_by_recomputation_must_have_been_expected(findings, expected, fails):
    findings.engines["decode"]["transfer"].update(received=1, failed=1, failures={"digest_mismatch": 1})
    findings.engines["decode"]["digests"].update(mismatched=3)
    findings.engines["decode"]["external_hits"] = {"received_tokens": 2}
    counters = {LOCAL_HITS: 2.0, EXTERNAL_HITS: 2.0 if expected else 4.0}
    report = build(dataclasses.replace(findings, expected_fallbacks=expected, decode_counters=counters))
    assert report["transfer"]["fallbacks"] == 1
    assert report["transfer"]["failures"] == {"digest_mismatch": 1}
    assert len(failing(report)) == fails
    assert report["passed"] is (fails == 0)


def test_recomputed_prompt_tokens_show_in_the_external_hits(findings):
    report = build(dataclasses.replace(findings, decode_counters={LOCAL_HITS: 2.0, EXTERNAL_HITS: 1.0}))
    assert failing(report) == ["external hits as expected"]


def test_tokens_that_decode_is_left_to_compute_are_no_external_hits(findings):
    findings.engines["decode"]["external_hits"] = {"received_tokens": 2, "left_tokens": 1}
    assert failing(build(findings)) == ["external hits as expected"]
    report = build(dataclasses.replace(findings, decode_counters={LOCAL_HITS: 2.0, EXTERNAL_HITS: 2.0}))
    assert report["external_hits"] == {"expected": 2, "observed": 2, "local": 2, "prompt_tokens": 6}
    assert report["passed"]


def test_nothing_checked_is_a_failure(findings):
    findings.engines["decode"]["digests"]["checked"] = 5
    assert failing(build(findings)) == ["digests of everything moved"]


def test_mismatches_name_request_layer_group_and_position(findings):
    where = {"request": "question-1", "layer_group": "0", "position": 3}
    findings.engines["decode"]["digests"] = {"checked": 6, "expected": 6, "mismatched": 1, "mismatches": [where]}
    detail = next(c["detail"] for c in build(findings)["conditions"] if c["name"] == "digests agree")
    assert detail == "1 of 6 differ: request question-1, layer group 0, position 3"


def test_no_questions_is_no_success(findings):
    empty = dataclasses.replace(findings, problems=[], baseline=[], rounds=[[]])
    assert "answers identical" in failing(build(empty))


@pytest.mark.parametrize(
    ("change", "what", "position"),
    [
        ({"prompt_tokens": (1, 2, 4)}, "prompt token ids", 2),
        ({"tokens": (7, 9)}, "token ids", 1),
        ({"tokens": (7,)}, "token ids", 1),
        ({"text": " 6"}, "text", 1),
        ({"finish_reason": "length"}, "finish reason", -1),
        ({"error": "refused"}, "no answer", -1),
    ],
)
def test_differences_are_found_and_placed(findings, change, what, position):
    found = first_difference(0, ANSWER, dataclasses.replace(ANSWER, **change))
    assert found is not None
    assert (found.what, found.position) == (what, position)
    other = dataclasses.replace(findings, rounds=[[dataclasses.replace(ANSWER, **change), ANSWER]])
    report = build(other)
    assert report["identical"] == 1
    assert "answers identical" in failing(report)


def test_two_empty_answers_are_not_called_identical():
    empty = dataclasses.replace(ANSWER, tokens=(), text="")
    assert first_difference(0, empty, empty).what == "no tokens"


def test_answers_may_be_left_out_of_the_judgement(findings):
    other = dataclasses.replace(ANSWER, tokens=(7, 9))
    assert build(dataclasses.replace(findings, rounds=[[other, ANSWER]], judge_answers=False))["passed"]
    refused = Answer(error="refused")
    report = build(dataclasses.replace(findings, rounds=[[refused, ANSWER]], judge_answers=False))
    assert "questions answered" in failing(report)


def test_building_a_report_changes_nothing(findings):
    before = copy.deepcopy(findings)
    build(findings)
    assert findings == before


@pytest.fixture
def offloaded(findings):
    """One engine that offloads, asked twice."""
    digests = {"checked": 2, "expected": 2, "mismatched": 0, "mismatches": []}
    counts = {"stores": 9, "reloads": 2, "evictions": 3, "hits": 2, "failed": 0, "pinned": 0, "external_tokens": 4}
    status = {**engine(), "offload": {**counts, "digests": digests}}
    return dataclasses.replace(
        findings, rounds=[[ANSWER, ANSWER]] * 2, engines={"single": status}, offloads=True, hands_off=False
    )


def test_an_engine_that_offloads_needs_no_hand_off(offloaded):
    report = build(offloaded)
    assert failing(report) == []
    assert report["identical"] == report["questions"] == 2
    assert (report["offload"]["evictions"], report["offload"]["reloads"]) == (3, 2)
    assert report["external_hits"] == {"expected": 4, "observed": 4, "local": 2, "prompt_tokens": 12}
    assert report["digests"]["checked"] == 2
    assert report["transfer"]["fallbacks"] == 0
    offloaded.engines["single"]["offload"]["failed"] = 1
    assert build(offloaded)["transfer"]["fallbacks"] == 1


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("stores", 0, "blocks left"),
        ("reloads", 0, "blocks came back"),
        ("evictions", 0, "host blocks were given"),
        ("failed", 1, "no load or store failed"),
        ("pinned", 1, "nothing pinned"),
        ("external_tokens", 5, "external hits"),
    ],
)
def test_each_condition_of_offload_fails_the_run(offloaded, key, value, name):
    offloaded.engines["single"]["offload"][key] = value
    (found,) = failing(build(offloaded))
    assert name in found


def test_what_was_loaded_and_differs_fails_the_run(offloaded):
    where = {"request": "question-1-again", "layer_group": "0", "position": 3}
    offloaded.engines["single"]["offload"]["digests"] |= {"mismatched": 1, "mismatches": [where]}
    assert failing(build(offloaded)) == ["digests agree"]


@pytest.mark.parametrize("bad_round", [0, 1])
def test_a_question_is_identical_when_it_was_in_every_round(offloaded, bad_round):
    other = dataclasses.replace(ANSWER, tokens=(7, 9))
    rounds = [[ANSWER, ANSWER], [ANSWER, ANSWER]]
    rounds[bad_round] = [ANSWER, other]
    report = build(dataclasses.replace(offloaded, rounds=rounds))
    assert report["identical"] == 1
    assert report["differences"][0]["index"] == 1


def test_both_rounds_of_a_pair_must_be_handed_off(findings):
    findings.engines["decode"]["transfer"]["received"] = 3
    findings.engines["decode"]["offload"] = {"stores": 1, "reloads": 1, "evictions": 1}
    both = dataclasses.replace(
        findings, rounds=[[ANSWER, ANSWER]] * 2, offloads=True, decode_counters={LOCAL_HITS: 2.0, EXTERNAL_HITS: 10.0}
    )
    assert failing(build(both)) == ["no fallbacks"]
    findings.engines["decode"]["transfer"]["received"] = 4
    assert failing(build(both)) == []


def test_the_request_whose_bytes_differ_is_named_in_one_piece_on_a_narrow_terminal(findings):
    request = "cmpl-question-0-again-0-84a69a34"
    findings.engines["decode"]["digests"].update(
        mismatched=1, mismatches=[{"request": request, "layer_group": "group0", "position": 3}]
    )
    console = Console(width=60, file=io.StringIO())
    show_verify(console, build(findings) | {"memory": {"peak_bytes": 1}, "duration_s": 1.0})
    assert f"bytes differ: request {request}, layer group group0, position 3\n" in console.file.getvalue()
