"""The load of a soak run: a router that keeps engines busy, aborts, kills, and knows how each request may end."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine_process import Remote, make_content, make_geometry
from soak_engine import Prompt, Resume
from soak_report import Look
from world import TOKENS, World

from kvx.plan import HeadRange, group_geometry

SETTINGS = {"transfer_deadline_s": 10.0, "lease_s": 10.0, "max_hold_s": 60.0}
BLOCK_TOKENS, MOST_BLOCKS = 16, 8
NUM_BLOCKS = 1024
"""Of each engine: enough for all that is on its way, and not for one lost block of each abort."""
CONCURRENCY = 32
ABORTED, CACHED, AT_PEER = 0.05, 0.25, 0.75
"""Shares of requests: that are aborted, of which decode has some blocks, that the engine that is killed prefills."""
WAIT_S = 0.02
HANG_S = 45.0
"""Three steps of a hand-off have a deadline each, and a busy machine adds to them."""
PROGRESS_S = 3.0


class Abort(StrEnum):
    """Who gives a request up: decode in the middle, decode at once (it only says so), prefill at any time."""

    READER = "by decode"
    UNWANTED = "by decode, before its begin"
    OWNER = "by prefill"


@dataclass
class Request:
    prompt: Prompt
    owner: Remote
    abort: Abort | None
    cached_blocks: int
    abort_after_s: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def num_wanted(self) -> int:
        """Tokens to be moved."""
        return self.prompt.num_tokens - self.cached_blocks * BLOCK_TOKENS


@dataclass
class Tally:
    """What became of the requests. `failures`: by cause, those that a kill or an abort explains."""

    received: int = 0
    released: int = 0
    wrong: int = 0
    aborts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Counter[str]] = field(default_factory=lambda: {"abort": Counter(), "kill": Counter()})
    kills: int = 0
    prompts_lost: int = 0
    digests_due: int = 0
    digests: dict[str, int] = field(default_factory=lambda: {"compared": 0, "differing": 0})
    failures_due: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> int:
        return self.received + self.released + sum(sum(causes.values()) for causes in self.failures.values())

    def as_row(self) -> dict[str, Any]:
        return {
            "hand_offs": self.ended, "received": self.received, "released_unread": self.released,
            "aborts": dict(self.aborts), "failures": {why: dict(causes) for why, causes in self.failures.items()},
            "kills": self.kills, "prompts_lost_to_kills": self.prompts_lost, "answers_wrong": self.wrong,
            "digests": self.digests,
        }  # fmt: skip


class Load:
    """`hand_offs` in laps of `lap`, after each of which all is at rest and looked at; `kills` of the peer."""

    def __init__(
        self, world: World, hand_offs: int, lap: int, kills: int, seed: int, tell: Callable[[str], None]
    ) -> None:
        self._world, self._tell, self._seed, self._rng = world, tell, seed, random.Random(seed)
        heads = world.reader.config.num_kv_heads
        self._group = group_geometry(make_geometry(world.reader.config), 0, HeadRange(0, heads, heads))
        self._laps = range(lap, hand_offs + 1, lap)
        # One kill before anything is measured: libraries take some things for good with the first. The last turn of a
        # lap, and of all, may end as many hand-offs as are on their way.
        first, rest = range(lap - 2 * CONCURRENCY), range(lap, hand_offs - 2 * CONCURRENCY)
        self._kill_at = deque(sorted([self._rng.choice(first), *self._rng.sample(rest, kills - 1)]))
        self.tally, self.looks = Tally(), list[Look]()
        self._killed: set[Remote] = set()
        self._running: dict[str, Request] = {}  # at decode
        self._ready: list[tuple[Request, Resume]] = []  # prefilled
        self._is_up, self._told = True, time.monotonic()
        self._began = time.monotonic()

    def run(self) -> None:
        """AssertionError: what a soak run must not show."""
        self._compared_before = self._world.reader.status()["digests"]["checked"]
        for end in self._laps:
            while self.tally.ended < end:
                self._turn(end)
                self._report()
            self._rest(end)

    # Turns

    def _turn(self, end: int) -> None:
        """All engines do their part of it at once, and a kill comes in the middle."""
        new, resumes, self._ready = self._new_requests(end), self._ready, []
        drops = [request for request, _ in resumes if request.abort is Abort.OWNER]
        self._greet_peer()
        prefilling = {
            owner: self._begin(owner, "prefill_all", [one.prompt for one in new if one.owner is owner],
                               [one.prompt.name for one in drops if one.owner is owner])
            for owner in self._owners()
        }  # fmt: skip
        self._running.update({request.prompt.name: request for request, _ in resumes})
        for request in self._running.values():
            assert time.monotonic() < request.began + HANG_S, f"{request} has no end"
        decoding = self._begin(self._world.reader, "resume_all", [resume for _, resume in resumes], WAIT_S)
        if self._kill_at and self.tally.ended >= self._kill_at[0]:
            self._kill()
        for name, ended in decoding().items():
            self._end(self._running.pop(name), ended)
        for owner, answer in prefilling.items():
            self._take_places(answer(), [one for one in new if one.owner is owner])

    def _owners(self) -> list[Remote]:
        return [self._world.well, *([self._world.peer] if self._is_up else [])]

    def _new_requests(self, end: int) -> list[Request]:
        on_its_way = len(self._running) + len(self._ready)
        count = min(CONCURRENCY - on_its_way, end - self.tally.ended - on_its_way)
        return [self._new_request() for _ in range(count)]

    def _new_request(self) -> Request:
        name, seed = self._world.new()
        rng = random.Random(f"{self._seed} {name}")  # its own: the same whatever has come between
        num_tokens = rng.randint(1, MOST_BLOCKS * BLOCK_TOKENS)
        is_at_peer = rng.random() < AT_PEER and self._is_up
        abort = rng.choice(list(Abort)) if rng.random() < ABORTED else None
        cached = rng.randint(0, (num_tokens - 1) // BLOCK_TOKENS) if rng.random() < CACHED else 0
        request = Request(Prompt(name, num_tokens, seed), self._owners()[is_at_peer], abort, cached)
        if abort is Abort.READER:
            request.abort_after_s = rng.choice([0.0, rng.uniform(0, 0.02)])
        return request

    def _take_places(self, places: Mapping[str, Any] | None, requests: list[Request]) -> None:
        """None: the owner was killed meanwhile, and nobody knows what it held."""
        if places is None:
            self.tally.prompts_lost += len(requests)
            return
        for request in requests:
            prompt = request.prompt
            if request.abort is Abort.UNWANTED:
                prompt = Prompt(prompt.name, 0, prompt.seed)
                request.cached_blocks = 0
            resume = Resume(prompt, places[prompt.name], request.cached_blocks, request.abort_after_s)
            self._ready.append((request, resume))
            if request.abort is not None:
                self.tally.aborts[request.abort.value] += 1

    def _end(self, request: Request, ended: dict[str, Any]) -> None:
        tally, cause = self.tally, ended["cause"]
        if cause:
            is_aborted = (request.abort, cause) in {(Abort.READER, "cancelled"), (Abort.OWNER, "refused")}
            assert is_aborted or request.owner in self._killed, f"{request} failed, and nothing explains it: {ended}"
            tally.failures["abort" if is_aborted else "kill"][cause] += 1
            tally.failures_due[cause] += request.abort is not Abort.UNWANTED  # which moves nothing
        elif request.abort is Abort.UNWANTED:
            tally.released += 1
        else:
            tally.received += 1
            tally.digests_due += request.num_wanted * self._group.heads.count
            tally.wrong += ended["answer"] != self._answer(request.prompt)
            assert not tally.wrong, f"{request}: what was read is not what its owner wrote"

    def _answer(self, prompt: Prompt) -> str:
        """Of the content that this request and no other has, made here."""
        return hashlib.sha256(make_content(self._group, prompt.num_tokens, prompt.seed).numpy().tobytes()).hexdigest()

    # Kills

    def _kill(self) -> None:
        self._kill_at.popleft()
        time.sleep(self._rng.uniform(0, 0.01))  # anywhere in the turn's work, or in a start
        self._killed.add(self._world.peer)
        self._world.peer.signal(signal.SIGKILL)
        self._world.begin_restart(same_port=self._is_up and self._rng.random() < 0.5)
        self._is_up = False
        self.tally.kills += 1

    def _greet_peer(self, must: bool = False) -> None:
        if not self._is_up and (must or self._world.peer.has_answer()):
            self._world.peer.ready()
            self._is_up = True

    def _begin(self, engine: Remote, name: str, *args: Any) -> Callable[[], Any]:
        """Call a method of an engine, which may be killed meanwhile: its answer is None then."""
        answer = engine.begin(name, *args)

        def take() -> Any:
            try:
                return answer()
            except (EOFError, OSError) as error:
                if engine in self._killed:
                    return None
                engine.process.join(1)
                code = engine.process.exitcode
                raise AssertionError(
                    f"engine {engine.config.engine_id} is gone, exit code {code}: {error!r}"
                ) from error

        return take

    # Rest

    def _rest(self, end: int) -> None:
        """Everything has ended: what is still held now is lost."""
        assert not self._running
        assert not self._ready
        world = self._world
        self._greet_peer(must=True)
        world.hand_off(world.peer, world.well)  # whoever came last has been read from as well
        self.tally.digests_due += 2 * TOKENS * self._group.heads.count
        world.require_blocks_back()
        world.require_no_internal_errors()
        self._require_counted()
        world.note_footprints()
        world.require_nothing_leaked()
        self.looks.append(Look(end, {"decode": world.reader.look(), "prefill": world.well.look()}))

    def _require_counted(self) -> None:
        """kvx's own counters say what happened."""
        tally, decode, prefill = self.tally, self._world.reader.status(), self._world.well.status()
        tally.digests = {
            "compared": decode["digests"]["checked"] - self._compared_before,
            "differing": decode["digests"]["mismatched"],
        }
        assert tally.digests == {"compared": tally.digests_due, "differing": 0}, (
            f"{tally.digests_due} digests are due: {tally.digests}"
        )
        assert decode["transfer"]["failures"] == {cause: n for cause, n in tally.failures_due.items() if n}
        assert prefill["handoff"]["expired"] == 0, "whoever gives a request up says so, and nobody waits for a lease"

    def _report(self) -> None:
        now = time.monotonic()
        if now >= self._told + PROGRESS_S:
            self._told = now
            tally = self.tally
            failed = {why: sum(causes.values()) for why, causes in tally.failures.items()}
            self._tell(
                f"{self._world.connector}: {tally.ended} of {self._laps[-1]} hand-offs, {tally.received} received, "
                f"failed by abort {failed['abort']}, by kill {failed['kill']}; kills {tally.kills}; "
                f"{now - self._began:.0f} s"
            )
