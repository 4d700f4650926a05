"""The same of engines of several ranks that need not be as many: whatever happens to any of them, in whatever order.

Beyond what `test_handoff_machine` asks of each engine, here of each rank:

- what decode uses is right in every head, of which each is read once;
- prefill's rank lets go, before its lease ends, only when all ranks of a reader that are to come have been there;
- where one part of a request has failed, none of its others goes on;
- when all are well again, a hand-off succeeds however long it waits, and no rank of prefill waits for the lease.
"""

from __future__ import annotations

import pytest
from handoff_world import LEASE_S, LOOK_S
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from ranks_world import RankedWorld
from test_handoff_machine import INDEX, SETTINGS, Handoff

# Ranks of prefill, ranks of decode, KV heads.
ENGINES = [(2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 1, 1), (1, 2, 1)]


class RankedHandoff(Handoff):
    world: RankedWorld | None
    engines = ENGINES[0]

    inverts = False

    @initialize(verify=st.booleans(), has_secret=st.booleans())
    def begin(self, verify: bool, has_secret: bool) -> None:
        owner_size, reader_size, total_heads = self.engines
        self.world = RankedWorld(
            verify=verify != self.inverts, has_secret=has_secret,
            owner_size=owner_size, reader_size=reader_size, total_heads=total_heads,
        )  # fmt: skip

    @rule(which=INDEX, count=st.integers(1, 3))
    def hand_offs_begin(self, which: int, count: int) -> None:
        """Once more: Hypothesis leaves rules out of an example, and the others do little without this one."""
        self.engines_act("hand off", which, count)

    @rule(
        what=st.sampled_from([*["nothing"] * 10, "stop", "stop", "stop", "memory", "memory", "grows", "death"]),
        whom=st.sampled_from(["prefill", "decode"]),
        which=INDEX,
    )
    def something_befalls(self, what: str, whom: str, which: int) -> None:
        """One rank, or all of an engine; each is taken back when it comes again."""
        ranks = self.w.prefill.ranks if whom == "prefill" else self.w.decode.ranks
        for rank in ranks if which > 5 else [ranks[which % len(ranks)]]:
            self.befall(what, rank)
        self.w.settle()

    @invariant()
    def a_request_ends_as_one(self) -> None:
        for rank in [] if self.world is None else self.w.decode.ranks:
            for joint in rank.worker._puller._joints.values() if rank.runs else ():
                fails = any(pull.cause is not None and pull.spec.num_tokens for pull in joint.pulls)
                goes_on = any(pull.cause is None for pull in joint.pulls)
                assert not (goes_on and (fails or joint.failed)), "a part goes on of what has failed"

    def end(self) -> None:
        super().end()
        if not self.w.held:
            return
        self.w.recover()
        for connection in list(self.w.network.connections):  # nothing is lost but with its connection
            self.w.network.hang_up(connection)
        self.w.settle()
        self.hand_off_in_peace(waits_s=1.5 * LEASE_S)
        self.hand_off_in_peace(gives_up=True)

    def hand_off_in_peace(self, *, waits_s: float = 0.0, gives_up: bool = False) -> None:
        prefill, decode = self.w.prefill, self.w.decode
        expired = [rank.worker.metrics.expired for rank in prefill.ranks]
        prefill.prefill(2)
        held = list(self.w.held.values())[-1]
        decode.wait(prefill, held)
        until = self.w.now + waits_s
        while self.w.now < until:
            self.w.settle()
            self.w.deliver_all()
            self.w.pass_time(LOOK_S)
        decode.pull(prefill, held, 0, gives_up)
        (name,) = decode.pulls
        for _ in range(2):
            self.w.settle()
            self.w.deliver_all()
            self.read_to_the_end()
        assert decode.outcomes[name] == "received"
        assert not prefill.holds, "every rank has let go"
        assert [rank.worker.metrics.expired for rank in prefill.ranks] == expired, "and not because of its lease"


def run(engines: tuple[int, int, int], numbers: range, steps: int) -> None:
    """An example for each number, and one in which nothing happens, with which Hypothesis begins.

    Each has a run of its own: in one run for all, most are the one before with some steps changed, and every other one
    is without a hand-off. What is drawn first is always another than in the first example, so every other run inverts.
    """
    name = "RankedHandoff{}To{}Of{}Heads".format(*engines)
    for number in numbers:
        fields = {"engines": engines, "inverts": number % 2 == 1}
        machine = seed(ENGINES.index(engines) * 10_000 + number)(type(name, (RankedHandoff,), fields))
        run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=2, stateful_step_count=steps))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("engines", ENGINES)
def test_hand_offs_between_ranks(engines: tuple[int, int, int]) -> None:
    run(engines, range(40), 40)


@pytest.mark.fuzz
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engines", ENGINES)
def test_many_more_hand_offs_between_ranks(engines: tuple[int, int, int]) -> None:
    run(engines, range(40, 640), 60)
