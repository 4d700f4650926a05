"""Whatever happens to holds in whatever order, each ends exactly once, in bounded time, and is not read after that."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvx.handshake import Claim, Claimed, Message, Refused, Renew, Renewed
from kvx.holds import Hold, HoldTable

LEASE_S, GRACE_S, LONGEST_S = 10.0, 2.0, 35.0
NAMES = st.sampled_from(["a", "b", "c"])
READERS = st.sampled_from(["1", "2", "3"])


class Holds(RuleBasedStateMachine):
    """The table, its clock, and a model: when each hold began, how often it was freed, what its readers were told."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.sent: list[Message] = []
        self.table = HoldTable("i", GRACE_S, lambda _, message: self.sent.append(message))
        self.began: dict[str, float] = {}  # of each hold that was ever added, by its unique name
        self.freed: Counter[str] = Counter()
        self.promised: dict[str, float] = {}  # until when readers may use what they read
        self.current: dict[str, str] = {}  # name -> the unique name that it has now
        self.asked: dict[int, str] = {}
        self.answered: Counter[int] = Counter()

    def free(self, *request_ids: str) -> None:
        self.freed.update(request_ids)

    def hear(self) -> None:
        """What was answered: promises, and at most one answer to each claim."""
        sent, self.sent = self.sent, []
        for message in sent:
            self.answered[message.sequence] += 1
            if isinstance(message, Claimed | Renewed):
                assert message.request_id not in self.freed, "it is gone"
                until = self.now + message.left_s
                assert until <= self.began[message.request_id] + LONGEST_S + GRACE_S + 1e-6
                self.promised[message.request_id] = max(self.promised.get(message.request_id, 0.0), until)
            else:
                assert isinstance(message, Refused)

    def name_of(self, name: str) -> str:
        return self.current.get(name, name)

    @rule(name=NAMES)
    def hold(self, name: str) -> None:
        if self.table.is_suspended or self.name_of(name) in self.table.holds:
            return
        unique = f"{name}{len(self.began)}"
        if name in self.current and self.current[name] not in self.began:
            unique = self.current[name]  # somebody waits for it already
        self.current[name] = unique
        self.began[unique] = self.now
        self.table.add(Hold(unique, ((1,),), 8, self.now + LEASE_S, LEASE_S, self.now + LONGEST_S), self.now)
        self.hear()

    @rule(name=NAMES, reader=READERS, wait=st.floats(0, 20), claims=st.sampled_from([1, 1, 2, 3]))
    def claim(self, name: str, reader: str, wait: float, claims: int) -> None:
        """By a pull alone, or by one of several ranks, of which some may never come."""
        self.current.setdefault(name, f"{name}0")
        sequence = len(self.asked) + 1
        self.asked[sequence] = reader
        unique = self.name_of(name)
        self.table.claim(
            b"",
            Claim(
                sequence=sequence,
                request_id=unique,
                reader=reader,
                wait_s=wait,
                share="s" * (claims > 1),
                claims=claims,
            ),
            self.now,
        )
        self.hear()

    @rule(name=NAMES)
    def renew(self, name: str) -> None:
        self.table.renew(b"", Renew(sequence=0, request_id=self.name_of(name)), self.now)
        self.hear()

    @rule(name=NAMES, reader=READERS)
    def release(self, name: str, reader: str) -> None:
        """Also what a cancelled, failed or rejected pull ends with; a reader that dies sends nothing."""
        hold = self.table.holds.get(self.name_of(name))
        awaited = dict(hold.awaited) if hold is not None else {}
        if self.table.release(self.name_of(name), reader):
            assert sum(awaited.values()) <= 1, "another rank still comes"
            self.free(self.name_of(name))
        self.hear()

    @rule(name=NAMES)
    def abort(self, name: str) -> None:
        if self.table.drop(self.name_of(name)):
            self.free(self.name_of(name))
        self.hear()

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ended = self.table.expire(self.now)
        assert all(self.now >= self.promised.get(request_id, 0.0) for request_id in ended), "taken too early"
        self.free(*ended)
        self.hear()

    @rule()
    def suspend(self) -> None:
        ended = self.table.suspend()
        self.free(*ended)
        self.hear()

    @rule()
    def resume(self) -> None:
        if not self.table.holds:
            self.table.generation, self.table.is_suspended = self.table.generation + 1, False

    @invariant()
    def each_hold_is_kept_or_was_freed_once(self) -> None:
        if not hasattr(self, "table"):
            return
        assert set(self.freed.values()) <= {1}
        assert set(self.table.holds).isdisjoint(self.freed)
        assert set(self.table.holds) | set(self.freed) == set(self.began)
        assert all(count == 1 for sequence, count in self.answered.items() if sequence)

    def teardown(self) -> None:
        """All readers die: everything is freed within the longest time and the grace, and every claim is answered."""
        if not hasattr(self, "table"):
            return
        self.time_passes(LONGEST_S + GRACE_S)
        self.each_hold_is_kept_or_was_freed_once()
        assert not self.table.holds
        assert set(self.asked) <= set(self.answered)
        assert self.table.next_time() is None


Holds.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestHolds = Holds.TestCase
