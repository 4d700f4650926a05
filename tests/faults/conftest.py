from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from engine_process import running_fork_server
from network import Hosts, Network
from offloading_server import OffloadingServer
from servers_world import SECRET, Answers, ServersWorld
from table import ALL, Cell
from world import World

from kvx.verify.model import default_model

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
        for name in {"world", "servers"} & set(item.funcargs if report.failed else ()):  # type: ignore[attr-defined]
            item.funcargs[name].sound = False  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--kvx-faults-json", default=None)
    if path:
        outcomes = session.config.stash[_OUTCOMES]
        rows = [
            {"connector": cell.connector, "fault": cell.fault, "policy": cell.policy, "on": cell.on,
             "outcome": "n/a" if cell.reason else outcomes.get(str(cell), "not run"), "reason": cell.reason}
            for cell in ALL
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts with a link between them."""
    made = Hosts()
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture
def cell_outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.config.stash[_OUTCOMES]


class Kept:
    """One world at a time: the last one, while it is sound and what is wanted."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._wanted, self._world = make, (), None

    def get(self, *wanted: Any) -> Any:
        if self._world is None or not self._world.sound or self._wanted != wanted:
            self.close()
            world = self._make(*wanted)
            try:
                world.open()
            except BaseException:
                world.close()
                raise
            self._wanted, self._world = wanted, world
        return self._world

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Kept]:
    def make(connector: str, policy: str, has_link: bool) -> World:
        return World(connector, policy, Network() if has_link else None)

    with running_fork_server(), contextlib.closing(Kept(make)) as kept:
        yield kept


@pytest.fixture
def world(worlds: Kept, cell: Cell) -> World:
    return worlds.get(cell.connector, cell.policy, cell.fault == "network_cut")


@pytest.fixture(scope="session")
def model() -> Path:
    return default_model()


@pytest.fixture(scope="session")
def server_worlds(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Pairs of servers, and the stock one that knows what is right; who asks for status needs their secret."""

    def make(connector: str) -> ServersWorld | OffloadingServer:
        kind = OffloadingServer if connector == "cpu_offload" else ServersWorld
        return kind(connector, model, tmp_path_factory.mktemp(connector), answers)

    with (
        pytest.MonkeyPatch.context() as patched,
        Answers(model, tmp_path_factory.mktemp("stock")) as answers,
        contextlib.closing(Kept(make)) as kept,
    ):
        patched.setenv("KVX_SECRET", SECRET)
        yield kept


@pytest.fixture
def servers(server_worlds: Kept, cell: Cell) -> ServersWorld | OffloadingServer:
    return server_worlds.get(cell.connector)
