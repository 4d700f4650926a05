"""`kvx bench plan`: every pair of caches is planned, with about as many copies as were asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvx import bench_plan as bench
from kvx.cli import main


def test_each_case_has_the_copies_that_were_asked_for() -> None:
    found = bench.bench_plan(bench.PlanSettings(copies=400, rounds=2))
    rows = {row["case"]: row for row in found["rows"]}
    assert rows.pop("equal blocks, in order")["copies"] == 1, "all of it is one"
    assert len(rows) == 10
    for row in rows.values():
        assert 300 <= row["copies"] <= 600, row
        assert 0 < row["plan_s"]["lowest"] <= row["plan_s"]["median"] <= row["plan_s"]["highest"]
    strided = rows.pop("LBNHC to BLNHC, 32 layers")
    assert strided["copies"] == 32 * strided["runs"], "layers are the stride of a run"
    assert all(row["copies"] == row["runs"] for row in rows.values())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["kvx", "bench", "plan", "--copies", "50", "--rounds", "1", "--json", str(report)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert json.loads(report.read_text())["copies"] == 50
    said = capsys.readouterr().out
    assert "kvx bench plan" in said
    assert "blocks of 32 to 64" in said
