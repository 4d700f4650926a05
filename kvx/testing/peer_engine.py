"""The other side of a test: memory, a connector on it, and a thread that polls. It lives in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvx.connector import Connector, ConnectorState, Op, Transfer, TransferState
from kvx.errors import TransferError
from kvx.peer import Peer
from kvx.plan import RUN_DTYPE, Runs
from kvx.testing.kit import Kit
from kvx.testing.memory import Bytes, KitMemory

POLL_INTERVAL_S = 0.0005
Rows = Sequence[tuple[int, int, int]]
"""(source offset, destination offset, length) of each copy."""
Ending = tuple[str, str, str, int]
"""State of a transfer, kind of its cause, the cause in words, how often `poll` reported it."""


class PeerEngine:
    """`poke` and `peek` go to the memory directly; everything else to the connector."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.memory = KitMemory(kit.peer_driver())
        self.connector: Connector = kit.make_connector()
        self._has_memory = False
        self._peer: Peer | None = None
        self._transfers: list[Transfer] = []
        self._reported: Counter[int] = Counter()
        self._notifications: list[tuple[str, bytes]] = []
        self._polls: threading.Thread | None = None
        self._stopping = threading.Event()

    # Memory

    def make_memory(self) -> None:
        if not self._has_memory:
            self.memory.open()
            self._has_memory = True

    def fill(self, seed: int) -> None:
        self.memory.fill(seed)

    def poke(self, offset: int, data: bytes) -> None:
        self.memory.write(offset, data)

    def peek(self, offset: int, nbytes: int) -> bytes:
        return self.memory.read(offset, nbytes)

    def snapshot(self) -> Bytes:
        return self.memory.snapshot()

    # The connector

    def open(self, generation: int = 1) -> bytes:
        """Open the connector, poll from now on, and say what a peer needs."""
        self.make_memory()
        self.connector.open(self.memory.regions(), generation)
        if self._polls is None:
            self._polls = threading.Thread(target=self._poll, daemon=True, name="kvx kit peer")
            self._polls.start()
        return self.connector.metadata()

    def connect(self, metadata: bytes) -> str:
        self._peer = self.connector.connect(metadata)
        return self._peer.name

    def submit(self, op: str, rows: Rows, deadline_s: float) -> int:
        """Start a transfer with the peer connected last; its number."""
        assert self._peer is not None, "connect first"
        self._transfers.append(self.connector.submit(Op(op), self._peer, runs_of(rows), deadline_s=deadline_s))
        return len(self._transfers) - 1

    def cancel(self, number: int) -> None:
        self.connector.cancel(self._transfers[number])

    def disconnect(self) -> None:
        assert self._peer is not None, "connect first"
        self.connector.disconnect(self._peer)

    def ending(self, number: int, timeout_s: float) -> Ending:
        """How a transfer ended, waiting for it at most so long."""
        transfer = self._transfers[number]
        wait_until(lambda: self._reported[id(transfer)] > 0, timeout_s)
        cause = transfer.cause
        return transfer.state.value, type(cause).__name__, str(cause), self._reported[id(transfer)]

    def notifications(self, count: int, timeout_s: float) -> list[tuple[str, bytes]]:
        """Those that came so far, waiting for `count` of them at most so long."""
        wait_until(lambda: len(self._notifications) >= count, timeout_s)
        return list(self._notifications)

    def close_connector(self) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        self.connector.close()
        return time.monotonic() - began

    def close(self) -> None:
        """End the connector, the polling and the memory."""
        self.connector.close()
        self._stopping.set()
        if self._polls is not None:
            self._polls.join()
            self._polls = None
        if self._has_memory:
            self.memory.close()
            self._has_memory = False

    # What a life costs

    def live(self, times: int, metadata: bytes | None, op: str, generation: int) -> int:
        """Open, connect, move and close so often: by one connector again and again, and each time by a new one, too.

        Without metadata of a peer, with the connector itself.
        The next generation that may be used.
        """
        self.make_memory()
        for _ in range(times):
            for connector in (self.connector, self.kit.make_connector()):
                connector.open(self.memory.regions(), generation)
                peer = connector.connect(metadata or connector.metadata())
                transfer = connector.submit(Op(op), peer, runs_of([(0, 0, 4096)]), deadline_s=self.kit.deadline_s)
                _finish(connector, transfer, self.kit.deadline_s)
                connector.close()
            generation += 1
        return generation

    def footprint(self) -> dict[str, int]:
        """What this process holds, by the kernel's count."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        # Address space that cannot be read is no memory; each thread's allocator sets 64 MiB of it aside.
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.split()[1][0] == "r"]
        return {
            "file descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": len(maps),
            "mapped bytes": sum(last - first for first, last in spans),
            "shared memory mappings": sum("/dev/shm" in line or "/memfd:" in line or "/SYSV" in line for line in maps),
        }

    def _poll(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            if self.connector.state is ConnectorState.NEW:
                continue
            events = self.connector.poll()
            self._reported.update(id(transfer) for transfer in events.finished)
            self._notifications += events.notifications


def _finish(connector: Connector, transfer: Transfer, timeout_s: float) -> None:
    wait_until(lambda: transfer in connector.poll().finished, timeout_s)
    if transfer.state is not TransferState.DONE:
        raise TransferError(
            f"a transfer with a healthy peer is {transfer.state} after {timeout_s:g} s: {transfer.cause}"
        )


def runs_of(rows: Rows) -> Runs:
    array = np.zeros(len(rows), RUN_DTYPE)
    for column, values in zip(
        ("source", "destination", "length"), np.array(rows, np.int64).reshape(-1, 3).T, strict=True
    ):
        array[column] = values
    array["count"] = 1
    return Runs(array)


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again: connectors tell by polling only."""
    deadline = time.monotonic() + timeout_s
    while not (result := done()) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return result
