"""What `kvx map` draws, worked out from engines' statuses and a verified run's report. Pure.

A status is what an engine's side channel answers (`kvx.handshake.request_status`), a report what `kvx verify` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvx.errors import DatasetError
from kvx.sizing import Row
from kvx.spec import round_up

Json = Mapping[str, Any]
WARM_UP = "warm-up, graph capture"
_NUMBERS = (
    "blocks_at_warmup",
    "blocks_final",
    "capacity_blocks",
    "reserved_bytes",
    "committed_bytes",
    "registered_bytes",
)
NEAR_TOKENS = 6
"""Tokens that are shown on each side of the first one that differs."""


@dataclass(frozen=True)
class SegmentBand:
    """`count` equal segments, one after another: of each, bytes from its start on."""

    count: int
    offset_bytes: int
    capacity_bytes: int
    committed_bytes: int
    registered_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Step:
    """One step of the start: seconds after the first one began, and how long it took."""

    name: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class EngineMap:
    """One engine's cache: blocks at warm-up, final and capacity; bytes reserved, committed, registered and held."""

    name: str
    blocks_at_warmup: int
    blocks_final: int
    capacity_blocks: int
    reserved_bytes: int
    committed_bytes: int
    registered_bytes: int
    held_blocks: int
    segments: tuple[SegmentBand, ...]
    ledger: tuple[Row, ...]
    timeline: tuple[Step, ...]


@dataclass(frozen=True)
class Tokens:
    """One side's token ids around the first that differs; `first` is the position of `ids[0]`."""

    first: int
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Comparison:
    """One question of a verified run. `differs_at`: position of the first token that differs, None where none does.

    `blame`: where digests of this request differed first, in words; empty where they agree.
    """

    index: int
    question: str
    differs_at: int | None
    baseline: Tokens
    candidate: Tokens
    error: str
    blame: str

    @property
    def is_identical(self) -> bool:
        return self.differs_at is None and not self.error


def engine_map(name: str, status: Json) -> EngineMap:
    """One engine.

    Raises:
        DatasetError: a status without a cache in it, as that of an engine that is no vLLM with kvx; or without numbers.
    """
    cache = status.get("cache") if isinstance(status, Mapping) else None
    if not cache:
        raise DatasetError(f"{name} reports no cache; kvx map draws vLLM engines that run with kvx")
    for field in _NUMBERS:
        if not isinstance(cache.get(field), int) or (field == "capacity_blocks" and cache[field] < 1):
            raise DatasetError(
                f"{name} reports {field} = {cache.get(field)!r}; kvx map needs a report as it was written"
            )
    return EngineMap(
        name=name,
        blocks_at_warmup=cache["blocks_at_warmup"],
        blocks_final=cache["blocks_final"],
        capacity_blocks=cache["capacity_blocks"],
        reserved_bytes=cache["reserved_bytes"],
        committed_bytes=cache["committed_bytes"],
        registered_bytes=cache["registered_bytes"],
        held_blocks=status.get("held", {}).get("blocks", 0),
        segments=tuple(_bands(cache, status.get("held", {}).get("blocks", 0))),
        ledger=tuple(Row(row["consumer"], row["bytes"]) for row in cache.get("ledger", ())),
        timeline=_timeline(cache.get("timeline", ())),
    )


def _timeline(events: Sequence[Any]) -> tuple[Step, ...]:
    """In the order in which they began. What lies between the first commit and the first extend is the engine's own."""
    ordered = sorted((Step(name, start_s, duration_s) for name, start_s, duration_s in events), key=_begin)
    if not ordered:
        return ()
    names = [step.name for step in ordered]
    if "commit" in names and "extend" in names:
        extend = names.index("extend")
        ready_s = max(step.start_s + step.duration_s for step in ordered[:extend])
        ordered.insert(extend, Step(WARM_UP, ready_s, max(0.0, ordered[extend].start_s - ready_s)))
    return tuple(replace(step, start_s=step.start_s - ordered[0].start_s) for step in ordered)


def _begin(step: Step) -> float:
    return step.start_s


def _bands(cache: Json, held_blocks: int) -> Iterator[SegmentBand]:
    """Neighbours of one stride together. A report of an older kvx says nothing of segments: then all are one."""
    capacity, final = cache["capacity_blocks"], cache["blocks_final"]
    segments = cache.get("segments") or [[0, cache["reserved_bytes"] // capacity]]
    granularity = cache.get("granularity_bytes", 1)
    is_registered = cache["registered_bytes"] > 0
    first = 0
    for index, (_, stride) in enumerate(segments):
        if index + 1 < len(segments) and segments[index + 1][1] == stride:
            continue
        yield SegmentBand(
            count=index + 1 - first,
            offset_bytes=segments[first][0],
            capacity_bytes=capacity * stride,
            committed_bytes=min(round_up(final * stride, granularity), capacity * stride),
            registered_bytes=final * stride if is_registered else 0,
            held_bytes=held_blocks * stride,
        )
        first = index + 1


def engines_of(report: Json) -> tuple[EngineMap, ...]:
    """The engines of a verified run, in its order.

    Raises:
        DatasetError: a file that is no report of `kvx verify`.
    """
    engines = report.get("engines")
    if not isinstance(engines, Mapping) or not engines:
        raise DatasetError("no engine is in this file; give a report that kvx verify --report has written")
    return tuple(engine_map(role, status) for role, status in engines.items())


def comparisons(report: Json) -> tuple[Comparison, ...]:
    """Every question of a verified run, and what differs in it."""
    mismatches = report.get("digests", {}).get("mismatches", ())
    block_tokens = report.get("settings", {}).get("block_size_tokens", 1)
    return tuple(
        _comparison(index, answer, [m for m in mismatches if _is_of(index, m)], block_tokens)
        for index, answer in enumerate(report.get("answers", ()))
    )


def _is_of(index: int, mismatch: Json) -> bool:
    """vLLM puts a prefix and a suffix of its own around the request id that `kvx verify` gave."""
    words = str(mismatch.get("request", "")).split("-")
    return ("question", str(index)) in pairwise(words)


def _comparison(index: int, answer: Json, mismatches: list[Json], block_tokens: int) -> Comparison:
    ours, theirs = answer["baseline"], answer["candidate"]
    pairs = enumerate(zip(ours["tokens"], theirs["tokens"], strict=False))
    at = next((position for position, (a, b) in pairs if a != b), None)
    if at is None and len(ours["tokens"]) != len(theirs["tokens"]):
        at = min(len(ours["tokens"]), len(theirs["tokens"]))
    return Comparison(
        index=index,
        question=answer["question"],
        differs_at=at,
        baseline=_near(ours, at),
        candidate=_near(theirs, at),
        error=ours["error"] or theirs["error"],
        blame="; ".join(_blame(mismatch, block_tokens) for mismatch in mismatches),
    )


def _blame(mismatch: Json, block_tokens: int) -> str:
    position = mismatch["position"]
    return (
        f"block {position // block_tokens} of the prompt (tokens {position // block_tokens * block_tokens} to "
        f"{position // block_tokens * block_tokens + block_tokens - 1}), layer group {mismatch['layer_group']}: "
        f"its digest differs first at token {position}"
    )


def _near(answer: Json, at: int | None) -> Tokens:
    first = 0 if at is None else max(0, at - NEAR_TOKENS)
    last = NEAR_TOKENS * 2 if at is None else at + NEAR_TOKENS
    return Tokens(first, tuple(answer["tokens"][first:last]), answer["text"])
