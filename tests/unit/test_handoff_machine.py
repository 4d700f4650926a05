"""Whatever happens to both sides of a hand-off, in whatever order: one owner a block, and an end in time.

Two real `HandoffWorker`s; `handoff_world` plays their clock, network, transfer library and memory. After every step:

- a block is one request's, on each side, until kvx says that it may be freed, which it says once;
- a hold ends at the latest with lease and grace, and a pull, exactly once, with its deadlines and the library's drain;
- what a pull hands to its engine is what was held, to the last byte, though a freed block has other content at once;
- nothing is written for a pull that has ended.
"""

from __future__ import annotations

from unittest import mock

import pytest
from handoff_world import (
    BLOCKS,
    DEADLINE_S,
    DRAIN_S,
    EXACT_S,
    GRACE_S,
    LEASE_S,
    LONGEST_S,
    LOOK_S,
    Engine,
    SimulatedExecutor,
    World,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvx import engine_side

INDEX = st.integers(0, 7)
# Claim, move, check: each has a deadline; a transfer that is stopped drains, and is looked at now and then.
LONGEST_PULL_S = 3 * DEADLINE_S + DRAIN_S + 4 * LOOK_S


class Handoff(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(engine_side, "ThreadPoolExecutor", SimulatedExecutor)
        self.patch.start()
        self.world: World | None = None

    @initialize(verify=st.booleans(), has_secret=st.booleans())
    def begin(self, verify: bool, has_secret: bool) -> None:
        self.world = World(verify=verify, has_secret=has_secret)

    @property
    def w(self) -> World:
        assert self.world is not None
        return self.world

    # Few rules with many kinds each: Hypothesis leaves rules out of an example, and the worst needs many kinds at once.

    @rule(
        what=st.sampled_from(
            ["hand off", "hand off", "hand off", "prefill", "pull", "pull", "wait", "drop", "drop", "cancel"]
        ),
        which=INDEX,
        count=st.integers(1, 3),
    )
    def engines_act(self, what: str, which: int, count: int) -> None:
        """Both engines' own calls."""
        prefill, decode = self.w.prefill, self.w.decode
        held = list(prefill.holds.values()) if which else list(self.w.held.values())  # also what was held once
        chosen = held[-1 - which % len(held)] if held else None
        if what == "hand off":  # the usual way, as far as the library, or not so far
            if which % 2:
                self.w.recover()
            before = len(self.w.held)
            prefill.prefill(count)
            if len(self.w.held) > before:
                decode.pull(prefill, list(self.w.held.values())[-1], 0, gives_up=which == 7)
                self.w.settle()
                self.w.deliver_some(count) if which in (4, 5, 6) else self.w.deliver_all()
        elif what == "prefill":
            prefill.prefill(count)
        elif what == "pull":
            decode.pull(prefill, chosen, count - 1, gives_up=which == 7)
        elif what == "wait" and chosen is not None:
            decode.wait(prefill, chosen)
        elif what == "drop" and chosen is not None:
            prefill.drop(chosen.name)
        elif what == "cancel" and decode.pulls:
            decode.cancel(list(decode.pulls)[which % len(decode.pulls)])
        self.w.settle()

    @rule(what=st.sampled_from(["all", "all", "all", "one", "twice", "lose", "lose", "break"]), which=INDEX)
    def network_acts(self, what: str, which: int) -> None:
        """In order; out of order, more than once, never; or never again."""
        messages = self.w.network.in_flight
        if what == "all":
            self.w.deliver_all()
        elif messages:
            message = messages[which % len(messages)]
            if what == "lose":
                self.w.network.lose(message)
            elif what == "break":
                self.w.network.hang_up(message.connection)
            else:
                self.w.network.deliver(message, keep=what == "twice")
            self.w.settle()

    @rule(
        what=st.sampled_from(["all", "all", "all", "move", "move", "flip", "over", "over", "broken", "digests"]),
        which=INDEX,
    )
    def library_acts(self, what: str, which: int) -> None:
        """It copies a block, and says when it is done, drained or broken; a digest thread gets its turn."""
        reads = self.w.decode.reads
        if what == "all":  # the usual way
            self.read_to_the_end()
        elif what == "digests":
            self.take_digests()
        elif reads:
            read = reads[which % len(reads)]
            # A byte that changes on its way is noticed where digests are compared.
            self.w.move(read, len(read.pieces) if what == "over" else 1, flip=what == "flip" and self.w.verify)
            read.is_over |= what in ("over", "broken")
            read.is_broken |= what == "broken"
        self.w.settle()

    def read_to_the_end(self) -> None:
        for read in self.w.decode.reads:
            self.w.move(read, len(read.pieces))
            read.is_over = True
        for _ in range(2):
            self.w.pass_time(0.3)
            self.take_digests()
            self.w.deliver_all()

    def take_digests(self) -> None:
        for job in list(SimulatedExecutor.jobs):
            job.work()
        self.w.settle()

    @rule(seconds=st.sampled_from([0.004, 0.3, 1.0, 2.0, 4.0, 5.5, 5.5, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.w.pass_time(seconds)

    @rule(
        what=st.sampled_from([*["nothing"] * 10, "stop", "stop", "stop", "memory", "memory", "grows", "death"]),
        name=st.sampled_from(["prefill", "decode"]),
    )
    def something_befalls(self, what: str, name: str) -> None:
        """Each is taken back when it comes again."""
        self.befall(what, self.w.engines[name])
        self.w.settle()

    def befall(self, what: str, engine: Engine) -> None:
        if what == "death":
            engine.die() if engine.is_alive else engine.start()
        elif what == "stop":
            engine.stop_or_go_on()
        elif what != "nothing":
            engine.wake() if engine.is_asleep else engine.change(what == "grows")

    # What must be so

    @invariant()
    def everything_ends_in_time(self) -> None:
        for engine in [] if self.world is None else self.w.engines.values():
            if engine.runs:
                assert engine.worker._side.metrics.internal_errors == 0
                self.holds_end_in_time(engine)
                self.pulls_end_in_time(engine)

    def holds_end_in_time(self, engine: Engine) -> None:
        table, now = engine.worker._holder._table, engine.clock()
        assert table.holds.keys() == engine.holds.keys(), "kept by both or by neither"
        for hold in table.holds.values():
            assert hold.expires <= now + LEASE_S, "nobody renews for longer than a lease"
            assert now < hold.expires + (GRACE_S if hold.readers else 0.0) + EXACT_S
            assert self.w.now < engine.holds[hold.request_id].began + LONGEST_S + GRACE_S + EXACT_S
        if engine.ended is not None:
            longest = max(LEASE_S + GRACE_S, DEADLINE_S)
            assert self.w.now < engine.change_began + longest + engine.slack_s + LOOK_S, "the memory is waited for"

    def pulls_end_in_time(self, engine: Engine) -> None:
        for pulled in engine.pulls.values():
            assert self.w.now < pulled.began + LONGEST_PULL_S + engine.slack_s, f"{pulled.name} never ends"

    def teardown(self) -> None:
        try:
            if self.world is not None and not self.w.is_wrong:
                self.end()
        finally:
            self.patch.stop()
            if self.world is not None:
                self.world.close()

    def end(self) -> None:
        """Nobody hears anybody any more, and the library only drains: all comes back, and all fall asleep."""
        for engine in self.w.engines.values():
            engine.is_stopped = False
            engine.wakes = self.w.now
        self.w.network.in_flight.clear()
        self.w.pass_time(LONGEST_S + GRACE_S)
        self.w.network.in_flight.clear()
        self.w.pass_time(LONGEST_PULL_S)
        for engine in self.w.engines.values():
            if engine.is_alive:
                self.everything_ends_in_time()
                assert (engine.holds, engine.pulls) == ({}, {})
                assert not engine.worker._puller.is_moving
                assert not engine.worker._holder._table._parked
                assert len(engine.free) == BLOCKS


# Without shrinking, which takes minutes: what fails is at most so many steps long. The same examples in every run.
SETTINGS = settings(
    max_examples=300, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
Handoff.TestCase.settings = SETTINGS
TestHandoff = Handoff.TestCase


@pytest.mark.fuzz
@pytest.mark.timeout(2400)
def test_many_more_hand_offs() -> None:
    run_state_machine_as_test(Handoff, settings=settings(SETTINGS, max_examples=6000, stateful_step_count=60))  # type: ignore[no-untyped-call]
