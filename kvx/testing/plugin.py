"""The pytest plug-in: fixtures of the kit, its table of rows, and that table as JSON.

Every pytest run in the environment loads this, so nothing of kvx is imported before a test asks for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvx.testing.pair import Pair
    from kvx.testing.peers import Processes

_CHECKS = (
    "connectors",
    "data",
    "drivers",
    "failures",
    "fault_tests",
    "life",
    "machine",
    "metadata",
    "pair",
    "resources",
)
pytest.register_assert_rewrite(*(f"kvx.testing.{name}" for name in _CHECKS))


@dataclass(frozen=True)
class Row:
    """One test of one subject: "passed", "failed" or "skipped", and why not passed."""

    test: str
    subject: str
    outcome: str
    reason: str


_ROWS = pytest.StashKey[dict[str, Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvx", "conformance kit of kvx")
    group.addoption("--kvx-kit-json", metavar="PATH", help="write the kit's rows there, as JSON")
    group.addoption("--kvx-kit-fault", metavar="NAME", help="give the connector under test a fault, to see it found")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = {}
    config.addinivalue_line("markers", "matrix: further rows of a matrix; leave them out with -m 'not matrix'")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:  # a generator's result goes by its return statement
    report: pytest.TestReport = yield  # type: ignore[assignment]
    owner = getattr(item, "cls", None)
    if owner is not None and hasattr(owner, "kvx_kit_subject"):
        rows, known = item.config.stash[_ROWS], item.config.stash[_ROWS].get(item.nodeid)
        # Of set-up, test and clean-up, the first that is not well decides.
        if known is None or known.outcome == "passed":
            rows[item.nodeid] = Row(item.name, owner.kvx_kit_subject(), report.outcome, _reason(report, call))
    return report  # type: ignore[return-value]


def _reason(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if report.failed and call.excinfo is not None:
        words = str(call.excinfo.value).strip().splitlines() or [call.excinfo.typename]
        return ("" if report.when == "call" else f"{report.when}: ") + words[0]
    return ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_ROWS].values()
    if not rows:
        return
    terminalreporter.section("kvx conformance kit")
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("test", "subject", "outcome")]
    for row in rows:
        cells = zip((row.test, row.subject, row.outcome), widths, strict=True)
        terminalreporter.write_line("  ".join([*(cell.ljust(width) for cell, width in cells), row.reason]).rstrip())
    for subject in dict.fromkeys(row.subject for row in rows):
        counts = [sum((row.subject, row.outcome) == (subject, outcome) for row in rows) for outcome in _OUTCOMES]
        terminalreporter.write_line(f"{subject}: " + ", ".join(map("{} {}".format, counts, _OUTCOMES)))


_OUTCOMES = ("passed", "failed", "skipped")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--kvx-kit-json")
    if path:
        rows = [asdict(row) for row in session.config.stash[_ROWS].values()]
        Path(path).write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture(scope="class")
def kvx_kit_environ(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the class wants in this process's environment."""
    before = dict(os.environ)
    os.environ.update(request.cls.environ)
    yield
    for name in request.cls.environ:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture(scope="class")
def kvx_kit_processes(
    request: pytest.FixtureRequest,
    kvx_kit_environ: None,  # noqa: ARG001
) -> Iterator[Processes]:
    """Starts peers in processes of their own."""
    from kvx.testing.peers import Processes

    with Processes(request.cls) as processes:
        yield processes


@pytest.fixture(scope="class")
def kvx_kit_pair(request: pytest.FixtureRequest, kvx_kit_processes: Processes) -> Iterator[Pair]:
    from kvx.testing.pair import Pair

    made = Pair(request.cls(), kvx_kit_processes, request.config.getoption("--kvx-kit-fault"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def pair(kvx_kit_pair: Pair) -> Pair:
    """The connector under test and its peer: open, connected, and the memory of both as `Pair.fresh` leaves it."""
    return kvx_kit_pair.fresh()


@pytest.fixture
def processes(kvx_kit_processes: Processes) -> Processes:
    """Peers besides the one of `pair`."""
    return kvx_kit_processes
