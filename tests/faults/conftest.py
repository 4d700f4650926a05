from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from engine_process import running_fork_server
from table import ALL, Cell
from world import Network, World

_OUTCOMES = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvx-faults-json", metavar="PATH", help="write the table of faults there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOMES] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # type: ignore[attr-defined]
    if isinstance(cell, Cell):
        outcomes = item.config.stash[_OUTCOMES]
        # Of set-up, test and clean-up, the first that is not well decides.
        if outcomes.get(str(cell), "passed") == "passed":
            outcomes[str(cell)] = report.outcome
        if report.failed and "world" in item.funcargs:  # type: ignore[attr-defined]
            item.funcargs["world"].sound = False  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--kvx-faults-json", default=None)
    if path:
        outcomes = session.config.stash[_OUTCOMES]
        rows = [
            {"connector": cell.connector, "fault": cell.fault, "policy": cell.policy,
             "outcome": "n/a" if cell.reason else outcomes.get(str(cell), "not run"), "reason": cell.reason}
            for cell in ALL
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


@pytest.fixture
def cell_outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.config.stash[_OUTCOMES]


class Worlds:
    """One at a time: engines of the last connector, policy and network, while they are sound."""

    def __init__(self) -> None:
        self._world: World | None = None

    def get(self, connector: str, policy: str, has_network: bool) -> World:
        now, wanted = self._world, (connector, policy, has_network)
        if now is None or not now.sound or (now.connector, now.policy, now.network is not None) != wanted:
            self.close()
            self._world = World(connector, policy, Network() if has_network else None)
            self._world.open()
        assert self._world is not None
        return self._world

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    with running_fork_server():
        kept = Worlds()
        yield kept
        kept.close()


@pytest.fixture
def world(worlds: Worlds, cell: Cell) -> World:
    return worlds.get(cell.connector, cell.policy, cell.fault == "network_cut")
