"""Digests compare content, not storage: the same in every layout and block size, different for every change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.digest import GroupDigests, digests, request_digests
from kvx.digest_check import DigestCheck, wanted_ranges
from kvx.drivers import digester
from kvx.drivers.digester import CHUNK_BYTES, Content, HostDigester, digester_for
from kvx.errors import DriverUnavailable, HandshakeError
from kvx.geometry import GroupGeometry, HeadRange
from kvx.inject import flip_byte, overwrite, swapped
from kvx.layout import KVCacheLayout
from kvx.plan import group_geometry
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.tensor import views_of

Views = dict[str, torch.Tensor]


def cache(
    layout: KVCacheLayout, block_size: int, kernel: int | None = None, dtype: str = "float32"
) -> tuple[Views, GroupGeometry]:
    spec = KVCacheSpec.full_attention(
        block_size_tokens=block_size, num_kv_heads=2, head_size=4, dtype=dtype, kernel_block_size_tokens=kernel
    )
    geometry = CacheGeometry(
        layout=layout, groups=(LayerGroup("g", ("a", "b", "c"), spec),), capacity_blocks=16, granularity_bytes=64
    )
    buffer = torch.zeros(geometry.segment_table.total_bytes, dtype=torch.int8)
    return views_of(buffer, geometry, kernel_blocks=kernel is not None), group_geometry(geometry, 0)


def write(views: Views, group: GroupGeometry, blocks: list[int], content: np.ndarray) -> None:
    """`content`: [L, H, n, C] bytes, placed token by token."""
    kernel = group.kernel_block_size_tokens
    for index, layer in enumerate(group.layers):
        view = views[layer].view(torch.uint8)
        for token in range(content.shape[2]):
            inside = token % group.block_size_tokens
            row = blocks[token // group.block_size_tokens] * (group.block_size_tokens // kernel) + inside // kernel
            view[row, :, inside % kernel] = torch.from_numpy(content[index, :, token])


def contents(tokens: int, content_bytes: int = 32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, 2, tokens, content_bytes), dtype=np.uint8)


CASES = [
    (KVCacheLayout.LBHNC, 16, None),
    (KVCacheLayout.LBNHC, 4, None),
    (KVCacheLayout.LHBNC, 8, None),
    (KVCacheLayout.BLHNC, 32, None),
    (KVCacheLayout.BLNHC, 16, None),
    (KVCacheLayout.BHLNC, 16, None),
    (KVCacheLayout.LBHNC, 16, 4),
]


@pytest.mark.parametrize(("layout", "block_size", "kernel"), CASES)
def test_the_same_content_has_the_same_digests_everywhere(
    layout: KVCacheLayout, block_size: int, kernel: int | None
) -> None:
    content = contents(40)
    views, group = cache(layout, block_size, kernel)
    blocks = [3, 11, 0, 7, 9, 15, 2, 4, 1, 12][: -(-40 // block_size)]
    write(views, group, blocks, content)
    plain_views, plain_group = cache(KVCacheLayout.LBHNC, 64)
    write(plain_views, plain_group, [5], content)
    ours, plain = digests(views, group, blocks, 5, 30), digests(plain_views, plain_group, [5], 0, 40)
    assert (ours.values == plain.values[:, 5:35]).all()
    assert ours.present.all()
    of_tokens = content[:, :, 5:35].transpose(1, 2, 0, 3)
    assert (ours.values == [[by_definition(piece) for piece in head] for head in of_tokens]).all()


def by_definition(content: np.ndarray) -> list[int]:
    """The digest of one head and token, [L, C] bytes, as `kvx.drivers.digester` defines it, in Python's own numbers."""
    sums, state = [0, 0], 0
    words = [(1).to_bytes(8, "little")]
    for piece in content:
        padded = piece.tobytes() + bytes(-len(piece) % 16)
        words += [padded[at : at + 8] for at in range(0, len(padded), 8)]
    for index, word in enumerate(words):
        for column, order in enumerate(("little", "big")):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            key = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) % 2**64
            key ^= key >> 31
            sums[column] += key * (int.from_bytes(word, order) if index else 1)
    return list(b"".join((number % 2**64).to_bytes(8, "little") for number in sums))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_content_of_any_size_has_the_digest_that_is_defined(size: int, layers: int, heads: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    memory = numbers.integers(0, 256, (layers, 7, heads, size + 3), dtype=np.uint8)
    strides = memory.strides
    tokens = numbers.permutation(7)[:5]
    content = Content(memory.ctypes.data + np.arange(layers) * strides[0], tokens * strides[1], heads, strides[2], size)
    (found,) = HostDigester().take([content])
    assert found.tolist() == [
        [by_definition(memory[:, token, head, :size]) for token in tokens] for head in range(heads)
    ]


def test_layers_are_taken_in_the_order_of_their_names() -> None:
    content = contents(16)
    views, group = cache(KVCacheLayout.LBHNC, 16)
    write(views, group, [3], content)
    turned = dataclasses.replace(group, layers=group.layers[::-1], layer_offsets_bytes=group.layer_offsets_bytes[::-1])
    before = digests(views, group, [3], 0, 16).values
    assert (digests(views, turned, [3], 0, 16).values == before).all()
    views["a"], views["b"] = views["b"], views["a"]
    assert (digests(views, group, [3], 0, 16).values != before).any(axis=2).all(), "two layers exchanged"


def test_zeros_have_a_digest_and_tokens_that_nobody_has_do_not() -> None:
    views, group = cache(KVCacheLayout.LBHNC, 16)
    found = digests(views, group, [3], 0, 20)
    assert found.values[:, :16].any(axis=2).all()
    assert not found.values[:, 16:].any()


def test_all_groups_of_a_request_at_once_and_whole_blocks_where_pages_are_packed() -> None:
    views, group = cache(KVCacheLayout.LBHNC, 16)
    write(views, group, [3, 1, 2], contents(48))
    packed = dataclasses.replace(group, name="p", layers=("b",), layer_offsets_bytes=(0,), page_format="halves")
    first, second = request_digests(views, [group, packed], [[3, 1, 2], [-1, 1, 2]], 16, 20)
    assert (first.values == digests(views, group, [3, 1, 2], 16, 20).values).all()
    assert (first.values.shape[1], second.values.shape[1]) == (20, 32)
    plain = dataclasses.replace(packed, page_format=None)
    assert (second.values == digests(views, plain, [3, 1, 2], 16, 32).values).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2), st.integers(0, 1), st.integers(0, 39), st.integers(0, 31), st.integers(1, 255))
def test_any_changed_byte_changes_exactly_its_digest(layer: int, head: int, token: int, byte: int, change: int) -> None:
    content = contents(40)
    views, group = cache(KVCacheLayout.LBNHC, 16)
    write(views, group, [3, 1, 2], content)
    before = digests(views, group, [3, 1, 2], 0, 40).values
    content[layer, head, token, byte] ^= change
    write(views, group, [3, 1, 2], content)
    changed = (before != digests(views, group, [3, 1, 2], 0, 40).values).any(axis=2)
    assert np.argwhere(changed).tolist() == [[head, token]]


def test_absent_blocks_have_no_digests_and_long_ranges_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digester, "CHUNK_BYTES", 100 * 2 * 16)  # 100 tokens
    views, group = cache(KVCacheLayout.LBHNC, 64, dtype="bfloat16")
    content = contents(600, content_bytes=16)
    blocks = [9, 3, 4, 1, 12, 6, 7, 8, 2, 5]
    write(views, group, blocks, content)
    whole = digests(views, group, blocks, 0, 600)
    holes = digests(views, group, [9, -1, *blocks[2:8]], 0, 600)
    assert holes.present.tolist() == [not (64 <= token < 128 or token >= 512) for token in range(600)]
    assert (holes.values[:, holes.present] == whole.values[:, holes.present]).all()
    assert not holes.values[:, ~holes.present].any()
    monkeypatch.setattr(digester, "CHUNK_BYTES", CHUNK_BYTES)
    assert (digests(views, group, blocks, 0, 600).values == whole.values).all()


def test_a_device_without_digests_is_named() -> None:
    with pytest.raises(DriverUnavailable, match=r"'xpu:0'.*set verify to off"):
        digester_for("xpu:0")


def check_of(ours: GroupGeometry, theirs: GroupGeometry, blocks: list[int], first: int, count: int) -> DigestCheck:
    return DigestCheck("r", [blocks], first, count, [ours], [theirs])


def test_a_check_names_the_group_and_the_first_position() -> None:
    views, group = cache(KVCacheLayout.LBHNC, 16)
    write(views, group, [3, 1, 2], contents(40))
    owner = digests(views, group, [3, 1, 2], 0, 40)
    flip_byte(views, group, 1, 20)
    check = check_of(group, group, [-1, 1, 2], 16, 24)
    assert [(ask.first_token, ask.num_tokens, ask.head_start, ask.head_count) for ask in check.asks] == [(16, 24, 0, 2)]
    with pytest.raises(HandshakeError, match="a page of digests has 3 bytes"):
        check.add_page(check.asks[0], b"abc")
    assert not check.is_complete
    check.add_page(check.asks[0], owner.values[:, 16:40].tobytes())
    assert not check.is_complete
    check.add_own([digests(views, group, [-1, 1, 2], 16, 24)])
    assert check.is_complete
    finding = check.finding()
    assert (finding.checked, finding.mismatched, finding.first) == (48, 1, ("g", 20))


def test_a_check_compares_the_heads_that_both_hold() -> None:
    _, group = cache(KVCacheLayout.LBHNC, 16)
    ours = dataclasses.replace(group, heads=HeadRange(2, 2, 8))
    theirs = dataclasses.replace(group, heads=HeadRange(0, 3, 8), head_stride_bytes=16, block_stride_bytes=1 << 16)
    values = np.arange(2 * 16 * 16, dtype=np.uint8).reshape(2, 16, 16)
    check = check_of(ours, theirs, [4], 0, 16)
    (ask,) = check.asks
    assert (ask.head_start, ask.head_count) == (2, 1)
    check.add_own([GroupDigests(0, values, np.ones(16, dtype=bool))])
    check.add_page(ask, values[0].tobytes())
    assert check.finding().first is None
    assert check_of(ours, dataclasses.replace(group, heads=HeadRange(4, 2, 8)), [4], 0, 16).asks == []


def test_wanted_ranges_join_neighbours_and_skip_holes() -> None:
    _, group = cache(KVCacheLayout.LBHNC, 16)
    assert wanted_ranges([1, 2, -1, 4], group, 5, 50) == [(5, 32), (48, 55)]
    assert wanted_ranges([-1, -1], group, 0, 20) == []


def test_faults_change_what_they_say() -> None:
    assert swapped([5, 6, 7], [1, 2], 10) == [5, 7, 6]
    assert swapped([5, 9, 7], [1], 10) == [5, 0, 7]
    views, group = cache(KVCacheLayout.LBHNC, 16, kernel=4)
    before = digests(views, group, [2, 3], 0, 32).values
    overwrite(views, group, 3)
    after = digests(views, group, [2, 3], 0, 32).values
    assert (before[:, :16] == after[:, :16]).all()
    assert (before[:, 16:] != after[:, 16:]).any(axis=2).all()
