"""A byte-identity run: ask one stock server, stop it, ask a kvx pair the same, and report what differs.

The baseline and the pair run one after the other, so that the run needs the memory of two engines, not of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import kvx
from kvx.errors import HandshakeError
from kvx.handshake import request_status
from kvx.servers import Server, Servers
from kvx.verify import engines, offload, report
from kvx.verify.client import Answer, Ask, Client
from kvx.verify.places import DECODE, HOST, PREFILL
from kvx.verify.questions import STOP, Problem, prompt

SETTLE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """One verified run: the engines, the questions, and how they are asked."""

    run: engines.RunSettings
    problems: Sequence[Problem]
    shots: Sequence[Problem] = ()
    max_tokens: int = 128
    concurrency: int = 4
    judge_answers: bool = True
    expect_fallbacks: int = 0
    logs: Path | None = None


class Progress(Protocol):
    """Where a run says how far it is."""

    def stage(self, text: str) -> None: ...

    def waiting(self, server: Server, seconds: float) -> None: ...

    def answered(self, done: int, total: int) -> None: ...


def verify(settings: VerifySettings, progress: Progress) -> dict[str, Any]:
    """Run both sides and return the report. Engines that do not start raise EngineError; answers never raise."""
    started_s = time.monotonic()
    asks = [_ask(settings, index) for index in range(len(settings.problems))]
    with Servers(settings.logs) as servers:
        servers.watch_memory()
        baseline = _ask_baseline(settings, servers, asks, progress)
        if settings.run.offloading:
            run = offload.fitted(settings.run, baseline, settings.max_tokens)
            settings = replace(settings, run=run)
        rounds, statuses, counters = _ask_candidate(settings, servers, asks, progress)
        findings = report.Findings(
            problems=settings.problems,
            baseline=baseline,
            rounds=rounds,
            engines=statuses,
            decode_counters=counters,
            judge_answers=settings.judge_answers,
            offloads=bool(settings.run.offloading),
            hands_off=settings.run.hands_off,
            expected_fallbacks=settings.expect_fallbacks,
        )
        candidate = findings.candidate
        peak_bytes = servers.peak_memory_bytes
    return {
        "kvx": kvx.__version__,
        "settings": _described(settings),
        **report.build(findings),
        "duration_s": round(time.monotonic() - started_s, 1),
        "memory": {"peak_bytes": peak_bytes},
        "answers": [
            {"question": p.question, "gold": p.gold, "baseline": a.__dict__, "candidate": b.__dict__}
            for p, a, b in zip(settings.problems, baseline, candidate, strict=True)
        ],
    }


def _ask(settings: VerifySettings, index: int) -> Ask:
    problem, shots = settings.problems[index], settings.shots
    text = prompt(problem, shots)
    if settings.run.offloading:
        text = offload.prompt(problem, shots, number=index + 1, block_size_tokens=settings.run.block_size_tokens)
    return Ask(request_id=f"question-{index}", prompt=text, max_tokens=settings.max_tokens, stop=STOP)


def _ask_baseline(
    settings: VerifySettings, servers: Servers, asks: Sequence[Ask], progress: Progress
) -> Sequence[Answer]:
    progress.stage("baseline: starting one stock server")
    server = servers.start(engines.baseline(settings.run))
    servers.wait_healthy(waiting=progress.waiting)
    progress.stage("baseline: asking")
    client = Client()
    try:
        answers = _ask_all(settings, asks, lambda ask: client.ask_single(server.url, ask), server.check, progress)
    finally:
        client.close()
    servers.stop_all()
    return answers


@dataclass(frozen=True)
class _Candidate:
    """The engines under test; the last one gives the answers."""

    servers: tuple[Server, ...]
    side_channels: Mapping[str, tuple[str, int]]  # role, and rank after the first -> host and port

    def ask(self, client: Client, ask: Ask) -> Answer:
        first, last = self.servers[0], self.servers[-1]
        return client.ask_single(last.url, ask) if first is last else client.ask_pair(first.url, last.url, ask)

    def check(self) -> None:
        for server in self.servers:
            server.check()


def _start_candidate(run: engines.RunSettings, servers: Servers, progress: Progress) -> _Candidate:
    if run.hands_off:
        progress.stage("candidate: starting a prefill and a decode server")
        pair = engines.kvx_pair(run, digests=True)
        ports = {PREFILL: pair.prefill_side_port, DECODE: pair.decode_side_port}
        channels = {
            report.name_of_rank(role, rank): (run.place(role).side_channel_host, port + rank)
            for role, port in ports.items()
            for rank in range(run.shape(role).tp_size)
        }
        return _Candidate(engines.start_pairs(run, servers, [pair], progress.waiting)[0], channels)
    progress.stage("candidate: starting one server")
    engine, port = engines.kvx_single(run, digests=True)
    server = servers.start(engine)
    servers.wait_healthy(waiting=progress.waiting)
    return _Candidate((server,), {engines.SINGLE: (HOST, port)})


def _ask_candidate(
    settings: VerifySettings, servers: Servers, asks: Sequence[Ask], progress: Progress
) -> tuple[Sequence[Sequence[Answer]], dict[str, dict[str, Any]], dict[str, float]]:
    """Answers of each round, statuses by role, and the counters of the engine that answers."""
    candidate = _start_candidate(settings.run, servers, progress)
    client = Client()
    try:
        progress.stage("candidate: asking")
        ask_one = partial(candidate.ask, client)
        rounds = [_ask_all(settings, asks, ask_one, candidate.check, progress)]
        if settings.run.offloading:
            progress.stage("candidate: asking again, backwards")
            again = [replace(ask, request_id=f"{ask.request_id}-again") for ask in reversed(asks)]
            rounds.append(_ask_all(settings, again, ask_one, candidate.check, progress)[::-1])
        statuses = _settled_statuses(candidate.side_channels)
        counters = client.counters(candidate.servers[-1].url)
    finally:
        client.close()
    servers.stop_all()
    return rounds, statuses, counters


def _ask_all(
    settings: VerifySettings,
    asks: Sequence[Ask],
    ask_one: Callable[[Ask], Answer],
    check: Callable[[], None],
    progress: Progress,
) -> list[Answer]:
    """Ask everything, `concurrency` at a time; raise EngineError as soon as an engine has ended."""
    answers: list[Answer] = []
    with ThreadPoolExecutor(settings.concurrency, thread_name_prefix="kvx-ask") as pool:
        try:
            for answer in pool.map(ask_one, asks):
                if answer.error:
                    check()
                answers.append(answer)
                progress.answered(len(answers), len(asks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return answers


def _settled_statuses(channels: Mapping[str, tuple[str, int]]) -> dict[str, dict[str, Any]]:
    """Each engine's status once nothing is held or pinned any more, or as it is after SETTLE_S seconds."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        try:
            found = {role: request_status(*where) for role, where in channels.items()}
        except HandshakeError:
            if time.monotonic() > deadline_s:
                return {}
            continue
        busy = [s["handoff"]["holds"] or s.get("offload", {}).get("pinned", 0) for s in found.values()]
        if not any(busy) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


def _described(settings: VerifySettings) -> dict[str, Any]:
    return {
        **settings.run.described(),
        "shots": len(settings.shots),
        "max_tokens": settings.max_tokens,
        "concurrency": settings.concurrency,
        "answers_judged": settings.judge_answers,
        "expected_fallbacks": settings.expect_fallbacks,
    }
