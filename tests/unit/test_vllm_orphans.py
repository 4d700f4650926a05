"""An engine core notices the end of the process that started it, in real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from kvx.vllm import orphans

SPAWN = multiprocessing.get_context("spawn")


def engine_core(said: Connection, is_stubborn: bool) -> None:
    orphans.DEADLINE_S = 0.2
    if is_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orphans.end_with_parent()
    said.send(os.getpid())
    time.sleep(60)


def api_server(said: Connection, name: str, is_stubborn: bool) -> None:
    """As vLLM does: not a daemon, which would end with its parent's exit."""
    child = SPAWN.Process(target=engine_core, args=(said, is_stubborn), name=name)
    child.start()
    child.join()


def orphaned(name: str, is_stubborn: bool = False) -> psutil.Process:
    """The child of a process that was killed."""
    ours, theirs = SPAWN.Pipe()
    server: Any = SPAWN.Process(target=api_server, args=(theirs, name, is_stubborn))
    server.start()
    assert ours.poll(60)
    core = psutil.Process(ours.recv())
    server.kill()
    server.join(10)
    return core


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_an_engine_core_ends_with_its_api_server(is_stubborn: bool) -> None:
    core = orphaned("EngineCore_DP0", is_stubborn)
    deadline = time.monotonic() + 20
    while is_alive(core):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_other_processes_are_nobodys_business() -> None:
    other = orphaned("somebody else's")
    try:
        time.sleep(0.5)  # nothing is awaited: nothing may happen
        assert is_alive(other)
    finally:
        other.kill()
