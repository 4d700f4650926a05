"""`kvx bench extend` and `bandwidth`: what they report, on the host and on a stand-in for a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_cuda import GRANULE, FakeCuda

from kvx import bench
from kvx.cli import main
from kvx.drivers import cuda
from kvx.drivers.cuda import CudaDriver
from kvx.drivers.host import HostDriver
from kvx.drivers.select import driver_for
from kvx.errors import DriverUnavailable, SizingError

MIB = 1 << 20


def require_summary(summary: dict[str, float]) -> None:
    assert 0 < summary["lowest"] <= summary["median"] <= summary["highest"]


def test_extend_on_the_host() -> None:
    report = bench.bench_extend(bench.ExtendSettings(device="cpu", total_bytes=32 * MIB, segments=3, rounds=2))
    assert (report["total_bytes"], report["segments"], report["device"]) == (30 * MIB, 3, "cpu")
    for name in ("map_s", "sleep_s", "wake_s"):
        require_summary(report[name])
    assert "zero_s" not in report, "host memory comes zeroed"


def test_extend_where_memory_must_be_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(cuda, "_load_bindings", lambda: fake)

    def on_host(_: str) -> CudaDriver:
        driver = CudaDriver()
        driver.device, driver.dlpack_device_type = "cpu", 1
        return driver

    monkeypatch.setattr(bench, "driver_for", on_host)
    monkeypatch.setattr(bench, "_MEMSET_BYTES", 4096)
    report = bench.bench_extend(bench.ExtendSettings(device="cuda:0", segments=4, rounds=2))
    assert report["total_bytes"] == 64 * GRANULE, "a quarter of what is free"
    for name in ("zero_s", "zero_bytes_per_s", "memset_bytes_per_s"):
        require_summary(report[name])
    assert report["zero_bandwidth_ratio"] > 0
    assert fake.books() == ({}, [], {})


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(SizingError, match="are free; ask for less"):
        bench.bench_extend(bench.ExtendSettings(device="cpu", total_bytes=1 << 50))


def test_bandwidth_moves_the_same_bytes_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LEAST_ROUND_S", 0)
    report = bench.bench_bandwidth(bench.BandwidthSettings(device="cpu", buffer_bytes=3 * MIB, pairs=3))
    assert (report["buffer_bytes"], list(report["operations"])) == (2 * MIB, ["copy", "kernel", "gather"])
    for found in report["operations"].values():
        for side in ("kvx", "torch", "ratio"):
            require_summary(found[side])


def test_a_device_s_driver() -> None:
    assert isinstance(driver_for("cpu"), HostDriver)
    for name in ("tpu", "cuda:x", "cpu:0", ""):
        with pytest.raises(DriverUnavailable, match="knows no memory driver"):
            driver_for(name)


@pytest.mark.parametrize(
    "words",
    [("extend", "--gib", "0.01", "--segments", "2", "--rounds", "1"), ("bandwidth", "--mib", "2", "--pairs", "1")],
)
def test_the_commands(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "deep" / "report.json"
    monkeypatch.setattr(sys, "argv", ["kvx", "bench", *words, "--device", "cpu", "--json", str(report)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert json.loads(report.read_text())["device"] == "cpu"
    assert "kvx bench" in capsys.readouterr().out
