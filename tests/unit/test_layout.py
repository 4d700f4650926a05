"""KVCacheLayout: names, predicates, and who decides."""

from __future__ import annotations

import pytest

from kvx.errors import LayoutError
from kvx.layout import KVCacheLayout, require_block_compact, resolve_layout


def test_every_value_is_a_permutation_in_the_order_of_the_name() -> None:
    for layout in KVCacheLayout:
        assert "".join("LBHNC"[axis] for axis in layout.value) == layout.name


@pytest.mark.parametrize(
    ("name", "layout"),
    [("LBHNC", "LBHNC"), ("blnhc", "BLNHC"), (" lhbnc ", "LHBNC"), ("NHD", "LBNHC"), ("hnd", "LBHNC")],
)
def test_parse(name: str, layout: str) -> None:
    assert KVCacheLayout.parse(name) is KVCacheLayout[layout]


@pytest.mark.parametrize("name", ["", "LBHN", "NDH", "5"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(LayoutError, match="LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC, NHD, HND"):
        KVCacheLayout.parse(name)


@pytest.mark.parametrize(
    ("layout", "compact", "layer_outermost", "token_major", "segments"),
    [
        ("LBHNC", True, True, False, 3),
        ("LBNHC", True, True, True, 3),
        ("LHBNC", False, True, False, 12),
        ("BLHNC", True, False, False, 1),
        ("BLNHC", True, False, True, 1),
        ("BHLNC", False, False, False, 1),
    ],
)
def test_predicates(layout: str, compact: bool, layer_outermost: bool, token_major: bool, segments: int) -> None:
    known = KVCacheLayout[layout]
    assert known.is_block_compact is compact
    assert known.is_layer_outermost is layer_outermost
    assert known.is_block_outermost is not layer_outermost
    assert known.is_token_major is token_major
    assert known.segments(num_layers=3, num_heads=4) == segments


def test_connectors_need_a_block_compact_layout() -> None:
    for layout in KVCacheLayout:
        if layout.is_block_compact:
            require_block_compact(layout)
        else:
            with pytest.raises(LayoutError, match=f"{layout.name} .*LBHNC, LBNHC, BLHNC, BLNHC"):
                require_block_compact(layout)


def test_the_first_writer_decides() -> None:
    everyone = {
        "override": "BLHNC",
        "backend": KVCacheLayout.LHBNC,
        "environ": {"VLLM_KV_CACHE_LAYOUT": "NHD"},
        "preferences": ["BLNHC", "BHLNC"],
    }
    expected = ["BLHNC", "LHBNC", "LBNHC", "BLNHC", "LBHNC"]
    for layout in expected:
        assert resolve_layout(**{"environ": {}, **everyone}).name == layout
        everyone.pop(next(iter(everyone), ""), None)


def test_resolve_reads_the_process_environment_and_ignores_an_empty_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "bhlnc")
    assert resolve_layout() is KVCacheLayout.BHLNC
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "")
    assert resolve_layout() is KVCacheLayout.LBHNC
    with pytest.raises(LayoutError, match="unknown KV cache layout 'XYZ'"):
        resolve_layout(environ={"VLLM_KV_CACHE_LAYOUT": "XYZ"})
