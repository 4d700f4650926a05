"""Both engines prefill and decode at once, with aborts and short leases: every request ends exactly once."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from engine_process import EngineConfig, Remote, StartEngines
from test_handoff import pull

pytestmark = pytest.mark.transfer

SETTINGS = {"verify": "all", "transfer_deadline_s": 10.0, "lease_s": 10.0, "grace_s": 0.5}


def test_every_hold_and_every_pull_ends_exactly_once(start_engines: StartEngines) -> None:
    size = {"num_blocks": 300, "capacity_blocks": 512}
    engines = start_engines(EngineConfig("a", settings=SETTINGS, **size), EngineConfig("b", settings=SETTINGS, **size))
    rng, ends = random.Random(5), [Counter[str](), Counter[str]()]
    expected: list[set[str]] = [set(), set()]
    for engine in engines:
        engine.fill([list(range(24))], 384, 9)
    for index in range(80):
        side = rng.randrange(2)
        owner, reader = engines[side], engines[1 - side]
        name = f"r{index}"
        start = rng.randrange(8) * 3
        fate = rng.choice(["plain", "plain", "plain", "dropped", "cancelled", "expires", "unheld", "unread"])
        if fate != "unheld":
            owner.hold(name, [[start, start + 1, start + 2]], 40, 0.05 if fate == "expires" else None)
            expected[side].add(f"hold {name}")
        if fate == "dropped":
            owner.drop(name)
        if fate != "unread":
            pull(reader, owner, name, [[30 + 3 * index, 31 + 3 * index, 32 + 3 * index]], 0, 40)
            expected[1 - side].add(f"pull {name}")
        if fate == "cancelled":
            reader.cancel(name)
        if rng.random() < 0.3:
            collect(engines, ends, 0.0)
    deadline = time.monotonic() + 60
    while any(set(end) != wanted for end, wanted in zip(ends, expected, strict=True)) and time.monotonic() < deadline:
        collect(engines, ends, 0.1)
    collect(engines, ends, 0.2)
    for engine, end, wanted in zip(engines, ends, expected, strict=True):
        assert set(end) == wanted
        assert set(end.values()) <= {1}
        status = engine.status()
        assert status["side_channel"] == {"refused": 0, "internal_errors": 0}
        assert status["handoff"]["holds"] == 0
        assert status["transfer"]["received"] > 5
        assert status["digests"]["mismatched"] == 0
        engine.close()


def collect(engines: list[Remote], ends: list[Counter[str]], timeout_s: float) -> None:
    for engine, end in zip(engines, ends, strict=True):
        events = engine.events(timeout_s)
        end.update(f"hold {name}" for name in [*events["released"], *events["expired"]])
        end.update(f"pull {name}" for name in [*events["received"], *events["failed"]])
