"""Time hand-offs between two processes with `verify` off and with `all`, in turn: what digests on both sides cost.

The cache is that of a model as Llama 3 8B: 32 layers, 8 KV heads of 128 elements in bfloat16, 16 tokens a block. So a
block is one run of 2 MiB where a block's layers lie together (BLHNC), and 32 runs of 64 KiB where they do not (LBHNC).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvx
from kvx import door
from kvx.bench_process import DEADLINE_S, Process, reading_class
from kvx.cache import ExtensibleKVCache
from kvx.digest import request_digests
from kvx.drivers.select import driver_for
from kvx.engine_side import HandoffSettings, Pull
from kvx.errors import TransferError
from kvx.geometry import group_geometry
from kvx.handoff import EngineInfo, HandoffWorker
from kvx.layout import KVCacheLayout
from kvx.peer import VerifyMode
from kvx.registry import connector_class
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup, align_capacity
from kvx.spread import spread
from kvx.tensor import views_of

LAYERS, BLOCK_TOKENS, BLOCK_BYTES = 32, 16, 2 << 20
CASES = {"2 MiB": KVCacheLayout.BLHNC, "64 KiB": KVCacheLayout.LBHNC}
MODES: tuple[VerifyMode, ...] = ("off", "all")
_LEAST_ROUND_S = 1.0
_MOST_REQUESTS = 256
_OWNER_POLL_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """Requests of `request_bytes`, whole blocks of 2 MiB, of which `in_flight` are pulled at a time."""

    connector: str = "ipc"
    device: str = "cpu"
    peer_device: str | None = None
    request_bytes: int = 64 << 20
    in_flight: int = 2
    pairs: int = 7

    @property
    def blocks_per_request(self) -> int:
        return self.request_bytes // BLOCK_BYTES


def bench_verify(settings: VerifySettings) -> dict[str, Any]:
    """The report: bytes a second of both modes and their ratio, for each size of a run.

    ConnectorError: as `reading_class`, or the connector cannot be opened there. TransferError: a hand-off failed, or
    digests were not compared.
    """
    reading_class(settings.connector)
    device = torch.device(settings.device)
    return {
        "kvx": kvx.__version__,
        "torch": torch.__version__,
        "device": settings.device,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory",
        "peer_device": settings.peer_device or settings.device,
        "connector": settings.connector,
        "request_bytes": settings.request_bytes,
        "in_flight": settings.in_flight,
        "pairs": settings.pairs,
        "rows": [_measure(name, layout, settings) for name, layout in CASES.items()],
    }


def _measure(name: str, layout: KVCacheLayout, settings: VerifySettings) -> dict[str, Any]:
    """Both modes in turns, each in two processes of its own; the first round of each is not counted."""
    with ExitStack() as undo:
        pairs = {mode: _Pair(mode, layout, settings, undo) for mode in MODES}
        for pair in pairs.values():
            pair.seconds(2 * settings.in_flight)
        requests = {mode: _requests(pair.seconds(4 * settings.in_flight), settings) for mode, pair in pairs.items()}
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for number in range(settings.pairs):
            for mode in MODES if number % 2 else reversed(MODES):
                seconds[mode].append(pairs[mode].seconds(requests[mode]))
        digest_s = [pairs["all"].reader.ask("digest_seconds") for _ in range(settings.pairs)]
        pairs["all"].reader.ask("require_compared")
    rates = {mode: spread([settings.request_bytes / value for value in values]) for mode, values in seconds.items()}
    return {
        "case": name,
        "layout": layout.name,
        "requests": requests,
        "bytes_per_s": rates,
        "digest_bytes_per_s": spread([settings.request_bytes / value for value in digest_s]),
        "ratio": spread([off / on for off, on in zip(seconds["off"], seconds["all"], strict=True)]),
    }


def _requests(one_s: float, settings: VerifySettings) -> int:
    """How many fill a round."""
    return min(_MOST_REQUESTS, max(2 * settings.in_flight, round(_LEAST_ROUND_S / one_s)))


class _Pair:
    """An owner and a reader that verify alike."""

    def __init__(self, mode: VerifyMode, layout: KVCacheLayout, settings: VerifySettings, undo: ExitStack) -> None:
        self._number = 0
        self._owner = Process(_Owner, mode, layout, settings, environment={})
        undo.callback(self._owner.stop)
        self.reader = Process(_Reader, mode, layout, settings, self._owner.first_answer, environment={})
        undo.callback(self.reader.stop)

    def seconds(self, requests: int) -> float:
        """For one request, from where its blocks are held to where it has arrived, the owner's digests included."""
        names = [f"r{self._number + index}" for index in range(requests)]
        self._number += requests
        started_s = time.perf_counter()
        self._owner.ask("hold", names)
        self.reader.ask("pull", names)
        elapsed_s = time.perf_counter() - started_s
        self._owner.ask("settle", requests)
        return elapsed_s / requests


class _Engine:
    """A cache, a connector and a hand-off. A request takes the place of its number among those in flight."""

    idle_s = _OWNER_POLL_S
    first_answer: object = None

    def __init__(
        self, name: str, device: str, mode: VerifyMode, layout: KVCacheLayout, settings: VerifySettings
    ) -> None:
        self._settings, self._undo = settings, ExitStack()
        if device != "cpu":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        found = connector_class(settings.connector)
        driver = driver_for(device, shareable=found.capabilities.shares_memory)
        spec = KVCacheSpec.full_attention(
            block_size_tokens=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype="bfloat16"
        )
        blocks = settings.blocks_per_request * settings.in_flight
        capacity = align_capacity(blocks, [BLOCK_BYTES, BLOCK_BYTES // LAYERS], driver.granularity_bytes, up=True)
        group = LayerGroup("layers", tuple(f"layer{index}" for index in range(LAYERS)), spec)
        geometry = CacheGeometry(layout, (group,), capacity, driver.granularity_bytes)
        self._cache = ExtensibleKVCache(driver, geometry.segment_table)
        self._cache.open()
        self._undo.callback(self._cache.close)
        self._views = views_of(self._cache.buffer, geometry)
        self._cache.set_views(self._views)
        self._cache.commit(1)
        info = EngineInfo(engine_id=name, model="bench", dtype="bfloat16", kv_cache_dtype="bfloat16")
        handoff = HandoffSettings(
            connectors=(settings.connector,), verify=mode, lease_s=2 * DEADLINE_S, transfer_deadline_s=DEADLINE_S
        )
        connector = found()
        door.prepare(handoff, [connector])
        self._cache.attach(connector)
        self._cache.extend_kv_cache(blocks)
        self.group = group_geometry(geometry, 0)
        self._order = np.random.default_rng(len(name)).permutation(blocks).reshape(settings.in_flight, -1).tolist()
        self._worker = HandoffWorker(handoff, info, [connector])
        self._worker.open([self.group], self._views, blocks, self._cache.generation, layout.name)
        self._undo.callback(self._worker.close)

    @property
    def num_tokens(self) -> int:
        return self._settings.blocks_per_request * BLOCK_TOKENS

    def blocks_of(self, index: int) -> list[int]:
        blocks: list[int] = self._order[index % self._settings.in_flight]
        return blocks

    def idle(self) -> None:
        return

    def close(self) -> None:
        self._views.clear()
        self._undo.close()


class _Owner(_Engine):
    def __init__(self, mode: VerifyMode, layout: KVCacheLayout, settings: VerifySettings) -> None:
        super().__init__("prefill", settings.peer_device or settings.device, mode, layout, settings)
        for number, view in enumerate(self._views.values()):
            committed = view[: self._cache.committed_blocks].view(torch.int16)
            committed.random_(generator=torch.Generator(view.device).manual_seed(number))
        self.first_answer = self._worker.port

    def hold(self, names: Sequence[str]) -> None:
        for index, name in enumerate(names):
            self._worker.hold(name, [self.blocks_of(index)], self.num_tokens)

    def settle(self, count: int) -> None:
        """Return when so many holds have been released."""
        until_s, ended = time.monotonic() + DEADLINE_S, 0
        while ended < count:
            if not self._worker.wait(until_s - time.monotonic()):
                raise TransferError(f"{count - ended} of {count} holds were not released")
            events = self._worker.poll()
            if events.expired:
                raise TransferError(f"holds ran out: {', '.join(sorted(events.expired))}")
            ended += len(events.released)


class _Reader(_Engine):
    def __init__(self, mode: VerifyMode, layout: KVCacheLayout, settings: VerifySettings, port: int) -> None:
        super().__init__("decode", settings.device, mode, layout, settings)
        self._port = port

    def pull(self, names: Sequence[str]) -> None:
        """Return when all have arrived."""
        started = ended = 0
        while ended < len(names):
            while started < len(names) and started - ended < self._settings.in_flight:
                self._worker.pull(self._pull(names[started], started))
                started += 1
            if not self._worker.wait(DEADLINE_S):
                raise TransferError(f"{len(names) - ended} of {len(names)} requests did not arrive")
            events = self._worker.poll()
            for failure in events.failed.values():
                raise TransferError(str(failure))
            ended += len(events.received)

    def digest_seconds(self) -> float:
        """Of one request's digests alone, on this side."""
        started_s = time.perf_counter()
        request_digests(self._views, [self.group], [self.blocks_of(0)], 0, self.num_tokens)
        return time.perf_counter() - started_s

    def require_compared(self) -> None:
        """TransferError when not every digest was compared: then nothing was measured."""
        found = self._worker.status()["digests"]
        if not found["checked"] == found["expected"] > 0 or found["mismatched"]:
            raise TransferError(f"digests were not all compared: {found}")

    def _pull(self, name: str, index: int) -> Pull:
        return Pull(
            request_id=name, remote_request_id=name, remote_engine_id="prefill", host="127.0.0.1", port=self._port,
            blocks=[self.blocks_of(index)], first_token=0, num_tokens=self.num_tokens,
        )  # fmt: skip
