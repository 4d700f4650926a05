from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from engine_process import running_fork_server
from soak_report import lines

_ROWS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvx-soak-json", metavar="PATH", help="write the table of soak runs there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--kvx-soak-json", default=None)
    if path:
        rows = session.config.stash[_ROWS]
        Path(path).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_ROWS]
    if rows:
        terminalreporter.section("soak runs")
    for row in rows:
        for line in lines(row):
            terminalreporter.write_line(line)


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The table of this session."""
    return request.config.stash[_ROWS]


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say how far a long test is, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return tell


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    with running_fork_server():
        yield
