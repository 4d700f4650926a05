"""What the fuzzer keeps, and bombs that it would hardly find, through every door: in `make check`, without atheris."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fuzz_doors
import pytest
from fuzz_doors import DOORS, Door, most_bytes
from handoff_world import SimulatedExecutor

CORPUS = Path(__file__).parent / "corpus"
# What must be among a door's ends, or its corpus does not reach what it is for.
REACHED = {
    "owner": {"answered", "taken", "malformed"},
    "owner-sealed": {"answered", "taken", "malformed", "unsigned", "forged", "stale", "replayed"},
    "reader": {"received", "waits", "malformed", "failed: digest_mismatch", "failed: refused"},
    "reader-sealed": {"received", "waits", "malformed", "unsigned", "replayed", "failed: digest_mismatch"},
    "ticket": {"taken", "no ticket", "not one that an engine", "expired", "leads to"},
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fuzz_doors.engine_side, "ThreadPoolExecutor", SimulatedExecutor)
    tracemalloc.start()
    yield
    tracemalloc.stop()


def fed(door: Door, data: bytes) -> str:
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    outcome = door.feed(data)
    used = tracemalloc.get_traced_memory()[1] - before
    assert used <= most_bytes(len(data)), f"{used} bytes for a message of {len(data)}"
    return outcome


@pytest.mark.parametrize("name", DOORS)
def test_each_kept_message_is_taken_or_refused_within_its_limits(name: str, traced: None) -> None:
    door: Door = DOORS[name]()
    kept = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    reached = {fed(door, data) for data in [*kept, *(data[:end] for data in kept for end in range(1, len(data), 7))]}
    door.require_usable()
    reached |= {fed(door, data) for data in door.large()}
    door.require_usable()
    assert reached >= REACHED[name]
    assert all(len(data) <= 1024 for data in kept), "a small corpus"
