"""Tensors over a reservation: what they show, and that nobody's memory goes while they live."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from memory_helpers import FaultyDriver, small_geometry

from kvx.drivers.host import HostDriver
from kvx.errors import LayoutError
from kvx.layout import KVCacheLayout
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.tensor import tensor_over, torch_dtype, views_of
from kvx.vmm import Reservation

GRANULE = 4096


@pytest.fixture
def driver() -> FaultyDriver:
    return FaultyDriver(HostDriver(GRANULE))


@pytest.fixture
def reservation(driver: FaultyDriver) -> Reservation:
    reservation = Reservation(driver, 64 * GRANULE)
    reservation.reserve()
    reservation.commit_range(0, 8 * GRANULE)
    return reservation


def test_a_tensor_covers_the_reservation_without_touching_it(reservation: Reservation) -> None:
    tensor = tensor_over(reservation)
    assert (tensor.dtype, tuple(tensor.shape), tensor.device.type) == (torch.int8, (64 * GRANULE,), "cpu")
    assert tensor.data_ptr() == reservation.address
    tensor[: 8 * GRANULE].fill_(3)
    assert int(tensor[: 8 * GRANULE].sum()) == 3 * 8 * GRANULE
    reservation.release()


def test_a_released_reservation_lives_until_the_last_view_has_died(
    driver: FaultyDriver, reservation: Reservation
) -> None:
    tensor = tensor_over(reservation)
    view = tensor.view(torch.float32)[3:9]
    view.fill_(1.5)
    reservation.release()
    del tensor
    assert view.tolist() == [1.5] * 6
    assert driver.mapped
    del view
    assert driver.books() == ({}, [], {})


def test_the_last_view_may_die_on_another_thread(driver: FaultyDriver, reservation: Reservation) -> None:
    held = [tensor_over(reservation)]
    reservation.release()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert driver.books() == ({}, [], {})


def test_a_tensor_that_cannot_be_made_is_not_counted(reservation: Reservation, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> torch.Tensor:
        raise RuntimeError("no DLPack today")

    monkeypatch.setattr("kvx.tensor.from_dlpack", refuse)
    with pytest.raises(RuntimeError, match="today"):
        tensor_over(reservation)
    assert reservation.tensors == 0
    reservation.release()


def test_a_process_with_live_tensors_ends_well() -> None:
    code = """
        import sys, threading, time
        import torch
        from kvx.cache import ExtensibleKVCache
        from kvx.drivers.host import HostDriver
        from kvx.spec import Segment, SegmentTable

        def make():
            cache = ExtensibleKVCache(HostDriver(4096), SegmentTable((Segment(0, 4096, 512),), 512, 4096 * 512, 4096))
            cache.open()
            cache.commit(8)
            view = cache.buffer.view(torch.float32)[:100]
            view.fill_(2.0)
            return cache, view

        sys.kept = make()
        in_module, view = make()
        in_module.close()
        loop = [*make()]
        loop.append(loop)
        del loop
        threading.Thread(target=lambda kept: time.sleep(9), args=(make(),), daemon=True).start()
        print(float(view.sum()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "200.0\n"), done.stderr
    assert not done.stderr


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_views_sit_where_the_geometry_says(driver: FaultyDriver, layout: KVCacheLayout) -> None:
    geometry = small_geometry(layout, layers=3)
    reservation = Reservation(driver, geometry.total_bytes)
    reservation.reserve()
    reservation.commit_range(0, geometry.total_bytes)
    buffer = tensor_over(reservation)
    views = views_of(buffer, geometry)
    assert list(views) == ["layer0", "layer1", "layer2"]
    for index, view in enumerate(views.values()):
        place = geometry.placement(0, index)
        assert tuple(view.shape) == place.shape
        assert tuple(step * 4 for step in view.stride()) == place.strides_bytes
        assert view.data_ptr() - buffer.data_ptr() == place.offset_bytes
        view.fill_(index + 1)
    assert [float(view.mean()) for view in views.values()] == [1.0, 2.0, 3.0], "no two layers share a byte"
    del buffer, views, view
    reservation.release()


def test_kernel_block_views_show_the_same_memory(driver: FaultyDriver) -> None:
    spec = KVCacheSpec.full_attention(
        block_size_tokens=8, num_kv_heads=2, head_size=16, dtype="bfloat16", kernel_block_size_tokens=4
    )
    geometry = CacheGeometry(KVCacheLayout.LBHNC, (LayerGroup("g", ("a",), spec),), 64, GRANULE)
    reservation = Reservation(driver, geometry.total_bytes)
    reservation.reserve()
    reservation.commit_range(0, geometry.total_bytes)
    buffer = tensor_over(reservation)
    view = views_of(buffer, geometry, kernel_blocks=True)["a"]
    assert tuple(view.shape) == (128, 2, 4, 32)
    assert view.is_contiguous()
    view[5] = 4.0  # the second kernel block of block 2
    page = buffer.view(torch.bfloat16).view(64, -1)[2]
    assert (page[: page.numel() // 2].sum(), page[page.numel() // 2 :].mean()) == (0, 4)
    del buffer, view, page
    reservation.release()


def test_what_torch_cannot_view_is_a_layout_error(reservation: Reservation) -> None:
    with pytest.raises(LayoutError, match="not one of torch's"):
        torch_dtype("float1024")
    with pytest.raises(LayoutError, match="not one of torch's"):
        torch_dtype("nn")
    reservation.release()
