"""One of vLLM's processes ends, asked or killed, on either side: what is left of its engine goes, and nothing stays.

The other engine keeps nothing of it, and hands off with the next one of its name.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvx import processes
from kvx.engine_settings import EngineSettings
from kvx.servers import Server, Servers
from kvx.verify import engines
from kvx.verify.client import Client

from .test_handoff import ask, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900)]

SHARED_MEMORY = Path("/dev/shm")
ROLES = {"api": "api_server", "core": "EngineCore", "worker": "Worker"}
SIDES = (engines.PREFILL, engines.DECODE)
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
ROWS = list(itertools.product(SIDES, ROLES, SIGNALS))
ENDS_WITH_IT_S = 60.0
"""The rest of an engine, by itself."""
SLACK = {"file descriptors": 12, "shared memory": 0}
"""How much more than at first a survivor may have after any number of rows: HTTP connections come and go."""


class Pair:
    """Two engines, of which one after the other is replaced."""

    def __init__(self, servers: Servers, sides: engines.Pair) -> None:
        self.servers, self.client = servers, Client()
        self.settings: dict[str, EngineSettings] = dict(zip(SIDES, sides.engines, strict=True))
        self.running: dict[str, Server] = {}
        self._first: dict[int, Counter[str]] = {}
        self._numbers = itertools.count()

    def start(self, *sides: str) -> None:
        for side in sides:
            self.running[side] = self.servers.start(self.settings[side])
        self.servers.wait_healthy(only=[self.running[side] for side in sides])
        self.hand_off()

    def hand_off(self) -> None:
        number = next(self._numbers)
        wanted = ask(f"kept {number}", tokens(200, seed=number))
        prefill, decode = (self.running[side].url for side in SIDES)
        found = self.client.ask_pair(prefill, decode, wanted)
        assert not found.error, found.error
        assert found.tokens == self.client.ask_single(decode, wanted).tokens

    def growth(self, side: str) -> dict[str, int]:
        """What each process of an engine holds, over what it held when it was first seen."""
        grown: dict[str, int] = {}
        for process in self.running[side].processes():
            now = footprint(process)
            first = self._first.setdefault(process.pid, now)
            grown |= {f"{process.name()} {process.pid}: {what}": now[what] - first[what] for what in SLACK}
        return grown


def footprint(process: psutil.Process) -> Counter[str]:
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    shared = sum(bool(re.search(r"/dev/shm/|/memfd:kvx", line)) for line in maps)
    return Counter({"file descriptors": process.num_fds(), "shared memory": shared})


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    run = engines.RunSettings(model=model, connectors=("auto",), max_model_len_tokens=512, explicit_blocks=16)
    with Servers(tmp_path_factory.mktemp("housekeeping")) as servers:
        made = Pair(servers, engines.kvx_pair(run, digests=True))
        made.start(*SIDES)
        yield made
        made.client.close()


def process_of(server: Server, role: str) -> psutil.Process:
    (found,) = [one for one in server.processes() if is_of(one, role)]
    return found


def is_of(process: psutil.Process, role: str) -> bool:
    """By what it calls itself; the tracker of Python's resources has a command line of its own."""
    words = " ".join(process.cmdline())
    return ROLES[role] in words and "resource_tracker" not in words


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def unmapped_files(known: set[str]) -> set[str]:
    """Shared memory that is new, and that no living process has mapped: nobody will miss it or remove it."""
    new = {str(SHARED_MEMORY / name) for name in os.listdir(SHARED_MEMORY)} - known
    mapped: set[str] = set()
    for process in psutil.process_iter():
        mapped |= processes.shared_memory_of(process)
    return new - mapped


def _row(row: tuple[str, str, signal.Signals]) -> Any:
    side, role, number = row
    return pytest.param(*row, id=f"{side}-{role}-{number.name}")


@pytest.mark.parametrize(("side", "role", "number"), [_row(row) for row in ROWS])
def test_nothing_is_left_of_an_engine(pair: Pair, side: str, role: str, number: signal.Signals) -> None:
    (other,) = set(SIDES) - {side}
    pair.growth(other)
    known = {str(SHARED_MEMORY / name) for name in os.listdir(SHARED_MEMORY)}
    victim = pair.running[side]
    victims = victim.processes()
    files = set[str]().union(*map(processes.shared_memory_of, victims))
    assert files, f"vLLM's processes share memory: {[(one.name(), one.pid) for one in victims]}, {sorted(known)}"
    folder = victims[0].cwd()
    assert any(path.is_socket() for path in Path(folder).iterdir()), "and sockets"

    process_of(victim, role).send_signal(number)
    until(
        lambda: not any(map(is_alive, victims)),
        lambda: f"do not end with it: {[one for one in victims if is_alive(one)]}",
        ENDS_WITH_IT_S,
    )
    assert pair.running[other].is_healthy()
    pair.servers.stop(victim)
    assert not [one for one in victims if is_alive(one)]
    assert not [path for path in files if os.path.exists(path)]
    assert not Path(folder).exists()
    until(lambda: not unmapped_files(known), lambda: f"left: {unmapped_files(known)}")

    pair.start(side)
    pair.hand_off()
    until(lambda: is_clean(pair, other), lambda: f"left in the {other} engine: {pair.growth(other)}")


def is_clean(pair: Pair, side: str) -> bool:
    return all(more <= SLACK[name.rpartition(": ")[2]] for name, more in pair.growth(side).items())


def until(holds: Callable[[], bool], why: Callable[[], str], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)
