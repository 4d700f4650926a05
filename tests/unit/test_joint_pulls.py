"""One request from several ranks of its owner: read together, ended together, and each rank is told."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import torch
from fake_connector import BASE, FakeConnector, region
from geometry_cases import fixed_seed
from hypothesis import given
from hypothesis import strategies as st
from test_handshake import INFO
from test_pulls import LAYER, FakeLink, Pair

from kvx.connector import Transfer, TransferState
from kvx.errors import PeerDead
from kvx.geometry import HeadRange
from kvx.handshake import Claim, Claimed, Hello, Refused, Release, welcome
from kvx.peer import PeerDescriptor
from kvx.ranks import shares

WHOLE = dataclasses.replace(
    LAYER, heads=HeadRange(0, 2, 2), head_stride_bytes=256, token_stride_bytes=16, content_bytes=16
)


class Ranks(Pair):
    """We hold two heads; the owner's two ranks hold one each, or both the same where there is only one."""

    def __init__(self, *, total_heads: int = 2, reader_size: int = 1) -> None:
        super().__init__()
        self.totals, self.reader_size = [total_heads], reader_size
        self.side.update(
            [WHOLE if total_heads == 2 else LAYER], {"a": torch.zeros(100, total_heads, 16, 4)}, 100, 1, "LBHNC"
        )

    def rank(self, number: int) -> PeerDescriptor:
        layer = LAYER
        if self.totals == [2]:
            layer = dataclasses.replace(
                WHOLE, heads=HeadRange(number, 1, 2), block_stride_bytes=256, kernel_block_stride_bytes=256
            )
        info = msgspec.structs.replace(INFO, tp_rank=number, tp_size=2)
        connector = FakeConnector()
        connector._metadata = lambda: b"rank %d" % number  # type: ignore[method-assign]
        connector.open([region(0, 100 * 512, base=(2 + number) * BASE)], 1)
        return dataclasses.replace(
            self.theirs, info=info, instance=f"i{number}", groups=(layer,), connectors={"fake": connector.metadata()}
        )

    def begin(self, **fields: object) -> tuple[FakeLink, FakeLink]:
        """Both ranks have been greeted."""
        self.start(shares=tuple(shares(self.totals, 0, self.reader_size, 2)), **fields)
        first, second = self.links
        for number, link in enumerate((first, second)):
            assert link.port == 1 + number
            link.answer(Hello, welcome(1, self.rank(number)))
        return first, second

    def give(self, number: int) -> Transfer | None:
        """That rank names its blocks; the transfer that begins, if one does."""
        before = list(self.connector._pending)
        claimed = Claimed(
            sequence=1, request_id="theirs", instance=f"i{number}", generation=1, blocks=[[3, 5]], num_tokens=32,
            left_s=30.0,
        )  # fmt: skip
        self.links[number].answer(Claim, claimed)
        return next((transfer for transfer in self.connector._pending if transfer not in before), None)

    def claim(self, number: int) -> Claim:
        (found,) = [message for message, _ in self.links[number].asked if isinstance(message, Claim)]
        return found

    def told(self) -> list[list[str]]:
        """Whose claims have been released, at each rank."""
        self.puller.tick(time.monotonic() + 1)
        return [[message.reader for message in link.told if isinstance(message, Release)] for link in self.links]

    def all_ended(self) -> bool:
        return not self.puller.is_moving and not self.puller._joints


def test_each_rank_brings_its_heads_and_the_request_ends_with_the_last() -> None:
    pair = Ranks()
    pair.begin()
    readers = [pair.claim(number).reader for number in (0, 1)]
    assert readers[0] != readers[1]
    assert [pair.claim(number).claims for number in (0, 1)] == [1, 1]
    first, second = pair.give(0), pair.give(1)
    assert first is not None
    assert second is not None
    local = [(copies.local - BASE).tolist() for copies in pair.connector.copies]
    assert local == [[7 * 512, 8 * 512], [7 * 512 + 256, 8 * 512 + 256]], "one head each"
    pair.finish(second)
    assert pair.events().received == frozenset(), "half of it is missing"
    pair.finish(first)
    assert pair.events().received == {"r"}
    assert pair.told() == [[readers[0]], [readers[1]]]
    metrics = pair.side.metrics
    assert (metrics.received, metrics.transfers, metrics.blocks, metrics.bytes) == (1, 2, 2, 2 * 512)
    assert pair.all_ended()


def test_one_rank_that_refuses_ends_the_request_when_the_others_are_drained() -> None:
    pair = Ranks()
    _, second = pair.begin()
    moving = pair.give(0)
    assert moving is not None
    second.answer(Claim, Refused(sequence=1, reason="its lease ran out", cause="lease_expired"))
    assert pair.events().failed == {}, "the other rank's transfer still writes"
    assert "cancel" in pair.connector.calls
    pair.finish(moving)
    failure = pair.events().failed["r"]
    assert failure.cause == "lease_expired"
    assert failure.peer == "e at 10.0.0.1:2", "the rank that refused"
    assert [len(readers) for readers in pair.told()] == [1, 1]
    assert pair.side.metrics.failures == {"lease_expired": 1}
    assert pair.all_ended()


def test_a_rank_that_dies_ends_the_request_once() -> None:
    pair = Ranks()
    first, _ = pair.begin()
    transfers = [pair.give(0), pair.give(1)]
    pair.puller.on_link_lost(first, PeerDead("it ended"))  # type: ignore[arg-type]
    assert pair.connector.calls.count("cancel") == 2, "the other one's, before the first is drained"
    for transfer in transfers:
        assert transfer is not None
        assert pair.events().failed == {}
        pair.finish(transfer)
    assert pair.events().failed["r"].cause == "peer_dead"
    assert pair.all_ended()


def test_a_cancelled_request_is_cancelled_at_every_rank() -> None:
    pair = Ranks()
    pair.begin()
    moving = pair.give(0)
    assert moving is not None
    pair.puller.cancel("r")
    assert pair.events().failed == {}
    pair.finish(moving)
    assert pair.events().failed["r"].cause == "cancelled"
    assert [len(readers) for readers in pair.told()] == [1, 1]
    assert pair.all_ended()


def test_a_head_that_both_ranks_hold_is_read_once_and_the_other_rank_is_told() -> None:
    pair = Ranks(total_heads=1)
    pair.begin()
    assert pair.give(1) is None
    moving = pair.give(0)
    assert moving is not None
    assert pair.events().received == frozenset()
    pair.finish(moving)
    assert pair.events().received == {"r"}
    assert [len(readers) for readers in pair.told()] == [1, 1]
    assert pair.side.metrics.transfers == 1


def test_a_rank_that_is_only_told_fails_nothing() -> None:
    pair = Ranks(total_heads=1)
    _, second = pair.begin()
    second.answer(Claim, Refused(sequence=1, reason="its lease ran out", cause="lease_expired"))
    moving = pair.give(0)
    assert moving is not None
    pair.finish(moving)
    events = pair.events()
    assert (events.received, events.failed) == ({"r"}, {})


def test_a_request_that_needs_nothing_tells_every_rank() -> None:
    pair = Ranks()
    pair.begin(num_tokens=0, blocks=[[]])
    assert pair.give(0) is None
    assert pair.events().received == frozenset()
    assert pair.give(1) is None
    assert pair.events().received == {"r"}
    assert [len(readers) for readers in pair.told()] == [1, 1]
    assert pair.side.metrics.released_only == 1


def test_ranks_of_one_reader_say_how_many_claims_come() -> None:
    """The owner has one rank, we have two: both claim it under one share."""
    pair = Ranks()
    pair.start(shares=tuple(shares([2], 1, 2, 1)))
    (link,) = pair.links
    whole = dataclasses.replace(pair.theirs, groups=(WHOLE,))
    pair.side.update(
        [dataclasses.replace(WHOLE, heads=HeadRange(1, 1, 2))], {"a": torch.zeros(100, 1, 16, 4)}, 100, 1, "LBHNC"
    )
    link.answer(Hello, welcome(1, whole))
    claim = pair.claim(0)
    assert (claim.share, claim.claims) == ("e/r", 2)


def test_a_rank_that_holds_other_heads_than_its_share_is_refused() -> None:
    """As where a client has changed how many ranks there are."""
    pair = Ranks()
    pair.start(shares=tuple(shares([2], 0, 1, 2)))
    pair.links[0].answer(Hello, welcome(1, dataclasses.replace(pair.theirs, groups=(WHOLE,))))
    failure = pair.events().failed["r"]
    assert failure.cause == "refused"
    assert "heads 0 to 0 of 2 to be read from rank 0" in failure.text
    assert "pass kv_transfer_params on as prefill gave them" in failure.text
    assert pair.all_ended()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["give", "give", "give", "finish", "finish", "refuse", "break", "cancel"]), st.booleans()
    ),
    max_size=8,
)


@given(STEPS, st.sampled_from([1, 2]), st.booleans())
@fixed_seed(300)
def test_whatever_the_ranks_do_there_is_one_end_and_nothing_moves_after_it(
    steps: list[tuple[str, bool]], total_heads: int, needs_nothing: bool
) -> None:
    pair = Ranks(total_heads=total_heads)
    links = pair.begin(**({"num_tokens": 0, "blocks": [[]]} if needs_nothing else {}))
    readers = [pair.claim(number).reader for number in (0, 1)]
    moving: dict[int, Transfer] = {}
    done, troubled, lost, answered = set(), False, set(), set()
    ends: list[str] = []

    def hear() -> None:
        events = pair.events()
        ends.extend(["received"] * len(events.received) + ["failed"] * len(events.failed))
        if ends:
            assert not pair.connector._pending, "nothing is written any more"

    def finish(number: int) -> None:
        transfer = moving.pop(number)
        pair.finish(transfer)
        if transfer.state is TransferState.DONE:
            done.add(number)

    # At the end all ranks answer, and all that moves ends.
    for action, second in [*steps, *[(action, second) for action in ("give", "finish") for second in (False, True)]]:
        number = int(second)
        is_read = not needs_nothing and (total_heads == 2 or number == 0)
        can_answer = number not in lost | answered
        if action == "give" and can_answer:
            answered.add(number)
            transfer = pair.give(number)
            assert transfer is None or is_read
            if transfer is not None:
                moving[number] = transfer
        elif action == "refuse" and can_answer:
            answered.add(number)
            links[number].answer(Claim, Refused(sequence=1, reason="no"))
            troubled |= is_read or needs_nothing
        elif action == "break" and number not in lost:
            lost.add(number)
            troubled |= number not in done and not ends and (is_read or (needs_nothing and number not in answered))
            pair.puller.on_link_lost(links[number], PeerDead("it ended"))  # type: ignore[arg-type]
        elif action == "finish" and number in moving:
            finish(number)
        elif action == "cancel":
            troubled |= not ends
            pair.puller.cancel("r")
        hear()
    assert ends == ["failed" if troubled else "received"]
    assert pair.all_ended()
    for number, told in enumerate(pair.told()):
        assert told == [readers[number]] or (number in lost and not told), "each rank is told once"
