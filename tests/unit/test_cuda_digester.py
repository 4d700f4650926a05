"""The GPU's digests without a GPU: the kernel's own source on the host, behind a stand-in for NVIDIA's binding."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import BAD
from fake_launches import PRIORITIES, FakeLaunches, copy_kernel, digest_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_digest import CASES, cache, contents, write

from kvx import digest
from kvx.digest import request_digests
from kvx.drivers import cuda, cuda_copier
from kvx.drivers.cuda_copier import CudaCopier
from kvx.drivers.cuda_digester import CudaDigester, is_aligned
from kvx.drivers.digester import Content, HostDigester
from kvx.errors import DriverError
from kvx.layout import KVCacheLayout

DRIVERS = Path(cuda.__file__).parent


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return digest_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., None]) -> FakeLaunches:
    library = FakeLaunches(kvx_digest=kernel, kvx_copy=copy_kernel)
    monkeypatch.setattr(cuda, "_load_bindings", lambda: library)
    return library


@pytest.fixture(scope="module")
def digester(kernel: Callable[..., None]) -> Iterator[CudaDigester]:
    """One for all examples of a property."""
    library = FakeLaunches(kvx_digest=kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_load_bindings", lambda: library)
        yield CudaDigester()


@st.composite
def some_contents(draw: st.DrawFn) -> tuple[np.ndarray, list[Content]]:
    """Up to three layer groups of any shape and alignment in one buffer of random bytes, layers in any order."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    memory = numbers.integers(0, 256, 1 << 18, dtype=np.uint8)
    made = []
    for _ in range(draw(st.integers(1, 3))):
        grain = draw(st.sampled_from([1, 2, 8, 16]))
        heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 5)) * grain
        stride = size + draw(st.integers(0, 3)) * grain
        offsets = numbers.permutation(64)[: draw(st.integers(0, 21))] * (
            heads * stride + draw(st.integers(0, 2)) * grain
        )
        first = -(-memory.ctypes.data // 16) * 16 + draw(st.integers(0, 3)) * grain
        layers = numbers.permutation(9)[: draw(st.integers(1, 9))] * 64 * (heads * stride + 2 * grain)
        made.append(Content(first + layers, offsets, heads, stride, size))
    return memory, made


@settings(max_examples=150, deadline=None)
@given(some_contents())
def test_the_kernel_says_what_the_host_says(digester: CudaDigester, given_: tuple[np.ndarray, list[Content]]) -> None:
    made = given_[1]
    for ours, theirs in zip(digester.take(made), HostDigester().take(made), strict=True):
        assert ours.shape == theirs.shape
        assert (ours == theirs).all()


@pytest.mark.parametrize(("layout", "block_size", "kernel_size"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2"])
def test_every_layout_partial_ranges_and_holes(
    digester: CudaDigester, layout: KVCacheLayout, block_size: int, kernel_size: int | None, dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    views, group = cache(layout, block_size, kernel_size, dtype)
    blocks = [3, 11, 0, 7, 9, 15, 2, 4, 1, 12][: -(-40 // block_size)]
    write(views, group, blocks, contents(40, group.content_bytes))
    half = dataclasses.replace(group, name="half", layers=("c", "a"), layer_offsets_bytes=(0, 1))
    asked = [group, half], [blocks, [*blocks[:-1], -1]]
    expected = request_digests(views, *asked, 5, 30)
    monkeypatch.setattr(digest, "digester_for", lambda device: digester)
    for ours, theirs in zip(request_digests(views, *asked, 5, 30), expected, strict=True):
        assert (ours.values == theirs.values).all()
        assert (ours.present == theirs.present).all()


def test_no_byte_outside_of_the_content_is_read(digester: CudaDigester) -> None:
    """The page before and the page after are not there: reading one ends this process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory[page : 2 * page] = np.random.default_rng(1).integers(0, 256, page, dtype=np.uint8).tobytes()
    libc = ctypes.CDLL(None)
    for guard in (address, address + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0
    for size in (1, 7, 8, 15, 16, 40, 48):
        tokens = page // (2 * size)
        first = address + 2 * page - 2 * tokens * size  # two layers up to the very end
        layers = np.array([first + tokens * size, first])
        made = Content(layers, np.arange(tokens) * size, 1, 0, size)
        assert (digester.take([made])[0] == HostDigester().take([made])[0]).all()
        made = dataclasses.replace(made, layer_addresses=np.array([address + page]))
        assert (digester.take([made])[0] == HostDigester().take([made])[0]).all()


def test_what_is_aligned() -> None:
    content = Content(np.array([32, 64]), np.array([0, 16]), 2, 48, 32)
    assert is_aligned(content)
    for change in (
        {"layer_addresses": np.array([32, 72])}, {"token_offsets": np.array([0, 8])}, {"head_stride_bytes": 40},
        {"content_bytes": 24},
    ):  # fmt: skip
        assert not is_aligned(dataclasses.replace(content, **change))
    assert is_aligned(dataclasses.replace(content, num_heads=1, head_stride_bytes=40)), "there is no other head"


def some_content(tokens: int = 9) -> tuple[np.ndarray, Content]:
    memory = np.arange(4096, dtype=np.uint8)
    return memory, Content(memory.ctypes.data + np.array([0, 2048]), np.arange(tokens) * 16, 1, 0, 16)


def test_one_launch_after_the_stream_that_wrote_and_its_table_serves_again(fake: FakeLaunches) -> None:
    digester, (memory, content) = CudaDigester(), some_content()
    digester.take([content])
    fake.calls.clear()
    digester.take([content, content], after=SimpleNamespace(cuda_event=77))
    assert fake.waited_for == [77]
    inside = [call for call in fake.calls if not call.startswith("cuCtx")]
    assert inside == [
        "cuStreamWaitEvent", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuEventRecord",
        "cuEventSynchronize",
    ]  # fmt: skip
    assert fake.contexts == []
    del memory


def test_a_launch_that_fails_is_an_error_and_the_next_one_works(fake: FakeLaunches) -> None:
    digester, (memory, content) = CudaDigester(), some_content()
    expected = digester.take([content])[0]
    memory[:] += 1
    fake.arm(fail_at=3)  # the launch: before it come the context and the copy of its table
    with pytest.raises(DriverError, match="cuLaunchKernel"):
        digester.take([content])
    fake.arm(0)
    assert (digester.take([content])[0] == HostDigester().take([content])[0]).all()
    assert (digester.take([content])[0] != expected).any(axis=2).all()
    assert "cuMemHostAlloc" not in fake.calls, "its table came back"


def test_a_larger_request_gets_a_larger_table(fake: FakeLaunches) -> None:
    digester = CudaDigester()
    memory = np.zeros(1 << 16, np.uint8)
    for tokens in (9, 4000):
        content = Content(np.array([memory.ctypes.data]), np.arange(tokens) * 16, 1, 0, 16)
        assert (digester.take([content])[0] == HostDigester().take([content])[0]).all()


def test_the_copier_copies_when_it_says_so_and_gives_everything_back(fake: FakeLaunches) -> None:
    copier = CudaCopier()
    source, found = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    offsets, sizes = np.array([0, 100]), np.array([50, 156])
    copying = copier.start(offsets + found.ctypes.data, offsets + source.ctypes.data, sizes, after=5)
    assert not copying.is_done()
    assert not found.any()
    copying.wait()
    copying.wait()
    assert copying.is_done()
    assert (found[:50] == source[:50]).all()
    assert not found[50:100].any()
    assert (found[100:] == source[100:]).all()
    copier.close()
    copier.close()
    assert (fake.alive, fake.buffers) == ([], {})


def test_only_copies_that_somebody_waits_for_go_before_other_work(fake: FakeLaunches) -> None:
    CudaCopier(goes_first=True).close()
    CudaCopier().close()
    CudaDigester()
    lowest, highest = PRIORITIES
    assert fake.priorities == [highest, lowest, lowest]


@dataclasses.dataclass
class ManyRuns:
    """Permuted pieces of a source, and a copier that takes them for a big call."""

    copier: CudaCopier
    source: np.ndarray
    found: np.ndarray
    expected: np.ndarray
    runs: tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture
def many(fake: FakeLaunches, monkeypatch: pytest.MonkeyPatch) -> ManyRuns:
    monkeypatch.setattr(cuda_copier, "BIG_BYTES", 1)
    numbers, count, size = np.random.default_rng(3), cuda_copier.MANY_RUNS, 8
    source, found = numbers.integers(0, 256, (count, size), dtype=np.uint8), np.zeros((count, size), np.uint8)
    to, at = numbers.permutation(count), numbers.permutation(count)
    expected = np.zeros_like(found)
    expected[to] = source[at]
    runs = to * size + found.ctypes.data, at * size + source.ctypes.data, np.full(count, size)
    return ManyRuns(CudaCopier(), source, found, expected, runs)


def test_the_first_of_many_runs_are_launched_while_the_others_are_cut(fake: FakeLaunches, many: ManyRuns) -> None:
    copying = many.copier.start(*many.runs, after=5)
    assert (len(fake.queue), len(fake.waited_for)) == (2, 1)
    fake.queue.pop(0)()
    assert (many.found == many.expected).all(axis=1).sum() < cuda_copier.MANY_RUNS / 2, "the lesser part goes first"
    assert not copying.is_done()
    copying.wait()
    assert copying.is_done()
    assert (many.found == many.expected).all()
    fake.calls.clear()
    many.copier.start(*many.runs).wait()
    assert "cuMemHostAlloc" not in fake.calls, "the tables of both launches came back"


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemHostAlloc"])
def test_when_the_second_launch_fails_the_first_has_ended(
    fake: FakeLaunches, many: ManyRuns, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whoever hears of the error may free the memory at once."""
    works, calls = getattr(fake, call), itertools.count()
    monkeypatch.setattr(
        fake, call, lambda *arguments: works(*arguments) if next(calls) != 1 else (BAD, None), raising=False
    )
    with pytest.raises(DriverError, match=call):
        many.copier.start(*many.runs)
    assert fake.queue == []
    many.copier.start(*many.runs).wait()
    assert (many.found == many.expected).all()


@pytest.mark.parametrize("name", ["copy_kernel", "digest_kernel"])
def test_the_ptx_is_made_of_its_source_and_fits_an_h200(name: str, tmp_path: Path) -> None:
    nvcc, ptxas = shutil.which("nvcc"), shutil.which("ptxas")
    if nvcc is None or ptxas is None:
        pytest.skip("no CUDA compiler here")
    made, kept = tmp_path / "made.ptx", DRIVERS / f"{name}.ptx"
    subprocess.run([nvcc, "-arch=compute_75", "-ptx", "-o", str(made), str(DRIVERS / f"{name}.cu")], check=True)
    assert code(made) == code(kept), f"make {name}.ptx anew: its source says how"
    subprocess.run([ptxas, "-arch=sm_90", "-o", str(tmp_path / "cubin"), str(kept)], check=True)


def code(ptx: Path) -> list[str]:
    """Without the compiler's name and the PTX version, which is set lower on purpose."""
    return [line for line in ptx.read_text().splitlines() if not line.startswith(("//", ".version"))]
