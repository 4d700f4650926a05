"""`FaultTests`: the kit can fail. A connector that passes is given each fault, and the kit must turn red."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from kvx.testing.faults import FAULTS
from kvx.testing.kit import Kit

CAUGHT_BY: Final[dict[str, tuple[str, ...]]] = {
    "dropped-run": ("test_a_run_across_regions", "test_transfers_in_flight_side_by_side"),
    "off-by-one": ("test_a_run_across_regions", "test_transfers_in_flight_side_by_side"),
    "duplicate-completion": ("test_poll_reports_a_transfer_once",),
    "early-completion": ("test_done_means_that_the_bytes_are_there",),
    "registration-beyond-committed": ("test_open_registers_the_regions_and_nothing_else",),
    "use-after-close": ("test_nothing_is_touched_after_close",),
}
RUN_S: Final = 240.0


class FaultTests:
    """Subclass it beside the kit's own subclass, and name that: `kit = TestMine`."""

    kit: ClassVar[type[Kit]]

    @classmethod
    def kvx_kit_subject(cls) -> str:
        """What the table calls the connector."""
        return f"{cls.kit().make_connector().name}, with a fault"

    @pytest.mark.matrix
    @pytest.mark.parametrize("fault", list(FAULTS))
    def test_the_kit_finds(self, fault: str, tmp_path: Path, record_property: Any, pytestconfig: pytest.Config) -> None:
        rows = self._run(CAUGHT_BY[fault], fault, tmp_path / "rows.json", pytestconfig.rootpath)
        failed = {row["test"].partition("[")[0]: row["reason"] for row in rows if row["outcome"] == "failed"}
        assert set(failed) == set(CAUGHT_BY[fault]), f"{fault} was not found by every test that looks for it: {rows}"
        assert not [row for row in rows if row["reason"].startswith("setup")], "nothing was tested"
        record_property("caught_by", ", ".join(f"{test}: {reason}" for test, reason in failed.items()))

    def _run(self, tests: Sequence[str], fault: str, report: Path, root: Path) -> list[dict[str, str]]:
        """The rows of these tests, in a process of their own, which a fault may bring down."""
        file = sys.modules[self.kit.__module__].__file__
        nodes = [f"{file}::{self.kit.__qualname__.replace('.', '::')}::{test}" for test in tests]
        options = ["-q", "-p", "no:cacheprovider", "--kvx-kit-fault", fault, "--kvx-kit-json", str(report)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *nodes],
            cwd=root,
            env={**os.environ, "PYTEST_ADDOPTS": "", **self.kit.environ},
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert report.exists(), f"the run ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        rows: list[dict[str, str]] = json.loads(report.read_text())["rows"]
        return rows
