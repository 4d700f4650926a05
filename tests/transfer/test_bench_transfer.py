"""`kvx bench transfer` end to end, small: its processes, its check, its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_side_channel import listening_addresses
from typer.testing import CliRunner

from kvx.bench_process import Process
from kvx.bench_transfer import CONNECTOR, RAW, TransferSettings, _Owner
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


@pytest.mark.parametrize("side", [CONNECTOR, RAW])
def test_nixl_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Both ends are on this host: an interface that goes, as a container's, takes nothing with it."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    settings = TransferSettings(connector="nixl", total_bytes=1 << 20)
    owner = Process(_Owner, side, settings, environment={"UCX_TLS": "tcp,self"})
    try:
        pid = owner._process.pid
        assert pid is not None
        addresses = listening_addresses(pid)
    finally:
        owner.stop()
    assert {address.split(":")[0] for address in addresses} == {"0100007F"}


def test_blocks_that_do_not_fit_are_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "transfer", "--mib", "4", "--block", "3"])
    assert found.exit_code == 2
    assert "no whole number of blocks of 3 KiB" in found.output
