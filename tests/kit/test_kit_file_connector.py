"""The example of a third party's connector: its own tests, and its installation."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from kvx_file_connector import FOLDER_VARIABLE, FileConnector

from kvx.connector import Connector
from kvx.testing import ConnectorTests, FaultTests

pytestmark = [pytest.mark.transfer, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "examples/file_connector"
LIMIT_LINES = 200


class TestFileConnector(ConnectorTests):
    environ: ClassVar = {FOLDER_VARIABLE: os.path.join(tempfile.gettempdir(), f"kvx-file-kit-{os.getuid()}")}

    def make_connector(self) -> Connector:
        return FileConnector()


class TestFileConnectorFaults(FaultTests):
    kit = TestFileConnector


def test_its_own_tests_pass() -> None:
    """All but the kit, which runs above."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not TestFileConnector", EXAMPLE],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_a_pip_install_of_its_own_is_all_that_it_takes(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", tmp_path, EXAMPLE], check=True)
    script = (
        "from kvx.registry import connector_class, known_connectors\n"
        "made = connector_class('file')()\n"
        "print(*known_connectors())\n"
        "print(type(made).__name__, *made.capabilities.operations, __import__('kvx_file_connector').__file__)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {"file", "nixl"} <= set(shown[0].split())
    assert shown[1] == f"FileConnector write {tmp_path / 'kvx_file_connector.py'}"


def test_its_module_stays_short() -> None:
    assert len((EXAMPLE / "kvx_file_connector.py").read_text().splitlines()) <= LIMIT_LINES
