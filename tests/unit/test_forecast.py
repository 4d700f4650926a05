"""What is planned for SmolLM2 on an H200 beside what an engine measured there, and what a hand-off moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_model import shape

from kvx.errors import ModelError, PeerMismatch, SizingError
from kvx.forecast import Device, Setting, forecast, handoff_plan, overheads, variations
from kvx.layout import KVCacheLayout
from kvx.sizing import GIB, MIB

MEASURED = Path(__file__).parents[2] / "docs/measurements/h200-memory.json"
H200_BYTES = 150_110_011_392


def measured() -> dict[str, Any]:
    """The first engine there with a ledger: V2 runner, graphs, nothing set."""
    for part in _dicts(json.loads(MEASURED.read_text())):
        if part.get("ledger"):
            return part
    raise AssertionError("the raw file has no ledger")


def _dicts(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(found for one in value.values() for found in _dicts(one))]
    return [found for one in value for found in _dicts(one)] if isinstance(value, list) else []


def test_each_line_of_the_ledger_is_near_the_measured_one() -> None:
    found = {row["consumer"]: row["bytes"] for row in measured()["ledger"]}
    total = sum(found.values())
    model, setting = shape("SmolLM2-135M"), Setting()
    planned = forecast(model, Device(total), setting, overheads(model, setting))
    rows = {row.consumer: row.nbytes for row in planned.sizing.ledger.rows}
    (counted,) = (name for name in found if name.startswith("KV cache: ") and name.endswith("blocks"))
    found["KV cache"], rows["KV cache"] = found.pop(counted), rows.pop(f"KV cache: {planned.sizing.num_blocks} blocks")
    for consumer, nbytes in found.items():
        assert abs(rows.pop(consumer, 0) - nbytes) <= max(nbytes // 20, 128 * MIB), consumer
    assert sum(rows.values()) <= 128 * MIB, "consumers that nobody measured"
    blocks = int(counted.split()[2])
    assert planned.sizing.num_blocks == pytest.approx(blocks, rel=0.01)


def test_stock_leaves_idle_what_it_was_seen_to_leave() -> None:
    model, setting = shape("SmolLM2-135M"), Setting()
    planned = forecast(model, Device(H200_BYTES), setting, overheads(model, setting))
    assert planned.stock.num_blocks == pytest.approx(370_880, rel=0.01)
    assert planned.stock.idle_bytes / GIB == pytest.approx(10.78, abs=0.5)
    assert planned.idle_bytes / GIB == pytest.approx(2.82, abs=0.1)


def test_what_is_given_counts_instead_of_the_guess() -> None:
    model, setting = shape("Qwen2.5-7B"), Setting(utilization=0.5)
    assert overheads(model, setting, weights_bytes=8 * GIB).weights_bytes == 8 * GIB
    planned = forecast(model, Device(80 * GIB), setting, overheads(model, setting, 8 * GIB))
    assert sum(row.nbytes for row in planned.sizing.ledger.rows) == 80 * GIB
    assert planned.sizing.num_blocks * planned.block_bytes < 40 * GIB
    assert planned.idle_bytes > 39 * GIB


def test_too_little_memory_is_a_sentence() -> None:
    model, setting = shape("Qwen2.5-7B"), Setting(max_model_len_tokens=32768)
    with pytest.raises(SizingError, match="are left for the cache"):
        forecast(model, Device(14 * GIB), setting, overheads(model, setting))
    with pytest.raises(SizingError, match="needs 2049; lower the maximum model length"):
        forecast(model, Device(17 * GIB), setting, overheads(model, setting))


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "DeepSeek-V2-Lite", "Gemma-3-1B"])
def test_variations_can_all_be_forecast(name: str) -> None:
    model = shape(name)
    names = []
    for title, setting in variations(Setting(), model):
        planned = forecast(model, Device(80 * GIB), setting, overheads(model, setting))
        assert planned.sizing.num_blocks > 1000
        names.append(title)
    assert names[0] == "as given"
    assert "fp8 cache" in names
    assert "TP 2" in names


def test_tokens_do_not_depend_on_the_block_size() -> None:
    model = shape("Qwen2.5-7B")
    tokens = [
        forecast(model, Device(80 * GIB), one, overheads(model, one)).num_tokens
        for one in (Setting(block_size_tokens=16), Setting(block_size_tokens=128))
    ]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.001)


def test_bytes_of_a_hand_off() -> None:
    model = shape("SmolLM2-135M")
    assert handoff_plan(model, Setting(), Setting(), 1000).nbytes == 1000 * 23040
    moved = handoff_plan(model, Setting(), Setting(), 1008)
    packed = handoff_plan(model, *[Setting(layout=KVCacheLayout.BLHNC)] * 2, 1008)
    # One for each block, all its layers lying side by side; but for the few whose neighbours a shuffle left in place.
    assert 55 < packed.descriptors <= 63
    assert moved.descriptors == 30 * packed.descriptors, "a page of each layer"


def test_half_the_heads_move_to_each_of_two_ranks() -> None:
    model = shape("Qwen2.5-7B")
    whole, half = (handoff_plan(model, Setting(), Setting(tp_size=ranks), 512) for ranks in (1, 2))
    assert half.nbytes * 2 == whole.nbytes


def test_block_sizes_may_differ() -> None:
    model = shape("SmolLM2-135M")
    assert handoff_plan(model, Setting(), Setting(block_size_tokens=64), 640).nbytes == 640 * 23040


def test_a_window_moves_its_tail() -> None:
    model = shape("Gemma-3-1B")
    moved = handoff_plan(model, Setting(), Setting(), 8192)
    assert moved.nbytes == 1024 * (4 * 8192 + 22 * 512)


def test_what_cannot_be_moved_is_named() -> None:
    model = shape("SmolLM2-135M")
    with pytest.raises(PeerMismatch, match="dtype"):
        handoff_plan(model, Setting(), Setting(cache_dtype="float32"), 100)
    with pytest.raises(ModelError, match="nothing to move"):
        handoff_plan(model, Setting(), Setting(), 0)
