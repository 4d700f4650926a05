"""`kvx bench offload` on the host: what it reports, and that it notices bytes that come back changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_connector import FakeConnector

from kvx import bench_offload as bench
from kvx.cli import main
from kvx.drivers.copier import Copying, HostCopier, Int64s
from kvx.errors import ConnectorError, LayoutError, TransferError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LEAST_ROUND_S", 0)


def test_each_size_each_way_beside_memcpy() -> None:
    found = bench.bench_offload(
        bench.OffloadSettings(device="cpu", total_bytes=4 * MIB, block_sizes_bytes=(32 << 10, 2 * MIB), pairs=2)
    )
    assert found["beside"] == "memcpy"
    assert [(row["block_bytes"], row["direction"]) for row in found["rows"]] == [
        (32 << 10, "to host"), (32 << 10, "to cache"), (2 * MIB, "to host"), (2 * MIB, "to cache"),
    ]  # fmt: skip
    for row in found["rows"]:
        for summary in (*row["bytes_per_s"].values(), row["ratio"]["memcpy"]):
            assert 0 < summary["lowest"] <= summary["median"] <= summary["highest"]


def test_bytes_that_come_back_changed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HostCopier.start

    def short(self: Any, destination: Int64s, source: Int64s, nbytes: Int64s, **more: Any) -> Copying:
        return whole(self, destination, source, nbytes - 1, **more)

    monkeypatch.setattr(HostCopier, "start", short)
    with pytest.raises(TransferError, match="other bytes came back"):
        bench.bench_offload(bench.OffloadSettings(device="cpu", total_bytes=4 * MIB, pairs=1))


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="no whole number of blocks"):
        bench.bench_offload(bench.OffloadSettings(device="cpu", total_bytes=3 << 20, pairs=1))
    monkeypatch.setattr(bench, "connector_class", lambda name: FakeConnector)
    with pytest.raises(ConnectorError, match="does not offload"):
        bench.bench_offload(bench.OffloadSettings(device="cpu", connector="fake", total_bytes=4 * MIB, pairs=1))


def test_the_command_draws_a_table_and_writes_all_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.json"
    monkeypatch.setattr(
        sys, "argv", ["kvx", "bench", "offload", "--device", "cpu", "--mib", "4", "--pairs", "1", "--json", str(report)]
    )
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "2048 KiB to cache" in text
    assert "kvx / memcpy" in text
    assert len(json.loads(report.read_text())["rows"]) == 8
