"""One Mooncake TransferEngine: how it starts, what it registers, and an end that is the end of its transfers.

The one place that imports the library.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvx.errors import ConnectorError, ConnectorUnavailable
from kvx_connectors.mooncake_settings import Settings

os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # read when the library is loaded; else it tells of every batch
try:
    from mooncake.engine import TransferEngine, TransferOpcode
except ImportError as error:
    if "libibverbs" not in str(error):
        raise
    # Its wheel is linked to the RDMA library, and so needs it for TCP as well.
    raise ConnectorUnavailable(
        "connector 'mooncake' needs the system library libibverbs.so.1, which is missing", "apt-get install libibverbs1"
    ) from error

IDENTITY_BYTES = 16
# An engine's end waits for its listener to look up: once a second, unless told otherwise.
GIVE_UP_S = 0.1
LISTENER_LOOKS_UP_S = 0.05
READ, WRITE = TransferOpcode.Read, TransferOpcode.Write


@dataclass(eq=False)
class Engine:
    """A TransferEngine with memory registered. The only reference to it, so that its end is when we say."""

    library: Any
    identity: np.ndarray[Any, np.dtype[np.uint8]]


def start_engine(settings: Settings) -> Engine:
    """With its own identity registered, and nothing else."""
    library = TransferEngine()
    status = library.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device)
    if status != 0:
        raise ConnectorError(
            f"Mooncake could not start an engine at {settings.host} over {settings.protocol} (status {status}); "
            "its log says why"
        )
    engine = Engine(library, np.frombuffer(bytearray(secrets.token_bytes(IDENTITY_BYTES)), np.uint8))
    _let_it_end_soon(engine, settings.host)
    failure = register(engine, [(engine.identity.ctypes.data, IDENTITY_BYTES)])
    if failure:
        raise ConnectorError(failure)
    return engine


def register(engine: Engine, memory: Sequence[tuple[int, int]]) -> str:
    status = engine.library.batch_register_memory([address for address, _ in memory], [nbytes for _, nbytes in memory])
    return f"Mooncake could not register {len(memory)} memory regions (status {status})" if status else ""


def end(engine: Engine) -> None:
    """Its destructor joins its threads, holding the interpreter's lock: at most 50 ms with `_let_it_end_soon`."""
    alive = weakref.ref(engine.library)
    engine.library = None
    assert alive() is None, "an engine that something else holds goes on moving bytes"


def _let_it_end_soon(engine: Engine, host: str) -> None:
    """Have the engine's listener look up more often than once a second, since its end waits for that."""
    port = engine.library.get_rpc_port()
    timeout = struct.pack("ll", 0, int(LISTENER_LOOKS_UP_S * 1e6))
    for found in _own_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    engine.library.send_probe(f"{host}:{port}")  # it holds for the next look


def give_up_reaching(thread: threading.Thread, address: str) -> None:
    """End the call for a peer that does not answer, by ending its connection: the library would wait for a minute.

    One that is still being set up (an address that drops what it gets) cannot be told, and ends by itself in seconds;
    nothing of ours is registered with its engine.
    """
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + GIVE_UP_S
    while thread.is_alive() and time.monotonic() < give_up:
        for found in _own_sockets():
            with contextlib.suppress(OSError):  # not connected
                if found.getpeername()[:2] == (host, int(port)):
                    found.shutdown(socket.SHUT_RDWR)
        thread.join(0.005)


def _own_sockets() -> Iterator[socket.socket]:
    """Every IPv4 or IPv6 socket of this process, the library's among them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        yield found
