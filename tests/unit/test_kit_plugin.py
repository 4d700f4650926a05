"""The kit's pytest plug-in: what it costs those who do not use it, and what it shows those who do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
from kvx.drivers.host import HostDriver
from kvx.testing import DriverTests

class TestSound(DriverTests):
    def make_driver(self):
        return HostDriver()

class Dirty(HostDriver):
    allocations_are_zero = False
    def memory_info(self):
        raise RuntimeError("no such device")

class TestDirty(DriverTests):
    def make_driver(self):
        return Dirty()

class TestAbsent(DriverTests):
    def make_driver(self):
        return HostDriver()

    @pytest.fixture
    def driver(self):
        raise RuntimeError("no such driver")
"""
SUBJECT = "driver of cpu"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_core_needs_no_pytest() -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(['pytest', 'hypothesis']));"
    run(f"{hidden} import kvx.bench, kvx.cache, kvx.cli.app, kvx.handoff, kvx.registry, kvx.testing.peer_engine")


def test_every_other_pytest_run_imports_next_to_nothing() -> None:
    kept = "[name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy', 'kvx')]"
    assert run(f"import sys, kvx.testing.plugin; print({kept})") == "['kvx', 'kvx.testing', 'kvx.testing.plugin']"


def test_the_table_says_what_became_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kvx-kit-json", "rows.json"]
    tests = ["test_it.py", "-k", "granularity or zero or more_than"]
    done = subprocess.run([*command, *tests], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    granularity, zero = "test_its_granularity_is_a_power_of_two", "test_fresh_memory_is_zero_where_declared"
    more = "test_more_than_there_is_is_out_of_memory"
    assert [(row["test"], row["subject"], row["outcome"], row["reason"]) for row in rows] == [
        (granularity, SUBJECT, "passed", ""),
        (zero, SUBJECT, "passed", ""),
        (more, SUBJECT, "passed", ""),
        (granularity, SUBJECT, "passed", ""),
        (zero, SUBJECT, "skipped", "allocations_are_zero is not declared"),
        (more, SUBJECT, "failed", "no such device"),
        (granularity, SUBJECT, "failed", "setup: no such driver"),
        (zero, SUBJECT, "failed", "setup: no such driver"),
        (more, SUBJECT, "failed", "setup: no such driver"),
    ]
    assert "driver of cpu: 4 passed, 4 failed, 1 skipped" in done.stdout
