"""`kvx verify` as a user runs it: what it writes, how it exits, and that each fault on purpose is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEADLINE_S = 900
MARK = "KVX_TEST_RUN"


def run_verify(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and output; and nothing of the run is left: no process, no shared memory."""
    report = tmp_path / "r.json"
    shared_before = set(os.listdir("/dev/shm"))
    mark = f"{MARK}={os.getpid()}-{tmp_path.name}"
    ended = subprocess.run(
        [sys.executable, "-m", "kvx.cli.main", "verify", "--report", str(report), "--logs", str(tmp_path), *arguments],
        env={**os.environ, MARK: mark.partition("=")[2], **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert not left_over(mark)
    assert set(os.listdir("/dev/shm")) <= shared_before
    text = ended.stdout + ended.stderr
    return ended.returncode, json.loads(report.read_text() or "{}"), text


def left_over(mark: str) -> list[int]:
    """Processes that carry the run's mark in their environment."""
    key, _, value = mark.partition("=")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(key) == value:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_run_without_an_explicit_size_holds_every_condition(model: Path, tmp_path: Path) -> None:
    """Each engine takes an eighth of what is free, so that the test fits a small machine."""
    code, report, text = run_verify(tmp_path, "--limit", "2", "--kv-space", "0", KVX_HOST_ENGINES="8")
    assert code == 0, text[-3000:]
    assert report["questions"] == report["identical"] == 2
    assert report["transfer"]["fallbacks"] == 0
    assert report["transfer"]["bytes"] > 0
    assert report["external_hits"]["expected"] == report["external_hits"]["observed"] > 0
    assert report["digests"]["checked"] > 0
    assert report["digests"]["mismatched"] == 0
    for engine in report["engines"].values():
        cache = engine["cache"]
        assert not cache["explicit_size"]
        assert cache["blocks_at_warmup"] < cache["blocks_final"]
        assert cache["base_address_unchanged"]
        assert cache["connector_opened_after_extend"]
        assert cache["registered_bytes"] <= cache["committed_bytes"] < cache["reserved_bytes"]


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("connectors", "connector"),
    [("mooncake", "mooncake"), ("ipc", "ipc"), pytest.param("auto", "ipc", marks=pytest.mark.matrix)],
)
def test_other_connectors_hand_off_as_well(model: Path, tmp_path: Path, connectors: str, connector: str) -> None:
    code, report, text = run_verify(tmp_path, "--connector", connectors, "--limit", "2")
    assert code == 0, text[-3000:]
    assert report["identical"] == report["questions"] == 2
    assert report["transfer"]["by_connector"] == {connector: 2}


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("connector", "fault"),
    [
        ("nixl", "flip-byte"),
        pytest.param("nixl", "swap-blocks", marks=pytest.mark.matrix),
        pytest.param("nixl", "stale", marks=pytest.mark.matrix),
        pytest.param("mooncake", "flip-byte", marks=pytest.mark.matrix),
        pytest.param("ipc", "swap-blocks", marks=pytest.mark.matrix),
    ],
)
def test_a_fault_on_purpose_is_found_and_named(model: Path, tmp_path: Path, connector: str, fault: str) -> None:
    code, report, text = run_verify(tmp_path, "--connector", connector, "--limit", "4", "--inject", fault)
    assert code == 1
    found = report["digests"]["mismatches"]
    assert found
    assert found[0]["request"]
    assert found[0]["layer_group"] == "group0"
    assert found[0]["position"] >= 0
    assert found[0]["request"] in text


@pytest.mark.matrix
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_fault_that_was_expected_is_repaired_by_computing_again(model: Path, tmp_path: Path) -> None:
    code, report, text = run_verify(tmp_path, "--limit", "2", "--inject", "flip-byte", "--expect-fallbacks", "1")
    assert code == 0, text[-3000:]
    assert report["identical"] == report["questions"] == 2
    assert report["transfer"]["failures"] == {"digest_mismatch": 1}
    assert report["digests"]["mismatches"][0]["request"] in text


@pytest.mark.matrix
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("connector", ["cpu_offload", "nixl,cpu_offload"])
def test_blocks_that_leave_and_return_change_no_answer(model: Path, tmp_path: Path, connector: str) -> None:
    code, report, text = run_verify(tmp_path, "--connector", connector, "--limit", "4")
    assert code == 0, text[-3000:]
    assert report["identical"] == report["questions"] == 4
    assert report["offload"]["evictions"] > 0 < report["offload"]["reloads"]
    assert report["external_hits"]["expected"] == report["external_hits"]["observed"] > 0


@pytest.mark.matrix
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_fault_in_what_was_loaded_is_found_and_named(model: Path, tmp_path: Path) -> None:
    code, report, text = run_verify(tmp_path, "--connector", "cpu_offload", "--limit", "4", "--inject", "stale")
    assert code == 1
    assert report["digests"]["mismatches"][0]["request"] in text


def test_too_little_memory_for_one_request_is_one_sentence(model: Path, tmp_path: Path) -> None:
    code, _, text = run_verify(tmp_path, "--limit", "1", "--explicit-size", "4")
    assert code != 0
    assert "To serve at least one request" in text  # vLLM's own sentence: the baseline has as little
    assert "Traceback" not in text
