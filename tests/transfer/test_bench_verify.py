"""`kvx bench verify` end to end, small: hand-offs in both modes, every digest compared, its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvx import bench_verify
from kvx.bench_verify import VerifySettings
from kvx.cli.app import app
from kvx.errors import TransferError

pytestmark = pytest.mark.transfer


def test_both_modes_stand_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_verify, "_LEAST_ROUND_S", 0.01)
    monkeypatch.delitem(bench_verify.CASES, "64 KiB")  # as slow to start, and the same otherwise
    report = tmp_path / "report.json"
    words = ["bench", "verify", "--device", "cpu", "--mib", "4", "--pairs", "2", "--json", str(report)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    rows = json.loads(report.read_text())["rows"]
    assert [(row["case"], row["layout"]) for row in rows] == [("2 MiB", "BLHNC")]
    for row in rows:
        assert set(row["bytes_per_s"]) == {"off", "all"}
        assert row["ratio"]["median"] > 0 < row["digest_bytes_per_s"]["median"]


def test_a_size_that_is_no_whole_number_of_blocks_is_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "verify", "--mib", "3"])
    assert found.exit_code == 2
    assert "no whole number of blocks of 2 MiB" in found.output


def test_digests_that_nobody_compared_are_no_measurement() -> None:
    reader = bench_verify._Reader("off", bench_verify.CASES["2 MiB"], VerifySettings(request_bytes=2 << 20), 1)
    try:
        with pytest.raises(TransferError, match="not all compared"):
            reader.require_compared()
    finally:
        reader.close()
