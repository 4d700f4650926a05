from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.transfer.engine_process import EngineConfig, Remote

os.environ.setdefault("UCX_TLS", "tcp,self,cma")

StartEngines = Callable[..., list[Remote]]


@pytest.fixture
def start_engines() -> Iterator[StartEngines]:
    """Start engine processes, all at once; they are gone when the test is."""
    started: list[Remote] = []

    def start(*configs: EngineConfig) -> list[Remote]:
        remotes = [Remote(config) for config in configs]
        started.extend(remotes)
        return [remote.ready() for remote in remotes]

    yield start
    for remote in started:
        remote.stop()
