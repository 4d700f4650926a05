from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from doctor_helpers import Doctor, Report, Start, report_of
from engine_process import EngineConfig, Remote, StartEngines, running_fork_server

from kvx.cli import main


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    with running_fork_server():
        yield


@pytest.fixture
def start_engines(fork_server: None) -> Iterator[StartEngines]:
    """Start engine processes, all at once; they are gone when the test is."""
    started: list[Remote] = []

    def start(*configs: EngineConfig) -> list[Remote]:
        remotes = [Remote(config) for config in configs]
        started.extend(remotes)
        return [remote.ready() for remote in remotes]

    yield start
    for remote in started:
        remote.stop()


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    """The command in this process; what it starts are processes all the same."""
    for name in [name for name in os.environ if name.startswith(("KVX_", "UCX_"))]:
        monkeypatch.delenv(name)

    def call(*words: object) -> Report:
        monkeypatch.setattr(sys, "argv", ["kvx", "doctor", "--json", "-", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert isinstance(ended.value.code, int)
        return report_of(ended.value.code, capfd.readouterr().out)

    return call


@pytest.fixture
def start(fork_server: None) -> Iterator[Start]:
    """Start an engine process of any kind; it is gone when the test is."""
    started: list[Remote] = []

    def start_one(make: Any, engine_id: str = "peer", **config: Any) -> Remote:
        started.append(Remote(EngineConfig(engine_id, **config), make))
        return started[-1].ready()

    yield start_one
    for remote in started:
        remote.stop()
