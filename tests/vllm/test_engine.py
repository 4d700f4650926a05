"""One real engine: what is registered and when, what count each place reads, blocks that exist since the extend."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import ProbeResult, run_probe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HELD_MIB = 512
# Resident memory after two equal warm-ups differs by what the allocators keep; seen: up to 100 MiB.
NOISE_MIB = 160


def test_nixl_registers_after_the_extend_and_only_committed_bytes(probe: ProbeResult) -> None:
    registrations = probe.found["registrations"]
    assert registrations
    for call in registrations:
        assert call["state"] == "READY"
        assert call["extends_before"] == 1
        assert call["ranges"]
        for address, nbytes in call["ranges"]:
            assert any(a <= address and address + nbytes <= a + n for a, n in call["committed"])


def test_the_final_count_is_the_same_wherever_it_is_read(probe: ProbeResult) -> None:
    counts = dict(probe.found["counts"])
    tokens = counts.pop("tokens")
    assert len(set(counts.values())) == 1, counts
    final = counts["block_pool"]
    assert tokens == final * 128
    sizes = [line for line in probe.log.splitlines() if "KV cache size" in line]
    assert len(sizes) == 1, sizes
    assert f"{tokens:,} tokens" in sizes[0]


def test_the_cache_grew_in_place_and_every_byte_is_in_the_ledger(probe: ProbeResult) -> None:
    report = probe.found["report"]
    assert 0 < report["blocks_at_warmup"] < report["blocks_final"] <= report["capacity_blocks"]
    assert report["base_address_unchanged"]
    assert report["connector_opened_after_extend"]
    assert report["registered_bytes"] <= report["committed_bytes"] < report["reserved_bytes"]
    consumers = [row["consumer"] for row in report["ledger"]]
    assert any("growth of resident memory" in consumer for consumer in consumers)
    assert all(consumer in probe.log for consumer in consumers)


def test_block_copy_and_zeroing_reach_blocks_that_came_with_the_extend(probe: ProbeResult) -> None:
    assert probe.found["memory"] == {"copied": True, "zeroed": True, "neighbour_kept": True}


def test_block_ids_outside_the_committed_blocks_are_refused(probe: ProbeResult) -> None:
    assert set(probe.found["refused"].values()) == {"LayoutError"}
    assert probe.found["text"].startswith(" Paris")


def test_the_count_is_measured(probe: ProbeResult, model: Path, tmp_path: Path) -> None:
    held = run_probe(model, tmp_path, KVX_INJECT_HOLD_MIB=str(HELD_MIB)).found["report"]
    free = probe.found["report"]
    block_mib = free["registered_bytes"] / free["blocks_final"] / 2**20
    missing_mib = (free["blocks_final"] - held["blocks_final"]) * block_mib
    assert HELD_MIB - NOISE_MIB <= missing_mib <= HELD_MIB + NOISE_MIB
