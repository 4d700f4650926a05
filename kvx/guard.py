"""Clears away after a run that was killed: `python -m kvx.guard FOLDER`, started by `servers.Servers`.

It waits for the end of its standard input. Where that comes without a word, its parent has died, and whatever works in
the run's folder is ended, with its shared memory; then the folder goes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from kvx import processes

DONE = b"done"


class Guard:
    """The parent's handle of the guard of one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start it, in a session of its own, so that no signal for its parent's group ends both."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvx.guard", self._folder],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """The parent has cleared away by itself. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate(DONE)


def main(folder: str) -> None:
    """Until the parent ends, one way or the other."""
    if sys.stdin.buffer.read() == DONE:
        return
    processes.end(one for one in processes.of_folder(folder) if one.pid != os.getpid())
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
