"""The reader's state machine with the owner and the transfer library played by the test."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from fake_connector import BASE, FakeConnector, region
from test_handshake import GROUP, INFO

from kvx import addresses, digest, digest_check, pulls
from kvx.connector import Copies, Transfer
from kvx.engine_side import EngineSide, HandoffEvents, HandoffSettings, Pull
from kvx.errors import ConnectorStateError, HandshakeError, PeerDead
from kvx.geometry import HeadRange
from kvx.handshake import Claim, Claimed, DigestPage, Digests, Hello, Message, Refused, Release, Reply, welcome
from kvx.peer import PeerDescriptor
from kvx.pulls import Puller

# One layer, one head: block b is bytes [b * 512, (b + 1) * 512), 16 tokens of 32 bytes.
LAYER = dataclasses.replace(
    GROUP, layers=("a",), layer_offsets_bytes=(0,), block_stride_bytes=512, kernel_block_stride_bytes=512,
    heads=HeadRange(0, 1, 1),
)  # fmt: skip
SETTINGS = HandoffSettings(transfer_deadline_s=5.0)


class FakeLink:
    def __init__(self, host: str, port: int, address: str) -> None:
        self.host, self.port, self.address, self.is_closed = host, port, address, False
        self.asked: list[tuple[Message, Any]] = []
        self.told: list[Message] = []

    def ask(self, message: Message, on_reply: Any) -> None:
        self.asked.append((message, on_reply))

    def tell(self, message: Message) -> None:
        self.told.append(message)

    def answer(self, kind: type[Message], reply: Reply) -> None:
        """Answer the one question of that kind."""
        (found,) = [item for item in self.asked if isinstance(item[0], kind)]
        self.asked.remove(found)
        found[1](reply)


class Pair:
    """A puller and the owner that the test plays."""

    def __init__(self, *, verify: bool = False) -> None:
        self.connector = FakeConnector()
        self.connector.open([region(0, 100 * 512)], 1)
        self.notes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        settings = dataclasses.replace(SETTINGS, verify="all" if verify else "off")
        self.side = EngineSide(settings, INFO, [self.connector], post=self.notes.put)
        self.side.allowed = addresses.AllowedHosts.anywhere()
        view = torch.zeros(100, 1, 16, 8)
        self.side.update([LAYER], {"a": view}, 100, 1, "LBHNC")
        self.links: list[FakeLink] = []
        self.puller = Puller(self.side, self._open_link, self._close_link)  # type: ignore[arg-type]
        theirs = FakeConnector()
        theirs.open([region(0, 100 * 512, base=2 * BASE)], 1)
        self.theirs = PeerDescriptor(
            info=INFO, instance="i", generation=1, layout="LBHNC", groups=(LAYER,), num_blocks=100,
            verify="all" if verify else "off", digest=digest.DIGEST_NAME, connectors={"fake": theirs.metadata()},
        )  # fmt: skip

    @property
    def link(self) -> FakeLink:
        return self.links[-1]

    def start(self, **fields: Any) -> None:
        given = {"request_id": "r", "remote_request_id": "theirs", "remote_engine_id": "e", "host": "10.0.0.1",
                 "port": 1, "blocks": [[7, 8]], "first_token": 0, "num_tokens": 32, **fields}  # fmt: skip
        self.puller.start(Pull(**given), time.monotonic())

    def welcome(self) -> None:
        self.link.answer(Hello, welcome(1, self.theirs))

    def claimed(self, left_s: float = 30.0, **fields: Any) -> None:
        given = {"instance": "i", "generation": 1, "blocks": [[3, 5]], "num_tokens": 32, **fields}
        self.link.answer(Claim, Claimed(sequence=1, request_id="theirs", left_s=left_s, **given))

    def moving(self, held: Any = ((3, 5),), held_tokens: int = 32, **fields: Any) -> Transfer:
        self.start(**fields)
        self.welcome()
        self.claimed(blocks=[list(blocks) for blocks in held], num_tokens=held_tokens)
        return self.transfer

    @property
    def transfer(self) -> Transfer:
        (pending,) = self.connector._pending
        return pending

    def finish(self, transfer: Transfer) -> None:
        self.connector.done.add(transfer)
        for finished in self.connector.poll().finished:
            self.puller.on_transfer(finished)

    def events(self) -> HandoffEvents:
        return self.side.outbox.take()

    def failure(self) -> str:
        events = self.events()
        assert events.received == frozenset()
        return events.failed["r"].text

    def _open_link(self, host: str, port: int, address: str) -> FakeLink:
        self.links.append(FakeLink(host, port, address))
        return self.links[-1]

    def _close_link(self, link: FakeLink) -> None:
        assert not link.is_closed
        link.is_closed = True


def test_the_whole_way() -> None:
    pair = Pair()
    pair.start()
    pair.welcome()
    (claim,) = [message for message, _ in pair.link.asked if isinstance(message, Claim)]
    pair.claimed()
    transfer = pair.transfer
    assert pair.events() == HandoffEvents()
    assert pair.puller.is_moving
    (copies,) = pair.connector.copies
    assert (copies.remote - 2 * BASE).tolist() == [3 * 512, 5 * 512]
    assert (copies.local - BASE).tolist() == [7 * 512, 8 * 512]
    pair.finish(transfer)
    assert pair.events().received == {"r"}
    assert pair.link.told == [], "our engine goes first"
    assert pair.puller.next_time() is not None
    pair.puller.tick(time.monotonic() + 1)
    assert pair.link.told == [Release(sequence=0, request_id="theirs", reader=claim.reader)]
    assert pair.side.metrics.blocks == 2
    pair.start(request_id="again")
    assert isinstance(pair.link.asked[0][0], Claim), "hands are shaken once"


def test_no_two_pulls_claim_under_one_name() -> None:
    pair = Pair()
    pair.start(request_id="sample 0")
    pair.welcome()
    pair.start(request_id="sample 1")
    pair.puller.cancel("sample 1")
    pair.start(request_id="sample 1")
    names = [message.reader for message, _ in pair.link.asked if isinstance(message, Claim)]
    assert len(set(names)) == 3
    (release,) = pair.link.told
    assert isinstance(release, Release)
    assert release.reader == names[1]


def test_blocks_are_the_owners_and_only_wanted_positions_move() -> None:
    pair = Pair()
    pair.moving(blocks=[[-1, 8]], first_token=16, num_tokens=16)
    (copies,) = pair.connector.copies
    assert (copies.remote - 2 * BASE).tolist() == [5 * 512]
    assert (copies.local - BASE).tolist() == [8 * 512]


def test_what_was_read_after_the_lease_is_not_used() -> None:
    pair = Pair()
    pair.start()
    pair.welcome()
    pair.claimed(left_s=0.05)
    assert pair.transfer.deadline_s <= 0.05
    time.sleep(0.06)
    pair.connector.done.add(pair.transfer)
    transfer = pair.transfer
    pair.connector._finish(transfer, pulls.TransferState.DONE)  # the library says so, too late
    pair.puller.on_transfer(pair.connector.poll().finished[0])
    assert "lease ended before everything was read" in pair.failure()


def test_a_cancelled_pull_ends_when_its_memory_is_safe() -> None:
    pair = Pair()
    transfer = pair.moving()
    pair.puller.cancel("r")
    assert pair.events() == HandoffEvents()
    pair.finish(transfer)
    assert "cancelled by the engine" in pair.failure()
    assert len(pair.link.told) == 1


def test_a_lost_owner_fails_what_waits_and_drains_what_moves() -> None:
    pair = Pair()
    transfer = pair.moving()
    pair.start(request_id="waiting")
    pair.puller.on_link_lost(pair.link, PeerDead("it closed its side channel"))  # type: ignore[arg-type]
    assert "closed its side channel" in pair.events().failed["waiting"].text
    pair.finish(transfer)
    assert "closed its side channel" in pair.failure()
    assert pair.links[0].is_closed
    pair.start()
    assert len(pair.links) == 2, "it may be another engine now: hands are shaken again"


def test_another_generation_is_greeted_again_but_not_for_ever() -> None:
    pair = Pair()
    pair.start()
    pair.welcome()
    pair.claimed(generation=2)
    pair.theirs = dataclasses.replace(pair.theirs, generation=2)
    pair.welcome()
    pair.claimed(generation=3)
    assert "change faster than they can be read" in pair.failure()
    pair.start()
    pair.claimed(generation=2)
    assert pair.puller.is_moving


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({"num_tokens": 31}, "is held with 31 tokens, tokens up to 32 were asked for"),
        ({"blocks": [[3, 100]]}, "100"),
        ({"blocks": [[3, -1]]}, "differs"),
        ({"blocks": [[3]]}, "differs"),
        ({"blocks": [[3, 5], []]}, "layer groups of the held blocks differs"),
    ],
)
def test_what_the_owner_says_is_checked(answer: dict[str, Any], cause: str) -> None:
    pair = Pair()
    pair.start()
    pair.welcome()
    pair.claimed(**answer)
    assert cause in pair.failure()
    assert pair.connector.copies == []
    assert pair.link.told, "and the owner may free the blocks"


def test_refusals_and_nonsense_fail_the_pull() -> None:
    pair = Pair()
    pair.start()
    pair.link.answer(Hello, Refused(sequence=1, reason="not ready"))
    assert "the owner refused: not ready" in pair.failure()
    assert pair.links[0].is_closed, "an engine that never answered well is not kept"
    pair.start()
    pair.link.answer(Hello, Claimed(sequence=1, request_id="r", instance="i", generation=1, blocks=[], num_tokens=0,
                                    left_s=0.0))  # fmt: skip
    assert "it sent Claimed" in pair.failure()


def test_nothing_to_move_is_received_at_once() -> None:
    pair = Pair()
    pair.start(blocks=[[-1, -1]])
    pair.welcome()
    pair.claimed()
    assert pair.events().received == {"r"}


def test_deadlines_of_words_are_kept_here() -> None:
    pair, began = Pair(), time.monotonic()
    pair.start()
    pair.puller.tick(began + 4.9)
    assert pair.events() == HandoffEvents()
    pair.puller.tick(time.monotonic() + 5.1)
    assert "no answer to greet from engine 10.0.0.1:1 within 5 s" in pair.failure()
    assert pair.puller.next_time() is None


def test_large_pulls_move_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MOVE_BYTES", 1024)
    pair = Pair()
    pair.start(blocks=[[10, 12, 14, 16, 18]], num_tokens=80)
    pair.welcome()
    pair.claimed(blocks=[[0, 5, 1, 6, 2]], num_tokens=80)
    sizes = []
    while pair.puller.is_moving:
        sizes.append(pair.transfer.nbytes)
        pair.finish(pair.transfer)
    assert sizes == [1024, 1024, 512]
    assert pair.events().received == {"r"}
    assert pair.side.metrics.bytes == 2560


def test_each_pull_that_begins_to_read_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MOVE_BYTES", 512)
    pair = Pair()
    assert not pair.puller.take_begun()
    transfer = pair.moving()
    assert (pair.puller.take_begun(), pair.puller.take_begun()) == (True, False)
    pair.finish(transfer)
    assert pair.puller.is_moving
    assert not pair.puller.take_begun(), "its next piece begins nothing"
    pair.start(request_id="second", blocks=[[9]], num_tokens=16)
    pair.claimed()
    assert pair.puller.take_begun()


def lending(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Pulls "a" and "b" are at the first of four pieces; "c" has been read and is in CHECK."""
    monkeypatch.setattr(pulls, "MOVE_BYTES", 512)
    pair = Pair(verify=True)
    for first, name in enumerate("ab"):
        pair.start(request_id=name, blocks=[[10 * first + block for block in (10, 12, 14, 16)]], num_tokens=64)
    pair.welcome()
    for claim in [on_reply for message, on_reply in pair.link.asked if isinstance(message, Claim)]:
        claim(Claimed(sequence=1, request_id="theirs", instance="i", generation=1, blocks=[[1, 2, 3, 4]],
                      num_tokens=64, left_s=30.0))  # fmt: skip
    pair.link.asked = [asked for asked in pair.link.asked if not isinstance(asked[0], Claim)]
    pair.start(request_id="c", blocks=[[50]], num_tokens=16)
    pair.claimed(blocks=[[7]], num_tokens=16)
    pair.puller.tick(time.monotonic())
    assert places(pair) == [10, 20, 50], "one piece of each"
    pair.finish(into(pair, 50))
    return pair


def places(pair: Pair) -> list[int]:
    """The blocks of ours that are being read into."""
    return sorted(map(place, pair.connector._pending))


def into(pair: Pair, block: int) -> Transfer:
    """The transfer that reads into this block of ours."""
    return next(transfer for transfer in pair.connector._pending if place(transfer) == block)


def place(transfer: Transfer) -> int:
    assert isinstance(transfer.handle, Copies)
    return int(transfer.handle.local[0] - BASE) // 512


def test_a_pull_that_is_checked_lends_its_place_to_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = lending(monkeypatch)
    assert places(pair) == [10, 20]
    for _ in range(3):
        pair.puller.tick(time.monotonic())
    assert places(pair) == [10, 12, 20], "as many as pulls"
    pair.finish(into(pair, 10))
    pair.puller.tick(time.monotonic())
    assert places(pair) == [12, 14, 20]
    digests_of_the_owner(pair)
    pair.notes.get(timeout=20)()
    assert pair.events().received == {"c"}
    pair.finish(into(pair, 12))
    pair.puller.tick(time.monotonic())
    assert places(pair) == [14, 20], "what was lent goes back"
    while pair.puller.is_moving:
        pair.finish(pair.connector._pending[0])
    for _ in range(2):
        pair.notes.get(timeout=20)()
    assert pair.events().received == {"a", "b"}
    assert pair.side.metrics.bytes == 9 * 512
    assert (pair.side.metrics.digests_expected, pair.side.metrics.digests_checked) == (144, 144)


def test_a_pull_with_a_lent_place_ends_when_all_of_it_has_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = lending(monkeypatch)
    pair.puller.tick(time.monotonic())
    own, lent = into(pair, 10), into(pair, 12)
    pair.puller.cancel("a")
    pair.finish(own)
    assert not pair.events().failed, "the other piece may still land"
    pair.puller.tick(time.monotonic())
    pair.finish(lent)
    assert pair.events().failed["a"].cause == "cancelled"
    pair.puller.tick(time.monotonic())
    assert places(pair) == [20, 22], "the place is the next one's now"


def test_nothing_is_lent_to_a_pull_of_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = lending(monkeypatch)
    (checked,) = [pull for pull in pair.puller._active if pull.spec.request_id == "c"]
    checked.owner = dataclasses.replace(checked.owner)
    pair.puller.tick(time.monotonic())
    assert places(pair) == [10, 20]


def test_the_next_piece_needs_the_connection_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library ends it with another transfer's failure: NIXL learns so of a dead peer, before its link does."""
    monkeypatch.setattr(pulls, "MOVE_BYTES", 512)
    pair = Pair()
    first = pair.moving()
    first.peer.connected = False
    pair.finish(first)
    failure = pair.events().failed["r"]
    assert (failure.cause, failure.text) == (
        "transfer_failed", "the connection to engine 10.0.0.1:1 ended before everything was read; ask again",
    )  # fmt: skip


def test_a_connection_that_ends_before_the_first_piece_is_made_again() -> None:
    pair = Pair()
    transfer = pair.moving()
    pair.start(request_id="second")
    pair.finish(transfer)
    transfer.peer.connected = False
    pair.claimed()
    assert pair.events().received == {"r"}
    pair.welcome()
    pair.claimed()
    pair.finish(pair.transfer)
    assert pair.events().received == {"second"}


def test_nothing_more_is_read_of_an_owner_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull was asked to stop, and its piece was complete all the same; its owner is connected anew by then."""
    monkeypatch.setattr(pulls, "MOVE_BYTES", 512)
    pair = Pair()
    transfer = pair.moving()
    pair.start(request_id="second")
    pair.claimed(generation=2)
    pair.theirs = dataclasses.replace(pair.theirs, generation=2)
    pair.welcome()
    pair.connector._finish(transfer, pulls.TransferState.DONE)
    pair.puller.on_transfer(pair.connector.poll().finished[0])
    assert pair.events().failed["r"].cause == "stale_generation"
    assert len(pair.connector.copies) == 1


def test_what_has_been_read_is_checked_while_its_owner_is_greeted_again() -> None:
    pair = Pair(verify=True)
    transfer = pair.moving()
    pair.start(request_id="second")
    pair.connector._finish(transfer, pulls.TransferState.DONE)
    transfer.peer.connected = False
    pair.claimed()
    pair.puller.on_transfer(pair.connector.poll().finished[0])
    assert pair.events() == HandoffEvents()
    assert {type(message) for message, _ in pair.link.asked} == {Hello, Digests}


def test_the_same_request_twice_is_refused_without_an_outcome() -> None:
    pair = Pair()
    pair.start()
    with pytest.raises(ConnectorStateError, match="being pulled already"):
        pair.start()
    assert pair.events() == HandoffEvents(), "the first one is on its way"
    pair.welcome()
    pair.claimed()
    pair.finish(pair.transfer)
    assert pair.events().received == {"r"}


def test_an_unexpected_error_fails_its_own_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.start()
    monkeypatch.setattr(pulls, "plan", lambda *arguments, **named: 1 / 0)
    pair.welcome()
    pair.claimed()
    assert "internal error: ZeroDivisionError" in pair.failure()
    assert pair.side.metrics.internal_errors == 1


def test_an_owner_that_is_lost_while_it_is_greeted_again_drains_its_transfers() -> None:
    """Another generation disconnects the owner while one of its pulls is still moving."""
    pair = Pair()
    moving = pair.moving()
    pair.start(request_id="second")
    pair.claimed(generation=2)
    assert pair.events() == HandoffEvents(), "the first one drains"
    pair.puller.on_link_lost(pair.link, PeerDead("it closed its side channel"))  # type: ignore[arg-type]
    assert set(pair.events().failed) == {"second"}
    pair.finish(moving)
    assert "closed its side channel" in pair.failure()
    assert pair.side.metrics.internal_errors == 0


def test_trouble_with_one_pull_of_a_lost_owner_leaves_the_others_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.moving()
    for name in ("a", "b", "c"):
        pair.start(request_id=name)
    monkeypatch.setattr(pair.connector, "_cancel", lambda transfer: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        pair.puller.on_link_lost(pair.link, PeerDead("it closed its side channel"))  # type: ignore[arg-type]
    assert set(pair.events().failed) == {"a", "b", "c"}
    assert pair.links[0].is_closed


@pytest.mark.parametrize("blocks", [[()], [[-1, -1]], [[7, 8]]])
def test_a_pull_of_no_tokens_only_releases(blocks: list[list[int]]) -> None:
    pair = Pair(verify=True)
    pair.start(blocks=blocks, num_tokens=0)
    pair.welcome()
    pair.claimed()
    assert pair.events().received == {"r"}
    assert [type(message) for message in pair.link.told] == [Release]
    metrics = pair.side.metrics
    assert (metrics.released_only, metrics.received, metrics.transfers, metrics.failed) == (1, 0, 0, 0)
    assert (metrics.digests_expected, metrics.digests_checked) == (0, 0)
    assert not metrics.durations_s
    assert pair.link.asked == [], "no digests are asked for"
    pair.start(num_tokens=0)
    pair.link.answer(Claim, Refused(sequence=1, reason="gone"))
    assert "gone" in pair.failure()
    assert metrics.failed == 0, "no transfer failed"


def digests_of_the_owner(pair: Pair) -> None:
    """Answer what is asked with the digests that zeros have."""
    one = digest.digests({"a": torch.zeros(100, 1, 16, 8)}, LAYER, [0], 0, 1).values.tobytes()
    for item in [item for item in pair.link.asked if isinstance(item[0], Digests)]:
        pair.link.asked.remove(item)
        message, on_reply = item
        assert isinstance(message, Digests)
        on_reply(DigestPage(sequence=1, request_id="r", digests=one * (message.num_tokens * message.head_count)))


def test_the_owners_digests_come_while_blocks_are_read() -> None:
    pair = Pair(verify=True)
    transfer = pair.moving()
    digests_of_the_owner(pair)
    assert pair.puller.is_moving
    assert pair.events() == HandoffEvents(), "ours are still to come"
    pair.finish(transfer)
    pair.notes.get(timeout=20)()
    assert pair.events().received == {"r"}
    assert not pair.link.asked, "nothing was asked twice"


def verified(pair: Pair) -> HandoffEvents:
    pair.finish(pair.moving(blocks=[[7, -1, 8]], num_tokens=40, held=[[3, 4, 5]], held_tokens=40))
    digests_of_the_owner(pair)
    pair.notes.get(timeout=20)()  # our own digests are there
    return pair.events()


def test_a_digest_of_every_token_and_head_is_compared() -> None:
    pair = Pair(verify=True)
    assert verified(pair).received == {"r"}
    assert (pair.side.metrics.digests_expected, pair.side.metrics.digests_checked) == (24, 24)


@pytest.mark.parametrize(("kept", "compared"), [(slice(0, 0), 0), (slice(0, 1), 16)])
def test_digests_that_nobody_compared_are_a_failure(
    kept: slice, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = digest_check.wanted_ranges
    monkeypatch.setattr(digest_check, "wanted_ranges", lambda *given: ranges(*given)[kept])
    pair = Pair(verify=True)
    failed = verified(pair).failed
    assert f"only {compared} of 24 digests" in failed["r"].text
    assert (pair.side.metrics.digests_expected, pair.side.metrics.digests_checked) == (24, compared)


@pytest.mark.parametrize("error", [UnicodeError("no"), RuntimeError("no"), HandshakeError("no")])
def test_whatever_keeps_a_link_from_opening_fails_the_pull(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()

    def open_link(host: str, port: int, address: str) -> FakeLink:
        raise error

    monkeypatch.setattr(pair.puller._owners, "_open_link", open_link)
    pair.start()
    assert "no" in pair.failure()
    assert pair.puller.links == []


def test_a_name_is_looked_up_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(addresses, "look_up", lambda host: "10.0.0.2" if answer.wait(20) else "")
    pair = Pair()
    pair.start(request_id="named", host="name")
    pair.start(request_id="other", host="name")
    pair.start(request_id="given up", host="name")
    assert pair.links == []
    pair.finish(pair.moving())
    assert pair.events().received == {"r"}, "nobody waits for the name's answer"
    pair.puller.cancel("given up")
    assert "cancelled" in pair.events().failed["given up"].text
    answer.set()
    pair.notes.get(timeout=20)()
    assert (pair.link.host, pair.link.address) == ("name", "10.0.0.2")
    pair.welcome()
    claims = [message for message, _ in pair.link.asked if isinstance(message, Claim)]
    assert len(claims) == 2


def test_a_name_without_an_answer_is_a_timeout_and_a_late_answer_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(addresses, "look_up", lambda host: "10.0.0.2" if answer.wait(20) else "")
    pair = Pair()
    pair.start(host="name")
    pair.puller.tick(time.monotonic() + 5.1)
    assert "no answer to name look-up from engine name:1 within 5 s" in pair.failure()
    answer.set()
    pair.notes.get(timeout=20)()
    assert pair.links == []


def test_a_name_without_an_address_fails_its_pulls() -> None:
    pair = Pair()
    pair.start(host="a" * 64)
    pair.notes.get(timeout=20)()
    assert "has no address" in pair.failure()


@pytest.mark.parametrize("end", ["close", "link lost", "disconnected"])
def test_an_owner_that_goes_hears_first_of_all_that_is_over(end: str) -> None:
    pair = Pair()
    pair.finish(pair.moving())
    link = pair.link
    assert link.told == [], "the release waits until our engine has had its turn"
    if end == "close":
        pair.puller.close()
    elif end == "link lost":
        pair.puller.on_link_lost(link, PeerDead("it ended"))  # type: ignore[arg-type]
    else:  # another pull's greeting fails, and takes the record with it
        pair.start(request_id="second")
        pair.claimed(generation=2)
        pair.link.answer(Hello, Refused(sequence=1, reason="no"))
    assert [type(message) for message in link.told][:1] == [Release]
    assert len([message for message in link.told if message.request_id == "theirs"]) >= 1
    assert pair.side.metrics.internal_errors == 0


def test_closing_fails_what_is_left() -> None:
    pair = Pair()
    pair.start()
    pair.puller.close()
    assert pair.failure() == "the hand-off was closed"
    assert pair.links[0].is_closed
