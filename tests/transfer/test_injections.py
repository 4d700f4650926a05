"""Negative controls: each injected fault is found by the digests, which name request, layer group and position."""

from __future__ import annotations

from typing import Any

import pytest
from engine_process import EngineConfig, Remote, StartEngines
from test_handoff import VERIFY, await_parked, hand_off, pull

pytestmark = pytest.mark.transfer


def pair(start_engines: StartEngines, owner: dict[str, Any], reader: dict[str, Any]) -> tuple[Remote, Remote]:
    prefill, decode = start_engines(
        EngineConfig("prefill", settings={**VERIFY, **owner}),
        EngineConfig("decode", layout="LBNHC", block_size_tokens=32, settings={**VERIFY, **reader}),
    )
    return prefill, decode


def found(reader: Remote, request_id: str) -> dict[str, Any]:
    events = reader.events(20)
    assert "digests of request" in events["failed"][request_id], events
    digests: dict[str, Any] = reader.status()["digests"]
    assert digests["mismatched"] > 0
    assert len(digests["mismatches"]) == 1
    return dict(digests["mismatches"][0])


def test_flip_byte(start_engines: StartEngines) -> None:
    owner, reader = pair(start_engines, {}, {"inject": "flip-byte"})
    owner.fill([[4, 2, 6]], 40, 1)
    owner.hold("r", [[4, 2, 6]], 40)
    pull(reader, owner, "r", [[-1, 7]], 32, 8)
    assert found(reader, "r") == {"request": "r", "layer_group": "full", "position": 32}
    assert reader.status()["digests"] | {"mismatches": 0} == {
        "expected": 16,
        "checked": 16,
        "mismatched": 1,
        "mismatches": 0,
    }
    assert owner.events(20)["released"] == {"r"}
    hand_off(owner, reader, 100, 3)


def test_what_differs_is_used_where_that_is_asked_for(start_engines: StartEngines) -> None:
    owner, reader = pair(start_engines, {}, {"inject": "flip-byte-used"})
    owner.fill([[4, 2, 6]], 40, 1)
    owner.hold("r", [[4, 2, 6]], 40)
    pull(reader, owner, "r", [[-1, 7]], 32, 8)
    assert reader.events(20)["received"] == {"r"}
    digests = reader.status()["digests"]
    assert (digests["checked"], digests["mismatched"]) == (16, 1)
    assert owner.events(20)["released"] == {"r"}


@pytest.mark.parametrize("num_tokens", [16, 100])
def test_swap_blocks(start_engines: StartEngines, num_tokens: int) -> None:
    owner, reader = pair(start_engines, {}, {"inject": "swap-blocks"})
    blocks = [10, 3, 7, 1, 9, 20, 33][: -(-num_tokens // 16)]
    owner.fill([blocks], num_tokens, 1)
    owner.hold("r", [blocks], num_tokens)
    pull(reader, owner, "r", [[5, 2, 8, 40]], 0, num_tokens)
    assert found(reader, "r") == {"request": "r", "layer_group": "full", "position": 0}
    assert owner.events(20)["released"] == {"r"}
    hand_off(owner, reader, 100, 3)


@pytest.mark.parametrize("is_reused_by_the_engine", [True, False])
def test_stale(start_engines: StartEngines, is_reused_by_the_engine: bool) -> None:
    owner, reader = pair(start_engines, {"inject": "stale"}, {})
    if is_reused_by_the_engine:
        owner.await_reuse(60.0)
    owner.fill([[4, 2, 6]], 40, 1)
    owner.hold("r", [[4, 2, 6]], 40)
    assert owner.events(20)["released"] == {"r"}, "freed before it was read"
    pull(reader, owner, "r", [[8, 7]], 0, 40)
    if is_reused_by_the_engine:
        await_parked(owner, "r")
        owner.fill([[30, 2]], 32, 2)
        owner.hold("next", [[30, 2]], 32)
    position = found(reader, "r")
    assert position == {"request": "r", "layer_group": "full", "position": 16 if is_reused_by_the_engine else 0}
    assert not owner.events(0.2)["released"], "one release only"
    hand_off(owner, reader, 100, 3)


def test_two_rounds_without_injection_find_nothing(start_engines: StartEngines) -> None:
    owner, reader = pair(start_engines, {}, {})
    hand_off(owner, reader, 100, 1)
    hand_off(owner, reader, 33, 5)
    assert reader.status()["digests"] == {"expected": 266, "checked": 266, "mismatched": 0, "mismatches": []}
