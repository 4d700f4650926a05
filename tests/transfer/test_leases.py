"""Leases between real processes: renewed while a request waits or is read, and ended in time by whoever is gone."""

from __future__ import annotations

import signal
import time

import pytest
from engine_process import EngineConfig, Remote, StartEngines
from test_handoff import hand_off, pull

pytestmark = pytest.mark.transfer

SHORT = {"lease_s": 1.0, "grace_s": 0.3, "transfer_deadline_s": 10.0}
# 131 KB a block.
BIG = {"num_layers": 8, "head_size": 64, "num_blocks": 1600, "capacity_blocks": 2048, "granularity_bytes": 1 << 20}


def keep(reader: Remote, owner: Remote, request_id: str) -> None:
    reader.keep(
        request_id=request_id,
        remote_request_id=request_id,
        remote_engine_id=owner.config.engine_id,
        host="127.0.0.1",
        port=owner.port,
    )


def test_a_request_that_waits_longer_than_its_lease_is_still_handed_off(start_engines: StartEngines) -> None:
    owner, reader = start_engines(EngineConfig("prefill", settings=SHORT), EngineConfig("decode", settings=SHORT))
    owner.fill([[1, 2]], 32, 1)
    for name in ("waits", "forgotten"):
        owner.hold(name, [[1, 2]], 32)
    keep(reader, owner, "waits")
    assert owner.events(3)["expired"] == {"forgotten"}
    assert not any(owner.events(2.5).values()), "more than three leases"
    assert owner.status()["handoff"]["renewed"] >= 6
    pull(reader, owner, "waits", [[3, 4]], 0, 32)
    assert reader.events(20)["received"] == {"waits"}
    assert reader.read([[3, 4]], 0, 32) == owner.read([[1, 2]], 0, 32)
    assert owner.events(20)["released"] == {"waits"}
    renewed = owner.status()["handoff"]["renewed"]
    assert not any(owner.events(1.0).values())
    assert owner.status()["handoff"]["renewed"] == renewed, "nothing is renewed any more"


def test_a_hold_is_renewed_for_its_longest_time_only(start_engines: StartEngines) -> None:
    owner, reader = start_engines(
        EngineConfig("prefill", settings={**SHORT, "max_hold_s": 2.0}), EngineConfig("decode", settings=SHORT)
    )
    began = time.monotonic()
    owner.hold("r", [[1]], 16)
    keep(reader, owner, "r")
    assert owner.events(20)["expired"] == {"r"}
    assert 2.0 <= time.monotonic() - began < 3.0


def test_a_reader_that_waits_and_dies_leaves_the_hold_to_its_lease(start_engines: StartEngines) -> None:
    owner, reader = start_engines(EngineConfig("prefill", settings=SHORT), EngineConfig("decode", settings=SHORT))
    owner.hold("r", [[1]], 16)
    keep(reader, owner, "r")
    assert not any(owner.events(2.0).values())
    reader.stop()
    began = time.monotonic()
    assert owner.events(20)["expired"] == {"r"}
    assert time.monotonic() - began < 2 * SHORT["lease_s"]


def test_a_waiting_request_that_is_given_up_frees_the_blocks_at_once(start_engines: StartEngines) -> None:
    owner, reader = start_engines(EngineConfig("prefill", settings=SHORT), EngineConfig("decode", settings=SHORT))
    owner.hold("r", [[1]], 16, 20.0)
    keep(reader, owner, "r")
    pull(reader, owner, "r", [[1]], 0, 0)
    assert owner.events(10)["released"] == {"r"}, "long before its lease ends"


def test_what_is_digested_for_longer_than_a_lease_keeps_it(start_engines: StartEngines) -> None:
    """The reader has read at once, and waits for the owner's digests, which come later than lease and grace."""
    verify = {**SHORT, "verify": "all", "transfer_deadline_s": 30.0}
    owner, reader = start_engines(EngineConfig("prefill", settings=verify), EngineConfig("decode", settings=verify))
    hand_off(owner, reader, 40, 1)
    owner.delay_digests(2.0)
    owner.hold("r", [[1, 2]], 32)
    began = time.monotonic()
    pull(reader, owner, "r", [[3, 4]], 0, 32)
    events = reader.events(30)
    assert events["received"] == {"r"}, events
    assert time.monotonic() - began > 1.3, "it took longer than lease and grace, or it shows nothing"
    assert owner.status()["handoff"]["renewed"] > 1
    assert owner.events(20)["released"] == {"r"}


@pytest.mark.parametrize("connector", ["nixl", "ipc", "mooncake"])
def test_a_reader_that_was_stopped_does_not_use_blocks_that_were_reused(
    start_engines: StartEngines, connector: str
) -> None:
    """SIGSTOP in the middle of a transfer, until the owner has other content there: it must fail."""
    configs = (EngineConfig(name, settings=SHORT, connectors=(connector,), **BIG) for name in ("prefill", "decode"))
    owner, reader = start_engines(*configs)
    hand_off(owner, reader, 40, 1)
    blocks = [list(range(1500))]
    for attempt in range(8):
        name, content = f"r{attempt}", attempt + 1
        owner.fill_all(content)
        owner.hold(name, blocks, 24000)
        pull(reader, owner, name, blocks, 0, 24000)
        time.sleep(0.02 / (attempt + 1))
        reader.signal(signal.SIGSTOP)
        ended = owner.events(20)
        owner.fill_all(100)
        reader.signal(signal.SIGCONT)
        events = reader.events(20)
        if events["received"]:  # stopped too late: it had all, and had told the owner or was about to
            assert events["received"] == {name}
            assert reader.is_all(content, blocks[0])
            continue
        assert ended["expired"] == {name}
        assert events["causes"] == {name: "lease_expired"}, events
        assert not events["received"]
        break
    else:
        pytest.fail("the reader was never stopped before its end")
    hand_off(owner, reader, 40, 10)
    assert reader.status()["side_channel"]["internal_errors"] == 0


def test_sleep_with_holds_ends_within_lease_and_grace(start_engines: StartEngines) -> None:
    """One hold that nobody reads, one whose reader claimed it and was stopped."""
    configs = (EngineConfig(name, settings=SHORT, **BIG) for name in ("prefill", "decode"))
    owner, reader = start_engines(*configs)
    hand_off(owner, reader, 40, 1)
    blocks = [list(range(1500))]
    owner.hold("read", blocks, 24000)
    owner.hold("unread", [[1]], 16)
    pull(reader, owner, "read", blocks, 0, 24000)
    reader.signal(signal.SIGSTOP)
    began = time.monotonic()
    owner.sleep()
    assert time.monotonic() - began < SHORT["lease_s"] + SHORT["grace_s"] + 5
    events = owner.events(1)
    assert events["expired"] | events["released"] == {"read", "unread"}
    owner.wake()
    reader.signal(signal.SIGCONT)
    reader.events(20)
    hand_off(owner, reader, 400, 2)


def test_an_engine_that_only_holds_uses_no_processor_time(start_engines: StartEngines) -> None:
    """A hundred holds, half of them renewed by a reader whose turn has not come."""
    owner, reader = start_engines(*(EngineConfig(name, settings={"lease_s": 6.0}) for name in ("prefill", "decode")))
    hand_off(owner, reader, 100, 1)
    owner.events(1.1), reader.events(0.1)  # past the time in which the owner helps to set up a connection
    for index in range(100):
        owner.hold(f"h{index}", [[1]], 16)
    for index in range(50):
        keep(reader, owner, f"h{index}")
    before = owner.cpu_s(), reader.cpu_s()
    began = time.monotonic()
    while time.monotonic() - began < 5.0:
        assert not any(owner.events(0.5).values())
        assert not any(reader.events(0.5).values())
    spent = owner.cpu_s() - before[0], reader.cpu_s() - before[1]
    assert owner.status()["handoff"]["renewed"] >= 100, "twice each"
    assert max(spent) < 0.5, f"{spent} s in 5 s"
