"""`kvx plan`: a table and JSON from a config alone, and sentences for what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvx.cli import plan as module
from kvx.cli.app import app
from kvx.errors import KVXError

CONFIG = Path(__file__).parent / "configs" / "SmolLM2-135M.json"
STATUS = {
    "cache": {"ledger": [{"consumer": "weights", "bytes": 261 << 20}, {"consumer": "workspaces", "bytes": 2 << 20}]}
}


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_a_table_for_a_config_by_itself(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    result = run(CONFIG, "--device-memory", "139.8GiB", "--prompt-tokens", 1008, "--json", report)
    assert result.exit_code == 0, result.output
    assert "KV cache: 394069 blocks" in result.output
    assert "moves 22.1 MiB in 1,8" in result.output
    assert "\x1b" not in result.output
    found = json.loads(report.read_text())
    assert found["blocks"] == 394_069
    assert found["block_bytes"] == 30 * found["page_bytes"][0] == 368_640
    assert sum(row["bytes"] for row in found["ledger"]) == found["device_bytes"]
    assert [row["name"] for row in found["settings"]][:2] == ["as given", "block size 32"]
    assert found["handoff"]["bytes"] == 1008 * 23040


def test_a_fp8_cache_holds_twice_the_blocks() -> None:
    result = run(CONFIG, "--device-memory", "80GiB", "--kv-cache-dtype", "fp8")
    assert result.exit_code == 0
    assert "184,320" in result.output
    assert "fp8 cache" not in result.output


def test_a_setting_that_cannot_be_is_a_row_of_its_own() -> None:
    result = run(CONFIG, "--device-memory", "80GiB", "--tensor-parallel", 3)
    assert result.exit_code == 0
    assert "TP 1" in result.output


def test_the_measured_ledger_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx.handshake.request_status", lambda host, port: STATUS if (host, port) == ("::1", 7) else {})
    result = run(CONFIG, "--device-memory", "80GiB", "--server", "[::1]:7")
    assert result.exit_code == 0, result.output
    assert "measured" in result.output
    assert [line for line in result.output.splitlines() if "weights" in line and "257" in line and "261" in line]
    assert [line for line in result.output.splitlines() if "workspaces " in line and " 2 " in line]
    result = run(CONFIG, "--device-memory", "80GiB", "--server", "127.0.0.1:7")
    assert isinstance(result.exception, KVXError)
    assert "reports no ledger" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device-memory", "much"], "'much' is no size; write it as 80GiB"),
        (["--device-memory", "80GiB", "--server", "here"], "'here' is no HOST:PORT"),
    ],
)
def test_bad_words_are_usage_errors(words: list[str], said: str) -> None:
    result = run(CONFIG, *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device-memory", "1GiB"], "needs 513; lower the maximum model length"),
        (["--device-memory", "80GiB", "--tensor-parallel", 2], "3 KV heads cannot be divided among 2"),
        (["--device-memory", "80GiB", "--dtype", "float99"], "unknown cache dtype 'float99'"),
        (["--device-memory", "80GiB", "--layout", "XYZ"], "unknown KV cache layout 'XYZ'"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(words: list[object], said: str) -> None:
    result = run(CONFIG, *words)
    assert isinstance(result.exception, KVXError)
    assert said in str(result.exception)


def test_without_a_gpu_its_memory_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    result = run(CONFIG)
    assert isinstance(result.exception, KVXError)
    assert "give --device-memory" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 << 30), ("80", 80 << 30), ("141 GB", 141 * 10**9), ("1.5tib", 3 << 39)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert module._bytes(text) == nbytes
