"""Memory that changes or goes in the middle of a transfer: what arrives is right or fails, and nothing old is read."""

from __future__ import annotations

import time

import pytest
from engine_process import EngineConfig, Remote, StartEngines
from test_failures import every_connector
from test_handoff import hand_off, pull
from test_leases import BIG

pytestmark = pytest.mark.transfer

SETTINGS = {"transfer_deadline_s": 30.0, "lease_s": 20.0, "grace_s": 1.0}
BLOCKS = list(range(1500))


def config(name: str, connector: str, **settings: object) -> EngineConfig:
    return EngineConfig(
        name, settings={**SETTINGS, **settings}, connectors=(connector,), agent_name=f"{name} of a test", **BIG
    )


def begin(owner: Remote, reader: Remote, value: int) -> str:
    """190 MB of one value, on their way: the request's name. One that has arrived before we could look is no use."""
    owner.fill_all(value)
    for attempt in range(8):
        name = f"r{attempt}"
        owner.hold(name, [BLOCKS], 24000)
        pull(reader, owner, name, [BLOCKS], 0, 24000)
        time.sleep(0.02 / (attempt + 1))
        if not any(reader.events(0.0).values()):
            return name
        assert owner.events(20)["released"] == {name}
    pytest.fail("every transfer ended at once")


def ended(owner: Remote, name: str) -> None:
    """The hold ends, once, as well as one that nobody reads."""
    seen: list[str] = []
    while len(seen) < 2:
        events = owner.events(40)
        assert any(events.values()), f"only {seen} ended"
        seen += [*events["released"], *events["expired"]]
    assert sorted(seen) == sorted([name, "unread"])


def right_or_failed(reader: Remote, name: str, value: int) -> str:
    """The end of the pull, which comes once: its cause, or nothing where all of the content arrived."""
    events = reader.events(40)
    if events["received"]:
        assert events["received"] == {name}
        assert not events["failed"]
        assert reader.is_all(value, BLOCKS)
        return ""
    assert list(events["causes"]) == [name], events
    return str(events["causes"][name])


def change(engine: Remote, what: str) -> None:
    if what == "extend":
        engine.extend(1900)
    else:
        engine.sleep()
        engine.wake()


@every_connector
@pytest.mark.parametrize("what", ["extend", "sleep"])
def test_the_owner_changes(start_engines: StartEngines, connector: str, what: str) -> None:
    """It waits for its reader; what it is read for afterwards is what it has then."""
    owner, reader = start_engines(config("prefill", connector), config("decode", connector))
    hand_off(owner, reader, 40, 1)
    owner.hold("unread", [[1]], 16)
    name = begin(owner, reader, 3)
    change(owner, what)
    assert right_or_failed(reader, name, 3) in {"", "stale_generation"}
    ended(owner, name)
    pull(reader, owner, "unread", [[1]], 0, 16)
    assert reader.events(20)["causes"] == {"unread": "stale_generation"}
    after(owner, reader)


@every_connector
@pytest.mark.parametrize("what", ["extend", "sleep"])
def test_the_reader_changes(start_engines: StartEngines, connector: str, what: str) -> None:
    """Its pull ends before its memory goes."""
    owner, reader = start_engines(config("prefill", connector), config("decode", connector))
    hand_off(owner, reader, 40, 1)
    name = begin(owner, reader, 3)
    reader.sleep() if what == "sleep" else reader.extend(1900)
    events = reader.events(40)
    if events["received"]:
        assert what == "sleep" or reader.is_all(3, BLOCKS)
    else:
        assert events["causes"][name] in {"cache_changing", "transfer_failed"}, events
    if what == "sleep":
        reader.wake()
        assert reader.is_all(0, BLOCKS), "nothing landed in what was mapped again"
    assert owner.events(20)["released"] == {name}
    after(owner, reader)


@every_connector
def test_the_owner_is_restarted_under_its_name_and_address(start_engines: StartEngines, connector: str) -> None:
    owner, reader = start_engines(config("prefill", connector), config("decode", connector))
    hand_off(owner, reader, 40, 1)
    port = owner.port
    name = begin(owner, reader, 3)
    owner.stop()
    cause = right_or_failed(reader, name, 3)
    assert cause in {"", "peer_dead", "transfer_failed"}
    (again,) = start_engines(config("prefill", connector, side_channel_port=port))
    again.fill_all(5)
    again.hold("r", [BLOCKS], 24000)
    pull(reader, again, "r", [BLOCKS], 0, 24000)
    assert right_or_failed(reader, "r", 5) == ""
    assert again.events(20)["released"] == {"r"}
    after(again, reader)


def after(owner: Remote, reader: Remote) -> None:
    """The pair goes on, over what is there now: all bytes are compared."""
    for seed in (20, 30):
        hand_off(owner, reader, 200, seed)
    for engine in (owner, reader):
        assert engine.status()["side_channel"]["internal_errors"] == 0
        assert engine.status()["handoff"]["holds"] == 0
