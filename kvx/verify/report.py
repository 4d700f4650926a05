"""What a verified run found, and every condition it must meet. Pure: no engine, no clock, no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvx.verify.client import Answer
from kvx.verify.questions import Problem, is_correct

PROMPT_TOKENS = "vllm:prompt_tokens_total"
LOCAL_HITS = "vllm:prompt_tokens_by_source_total{source=local_cache_hit}"
EXTERNAL_HITS = "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"
OFFLOAD_COUNTS = (
    "stores", "reloads", "evictions", "hits", "refused", "failed", "pinned", "external_tokens", "stored_bytes",
    "loaded_bytes",
)  # fmt: skip


_RANK = " rank "


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to question `index` (from 0) differ."""

    index: int
    what: str
    position: int
    baseline: str
    candidate: str

    def sentence(self) -> str:
        where = f" at {self.position}" if self.position >= 0 else ""
        return f"question {self.index}: {self.what}{where}: baseline {self.baseline}, candidate {self.candidate}"


@dataclass(frozen=True)
class Condition:
    """One thing that must hold. Failing any of them fails the run."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Findings:
    """All that a run brought home: answers by question, each engine's status, and decode's own counters.

    `rounds`: the candidate was asked everything so many times. `expected_fallbacks`: so many were made on purpose.
    """

    problems: Sequence[Problem]
    baseline: Sequence[Answer]
    rounds: Sequence[Sequence[Answer]]
    engines: Mapping[str, Mapping[str, Any]]  # role, and rank after the first -> status from the side channel
    decode_counters: Mapping[str, float]
    judge_answers: bool = True
    offloads: bool = False
    hands_off: bool = True
    expected_fallbacks: int = 0

    @cached_property
    def candidate(self) -> Sequence[Answer]:
        """For each question the first answer that differs from the baseline's, else the last one."""
        return [
            next((a for a in answers if first_difference(0, ours, a) is not None), answers[-1])
            for ours, *answers in zip(self.baseline, *self.rounds, strict=True)
        ]

    @property
    def all_answers(self) -> Sequence[Answer]:
        """The candidate's, of all rounds."""
        return [answer for answers in self.rounds for answer in answers]


def name_of_rank(role: str, rank: int) -> str:
    """What a rank's status is found under: that of an engine's first rank under the engine's role."""
    return f"{role}{_RANK}{rank}" if rank else role


def first_difference(index: int, baseline: Answer, candidate: Answer) -> Difference | None:
    """Compare two answers byte for byte: errors, prompt token ids, token ids, text, and why they ended."""
    if baseline.error or candidate.error:
        return Difference(index, "no answer", -1, baseline.error or "answered", candidate.error or "answered")
    for what, ours, theirs in (
        ("prompt token ids", baseline.prompt_tokens, candidate.prompt_tokens),
        ("token ids", baseline.tokens, candidate.tokens),
        ("text", baseline.text.encode(), candidate.text.encode()),
    ):
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            at = min(len(ours), len(theirs)) if at < 0 else at
            return Difference(index, what, at, _item(ours, at), _item(theirs, at))
    if not baseline.tokens:
        return Difference(index, "no tokens", -1, repr(baseline.text), repr(candidate.text))
    if baseline.finish_reason != candidate.finish_reason:
        return Difference(index, "finish reason", -1, baseline.finish_reason, candidate.finish_reason)
    return None


def build(findings: Findings) -> dict[str, Any]:
    """The report, JSON-able, with `conditions` and `passed`."""
    pairs = list(zip(findings.baseline, findings.candidate, strict=True))
    differences = [d for i, (a, b) in enumerate(pairs) if (d := first_difference(i, a, b)) is not None]
    report: dict[str, Any] = {
        "questions": len(findings.problems),
        "identical": len(pairs) - len(differences),
        "accuracy": {
            "baseline": _accuracy(findings.problems, findings.baseline),
            "candidate": _accuracy(findings.problems, findings.candidate),
        },
        "transfer": _transfer(findings),
        "external_hits": _external_hits(findings),
        "offload": _offload(findings),
        "digests": _digests(findings.engines),
        "engines": {role: dict(status) for role, status in findings.engines.items()},
        "differences": [difference.__dict__ for difference in differences],
    }
    conditions = list(_conditions(report, findings))
    report["conditions"] = [condition.__dict__ for condition in conditions]
    report["passed"] = all(condition.holds for condition in conditions)
    return report


def _accuracy(problems: Sequence[Problem], answers: Sequence[Answer]) -> float:
    correct = sum(is_correct(answer.text, problem) for problem, answer in zip(problems, answers, strict=True))
    return round(correct / len(problems), 4) if problems else 0.0


def _transfer(findings: Findings) -> dict[str, Any]:
    """Sums over both engines; a fallback is a request that was answered without all its blocks being handed off.

    `count`: requests that were received, by all ranks of an engine. Of one engine by itself, which hands nothing off, a
    fallback is a load that failed, or a store.
    """
    parts = [status.get("transfer", {}) for status in findings.engines.values()]
    total = {key: sum(part.get(key, 0) for part in parts) for key in ("bytes", "blocks")}
    ranks = [[status.get("transfer", {}) for status in engine] for engine in _by_engine(findings.engines)]
    total["count"] = sum(min(part.get("received", 0) for part in engine) for engine in ranks)
    total["failed"] = sum(max(part.get("failed", 0) for part in engine) for engine in ranks)
    answered = sum(not answer.error for answer in findings.all_answers)
    by_connector: Counter[str] = Counter()
    for part in parts:
        by_connector.update(part.get("by_connector", {}))
    total["by_connector"] = dict(by_connector)
    failures: Counter[str] = Counter()
    for part in parts:
        failures.update(part.get("failures", {}))
    total["failures"] = dict(failures)
    if not findings.hands_off:
        return {**total, "fallbacks": _offload(findings)["failed"]}
    # A failed hand-off whose request was computed again is in both numbers.
    return {**total, "fallbacks": max(0, answered - total["count"], total["failed"])}


def _external_hits(findings: Findings) -> dict[str, Any]:
    """Observed: vLLM's count of tokens loaded. Expected: after hand-offs every prompt token that decode had not cached
    itself, but those that it is left to compute; from host memory, and where fallbacks are expected, as many as kvx
    says it has loaded.
    """
    prompts = [len(answer.prompt_tokens) for answer in findings.all_answers]
    local = int(findings.decode_counters.get(LOCAL_HITS, 0))
    told = (status.get("external_hits", {}) for status in findings.engines.values())
    left = max((hits.get("left_tokens", 0) for hits in told), default=0)
    return {
        "expected": _expected_hits(findings, sum(max(0, tokens - left) for tokens in prompts) - local),
        "observed": int(findings.decode_counters.get(EXTERNAL_HITS, 0)),
        "local": local,
        "prompt_tokens": sum(prompts),
    }


def _expected_hits(findings: Findings, not_local: int) -> int:
    if not findings.hands_off:
        return _offload(findings)["external_tokens"]
    if not findings.expected_fallbacks:
        return not_local
    received: list[int] = [
        min(status.get("external_hits", {}).get("received_tokens", 0) for status in engine)
        for engine in _by_engine(findings.engines)
    ]
    return sum(received, _offload(findings)["external_tokens"])


def _by_engine(statuses: Mapping[str, Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The statuses of each engine's ranks."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, status in statuses.items():
        found.setdefault(name.partition(_RANK)[0], []).append(status)
    return list(found.values())


def _offload(findings: Findings) -> dict[str, int]:
    """Sums over all engines; blocks, but for bytes and tokens."""
    parts = [status.get("offload", {}) for status in findings.engines.values()]
    return {key: sum(part.get(key, 0) for part in parts) for key in OFFLOAD_COUNTS}


def _digests(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    parts = [status.get("digests", {}) for status in engines.values()]
    parts += [status.get("offload", {}).get("digests", {}) for status in engines.values()]
    return {
        "checked": sum(part.get("checked", 0) for part in parts),
        "expected": sum(part.get("expected", 0) for part in parts),
        "mismatched": sum(part.get("mismatched", 0) for part in parts),
        "mismatches": [mismatch for part in parts for mismatch in part.get("mismatches", ())],
    }


def _conditions(report: Mapping[str, Any], findings: Findings) -> Iterator[Condition]:
    questions, identical = report["questions"], report["identical"]
    if findings.judge_answers:
        holds = identical == questions > 0
        yield Condition("answers identical", holds, f"{identical} of {questions}")
    else:
        answered = sum(not answer.error for answer in findings.candidate)
        yield Condition("questions answered", answered == questions > 0, f"{answered} of {questions}")
    transfer, hits, digests = report["transfer"], report["external_hits"], report["digests"]
    if findings.hands_off:
        yield Condition("blocks were moved", transfer["bytes"] > 0 < transfer["blocks"], f"{transfer['bytes']} bytes")
        yield _fallback_condition(transfer, findings.expected_fallbacks)
    if findings.offloads:
        yield from _offload_conditions(report["offload"])
    hits_agree = hits["expected"] == hits["observed"] > 0
    yield Condition(
        "external hits as expected", hits_agree, f"{hits['observed']} observed, {hits['expected']} expected"
    )
    everything = digests["checked"] == digests["expected"] > 0
    yield Condition("digests of everything moved", everything, f"{digests['checked']} of {digests['expected']}")
    repaired = findings.expected_fallbacks > 0 and transfer["failures"].get("digest_mismatch", 0) > 0
    yield Condition("digests agree", digests["mismatched"] == 0 or repaired, _mismatch_detail(digests))
    if not findings.engines:
        yield Condition("engines answered for themselves", False, "no status came over the side channel")
    for role, status in findings.engines.items():
        yield from _cache_conditions(role, status.get("cache", {}))
        expired = status.get("handoff", {}).get("expired", -1)
        yield Condition(f"{role}: no hold expired", expired == 0, f"{expired}")
        held = status.get("handoff", {}).get("holds", -1)
        yield Condition(f"{role}: nothing held at the end", held == 0, f"{held}")


def _fallback_condition(transfer: Mapping[str, Any], expected: int) -> Condition:
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(transfer["failures"].items()))
    detail = f"{transfer['fallbacks']}" + (f" ({causes})" if causes else "")
    if not expected:
        return Condition("no fallbacks", transfer["fallbacks"] == 0, detail)
    return Condition("fallbacks as expected", transfer["fallbacks"] == expected, f"{detail}, {expected} expected")


def _offload_conditions(offload: Mapping[str, int]) -> Iterator[Condition]:
    """The run was made so that blocks must leave, come back, and give room to others."""
    for key, name in (
        ("stores", "blocks left for host memory"),
        ("reloads", "blocks came back from host memory"),
        ("evictions", "host blocks were given to others"),
    ):
        yield Condition(name, offload[key] > 0, f"{offload[key]}")
    yield Condition("no load or store failed", offload["failed"] == 0, f"{offload['failed']}")
    yield Condition("nothing pinned at the end", offload["pinned"] == 0, f"{offload['pinned']}")


def _cache_conditions(role: str, cache: Mapping[str, Any]) -> Iterator[Condition]:
    """How the engine's cache grew: -1 stands for a number that the engine did not give, and never passes."""
    warm, final = cache.get("blocks_at_warmup", -1), cache.get("blocks_final", -1)
    yield Condition(f"{role}: cache grew after warm-up", 0 < warm < final, f"{warm} -> {final} blocks")
    for key, name in (
        ("base_address_unchanged", "base address unchanged"),
        ("connector_opened_after_extend", "connector opened after the extend"),
    ):
        yield Condition(f"{role}: {name}", cache.get(key) is True, str(cache.get(key)))
    registered, committed, reserved = (
        cache.get(f"{name}_bytes", -1) for name in ("registered", "committed", "reserved")
    )
    # An explicit size may be all that is reserved; where the size is measured, some is left over.
    inside = 0 < registered <= committed < reserved + (cache.get("explicit_size") is True)
    detail = f"registered {registered}, committed {committed}, reserved {reserved}"
    yield Condition(f"{role}: only committed bytes registered", inside, detail)


def _mismatch_detail(digests: Mapping[str, Any]) -> str:
    """`0 of 120`, or the first mismatches by request, layer group and position."""
    if not digests["mismatched"]:
        return f"0 of {digests['checked']} differ"
    named = [
        f"request {m.get('request')}, layer group {m.get('layer_group')}, position {m.get('position')}"
        for m in digests["mismatches"][:3]
    ]
    return f"{digests['mismatched']} of {digests['checked']} differ: " + "; ".join(named)


def _item(values: Sequence[Any], at: int) -> str:
    return str(values[at]) if at < len(values) else "the end"
