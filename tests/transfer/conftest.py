from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineConfig, Remote, StartEngines, running_fork_server


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
