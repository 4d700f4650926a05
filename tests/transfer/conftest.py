from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, set_forkserver_preload

import pytest
from engine_process import EngineConfig, Remote, StartEngines


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Engine processes are forks of a process that has torch and NIXL imported: they start within a second."""
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11's fork server imports its preload modules without our sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]))
        patch.setenv("UCX_TLS", "tcp,self,cma")
        patch.setenv("NIXL_LOG_LEVEL", "WARN")
        set_forkserver_preload(["preload"])
        forkserver.ensure_running()


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
