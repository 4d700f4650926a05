"""Processes of an engine, found from outside: who belongs to it, what shared memory it has, and an end of both."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

# What an engine's children get after the engine itself has ended.
CHILDREN_DEADLINE_S = 5.0
_SHARED_MEMORY = re.compile(r"(/dev/shm/\S+)")
# Python's: it unlinks what its processes have left in /dev/shm, as soon as the last of them has ended.
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def of_session(leader: int) -> list[psutil.Process]:
    """Every living process of the session, and every descendant of its leader that left it."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update({child.pid: child for child in psutil.Process(leader).children(recursive=True)})
    found.update({process.pid: process for process in _living(lambda process: os.getsid(process.pid) == leader)})
    return list(found.values())


def of_folder(folder: str) -> list[psutil.Process]:
    """Every living process that works in the folder or in one of its own: what was started there, orphans too."""
    return list(_living(lambda process: Path(process.cwd()).is_relative_to(folder)))


def shared_memory_of(process: psutil.Process) -> set[str]:
    """Paths of the shared memory that a process has mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            match = _SHARED_MEMORY.search(line)
            if match and not line.endswith("(deleted)"):
                found.add(match.group(1))
    return found


def end(processes: Iterable[psutil.Process], shared_memory: Iterable[str] = ()) -> None:
    """Kill processes, and remove their shared memory, with what is known to have been theirs.

    Python's trackers go last and by themselves: they know of files that nobody has mapped any more.
    """
    living = list(processes)
    files = set(shared_memory).union(*map(shared_memory_of, living))
    trackers = [process for process in living if _is_tracker(process)]
    _kill([process for process in living if process not in trackers])
    _, left = psutil.wait_procs(trackers, timeout=CHILDREN_DEADLINE_S)
    _kill(left)
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=CHILDREN_DEADLINE_S)


def _living(is_one: Callable[[psutil.Process], bool]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if is_one(process) and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(_RESOURCE_TRACKER in word for word in process.cmdline())
    return False
