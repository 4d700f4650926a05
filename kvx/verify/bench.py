"""Time a kvx pair beside a pair with vLLM's stock NixlConnector, on one machine, in one run.

Both pairs live all the time, but only one runs: the other is frozen (SIGSTOP), because the stock connector's progress
threads spin even when idle and would slow the pair beside it. The pairs alternate, and take turns at going first, so
that a machine that slows down or speeds up meanwhile does so for both.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvx
from kvx.errors import EngineError
from kvx.handshake import request_status
from kvx.servers import Server, Servers
from kvx.spread import spread
from kvx.verify import engines
from kvx.verify.client import Ask, Client
from kvx.verify.places import HOST
from kvx.verify.runner import Progress

KVX, STOCK = "kvx", "stock"
METRICS = ("first_token_s", "prefill_s", "between_tokens_s", "handoff_p50_s", "handoff_p99_s")
_VOCABULARY = range(1000, 30000)  # token ids of ordinary words in every model's vocabulary
_LOG_DEADLINE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """`pairs` alternations of `requests` requests on each pair, after one warm-up alternation that is not counted."""

    run: engines.RunSettings
    pairs: int = 7
    requests: int = 8
    concurrency: int = 1
    prompt_tokens: int = 384
    new_tokens: int = 16
    logs: Path | None = None


@dataclass(frozen=True)
class Round:
    """What one pair did in one alternation, in seconds."""

    first_token_s: Sequence[float]
    prefill_s: Sequence[float]
    between_tokens_s: Sequence[float]
    handoff_s: Sequence[float]

    def values(self) -> dict[str, float]:
        """One number per metric: medians, and the 99th percentile of the hand-offs."""
        return {
            "first_token_s": statistics.median(self.first_token_s),
            "prefill_s": statistics.median(self.prefill_s),
            "between_tokens_s": statistics.median(self.between_tokens_s),
            "handoff_p50_s": statistics.median(self.handoff_s),
            "handoff_p99_s": percentile(self.handoff_s, 99),
        }


@dataclass
class _Side:
    """One of the two pairs while it runs."""

    name: str
    prefill: Server
    decode: Server
    handoff_log: Path
    decode_side_port: int | None = None
    rounds: list[Round] = field(default_factory=list)
    seen_handoffs: int = 0

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at `percent`, interpolated between neighbours."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def bench_pd(settings: BenchSettings, progress: Progress) -> dict[str, Any]:
    """Run the comparison and return its report. Trigger of EngineError: an engine or a hand-off failed."""
    with Servers(settings.logs) as servers:
        sides = _start(settings, servers, progress)
        client = Client()
        try:
            for number in range(settings.pairs + 1):
                progress.stage(f"pair {number} of {settings.pairs}" if number else "warm-up")
                for side in sides if number % 2 else reversed(sides):
                    with _thawed(side):
                        measured = _measure(settings, client, side, number)
                    if number:
                        side.rounds.append(measured)
                progress.answered(number, settings.pairs)
            phases = _phases(sides)
        finally:
            client.close()
            for side in sides:
                _for_each(side, Server.resume)
    return build(settings, {side.name: side.rounds for side in sides}, phases)


def build(
    settings: BenchSettings, rounds: dict[str, list[Round]], phases_s: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The report: per metric and pair, the median over the alternations and their spread; kvx over stock.

    `phases_s`: medians of what kvx's hand-offs were doing.
    """
    values = {name: [one.values() for one in found] for name, found in rounds.items()}
    metrics = {}
    for metric in METRICS:
        sides = {name: spread([one[metric] for one in found]) for name, found in values.items()}
        ratios = [a[metric] / b[metric] for a, b in zip(values[KVX], values[STOCK], strict=True)]
        metrics[metric] = {**sides, "ratio": spread(ratios)}
    everything = {name: [s for one in found for s in one.handoff_s] for name, found in rounds.items()}
    return {
        "kvx": kvx.__version__,
        "pairs": settings.pairs,
        "requests": settings.requests,
        "concurrency": settings.concurrency,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        **settings.run.described(),
        "metrics": metrics,
        "handoffs": {
            name: {"count": len(found), "p50_s": percentile(found, 50), "p99_s": percentile(found, 99)}
            for name, found in everything.items()
        },
        "phases_s": dict(phases_s or {}),
    }


def read_handoffs(text: str) -> list[float]:
    """Durations in seconds from a hand-off log; an unfinished last line is left for later."""
    complete = text[: text.rfind("\n") + 1]
    rows = [json.loads(line) for line in complete.splitlines()]
    return [row["arrived_s"] - row["asked_s"] for row in rows]


def _start(settings: BenchSettings, servers: Servers, progress: Progress) -> list[_Side]:
    """Both pairs, healthy and frozen."""
    progress.stage("starting a prefill and a decode server of each kind")
    logs = {name: servers.logs / f"{name}-handoffs.jsonl" for name in (KVX, STOCK)}
    for log in logs.values():
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    timed = {name: {"KVX_HANDOFF_LOG": str(log.resolve())} for name, log in logs.items()}
    pairs = [
        engines.kvx_pair(settings.run, digests=False, environment=timed[KVX]),
        engines.stock_pair(settings.run, environment=timed[STOCK]),
    ]
    started = engines.start_pairs(settings.run, servers, pairs, progress.waiting)
    sides = [_Side(name, *pair, log) for (name, log), pair in zip(logs.items(), started, strict=True)]
    sides[0].decode_side_port = pairs[0].decode_side_port
    for side in sides:
        _for_each(side, Server.pause)
    return sides


@contextmanager
def _thawed(side: _Side) -> Iterator[None]:
    _for_each(side, Server.resume)
    yield
    _for_each(side, Server.pause)


def _for_each(side: _Side, action: Callable[[Server], None]) -> None:
    for server in side.servers:
        action(server)


def _measure(settings: BenchSettings, client: Client, side: _Side, number: int) -> Round:
    """Ask both pairs the same prompts; prompts never repeat, so that no prefix cache can help."""
    timings = []
    for index in range(settings.requests):
        words = random.Random(f"{number}-{index}")
        prompt = [words.choice(_VOCABULARY) for _ in range(settings.prompt_tokens)]
        ask = Ask(f"{side.name}-{number}-{index}", prompt, settings.new_tokens, ignore_eos=True)
        try:
            timings.append(client.time_pair(side.prefill.url, side.decode.url, ask))
        except EngineError:
            _for_each(side, Server.check)
            raise
    return Round(
        first_token_s=[timing.first_token_s for timing in timings],
        prefill_s=[timing.prefill_s for timing in timings],
        between_tokens_s=[gap for timing in timings for gap in timing.gaps_s],
        handoff_s=_new_handoffs(side, settings.requests),
    )


def _phases(sides: Sequence[_Side]) -> dict[str, float]:
    """Seconds of each phase of a hand-off, medians of those that the decode engine still knows; where it is kvx's."""
    found: dict[str, list[float]] = {}
    for side in sides:
        if side.decode_side_port is not None:
            with _thawed(side):
                spans = request_status(HOST, side.decode_side_port)["spans_s"]
            for span in spans:
                for phase, seconds in span.items():
                    found.setdefault(phase, []).append(seconds)
    return {phase: statistics.median(values) for phase, values in found.items()}


def _new_handoffs(side: _Side, expected: int) -> list[float]:
    """The hand-offs logged since last time. Trigger of EngineError: fewer than were asked for."""
    deadline_s = time.monotonic() + _LOG_DEADLINE_S
    while True:
        found = read_handoffs(side.handoff_log.read_text())[side.seen_handoffs :]
        if len(found) >= expected:
            side.seen_handoffs += len(found)
            return found
        if time.monotonic() > deadline_s:
            raise EngineError(
                f"the {side.name} pair logged {len(found)} hand-offs of {expected}; see {side.decode.log}"
            )
        time.sleep(0.05)
