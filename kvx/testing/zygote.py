"""The process that peers are forks of: it has imported the author's test class, so that a peer starts at once.

    python -m kvx.testing.zygote MODULE FILE CLASS < addresses

Each line of standard input is a Unix socket on which one new peer answers. It ends at the end of its input, and its
peers with it, stopped ones too.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import sys
from multiprocessing.connection import Client, Connection
from types import ModuleType

from kvx.testing.kit import Kit

_PR_SET_PDEATHSIG = 1


def main() -> None:
    module, file, name = sys.argv[1:]
    found: object = _load(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, type)
    assert issubclass(found, Kit)
    found().make_connector()  # imports what connectors import late
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a peer that was killed
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with Client(line.strip()) as pipe:
                _serve(found(), pipe)
            os._exit(0)  # what libraries do at exit is not the kit's to test


def _load(name: str, file: str) -> ModuleType:
    """By name where that finds the same file, else by file: pytest can import modules that no path leads to."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(kit: Kit, pipe: Connection) -> None:
    from kvx.testing.peer_engine import PeerEngine

    engine = PeerEngine(kit)
    pipe.send(os.getpid())
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(engine, name)(*arguments))
        except Exception as error:  # noqa: BLE001  the test raises it
            answer = (False, ([kind.__name__ for kind in type(error).__mro__], str(error)))
        pipe.send(answer)


if __name__ == "__main__":
    main()
