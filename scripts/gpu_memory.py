"""Tests and measurements of the memory itself on a machine with a GPU; needs torch, cuda-bindings and pytest there.

    PYTHONPATH=. python scripts/gpu_memory.py FOLDER [--only verify_all,bandwidth] [--no-tests]

Writes FOLDER/memory.json (what was measured, by the names of docs/measurements.json) and FOLDER/memory-tests.xml, and
says everything on standard output as it comes. The status is pytest's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from say import say

import kvx
from kvx.bench import GIB, BandwidthSettings, ExtendSettings, bench_bandwidth, bench_extend
from kvx.bench_verify import VerifySettings, bench_verify
from kvx.drivers.select import driver_for

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--no-tests", action="store_true")
    options.add_argument("--only", type=lambda names: names.split(","), help="of what is measured, by its names")
    chosen = options.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "versions": versions(chosen.device),
        "reports": {},
        "measurements": {},
    }
    say(json.dumps(found["versions"]))
    status = 0 if chosen.no_tests else run_tests(chosen.folder)
    for name, measure in stages(chosen.device).items():
        if chosen.only and name not in chosen.only:
            continue
        start = time.monotonic()
        try:
            found["reports"][name] = measure()
        except Exception as error:  # noqa: BLE001  (one that fails does not keep the others from being measured)
            found["reports"][name] = {"error": repr(error)}
            status = status or 1
        say(f"{name} ({time.monotonic() - start:.1f} s): {json.dumps(found['reports'][name])}")
        found["measurements"] = measurements(found["reports"])
        (chosen.folder / "memory.json").write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    say(json.dumps(found["measurements"], indent=1))
    return status


def run_tests(folder: Path) -> int:
    """In a process of its own, the slow ones left out: what they check is measured here anyway."""
    command = [
        sys.executable, "-m", "pytest", "tests/gpu", "-v", "-s", "-W", "default", "-m", "not slow",
        "-p", "no:cacheprovider", f"--junitxml={(folder / 'memory-tests.xml').resolve()}",
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT).returncode


def stages(device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    free = driver_for(device).memory_info().free_bytes

    def extend(gib: int, segments: int) -> Callable[[], dict[str, Any]]:
        total = min(gib * GIB, int(free * 0.95))
        return lambda: bench_extend(ExtendSettings(device=device, total_bytes=total, segments=segments))

    return {
        "extend_130gib_30": extend(130, 30),
        "extend_100gib_60": extend(100, 60),
        "bandwidth": lambda: bench_bandwidth(BandwidthSettings(device=device, buffer_bytes=4 * GIB)),
        "verify_all": lambda: bench_verify(VerifySettings(device=device, request_bytes=GIB, in_flight=4)),
    }


def measurements(reports: dict[str, dict[str, Any]]) -> dict[str, float]:
    """By the names of docs/measurements.json; a report that failed, or that a smaller GPU shrank, gives none."""
    found: dict[str, float] = {}
    for gib, segments in ((130, 30), (100, 60)):
        report = reports.get(f"extend_{gib}gib_{segments}", {})
        if report.get("total_bytes", 0) > (gib - 1) * GIB:
            where = f"{gib}gib_{segments}_segments"
            found[f"extend.map_ms_{where}"] = round(report["map_s"]["median"] * 1e3, 2)
            found[f"extend.release_ms_{where}"] = round(report["sleep_s"]["median"] * 1e3, 2)
            found.setdefault("extend.zero_bandwidth_ratio", round(report["zero_bandwidth_ratio"], 4))
    for name, sides in reports.get("bandwidth", {}).get("operations", {}).items():
        found[f"bandwidth.{name}_ratio"] = round(sides["ratio"]["median"], 4)
    for row in reports.get("verify_all", {}).get("rows", []):
        end = "" if row["case"] == "2 MiB" else f"_{row['case'].replace(' ', '').lower()}"
        found[f"digest.verify_all_ratio{end}"] = round(row["ratio"]["median"], 4)
        found[f"digest.gb_per_s{end}"] = round(row["digest_bytes_per_s"]["median"] / 1e9, 1)
    return found


def versions(device: str) -> dict[str, str]:
    driver = driver_for(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        installed = version("cuda-bindings")
    except PackageNotFoundError:
        installed = "unknown"
    return {
        "kvx": kvx.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda_bindings": installed,
        "nvidia_driver": subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0],
        "gpu": torch.cuda.get_device_name(device),
        "granularity_bytes": str(driver.granularity_bytes),
    }


if __name__ == "__main__":
    sys.exit(main())
