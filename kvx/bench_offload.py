"""Time copies of shuffled cache blocks to host memory and back, beside a plain memcpy or vLLM's own batch of copies.

Both sides move the same bytes in turns, each going first as often as the other. What comes back is compared with what
left, once for each size of a block.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvx
from kvx.cache import ExtensibleKVCache
from kvx.connector import Op, TransferState
from kvx.drivers.base import Driver
from kvx.drivers.select import driver_for
from kvx.errors import ConnectorError, LayoutError, TransferError
from kvx.offload_worker import OffloadConnector, block_runs
from kvx.peer import Int64s, Peer
from kvx.registry import connector_class
from kvx.spec import Segment, SegmentTable
from kvx.spread import spread

KVX, MEMCPY, SWAP = "kvx", "memcpy", "swap_blocks_batch"
TO_HOST, TO_CACHE = "to host", "to cache"
_DEADLINE_S = 60.0
#: Transfers, and calls of what kvx is compared with, that one copy is made of.
IN_FLIGHT = 4
_LEAST_ROUND_S = 0.1
_POLL_S = 100e-6  # the copying thread needs the interpreter too, once for each block on the host

Acts = dict[str, Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """`total_bytes` a copy, in blocks of each of `block_sizes_bytes`, which divide it."""

    device: str
    connector: str = "cpu_offload"
    total_bytes: int = 256 << 20
    block_sizes_bytes: Sequence[int] = (32 << 10, 64 << 10, 256 << 10, 2 << 20)
    pairs: int = 7


def bench_offload(
    settings: OffloadSettings, as_it_comes: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """The report: bytes a second each way and for each size of a block, of both sides, and kvx over the other.

    `as_it_comes` gets what there is after each size. ConnectorError: the connector does not offload. TransferError: a
    copy failed, or other bytes came back.
    """
    driver = driver_for(settings.device)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "kvx": kvx.__version__,
        "torch": torch.__version__,
        "device": driver.device,
        "connector": settings.connector,
        "total_bytes": settings.total_bytes,
        "pairs": settings.pairs,
        "in_flight": IN_FLIGHT,
        "rows": rows,
    }
    for size in settings.block_sizes_bytes:
        rows += _measure(driver, settings, size)
        report["beside"] = next((side for side in rows[0]["bytes_per_s"] if side != KVX), None)
        as_it_comes(report)
    return report


def _measure(driver: Driver, settings: OffloadSettings, block_bytes: int) -> list[dict[str, Any]]:
    """Both directions for one size of a block."""
    with ExitStack() as undo:
        bench = _Bench(driver, settings, block_bytes, undo)
        bench.check()
        return [
            {"block_bytes": block_bytes, "direction": way, **_alternate(acts, settings)}
            for way, acts in ((TO_HOST, bench.acts(Op.WRITE)), (TO_CACHE, bench.acts(Op.READ)))
        ]


class _Bench:
    """One cache of one segment, host memory as large, and what copies between them."""

    def __init__(self, driver: Driver, settings: OffloadSettings, block_bytes: int, undo: ExitStack) -> None:
        self._driver, self._total, self._block_bytes = driver, settings.total_bytes, block_bytes
        blocks = settings.total_bytes // block_bytes
        if blocks * block_bytes != settings.total_bytes or settings.total_bytes % driver.granularity_bytes:
            raise LayoutError(
                f"{settings.total_bytes} bytes are no whole number of blocks of {block_bytes} bytes and of granules of "
                f"{driver.granularity_bytes}; choose a total that is"
            )
        numbers = np.random.default_rng(block_bytes)
        self._blocks: Int64s = numbers.permutation(np.arange(blocks, dtype=np.int64))
        self._hosts: Int64s = numbers.permutation(np.arange(blocks, dtype=np.int64))
        self._segments = np.array([[0, block_bytes]], dtype=np.int64)
        table = SegmentTable((Segment(0, block_bytes, blocks),), blocks, settings.total_bytes, driver.granularity_bytes)
        self._cache = ExtensibleKVCache(driver, table)
        self._cache.open()
        undo.callback(self._cache.close)
        self._cache.set_views([self._cache.buffer.view(blocks, 1, 1, block_bytes)])
        self._cache.commit(1)
        self._cache.extend_kv_cache(blocks)
        self._connector = _offload_connector(settings)
        self._cache.attach(self._connector)
        self._peer = _ready_peer(self._connector, settings.total_bytes)
        self._beside = _beside(driver, self._cache.base_address, self._total, block_bytes, self._blocks, self._hosts)

    def check(self) -> None:
        """Everything leaves and comes back as it was."""
        bytes_now = self._cache.committed_range(0, self._total)
        bytes_now.random_(generator=torch.Generator(self._driver.device).manual_seed(1))
        before = bytes_now.clone()
        self._copy(Op.WRITE)
        bytes_now.zero_()
        self._driver.synchronize()
        self._copy(Op.READ)
        if not torch.equal(bytes_now, before):
            raise TransferError("other bytes came back from host memory than had left for it")

    def acts(self, op: Op) -> Acts:
        """One whole copy of each side."""
        return {KVX: lambda: self._copy(op), **{name: ways[op] for name, ways in self._beside.items()}}

    def _copy(self, op: Op) -> None:
        """In several transfers, as an engine's steps and requests have them: one is prepared while others copy."""
        transfers = []
        for blocks, hosts in zip(_parts(self._blocks), _parts(self._hosts), strict=True):
            runs = block_runs(self._segments, blocks, hosts, to_host=op is Op.WRITE)
            transfers.append(self._connector.submit(op, self._peer, runs, deadline_s=_DEADLINE_S))
        for transfer in transfers:
            while transfer.state is TransferState.PENDING:
                time.sleep(_POLL_S)
                self._connector.poll()
            if transfer.state is not TransferState.DONE:
                raise TransferError(f"a {op.value} of {transfer.nbytes} bytes failed: {transfer.cause}")


def _parts(numbers: Int64s) -> list[Int64s]:
    return np.array_split(numbers, min(IN_FLIGHT, len(numbers)))


def _offload_connector(settings: OffloadSettings) -> OffloadConnector:
    made = connector_class(settings.connector)()
    if not isinstance(made, OffloadConnector):
        raise ConnectorError(f"connector {settings.connector} does not offload; name one that does: cpu_offload")
    made.host_bytes = settings.total_bytes
    return made


def _ready_peer(connector: OffloadConnector, total_bytes: int) -> Peer:
    until = time.monotonic() + _DEADLINE_S
    while connector.ready_bytes < total_bytes:
        if time.monotonic() > until:
            raise ConnectorError(
                f"{connector.ready_bytes} of {total_bytes} bytes of host memory are there; ask for less"
            )
        time.sleep(0.01)
    return connector.connect(connector.metadata())


def _beside(
    driver: Driver, base: int, total_bytes: int, block_bytes: int, blocks: Int64s, hosts: Int64s
) -> Mapping[str, Mapping[Op, Callable[[], None]]]:
    """What kvx is compared with on this device, each way; nothing where there is nothing."""
    kind = driver.device.partition(":")[0]
    if kind == "cpu":
        other = torch.ones(total_bytes, dtype=torch.int8)
        address = other.data_ptr()

        def copy(to: int, at: int) -> Callable[[], None]:
            def act(keep: torch.Tensor = other) -> None:
                ctypes.memmove(to, at, keep.numel())

            return act

        return {MEMCPY: {Op.WRITE: copy(address, base), Op.READ: copy(base, address)}}
    from kvx.vllm.swap import swap_blocks_batch

    swap = swap_blocks_batch()
    if swap is None:
        return {}
    host = torch.ones(total_bytes, dtype=torch.int8, pin_memory=True)
    sizes = torch.full((len(blocks),), block_bytes, dtype=torch.int64)
    cache_side = torch.from_numpy(base + blocks * block_bytes)
    host_side = torch.from_numpy(host.data_ptr() + hosts * block_bytes)
    count = min(IN_FLIGHT, len(blocks))
    stream = torch.cuda.Stream(driver.device)  # type: ignore[no-untyped-call]

    def swapped(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        def act(keep: torch.Tensor = host) -> None:
            del keep
            with torch.cuda.stream(stream):
                for parts in zip(*(whole.tensor_split(count) for whole in (source, target, sizes)), strict=True):
                    swap(*parts)
            stream.synchronize()

        return act

    return {SWAP: {Op.WRITE: swapped(cache_side, host_side), Op.READ: swapped(host_side, cache_side)}}


def _alternate(acts: Acts, settings: OffloadSettings) -> dict[str, Any]:
    """Bytes a second of each side in each alternation, and kvx over the other; the first round is not counted."""
    repeat = {side: max(1, round(_LEAST_ROUND_S / _seconds(act, 1))) for side, act in acts.items()}
    rates: dict[str, list[float]] = {side: [] for side in acts}
    for number in range(settings.pairs):
        for side in acts if number % 2 else reversed(acts):
            rates[side].append(settings.total_bytes / _seconds(acts[side], repeat[side]))
    ratios = {
        side: spread([ours / theirs for ours, theirs in zip(rates[KVX], found, strict=True)])
        for side, found in rates.items()
        if side != KVX
    }
    return {"bytes_per_s": {side: spread(found) for side, found in rates.items()}, "ratio": ratios}


def _seconds(act: Callable[[], None], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        act()
    return (time.perf_counter() - start) / repeat
