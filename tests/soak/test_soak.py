"""Thousands of hand-offs with aborts and kills in between: all of them right, and nothing is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from soak_engine import SoakEngine
from soak_load import NUM_BLOCKS, SETTINGS, Load
from soak_report import Look, growths, memory_of
from world import World


@dataclass(frozen=True)
class Size:
    """`lap`: after so many hand-offs all is at rest, and looked at."""

    hand_offs: int
    lap: int
    kills: int


SHORT, LONG = Size(500, 100, 3), Size(10_000, 500, 20)


@pytest.mark.transfer
@pytest.mark.slow
def test_a_short_soak(fork_server: None, rows: list[dict[str, Any]], tell: Callable[[str], None]) -> None:
    soak("nixl", SHORT, rows, tell)


@pytest.mark.transfer
@pytest.mark.soak
@pytest.mark.timeout(15 * 60)
@pytest.mark.parametrize("connector", ["nixl", "ipc", "mooncake"])
def test_a_long_soak(
    fork_server: None, rows: list[dict[str, Any]], tell: Callable[[str], None], connector: str
) -> None:
    soak(connector, LONG, rows, tell)


def soak(connector: str, size: Size, rows: list[dict[str, Any]], tell: Callable[[str], None], seed: int = 5) -> None:
    began, problems = time.monotonic(), list[str]()
    world = World(connector, "fail", None, engine=SoakEngine, num_blocks=NUM_BLOCKS, settings=SETTINGS)
    try:
        world.open()
        load = Load(world, size.hand_offs, size.lap, size.kills, seed, tell)
        try:
            load.run()
            problems += growths(load.looks)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            rows.append(
                {
                    "connector": connector, "seed": seed, **load.tally.as_row(), "duration_s": time.monotonic() - began,
                    "memory": memory_of(load.looks), "problems": problems,
                }
            )  # fmt: skip
    finally:
        world.close()
    assert not problems
    assert (load.tally.ended, load.tally.kills) == (size.hand_offs, size.kills)
    assert load.tally.received > 0.85 * size.hand_offs, "most are neither aborted nor lost to a kill"


WELL = {
    "resident": 200 << 20, "objects": 600_000, "file descriptors": 40, "threads": 6, "mappings": 1000,
    "shared memory mappings": 3,
}  # fmt: skip


def looks_of(last: dict[str, int]) -> list[Look]:
    """Of a run whose decode has changed between its middle and its end."""
    seen = [WELL] * 10 + [{**WELL, **last}] * 10
    return [Look(500 * number, {"decode": look, "well": WELL}) for number, look in enumerate(seen, 1)]


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ({"resident": 212 << 20}, "resident memory grew from 209715200 to 222298112 bytes"),
        ({"objects": 601_000}, "1000 objects more in the last 5000 hand-offs"),
        ({"threads": 7}, "1 threads more"),
        ({"file descriptors": 45}, "5 file descriptors more"),
        ({"mappings": 1009}, "9 mappings more"),
        ({"shared memory mappings": 4}, "1 shared memory mappings more"),
    ],
)
def test_what_grows_is_found(last: dict[str, int], problem: str) -> None:
    assert growths(looks_of(last)) == [f"decode: {problem}"]


def test_what_stays_or_shrinks_is_well() -> None:
    assert growths(looks_of({})) == []
    assert growths(looks_of({"resident": 209 << 20, "objects": 600_600, "file descriptors": 43, "mappings": 900})) == []


def test_a_peak_between_the_first_look_and_the_last_tenth_is_no_leak() -> None:
    looks = looks_of({})
    looks[5] = Look(3000, {"decode": {**WELL, "resident": 300 << 20, "threads": 9}, "well": WELL})
    assert growths(looks) == []
