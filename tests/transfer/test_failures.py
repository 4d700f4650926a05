"""What happens when a peer stops, dies, restarts, changes, differs, or lies: one request fails, with its cause."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
from engine_process import EngineConfig, Remote, StartEngines
from test_handoff import await_parked, hand_off, pull

pytestmark = pytest.mark.transfer

SETTINGS = {"transfer_deadline_s": 10.0, "lease_s": 20.0, "grace_s": 1.0}
QUICK = {**SETTINGS, "transfer_deadline_s": 3.0}  # where a test waits for the deadline


every_connector = pytest.mark.parametrize("connector", ["nixl", "ipc", "mooncake"])


def engines(
    start_engines: StartEngines, connector: str = "nixl", settings: dict[str, float] = SETTINGS, **owner: object
) -> tuple[Remote, Remote]:
    first = EngineConfig("prefill", settings=settings, connectors=(connector,), **owner)  # type: ignore[arg-type]
    prefill, decode = start_engines(first, EngineConfig("decode", settings=settings, connectors=(connector,)))
    return prefill, decode


def test_one_that_fails_leaves_the_others_of_its_engine_alone(start_engines: StartEngines) -> None:
    """Three owners: one stopped, one killed, one well, whose hand-offs go on while the others' fail."""
    owners = start_engines(*(EngineConfig(name, settings=QUICK) for name in ("well", "stopped", "killed")))
    (reader,) = start_engines(EngineConfig("decode", settings=QUICK))
    well, stopped, killed = owners
    for seed, owner in enumerate(owners):
        hand_off(owner, reader, 40, seed * 10)
    stopped.hold("s", [[1]], 16)
    stopped.signal(signal.SIGSTOP)
    pull(reader, stopped, "s", [[90]], 0, 16)
    pull(reader, killed, "k", [[91]], 0, 16)  # parked there: it holds no such request
    await_parked(killed, "k")
    blocks, causes = [[3, 4, 5]], dict[str, str]()
    give_up = time.monotonic() + 30  # by the clock, not by a count: a fast machine hands off 200 times in the deadline
    for index in itertools.count():
        well.fill(blocks, 40, index)
        well.hold(f"w{index}", blocks, 40)
        pull(reader, well, f"w{index}", [[6, 7, 8]], 0, 40)
        if index == 0:  # in the middle of a hand-off, and long before the deadline
            killed.stop()
        received: set[str] = set()
        while not received:
            events = reader.events(20)
            received |= events["received"]
            causes |= events["causes"]
        assert received == {f"w{index}"}
        assert reader.read([[6, 7, 8]], 0, 40) == well.read(blocks, 0, 40)
        if (len(causes) == 2 and index > 10) or time.monotonic() > give_up:
            break
    assert causes == {"k": "peer_dead", "s": "timeout"}
    assert reader.status()["transfer"]["failures"] == {"peer_dead": 1, "timeout": 1}
    assert reader.status()["side_channel"]["internal_errors"] == 0


def failure(reader: Remote, request_id: str = "r", timeout_s: float = 20.0) -> str:
    events = reader.events(timeout_s)
    assert list(events["failed"]) == [request_id], events
    return str(events["failed"][request_id])


@every_connector
def test_a_stopped_owner_is_a_timeout_and_only_for_its_request(start_engines: StartEngines, connector: str) -> None:
    owner, reader = engines(start_engines, connector, QUICK)
    hand_off(owner, reader, 40, 1)
    owner.hold("r", [[1]], 16)
    owner.signal(signal.SIGSTOP)
    began = time.monotonic()
    pull(reader, owner, "r", [[1]], 0, 16)
    assert "no answer to claim" in failure(reader)
    assert QUICK["transfer_deadline_s"] <= time.monotonic() - began < QUICK["transfer_deadline_s"] + 3.0
    owner.signal(signal.SIGCONT)
    # Well before the lease would have ended it.
    assert owner.events(15)["released"] == {"r"}, "the reader's release, sent when it gave up, frees the blocks"
    hand_off(owner, reader, 40, 2)
    assert reader.status()["side_channel"]["internal_errors"] == 0


@every_connector
def test_a_killed_owner_fails_at_once_and_a_restarted_one_works(start_engines: StartEngines, connector: str) -> None:
    owner, reader = engines(start_engines, connector, agent_name="same")
    hand_off(owner, reader, 40, 1)
    port = owner.port
    pull(reader, owner, "r", [[1]], 0, 16)
    await_parked(owner, "r")
    owner.stop()
    began = time.monotonic()
    assert "closed its side channel" in failure(reader)
    assert time.monotonic() - began < 0.9 * SETTINGS["transfer_deadline_s"], "not by its deadline"
    pull(reader, owner, "r", [[1]], 0, 16)
    assert "cannot be connected to; is it still running?" in failure(reader), "and nothing of it waits for the next"
    settings = {**SETTINGS, "side_channel_port": port}
    (again,) = start_engines(EngineConfig("prefill", agent_name="same", settings=settings, connectors=(connector,)))
    hand_off(again, reader, 100, 2)


def test_a_killed_reader_leaves_the_hold_to_its_lease(start_engines: StartEngines) -> None:
    owner, reader = engines(start_engines)
    hand_off(owner, reader, 40, 1)
    reader.stop()
    owner.hold("r", [[1]], 16, 0.3)
    assert owner.events(20)["expired"] == {"r"}
    assert owner.status()["handoff"] == {"holds": 0, "released": 1, "expired": 1, "renewed": 0}


@every_connector
def test_a_changed_cache_is_noticed_and_hands_are_shaken_again(start_engines: StartEngines, connector: str) -> None:
    owner, reader = engines(start_engines, connector, num_blocks=64)
    hand_off(owner, reader, 100, 1)
    owner.extend(96)
    owner.fill([[90, 95]], 32, 3)
    owner.hold("r", [[90, 95]], 32)
    pull(reader, owner, "r", [[3, 4]], 0, 32)
    assert reader.events(20)["received"] == {"r"}
    assert reader.read([[3, 4]], 0, 32) == owner.read([[90, 95]], 0, 32)


@every_connector
def test_a_cache_that_sleeps_ends_what_touches_it_and_never_hands_off_zeros(
    start_engines: StartEngines, connector: str
) -> None:
    verify = {**SETTINGS, "verify": "all"}
    big = {"num_layers": 8, "head_size": 64, "num_blocks": 300, "capacity_blocks": 512, "granularity_bytes": 1 << 20}
    owner, reader = start_engines(
        *(EngineConfig(name, settings=verify, connectors=(connector,), **big) for name in ("prefill", "decode"))
    )
    hand_off(owner, reader, 40, 1)
    blocks = list(range(250))
    owner.fill([blocks], 4000, 3)
    owner.hold_and_sleep(6, [blocks], 4000)
    assert owner.events(20)["expired"] == {f"h{index}" for index in range(6)}
    pull(reader, owner, "h0", [blocks], 0, 4000)
    assert failure(reader, "h0"), "refused while it sleeps, too"
    owner.wake()
    pull(reader, owner, "h1", [blocks], 0, 4000)
    assert "its owner's cache changed" in failure(reader, "h1")
    hand_off(owner, reader, 400, 2)

    pull(reader, owner, "parked", [[1]], 0, 16)
    reader.sleep()
    assert "the cache went to sleep or changed" in failure(reader, "parked")
    with pytest.raises(RuntimeError, match="ConnectorStateError: the cache of engine decode is asleep or changing"):
        pull(reader, owner, "x", [[1]], 0, 16)
    reader.wake()
    hand_off(owner, reader, 400, 3)
    for engine in (owner, reader):
        assert engine.status()["side_channel"]["internal_errors"] == 0
        engine.close()


@every_connector
def test_a_cache_that_grows_again_ends_holds_and_goes_on(start_engines: StartEngines, connector: str) -> None:
    owner, reader = engines(start_engines, connector, num_blocks=64)
    hand_off(owner, reader, 100, 1)
    owner.hold("before", [[1, 2]], 32)
    owner.extend(96)
    assert owner.events(20)["expired"] == {"before"}
    pull(reader, owner, "before", [[1, 2]], 0, 32)
    assert "its owner's cache changed" in failure(reader, "before")
    for seed in (2, 3):
        hand_off(owner, reader, 100, seed)


def test_abort_and_expiry_on_both_sides(start_engines: StartEngines) -> None:
    owner, reader = engines(start_engines, settings=QUICK)
    owner.hold("dropped", [[1]], 16)
    owner.drop("dropped")
    assert owner.events(20)["released"] == {"dropped"}
    pull(reader, owner, "dropped", [[1]], 0, 16)
    assert "aborted by its owner" in failure(reader, "dropped")

    owner.hold("expired", [[1]], 16, 0.2)
    assert owner.events(20)["expired"] == {"expired"}
    pull(reader, owner, "expired", [[1]], 0, 16)
    assert "lease ran out" in failure(reader, "expired")

    pull(reader, owner, "cancelled", [[1]], 0, 16)
    await_parked(owner, "cancelled")
    reader.cancel("cancelled")
    assert "cancelled" in failure(reader, "cancelled")

    pull(reader, owner, "late", [[1]], 0, 16)
    await_parked(owner, "late")
    owner.hold("late", [[5]], 16)
    assert reader.events(20)["received"] == {"late"}, "a claim waits for a hold that comes later"
    assert owner.events(20)["released"] == {"late"}

    pull(reader, owner, "never", [[1]], 0, 16)
    cause = failure(reader, "never")
    assert "is not held here" in cause or "no answer to claim" in cause
    assert owner.status()["handoff"]["holds"] == 0


@pytest.mark.parametrize(
    ("owner_config", "reader_config", "fields"),
    [
        ({"model": "other"}, {}, ["model differs: here 'tiny', at the peer 'other'"]),
        ({"dtype": "bfloat16", "model": "other"}, {},
         ["model", "dtype", "kv_cache_dtype", "dtype of layer group full", "content_bytes of layer group full"]),
        ({"num_layers": 2}, {}, ["layers of layer group full"]),
        ({"head_size": 16}, {}, ["content_bytes of layer group full"]),
        ({"num_kv_heads": 1}, {}, ["heads.total of layer group full"]),
        ({"num_kv_heads": 2, "total_heads": 4, "tp_size": 2}, {"num_kv_heads": 4, "total_heads": 4},
         ["heads", "tp_size"]),
        ({"sliding_layers": 1}, {}, ["layer groups"]),
        ({}, {"settings": {"verify": "all"}}, ["verify differs: here 'all', at the peer 'off'"]),
    ],
)  # fmt: skip
def test_the_fields_that_differ_are_named(
    start_engines: StartEngines, owner_config: dict[str, object], reader_config: dict[str, object], fields: list[str]
) -> None:
    owner, reader = start_engines(EngineConfig("prefill", **owner_config), EngineConfig("decode", **reader_config))  # type: ignore[arg-type]
    owner.hold("r", [[1]] * (2 if owner.config.sliding_layers else 1), 16)
    pull(reader, owner, "r", [[1]], 0, 16)
    reason = failure(reader)
    for field in fields:
        assert (field if " differs: " in field else f"{field} differs: ") in reason
    assert reason.count("refused: ") in (0, len(fields)), "one alone is one sentence"
    assert reader.status()["side_channel"] == {"refused": 0, "internal_errors": 0}
    give_up = time.monotonic() + 10
    while not owner.status()["messages_refused"] and time.monotonic() < give_up:
        pass  # the message is on its way
    assert owner.status()["messages_refused"] == {"mismatch": 1}, "it is told"


def test_wrong_requests_fail_alone(start_engines: StartEngines) -> None:
    owner, reader = engines(start_engines)
    owner.hold("r", [[1]], 16)
    pull(reader, owner, "r", [[1, 2]], 0, 32)
    assert "held with 16 tokens, tokens up to 32 were asked for" in failure(reader)
    assert owner.events(20)["released"] == {"r"}
    reader.pull(
        request_id="r", remote_request_id="r", remote_engine_id="someone else", host="127.0.0.1", port=owner.port,
        blocks=[[1]], first_token=0, num_tokens=16,
    )  # fmt: skip
    assert "'someone else', at the peer 'prefill'" in failure(reader)
    reader.pull(
        request_id="r", remote_request_id="r", remote_engine_id="prefill", host="no.such.host.invalid", port=1,
        blocks=[[1]], first_token=0, num_tokens=16,
    )  # fmt: skip
    assert "'no.such.host.invalid' has no address" in failure(reader)
    with pytest.raises(RuntimeError, match="LayoutError: block 1000000 of layer group full is not committed"):
        owner.hold("x", [[1_000_000]], 16)
    with pytest.raises(RuntimeError, match="LayoutError: block 96 of layer group full is not committed"):
        pull(reader, owner, "x", [[96]], 0, 16)
    with pytest.raises(RuntimeError, match="LayoutError: block lists for 2 layer groups given, there are 1"):
        owner.hold("x", [[1], [2]], 16)
    hand_off(owner, reader, 40, 2)
