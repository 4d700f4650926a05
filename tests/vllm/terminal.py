"""A command on a terminal, as a user has it, and what its processes hold."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command with a terminal of its own, on which Ctrl-C can be typed."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["env", "--default-signal=INT", "setsid", "--ctty", *command],  # a shell ignores it for background jobs
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", **environment},
        )
        os.close(slave)
        self._seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._seen += os.read(self._master, 65536)
            except OSError:  # the last process with this terminal has ended
                return

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._seen.decode(errors="replace"))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, is_there: Callable[[str], bool], deadline_s: float) -> None:
        """Until what has been on the screen is as asked for, while the command runs."""
        end_s = time.monotonic() + deadline_s
        while not is_there(self.text):
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < end_s, self.text[-4000:]
            time.sleep(0.1)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._reader.join(10)
        os.close(self._master)


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    found: set[str] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= set(re.findall(r"(/dev/shm/\S+)$", maps, flags=re.MULTILINE))
    return found
