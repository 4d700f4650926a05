"""Pages that keep part of a token's content transposed: copied and digested by token, whatever the block sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from geometry_cases import fixed_seed
from hypothesis import given
from hypothesis import strategies as st

from kvx.digest import digests
from kvx.drivers.cuda_digester import CudaDigester
from kvx.drivers.digester import Content, Transposed
from kvx.errors import DriverUnavailable, LayoutError, PeerMismatch
from kvx.geometry import GroupGeometry, HeadRange, group_geometry
from kvx.inject import flip_byte
from kvx.layout import KVCacheLayout
from kvx.plan import Runs, plan
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.tensor import views_of

HEAD_SIZE, LAYERS, TOTAL_HEADS = 4, ("a", "b"), 4
ELEMENTS = 2 * HEAD_SIZE  # of a token and head: keys, then values
BLOCKS = 16


@dataclass
class Side:
    """A cache whose keys are [C, N] and whose values are [N, C] behind them, as some CPU kernels want it."""

    blocks: list[int]
    block_size: int
    kernel: int
    heads: HeadRange
    dtype: str = "float32"
    layout: KVCacheLayout = KVCacheLayout.LBHNC
    transposed: bool = True

    def __post_init__(self) -> None:
        spec = KVCacheSpec.full_attention(
            block_size_tokens=self.block_size, num_kv_heads=self.heads.count, head_size=HEAD_SIZE, dtype=self.dtype,
            kernel_block_size_tokens=self.kernel,
        )  # fmt: skip
        geometry = CacheGeometry(
            layout=self.layout, groups=(LayerGroup("g", LAYERS, spec),), capacity_blocks=BLOCKS, granularity_bytes=64
        )
        self.buffer = torch.zeros(geometry.segment_table.total_bytes, dtype=torch.int8)
        self.views = views_of(self.buffer, geometry, kernel_blocks=True)
        plain = group_geometry(geometry, 0, self.heads)
        self.group = replace(plain, transposed_bytes=plain.content_bytes // 2) if self.transposed else plain

    def cells(self) -> np.ndarray:
        """[L, H, n, C]: a view of every element of the request, by numpy's indexing of the definition."""
        kind = np.uint32 if self.dtype == "float32" else np.uint16
        number = torch.int32 if self.dtype == "float32" else torch.int16
        found = []
        for layer in LAYERS:
            rows = self.views[layer].view(number).numpy().view(kind)
            ratio, size = self.block_size // self.kernel, self.kernel * HEAD_SIZE
            tokens = []
            for block in self.blocks:
                for token in range(self.block_size):
                    row = rows[block * ratio + token // self.kernel]  # [H, N, C]
                    inside = token % self.kernel
                    if not self.transposed:
                        tokens.append([row[head, inside] for head in range(self.heads.count)])
                        continue
                    flat = [row[head].reshape(-1) for head in range(self.heads.count)]
                    keys = [page[:size].reshape(HEAD_SIZE, self.kernel)[:, inside] for page in flat]
                    values = [page[size:].reshape(self.kernel, HEAD_SIZE)[inside] for page in flat]
                    tokens.append([np.concatenate(pair) for pair in zip(keys, values, strict=True)])
            found.append(np.array(tokens).transpose(1, 0, 2))
        return np.array(found)

    def fill(self, seed: int) -> None:
        self.buffer.copy_(torch.from_numpy(np.random.default_rng(seed).integers(-128, 128, len(self.buffer), np.int8)))


def read(source: Side, destination: Side, first: int, count: int) -> Runs:
    runs = plan(
        source.group, source.blocks, destination.group, destination.blocks, first_token=first, num_tokens=count,
        source_num_blocks=BLOCKS, destination_num_blocks=BLOCKS,
    )  # fmt: skip
    theirs, ours = source.buffer.numpy(), destination.buffer.numpy()
    for start, end, length in runs.expand().tolist():
        ours[end : end + length] = theirs[start : start + length]
    return runs


def full(block_size: int, kernel: int, blocks: list[int], heads: HeadRange | None = None, **more: object) -> Side:
    return Side(blocks, block_size, kernel, heads or HeadRange(0, TOTAL_HEADS, TOTAL_HEADS), **more)  # type: ignore[arg-type]


SIZES = st.sampled_from([(4, 4), (8, 8), (8, 4), (16, 16), (16, 4), (12, 12)])
HEADS = st.sampled_from([HeadRange(0, 4, 4), HeadRange(0, 2, 4), HeadRange(1, 3, 4)])


@fixed_seed(150)
@given(
    SIZES,
    SIZES,
    HEADS,
    HEADS,
    st.integers(0, 40),
    st.integers(1, 48),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([KVCacheLayout.LBHNC, KVCacheLayout.BLHNC]),
    st.randoms(use_true_random=False),
)
def test_every_token_arrives_whatever_the_block_sizes_and_heads(
    ours: tuple[int, int], theirs: tuple[int, int], our_heads: HeadRange, their_heads: HeadRange, first: int,
    count: int, dtype: str, layout: KVCacheLayout, random: np.random.Generator,
) -> None:  # fmt: skip
    count = min(count, 48 - first)
    if ours[0] != ours[1]:
        layout = KVCacheLayout.LBHNC  # no other takes kernel blocks
    sides = []
    for (size, kernel), heads, order in ((theirs, their_heads, KVCacheLayout.LBHNC), (ours, our_heads, layout)):
        sides.append(full(size, kernel, random.sample(range(BLOCKS), -(-48 // size)), heads, dtype=dtype, layout=order))
    source, destination = sides
    source.fill(1)
    destination.fill(2)
    before = destination.cells()
    runs = read(source, destination, first, count)
    after, wanted = destination.cells(), before.copy()
    common = our_heads.common(their_heads)
    assert common is not None
    end = first + count
    if ours[1] == theirs[1] and first % ours[1] == 0:
        end = -(-end // ours[1]) * ours[1]  # whole kernel blocks, since nothing has to be taken apart
    held = slice(common.start - our_heads.start, common.end - our_heads.start)
    given_heads = slice(common.start - their_heads.start, common.end - their_heads.start)
    wanted[:, held, first:end] = source.cells()[:, given_heads, first:end]
    np.testing.assert_array_equal(after[:, :, :48], wanted[:, :, :48])
    assert runs.total_bytes == len(LAYERS) * common.count * (end - first) * ELEMENTS * (4 if dtype == "float32" else 2)
    of = [
        digests(side.views, side.group, side.blocks, first, count).values[part]
        for side, part in ((source, given_heads), (destination, held))
    ]
    np.testing.assert_array_equal(*of)


def test_equal_blocks_are_one_copy_each_and_others_a_row_an_element() -> None:
    source, destination = full(8, 8, [3, 1]), full(8, 8, [2, 5])
    source.fill(1)
    alike = read(source, destination, 0, 13)
    assert alike.num_descriptors == 2 * len(LAYERS), "a block of a layer is one run, all heads and the tail with it"
    np.testing.assert_array_equal(destination.cells(), source.cells())
    halves = full(4, 4, [9, 4, 6, 0])
    apart = read(source, halves, 0, 16)
    pieces = 4 * TOTAL_HEADS * len(LAYERS)
    assert apart.num_descriptors == pieces * (HEAD_SIZE + 1), "each of the keys, and the values together"
    np.testing.assert_array_equal(halves.cells(), source.cells())


def test_digests_are_those_of_the_same_content_token_after_token() -> None:
    transposed = full(8, 4, [3, 1])
    transposed.fill(1)
    plain = full(16, 16, [5], transposed=False)
    plain_cells = plain.cells
    for layer, content in zip(LAYERS, transposed.cells(), strict=True):
        plain.views[layer][5] = torch.from_numpy(content.view(np.float32))
    np.testing.assert_array_equal(plain_cells(), transposed.cells())
    ours = digests(transposed.views, transposed.group, [3, 1], 2, 13)
    assert (ours.values == digests(plain.views, plain.group, [5], 2, 13).values).all()


@pytest.mark.parametrize("byte", range(8 * ELEMENTS * 4))
def test_each_byte_of_a_page_belongs_to_the_digest_of_one_token(byte: int) -> None:
    """Bytes of a page are keys by element and then values by token."""
    side = full(8, 8, [3], HeadRange(0, 1, 1))
    side.fill(1)
    before = digests(side.views, side.group, [3], 0, 8).values
    side.views["b"][3].view(torch.uint8).reshape(-1)[byte] ^= 0x10
    changed = (before != digests(side.views, side.group, [3], 0, 8).values).any(axis=2)
    keys = 8 * HEAD_SIZE * 4
    token = byte // 4 % 8 if byte < keys else (byte - keys) // (HEAD_SIZE * 4)
    assert np.argwhere(changed).tolist() == [[0, token]]


@pytest.mark.parametrize(("block_size", "kernel", "token"), [(8, 8, 5), (8, 4, 5), (16, 4, 15), (4, 4, 0)])
def test_the_injected_flip_is_at_its_token(block_size: int, kernel: int, token: int) -> None:
    side = full(block_size, kernel, [3])
    side.fill(1)
    before = digests(side.views, side.group, [3], 0, block_size).values
    flip_byte(side.views, side.group, 3, token)
    changed = (before != digests(side.views, side.group, [3], 0, block_size).values).any(axis=2)
    assert np.argwhere(changed).tolist() == [[0, token]]


def test_only_sides_that_keep_it_alike_exchange_it() -> None:
    with pytest.raises(PeerMismatch) as raised:
        read(full(8, 8, [3], transposed=False), full(8, 8, [1]), 0, 8)
    assert raised.value.field == "transposed_bytes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_format": "halves"}, "16 transposed bytes of layer group 'g' are not whole float32 elements"),
        ({"transposed_bytes": 32}, "32 transposed bytes .* fewer than its 32 bytes a token"),
        ({"transposed_bytes": 6}, "6 transposed bytes .* are not whole float32 elements"),
        ({"transposed_bytes": -4}, "transposed_bytes of layer group 'g' is -4, out of range"),
        ({"token_stride_bytes": 128, "head_stride_bytes": 32}, "'g' are transposed, which needs each head's .* LBHNC"),
    ],
)
def test_other_orders_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(full(8, 8, [0]).group, **change)  # type: ignore[arg-type]


def test_it_goes_over_the_wire() -> None:
    group = full(8, 8, [0]).group
    assert GroupGeometry.from_wire(group.to_wire()) == group
    with pytest.raises(LayoutError, match="transposed_bytes from a peer must be int, found '16'"):
        GroupGeometry.from_wire({**group.to_wire(), "transposed_bytes": "16"})


def test_a_gpu_takes_no_digests_of_it() -> None:
    none = np.zeros(0, np.int64)
    content = Content(none, none, 1, 0, 16, Transposed(none, 4, 4, 32))
    with pytest.raises(DriverUnavailable, match="transposed pages"):
        CudaDigester.take(object.__new__(CudaDigester), [content])
