"""`kvx bench transfer` end to end, small: its processes, its check, its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvx.cli.app import app

pytestmark = pytest.mark.transfer


@pytest.mark.parametrize(
    ("connector", "sides"),
    [("ipc", {"memcpy"}), ("nixl", {"memcpy", "raw library"}), ("mooncake", {"memcpy", "raw library"})],
)
def test_the_report_has_every_case_beside_every_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, sides: set[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self,cma")
    report = tmp_path / "report.json"
    words = ["bench", "transfer", "--connector", connector, "--mib", "4", "--block", "64", "--block", "256"]
    found = CliRunner().invoke(app, [*words, "--pairs", "2", "--in-flight", "2", "--json", str(report)])
    assert found.exit_code == 0, found.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "64 KiB in order", "64 KiB permuted", "256 KiB in order", "256 KiB permuted",
    ]  # fmt: skip
    for row in rows:
        assert set(row["ratio"]) == sides
        assert row["ratio"]["memcpy"]["median"] > 0 < row["single_transfer_s"]["median"]


def test_blocks_that_do_not_fit_are_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "transfer", "--mib", "4", "--block", "3"])
    assert found.exit_code == 2
    assert "no whole number of blocks of 3 KiB" in found.output
