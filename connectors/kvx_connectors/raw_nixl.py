"""NIXL without kvx, as fast as it goes: what `kvx bench transfer` measures the connector against."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from nixl._api import nixl_agent, nixl_agent_config

Int64s = npt.NDArray[np.int64]


class RawNixl:
    """One agent; descriptor lists are prepared once for each set of blocks."""

    environment: ClassVar[Mapping[str, str]] = {
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",  # without it a GPU's memory inside one host goes through the host
        "NIXL_LOG_LEVEL": "WARN",
    }

    def __init__(self) -> None:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # as the connector: both ends are on this host
        self._agent: Any = nixl_agent(f"raw-{uuid4().hex[:8]}", nixl_agent_config(False, backends=["UCX"]))
        self._registered: Any = None
        self._peer = ""
        self._prepared: dict[tuple[int, int], Any] = {}
        self._place = "DRAM", 0

    def serve(self, device: str, address: int, nbytes: int) -> bytes:
        self._register(device, address, nbytes)
        metadata: bytes = self._agent.get_agent_metadata()
        return address.to_bytes(8, "little") + metadata

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def prepare(self, metadata: bytes, device: str, address: int, nbytes: int) -> None:
        self._register(device, address, nbytes)
        self._remote_base, self._local_base = int.from_bytes(metadata[:8], "little"), address
        name = self._agent.add_remote_agent(metadata[8:])
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._peer)

    def read(self, remote: Int64s, local: Int64s, block_bytes: int) -> None:
        key = block_bytes, len(remote)
        if key not in self._prepared:
            indices = np.arange(len(remote), dtype=np.int32)
            ours = self._agent.prep_xfer_dlist("", self._rows(local + self._local_base, block_bytes), self._place[0])
            rows = self._rows(remote + self._remote_base, block_bytes)
            theirs = self._agent.prep_xfer_dlist(self._peer, rows, self._place[0])
            self._prepared[key] = self._agent.make_prepped_xfer("READ", ours, indices, theirs, indices, b"")
        handle = self._prepared[key]
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")

    def close(self) -> None:
        for handle in self._prepared.values():
            self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(self._registered)
        self._agent = None

    def _register(self, device: str, address: int, nbytes: int) -> None:
        kind, _, index = device.partition(":")
        self._place = ("DRAM" if kind == "cpu" else "VRAM"), int(index or 0)
        self._registered = self._agent.register_memory([(address, nbytes, self._place[1], "")], self._place[0])

    def _rows(self, addresses: Int64s, block_bytes: int) -> npt.NDArray[np.uint64]:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, block_bytes, self._place[1]
        return rows
