"""Digests on a real GPU: what the host says of the same bytes, read in place, and after what wrote them."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from gpu_helpers import BLOCKS, GIB, MIB, keep_busy, opened

from kvx.bench_verify import VerifySettings, bench_verify
from kvx.digest import digester_of, digests, request_digests
from kvx.drivers.cuda import CudaDriver
from kvx.drivers.cuda_digester import CudaDigester
from kvx.drivers.digester import Content, HostDigester, digester_for
from kvx.geometry import GroupGeometry, HeadRange, group_geometry
from kvx.inject import flip_byte
from kvx.layout import KVCacheLayout
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.tensor import views_of

Views = dict[str, torch.Tensor]
# (tokens of a block, of a kernel block, KV heads, head size, dtype): pieces of 4096 to 5 bytes, whole 16s and not.
SHAPES = [
    (16, None, 8, 128, "bfloat16"),
    (32, 8, 3, 64, "float32"),
    (16, None, 4, 64, "float8_e4m3fn"),
    (4, None, 1, 576, "float16"),
    (8, None, 2, 12, "float16"),
    (16, None, 3, 5, "uint8"),
    (16, None, 1, 1024, "float32"),
]


def make(
    layout: KVCacheLayout, shape: tuple[int, int | None, int, int, str], layers: int = 5
) -> tuple[Views, Views, GroupGeometry]:
    """Views of random bytes on the GPU, of the same bytes on the host, and their geometry."""
    tokens, kernel, heads, size, dtype = shape
    kernel = None if layout.is_block_outermost else kernel  # only dense pages are split
    spec = KVCacheSpec.full_attention(
        block_size_tokens=tokens, num_kv_heads=heads, head_size=size, dtype=dtype, kernel_block_size_tokens=kernel
    )
    names = tuple(f"layer{index}" for index in range(layers))
    geometry = CacheGeometry(layout, (LayerGroup("g", names, spec),), 32, 16)
    numbers = torch.Generator().manual_seed(1)
    host = torch.randint(-128, 128, (geometry.segment_table.total_bytes,), dtype=torch.int8, generator=numbers)
    both = (views_of(buffer, geometry, kernel_blocks=kernel is not None) for buffer in (host.cuda(), host))
    torch.cuda.synchronize()
    return *both, group_geometry(geometry, 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_the_gpu_says_what_the_host_says(driver: CudaDriver, layout: KVCacheLayout, shape: tuple) -> None:
    gpu, host, group = make(layout, shape)
    size = group.block_size_tokens
    blocks = np.random.default_rng(2).permutation(32)[:9].tolist()
    for first, count in ((0, 9 * size), (0, 1), (size + 1, 5 * size + 2), (9 * size - 1, 1)):
        ours, theirs = (digests(views, group, blocks, first, count) for views in (gpu, host))
        assert (ours.values == theirs.values).all(), (first, count)
    holes = [blocks[0], -1, *blocks[2:5], -1]
    ours, theirs = (digests(views, group, holes, 3, 8 * size) for views in (gpu, host))
    assert (ours.present == theirs.present).all()
    assert (ours.values == theirs.values).all()


def test_groups_of_different_shapes_are_one_request(driver: CudaDriver) -> None:
    gpu, host, group = make(KVCacheLayout.LBHNC, SHAPES[0])
    fewer = dataclasses.replace(group, layers=("layer4", "layer1"), layer_offsets_bytes=(0, 1))
    nothing = [-1, -1, -1]
    asked = [group, fewer, group], [[3, 1, 2], [-1, 5, 6], nothing], 5, 40
    for ours, theirs in zip(request_digests(gpu, *asked), request_digests(host, *asked), strict=True):
        assert (ours.values == theirs.values).all()
        assert (ours.present == theirs.present).all()


def test_ranks_that_hold_other_heads_in_another_layout_agree_on_what_they_share(driver: CudaDriver) -> None:
    whole, _, of_whole = make(KVCacheLayout.LBNHC, (16, None, 4, 64, "float16"))
    half, _, of_half = make(KVCacheLayout.LHBNC, (32, None, 2, 64, "float16"))
    of_half = dataclasses.replace(of_half, heads=HeadRange(2, 2, 4))
    for layer in whole:
        for token in range(48):
            half[layer][[7, 3][token // 32], :, token % 32] = whole[layer][[5, 0, 9][token // 16], 2:, token % 16]
    torch.cuda.synchronize()
    theirs = digests(whole, of_whole, [5, 0, 9], 0, 48)
    assert (digests(half, of_half, [7, 3], 0, 48).values == theirs.values[2:]).all()


def test_a_changed_byte_changes_exactly_its_digest(driver: CudaDriver) -> None:
    gpu, _, group = make(KVCacheLayout.BLHNC, SHAPES[0])
    before = digests(gpu, group, [4, 9, 2], 0, 48).values
    flip_byte(gpu, group, 9, 20)
    changed = (digests(gpu, group, [4, 9, 2], 0, 48).values != before).any(axis=2)
    assert np.argwhere(changed).tolist() == [[0, 20]]


def test_two_layers_exchanged_are_noticed(driver: CudaDriver) -> None:
    gpu, _, group = make(KVCacheLayout.LBHNC, SHAPES[0])
    before = digests(gpu, group, [4], 0, 16).values
    gpu["layer1"], gpu["layer2"] = gpu["layer2"], gpu["layer1"]
    assert (digests(gpu, group, [4], 0, 16).values != before).any(axis=2).all()


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_neighbours_are_not_read_and_addresses_without_memory_not_touched(
    driver: CudaDriver, layout: KVCacheLayout
) -> None:
    """Reading where there is no memory kills the context, which the driver's fixture looks at."""
    cache, views = opened(driver, layout)
    spec = KVCacheSpec.full_attention(block_size_tokens=16, num_kv_heads=4, head_size=64, dtype="float16")
    geometry = CacheGeometry(
        layout, (LayerGroup("g", tuple(views), spec),), cache.capacity_blocks, driver.granularity_bytes
    )
    group = group_geometry(geometry, 0)
    cache.extend_kv_cache(BLOCKS // 2)
    last = cache.committed_blocks - 1
    for number, view in enumerate(views.values()):
        view[: last + 1] = number + 1
    torch.cuda.synchronize()
    expected = digests(views, group, [0, last], 0, 32).values
    for view in views.values():
        view[1:last] = 0x5A
    torch.cuda.synchronize()
    assert (digests(views, group, [0, last], 0, 32).values == expected).all()
    everything = digests(views, group, list(range(last + 1)), 0, (last + 1) * 16)
    assert everything.present.all()
    cache.close()


@pytest.mark.parametrize("size", [1, 15, 16, 24, 4096])
def test_the_last_byte_before_a_hole_is_read_and_the_first_one_in_it_is_not(driver: CudaDriver, size: int) -> None:
    cache, views = opened(driver)
    mapping = cache.mappings[0]
    end = mapping.address + mapping.nbytes
    del views
    cache.committed_range(0, mapping.nbytes).random_(generator=torch.Generator("cuda").manual_seed(1))
    torch.cuda.synchronize()
    count = 37
    content = Content(np.array([end - count * size]), np.arange(count) * size, 1, 0, size)
    host = cache.committed_range(mapping.nbytes - count * size, count * size).cpu().numpy()
    on_host = dataclasses.replace(content, layer_addresses=np.array([host.ctypes.data]))
    assert (digester_for(driver.device).take([content])[0] == HostDigester().take([on_host])[0]).all()
    cache.close()


def test_digests_come_after_what_wrote_the_blocks_and_wait_for_nothing_later(driver: CudaDriver) -> None:
    gpu, _, group = make(KVCacheLayout.LBHNC, SHAPES[0])
    asked = [group], [[4, 9, 2]], 0, 48
    request_digests(gpu, *asked)  # its table is there from now on: allocating one may wait for everything queued
    keep_busy(0.2)
    for view in gpu.values():
        view[9] = 3
    after = digester_of(gpu).mark()
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.append(request_digests(gpu, *asked, after=after)[0].values))
    thread.start()
    keep_busy(1.0)
    later = torch.cuda.Event()
    later.record()
    thread.join()
    assert not later.query(), "the engine's next step is not waited for"
    torch.cuda.synchronize()
    assert (found[0] == request_digests(gpu, *asked)[0].values).all()


def test_many_threads_take_digests_at_once(driver: CudaDriver) -> None:
    gpu, host, group = make(KVCacheLayout.BLNHC, SHAPES[0])
    wrong: list[int] = []

    def take(number: int) -> None:
        blocks = np.random.default_rng(number).permutation(32)[: number + 1].tolist()
        expected = digests(host, group, blocks, 0, (number + 1) * 16).values
        for _ in range(20):
            wrong.append(int((digests(gpu, group, blocks, 0, (number + 1) * 16).values != expected).sum()))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 160


def test_blocks_do_not_come_to_the_host(driver: CudaDriver) -> None:
    """Faster than any bus, and through a table that holds less than a hundredth of them."""
    layers, tokens = 32, 8192
    memory = torch.empty(GIB, dtype=torch.int8, device="cuda")
    piece = GIB // (layers * tokens * 8)
    content = Content(
        memory.data_ptr() + np.arange(layers) * (GIB // layers), np.arange(tokens) * 8 * piece, 8, piece, piece
    )
    digester = CudaDigester()
    seconds = []
    for _ in range(5):
        started_s = time.perf_counter()
        digester.take([content])
        seconds.append(time.perf_counter() - started_s)
    print(f"1 GiB in {min(seconds) * 1e3:.2f} ms: {GIB / min(seconds) / 1e9:.0f} GB/s")
    assert GIB / min(seconds) > 100e9
    (table,) = digester._kernel._free
    assert table.nbytes <= 4 * MIB


def test_hand_offs_between_two_processes_are_compared(driver: CudaDriver) -> None:
    found = bench_verify(VerifySettings(device=driver.device, request_bytes=64 * MIB, pairs=1))
    print(found)
    assert [row["case"] for row in found["rows"]] == ["2 MiB", "64 KiB"]
    assert all(row["ratio"]["median"] > 0 for row in found["rows"])


def test_a_captured_graph_of_the_engine_is_not_disturbed(driver: CudaDriver) -> None:
    gpu, host, group = make(KVCacheLayout.LBHNC, SHAPES[0])
    number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        number.add_(1)
    for _ in range(10):
        graph.replay()
        assert (digests(gpu, group, [1], 0, 16).values == digests(host, group, [1], 0, 16).values).all()
    assert number.item() == 10
