"""plan(): copies executed by a plain reference equal indexing by (layer, block, head, token)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from geometry_cases import LAYOUTS, bytes_view, fixed_seed, geometry_of, plain, specs
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import KVXError, LayoutError, PeerMismatch
from kvx.layout import KVCacheLayout
from kvx.plan import GroupGeometry, HeadRange, Runs, group_geometry, plan
from kvx.spec import AttentionKind, CacheGeometry, KVCacheSpec, LayerGroup


@dataclass(frozen=True)
class Side:
    """One engine's cache: its geometry, the heads it holds and one request's blocks by position."""

    geometry: CacheGeometry
    heads: HeadRange
    blocks: list[int]
    group_index: int = 0

    @property
    def group(self) -> GroupGeometry:
        return group_geometry(self.geometry, self.group_index, self.heads)

    def cell(self, buffer: np.ndarray, layer: str, head: int, token: int) -> np.ndarray:
        """The content bytes [C] of one (layer, head of the model, token of the request), by numpy's indexing."""
        group = self.geometry.groups[self.group_index]
        view = bytes_view(buffer, self.geometry, self.group_index, group.layers.index(layer))
        block, inside = self.blocks[token // group.spec.block_size_tokens], token % group.spec.block_size_tokens
        kernel = group.spec.kernel_block_tokens
        row = block * group.spec.kernel_blocks_per_block + inside // kernel
        return view[row, head - self.heads.start, inside % kernel]


@dataclass(frozen=True)
class Case:
    source: Side
    destination: Side
    first_token: int
    num_tokens: int

    def plan(self) -> Runs:
        return plan(
            self.source.group,
            self.source.blocks,
            self.destination.group,
            np.array(self.destination.blocks, np.int64),
            first_token=self.first_token,
            num_tokens=self.num_tokens,
            source_num_blocks=self.source.geometry.capacity_blocks,
            destination_num_blocks=self.destination.geometry.capacity_blocks,
        )

    def expected(self, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
        """The destination as it must be afterwards: wanted cells from the source, every other byte as before."""
        after = destination.copy()
        spec = self.destination.geometry.groups[self.destination.group_index].spec
        heads = range(
            max(self.source.heads.start, self.destination.heads.start),
            min(self.source.heads.end, self.destination.heads.end),
        )
        for token in range(self.first_token, self.first_token + self.num_tokens):
            if self.destination.blocks[token // spec.block_size_tokens] < 0:
                continue
            for layer in self.source.geometry.groups[self.source.group_index].layers:
                for head in heads:
                    self.destination.cell(after, layer, head, token)[:] = self.source.cell(source, layer, head, token)
        return after


def execute(rows: np.ndarray, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    """The plain reference: one slice after the other."""
    after = destination.copy()
    for source_offset, destination_offset, length in rows.tolist():
        assert min(source_offset, destination_offset) >= 0
        after[destination_offset : destination_offset + length] = source[source_offset : source_offset + length]
    return after


def buffers(case: Case) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    sizes = case.source.geometry.total_bytes, case.destination.geometry.total_bytes
    return random.integers(0, 128, sizes[0], np.uint8), random.integers(128, 256, sizes[1], np.uint8)


def check(case: Case) -> Runs:
    runs = case.plan()
    source, destination = buffers(case)
    rows = runs.expand()
    np.testing.assert_array_equal(execute(rows, source, destination), case.expected(source, destination))
    assert rows[:, 2].sum() == runs.total_bytes
    assert len(rows) == runs.num_descriptors
    assert (rows[:, 2] > 0).all()
    check_longest(case, rows)
    return runs


def segment_numbers(geometry: CacheGeometry, rows: np.ndarray, column: int) -> np.ndarray:
    starts = [segment.offset_bytes for segment in geometry.segment_table.segments]
    first = np.searchsorted(starts, rows[:, column], side="right")
    last = np.searchsorted(starts, rows[:, column] + rows[:, 2] - 1, side="right")
    assert (first == last).all(), "a run leaves its segment"
    return first


def check_longest(case: Case, rows: np.ndarray) -> None:
    """No run leaves its segment, and no two runs of the same segments could have been one."""
    segments = [
        segment_numbers(case.source.geometry, rows, 0),
        segment_numbers(case.destination.geometry, rows, 1),
    ]
    starts = set(zip(*segments, rows[:, 0].tolist(), rows[:, 1].tolist(), strict=True))
    ends = set(zip(*segments, (rows[:, 0] + rows[:, 2]).tolist(), (rows[:, 1] + rows[:, 2]).tolist(), strict=True))
    assert len(starts) == len(rows)
    assert not starts & ends


def respecified(spec: KVCacheSpec, heads: int, kernel: int, ratio: int, padding: int) -> KVCacheSpec:
    """The same content in another block size, kernel block size, head count and padding."""
    if spec.kind is AttentionKind.RECURRENT:
        return spec
    return replace(
        spec,
        num_kv_heads=heads,
        block_size_tokens=kernel * ratio,
        kernel_block_size_tokens=kernel,
        page_padding_bytes=padding if ratio == 1 else 0,
    )


@st.composite
def sides(draw: st.DrawFn, spec: KVCacheSpec, layers: tuple[str, ...], heads: HeadRange, tokens: int) -> Side:
    """One side in a layout, block size, and perhaps under a second layer group of its own."""
    layout = draw(LAYOUTS)
    padding = draw(st.integers(0, 1)) * spec.dtype_bytes
    spec = respecified(spec, heads.count, draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3])), padding)
    if layout.is_block_outermost:
        spec = plain(LayerGroup("g", layers, spec)).spec
    if not layout.is_block_compact and spec.num_kv_heads > 1:
        spec = replace(spec, page_padding_bytes=0)
    groups = [LayerGroup("ours", layers, spec)]
    if draw(st.booleans()):
        groups.insert(draw(st.integers(0, 1)), LayerGroup("other", ("x", "y"), spec))
    needed = -(-tokens // spec.block_size_tokens)
    geometry = geometry_of(layout, tuple(groups), needed + draw(st.integers(0, 3)))
    blocks = draw(block_lists(needed, geometry.capacity_blocks))
    return Side(geometry, heads, blocks, groups.index(next(group for group in groups if group.name == "ours")))


@st.composite
def block_lists(draw: st.DrawFn, needed: int, capacity: int) -> list[int]:
    """Runs of consecutive ids in any order, so that there is something to coalesce."""
    start = draw(st.integers(0, capacity - needed))
    ids = list(range(start, start + needed))
    cut = draw(st.integers(0, needed))
    return draw(st.sampled_from([ids, ids[cut:] + ids[:cut], ids[::-1], draw(st.permutations(ids))]))


@st.composite
def head_ranges(draw: st.DrawFn, total: int) -> HeadRange:
    start = draw(st.integers(0, total - 1))
    return HeadRange(start, draw(st.integers(1, total - start)), total)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec = draw(specs())
    total = spec.num_kv_heads if spec.kind in (AttentionKind.MLA, AttentionKind.RECURRENT) else draw(st.integers(1, 8))
    everyone = HeadRange(0, total, total)
    layers = tuple(f"layer{index}" for index in range(draw(st.integers(1, 3))))
    tokens = draw(st.integers(1, 14))
    first = draw(st.integers(0, tokens - 1))
    source = draw(sides(spec, layers, draw(st.one_of(st.just(everyone), head_ranges(total))), tokens))
    other_order = tuple(draw(st.permutations(layers))) if draw(st.booleans()) else layers
    destination = draw(sides(spec, other_order, draw(st.one_of(st.just(everyone), head_ranges(total))), tokens))
    unwanted = draw(st.sets(st.integers(0, len(destination.blocks) - 1), max_size=2))
    blocks = [-1 if index in unwanted else block for index, block in enumerate(destination.blocks)]
    return Case(source, replace(destination, blocks=blocks), first, draw(st.integers(0, tokens - first)))


@given(cases())
@fixed_seed(400)
def test_a_plan_equals_indexing(case: Case) -> None:
    check(case)


Move = tuple[int, int, int, int]
"""One byte: the segments that it leaves and enters, and its offsets on both sides."""


def moves_of(case: Case) -> set[Move]:
    """Every byte that a case copies, found by indexing alone."""
    buffers = [np.zeros(side.geometry.total_bytes, np.uint8) for side in (case.source, case.destination)]
    block_size = case.destination.geometry.groups[case.destination.group_index].spec.block_size_tokens
    held = [set(range(side.heads.start, side.heads.end)) for side in (case.source, case.destination)]
    moves = set()
    for token in range(case.first_token, case.first_token + case.num_tokens):
        if case.destination.blocks[token // block_size] < 0:
            continue
        for layer in case.source.geometry.groups[case.source.group_index].layers:
            for head in held[0] & held[1]:
                places = []
                for side, buffer in zip((case.source, case.destination), buffers, strict=True):
                    cell = side.cell(buffer, layer, head, token)
                    places.append(cell.ctypes.data - buffer.ctypes.data)
                segments = [
                    segment_of(side.geometry, place)
                    for side, place in zip((case.source, case.destination), places, strict=True)
                ]
                moves |= {(*segments, places[0] + byte, places[1] + byte) for byte in range(len(cell))}
    return moves


def segment_of(geometry: CacheGeometry, offset: int) -> int:
    (found,) = [
        number
        for number, segment in enumerate(geometry.segment_table.segments)
        if segment.offset_bytes <= offset < segment.end_bytes
    ]
    return found


def fewest_copies(moves: set[Move]) -> int:
    """A contiguous copy is a chain of moves, each one byte on from the last; it begins where none leads to."""
    return sum((left, entered, read - 1, written - 1) not in moves for left, entered, read, written in moves)


@given(cases())
@fixed_seed(150)
def test_a_plan_has_as_few_copies_as_there_can_be(case: Case) -> None:
    """Against all bytes one by one: each is copied once, from and to where indexing says, in the fewest pieces."""
    moves = moves_of(case)
    runs = case.plan()
    copied = [
        (source + byte, destination + byte)
        for source, destination, length in runs.expand().tolist()
        for byte in range(length)
    ]
    assert len(copied) == len(moves)
    assert set(copied) == {(read, written) for _, _, read, written in moves}
    assert runs.num_descriptors == fewest_copies(moves)
    assert len(runs) <= runs.num_descriptors


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize("destination_layout", KVCacheLayout)
@pytest.mark.parametrize("source_layout", KVCacheLayout)
def test_every_pair_of_layouts_kind_and_head_count(
    source_layout: KVCacheLayout, destination_layout: KVCacheLayout, kind: AttentionKind
) -> None:
    one_head = kind in (AttentionKind.MLA, AttentionKind.RECURRENT)
    for total in (1,) if one_head else range(1, 9):
        held = HeadRange(0, total, total)
        upper = HeadRange(total // 2, total - total // 2, total)
        window = 9 if kind is AttentionKind.SLIDING_WINDOW else None
        spec = KVCacheSpec(
            kind=kind,
            block_size_tokens=1 if kind is AttentionKind.RECURRENT else 2,
            num_kv_heads=total,
            content_size=3,
            dtype="bfloat16",
            sliding_window_tokens=window,
        )
        source = geometry_of(source_layout, (LayerGroup("g", ("a", "b"), spec),))
        other = respecified(spec, upper.count, 3, 1, 0)
        destination = geometry_of(destination_layout, (LayerGroup("g", ("a", "b"), other),))
        check(Case(Side(source, held, [3, 4, 1, 0, 5]), Side(destination, upper, [2, 3, 0, 1, 4]), 1, 4))


def side(layout: str, blocks: list[int], *, heads: int = 2, tokens: int = 4, layers: int = 3, **changes: Any) -> Side:
    spec = KVCacheSpec.full_attention(
        block_size_tokens=tokens, num_kv_heads=heads, head_size=4, dtype="bfloat16", **changes
    )
    group = LayerGroup("g", tuple(f"layer{index}" for index in range(layers)), spec)
    geometry = geometry_of(KVCacheLayout[layout], (group,), 16)
    return Side(geometry, HeadRange(0, heads, heads), blocks)


CONTENT = 16  # bytes of one head and token in side()


@pytest.mark.parametrize(
    ("source", "destination", "descriptors", "length"),
    [
        # Whole pages, consecutive on both sides: one run a layer, also where the heads of a page are inside tokens.
        (side("LBHNC", [4, 5, 6]), side("LBHNC", [1, 2, 3]), 3, 3 * 8 * CONTENT),
        (side("LBNHC", [4, 5, 6]), side("LBNHC", [1, 2, 3]), 3, 3 * 8 * CONTENT),
        # The same blocks in another order of positions, but a matching one.
        (side("LBHNC", [6, 4, 5]), side("LBHNC", [3, 1, 2]), 3, 3 * 8 * CONTENT),
        # Consecutive on one side only.
        (side("LBHNC", [4, 5, 6]), side("LBHNC", [1, 9, 3]), 9, 8 * CONTENT),
        # B outermost: the layers of a block join too; across layouts only pages do.
        (side("BLHNC", [4, 5, 6]), side("BLHNC", [1, 2, 3]), 1, 9 * 8 * CONTENT),
        (side("BLHNC", [4, 5, 6]), side("LBHNC", [1, 2, 3]), 9, 8 * CONTENT),
        # One segment for each head.
        (side("LHBNC", [4, 5, 6]), side("LHBNC", [1, 2, 3]), 6, 3 * 4 * CONTENT),
        (side("LHBNC", [4, 5, 6]), side("LBHNC", [1, 2, 3]), 18, 4 * CONTENT),
        # Heads and tokens in another order: single cells (of neighbouring blocks, the last and the first cell join).
        (side("LBNHC", [4, 6, 8]), side("LBHNC", [1, 3, 5]), 72, CONTENT),
        # Padding keeps pages apart.
        (side("LBHNC", [4, 5, 6], page_padding_bytes=16), side("LBHNC", [1, 2, 3]), 9, 8 * CONTENT),
        # Kernel blocks inside a page are in one run when both sides have them.
        (
            side("LBHNC", [4, 5, 6], kernel_block_size_tokens=2),
            side("LBHNC", [1, 2, 3], kernel_block_size_tokens=2),
            3,
            3 * 8 * CONTENT,
        ),
        (side("LBHNC", [4, 6, 8], kernel_block_size_tokens=2), side("LBHNC", [1, 3, 5]), 36, 2 * CONTENT),
    ],
)
def test_descriptors_are_coalesced(source: Side, destination: Side, descriptors: int, length: int) -> None:
    runs = check(Case(source, destination, 0, 12))
    assert runs.num_descriptors == descriptors
    assert set(runs.array["length"].tolist()) == {length}


@pytest.mark.parametrize("other", ["BLHNC", "LBHNC"])
def test_a_run_never_leaves_its_segment(other: str) -> None:
    """With a capacity of one block the layers' segments touch, and each may be a mapping of its own."""
    full = geometry_of(KVCacheLayout.LBHNC, side("LBHNC", []).geometry.groups, 1)
    assert full.capacity_blocks == 1
    single = Side(full, HeadRange(0, 2, 2), [0])
    for case in (Case(single, side(other, [3]), 0, 4), Case(side(other, [3]), single, 0, 4)):
        assert check(case).num_descriptors == 3


def test_offsets_of_64_bits_are_put_in_order() -> None:
    group = side("LBHNC", []).group
    far = replace(group, block_stride_bytes=2**58)
    blocks = [7, 2, 0, 5, 1, 6, 4, 3]
    runs = plan_groups(group, far, blocks, blocks, num_tokens=32, destination_num_blocks=8)
    assert runs.array["destination"].tolist() == [block * 2**58 for block in range(8)]
    assert runs.array["source"].tolist() == [block * group.block_stride_bytes for block in range(8)]


def test_layers_become_the_stride_of_a_run() -> None:
    runs = check(Case(side("LBHNC", [4, 9, 6]), side("LBHNC", [1, 5, 3]), 0, 12))
    assert len(runs) == 3
    assert set(runs.array["count"].tolist()) == {3}


def test_tensor_parallel_slices_meet_in_the_heads_that_both_hold() -> None:
    whole = side("LBHNC", [4, 5], heads=8)
    for rank in range(4):
        slice_of = Side(side("LBHNC", [0, 1], heads=2).geometry, HeadRange(2 * rank, 2, 8), [0, 1])
        runs = check(Case(whole, slice_of, 0, 8))
        assert runs.num_descriptors == 6  # the heads of one page are one run, whole pages are not neighbours
        check(Case(slice_of, whole, 0, 8))
    apart = Side(side("LBHNC", [0, 1]).geometry, HeadRange(0, 2, 8), [0, 1])
    assert len(Case(apart, replace(apart, heads=HeadRange(2, 2, 8)), 0, 8).plan()) == 0


def test_blocks_are_matched_by_position_after_a_prefix_hit() -> None:
    """Decode already has positions 0 and 1: what it wants is the source's blocks 2 and 3, not 0 and 1."""
    runs = check(Case(side("LBHNC", [4, 5, 6, 7]), side("LBHNC", [-1, -1, 2, 3]), 8, 8))
    assert runs.bounds()[0][0] == 6 * 8 * CONTENT
    assert check(Case(side("LBHNC", [-1, -1, 6, 7]), side("LBHNC", [-1, -1, 2, 3]), 0, 16)).num_descriptors == 3


def test_irregular_layers_are_written_out() -> None:
    source, destination = side("LBHNC", [1, 2]), side("LBHNC", [3, 4])
    offsets = source.group.layer_offsets_bytes
    moved = replace(source.group, layer_offsets_bytes=(offsets[0], offsets[2], offsets[2] * 3))
    runs = plan_groups(moved, destination.group, [1, 2], [3, 4])
    assert len(runs) == runs.num_descriptors == 3
    assert sorted(runs.array["source"].tolist()) == [offset + 128 for offset in moved.layer_offsets_bytes]
    shared = side("BLHNC", [1, 2]).group
    gap = replace(shared, layer_offsets_bytes=(0, 256, 384), block_stride_bytes=512)
    runs = plan_groups(gap, gap, [1, 2], [3, 4])
    assert sorted(runs.array["length"].tolist()) == [128, 256, 384]


def plan_groups(source: GroupGeometry, destination: GroupGeometry, ours: Any, theirs: Any, **changes: int) -> Runs:
    values = {"first_token": 0, "num_tokens": 8, "source_num_blocks": 16, "destination_num_blocks": 16}
    return plan(source, ours, destination, theirs, **{**values, **changes})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kind", {"kind": "mla"}),
        ("layers", {"layers": ("layer0", "layer1", "other")}),
        ("dtype", {"dtype": "float16"}),
        ("content_bytes", {"content_bytes": 8}),
        ("heads.total", {"heads": HeadRange(0, 2, 4)}),
        ("sliding_window_tokens", {"sliding_window_tokens": 64}),
        ("page_format", {"page_format": "halves"}),
    ],
)
def test_a_mismatch_names_the_field(field: str, change: dict[str, Any]) -> None:
    group = side("LBHNC", []).group
    with pytest.raises(PeerMismatch, match=field) as caught:
        plan_groups(replace(group, **change), group, [0, 1], [0, 1])
    assert caught.value.field == field
    assert caught.value.ours != caught.value.theirs


@pytest.mark.parametrize(
    ("ours", "theirs", "changes", "error", "message"),
    [
        ([0, 16], [0, 1], {}, LayoutError, "source block 16 at position 1 is not committed; only 16 blocks are"),
        ([0, 1], [7, 1], {"destination_num_blocks": 7}, LayoutError, "destination block 7 at position 0"),
        # Also where the tokens asked for do not reach it.
        ([0, 1, 99], [0, 1], {}, LayoutError, "source block 99 at position 2"),
        ([], [0, 99], {"num_tokens": 0}, LayoutError, "destination block 99 at position 1"),
        ([0, 1], [0], {}, LayoutError, "need 2 destination blocks of 4 tokens, the list has 1"),
        ([0, 1], [], {"num_tokens": 10**15}, LayoutError, "the list has 0"),
        ([0, 1], [3, 3], {}, LayoutError, "destination blocks \\[3\\] stand at more than one position"),
        ([0, 1], [0, 1], {"first_token": -1}, LayoutError, "neither may be negative"),
        ([0, 1], [0, 1], {"num_tokens": -1}, LayoutError, "neither may be negative"),
        ([[0, 1]], [0, 1], {}, LayoutError, "one-dimensional integers"),
        ([0.5, 1.0], [0, 1], {}, LayoutError, "one-dimensional integers"),
        ([0], [0, 1], {}, PeerMismatch, "token 4 wanted.*no block at position 1"),
        ([], [0, 1], {}, PeerMismatch, "token 0 wanted.*no block at position 0"),
        ([-1, 1], [0, 1], {}, PeerMismatch, "token 0 wanted.*no block at position 0"),
        ([0, -1], [0, 1], {"first_token": 2, "num_tokens": 6}, PeerMismatch, "token 4 wanted"),
    ],
)
def test_bad_block_lists(ours: Any, theirs: Any, changes: dict[str, int], error: type[KVXError], message: str) -> None:
    group = side("LBHNC", []).group
    with pytest.raises(error, match=message):
        plan_groups(group, group, ours, theirs, **changes)


def test_what_is_not_wanted_need_not_exist() -> None:
    group = side("LBHNC", []).group
    assert len(plan_groups(group, group, [], [-1, -1])) == 0
    assert len(plan_groups(group, group, [0, 1], [0, 1], num_tokens=0)) == 0
    assert plan_groups(group, group, [-1, 1, -1], [-1, 3]).num_descriptors == 3
    assert plan_groups(group, group, [5, 5], [0, 1]).num_descriptors == 6  # the same bytes may be read twice


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_packed_pages_are_copied_whole(layout: str) -> None:
    """Where a kernel packs a page in an order of its own, a token of it has no bytes: the block goes as a whole."""
    source, destination = side("LBHNC", [4, 6]), side(layout, [1, 3])
    packed = [replace(each.group, page_format="halves") for each in (source, destination)]
    whole = Case(source, destination, 0, 8).plan().expand()
    for first, tokens in [(0, 5), (0, 8)]:
        found = plan_groups(*packed, [4, 6], [1, 3], first_token=first, num_tokens=tokens).expand()
        np.testing.assert_array_equal(found, whole)
    one = plan_groups(*packed, [4, 6], [1, 3], first_token=4, num_tokens=1)
    assert one.total_bytes == 3 * 8 * CONTENT
    with pytest.raises(LayoutError, match="cannot copy from token 5: pages packed as 'halves' are copied whole"):
        plan_groups(*packed, [4, 6], [1, 3], first_token=5, num_tokens=1)
    for field, other in [
        ("block_size_tokens", side("LBHNC", [], tokens=8, kernel_block_size_tokens=4)),
        ("kernel_block_size_tokens", side("LBHNC", [], kernel_block_size_tokens=2)),
    ]:
        with pytest.raises(PeerMismatch, match="pages packed as halves cannot be split") as caught:
            plan_groups(replace(other.group, page_format="halves"), packed[1], [0, 1], [0, 1])
        assert caught.value.field == field


def test_a_peer_whose_offsets_leave_64_bits_is_refused() -> None:
    group = side("LBHNC", []).group
    with pytest.raises(LayoutError, match="64-bit"):
        plan_groups(replace(group, block_stride_bytes=2**61), group, [3, 1], [0, 1])


@pytest.mark.parametrize(("ours", "theirs"), [(6, 4), (4, 6), (2, 8), (8, 2), (3, 3)])
@pytest.mark.parametrize("first", [0, 1, 13, 40])
def test_blocks_of_any_two_sizes_over_many_periods(ours: int, theirs: int, first: int) -> None:
    """Blocks of both sides begin together every 12 or 8 tokens; the first and the last stretch are cut short."""
    numbers = np.random.default_rng(ours * theirs)
    sides = []
    for tokens in (ours, theirs):
        needed = -(-90 // tokens)
        spec = KVCacheSpec.full_attention(block_size_tokens=tokens, num_kv_heads=2, head_size=1, dtype="uint8")
        geometry = geometry_of(KVCacheLayout.LBNHC, (LayerGroup("g", ("a", "b"), spec),), needed + 3)
        sides.append(Side(geometry, HeadRange(0, 2, 2), numbers.permutation(needed + 3)[:needed].tolist()))
    for end in (first + 1, 89, 90):
        case = Case(*sides, first, end - first)
        assert check(case).num_descriptors == fewest_copies(moves_of(case))


def test_a_hundred_thousand_runs_take_no_python_loop() -> None:
    """`kvx bench plan` times them; a Python loop over the runs would take a second."""
    spec = KVCacheSpec.full_attention(block_size_tokens=16, num_kv_heads=8, head_size=64, dtype="bfloat16")
    group = group_geometry(geometry_of(KVCacheLayout.LBHNC, (LayerGroup("g", ("layer",), spec),), 1 << 17), 0)
    random = np.random.default_rng(3)
    ours, theirs = (random.permutation(1 << 17)[:100_000] for _ in range(2))
    durations_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        runs = plan_groups(
            group, group, ours, theirs, num_tokens=1_600_000, source_num_blocks=1 << 17, destination_num_blocks=1 << 17
        )
        durations_s.append(time.perf_counter() - start_s)
    assert runs.num_descriptors > 99_000
    assert min(durations_s) < 0.2
