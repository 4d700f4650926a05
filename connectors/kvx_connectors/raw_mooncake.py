"""Mooncake without kvx, as fast as it goes: what `kvx bench transfer` measures the connector against."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from mooncake.engine import TransferEngine

Int64s = npt.NDArray[np.int64]

# The library refuses more than 1024 that wait.
_WINDOW = 1000


class RawMooncake:
    """One engine. A batch for each block and no waiting call: faster than the library's own batches (ADR 9)."""

    environment: ClassVar[Mapping[str, str]] = {"MC_LOG_LEVEL": "WARNING"}

    def __init__(self) -> None:
        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake does not start")
        self._peer = ""

    def serve(self, device: str, address: int, nbytes: int) -> bytes:
        self._register(device, address, nbytes)
        return address.to_bytes(8, "little") + f"127.0.0.1:{self._engine.get_rpc_port()}".encode()

    def progress(self) -> None:
        """Its own threads do."""

    def prepare(self, metadata: bytes, device: str, address: int, nbytes: int) -> None:
        self._register(device, address, nbytes)
        self._remote_base, self._local_base = int.from_bytes(metadata[:8], "little"), address
        self._peer = metadata[8:].decode()

    def read(self, remote: Int64s, local: Int64s, block_bytes: int) -> None:
        ours, theirs = (local + self._local_base).tolist(), (remote + self._remote_base).tolist()
        peer, length, engine = self._peer, [block_bytes], self._engine
        waiting: deque[int] = deque()
        given = 0
        while given < len(ours) or waiting:
            while given < len(ours) and len(waiting) < _WINDOW:
                waiting.append(engine.batch_transfer_async_read(peer, [ours[given]], [theirs[given]], length))
                given += 1
            status = engine.transfer_check_status(waiting[0])
            if status == 1:
                waiting.popleft()
            elif status == 0:
                time.sleep(100e-6)  # its threads need the cores
            else:
                raise RuntimeError(f"Mooncake says {status}")

    def close(self) -> None:
        self._engine = None

    def _register(self, device: str, address: int, nbytes: int) -> None:
        if device != "cpu" or self._engine.register_memory(address, nbytes) != 0:
            raise RuntimeError(f"Mooncake does not register memory of {device}")
