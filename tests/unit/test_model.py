"""What a model keeps and weighs, read from the public `config.json` of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvx.cli.checkpoint import read_config, weights_bytes
from kvx.errors import ModelError
from kvx.model import ModelShape, read_shape
from kvx.spec import AttentionKind

CONFIGS = Path(__file__).parent / "configs"
FULL, WINDOW = AttentionKind.FULL_ATTENTION, AttentionKind.SLIDING_WINDOW


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def shape(name: str) -> ModelShape:
    return read_shape(config(name))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.134515),
        ("Qwen2.5-7B", 7.6156),
        ("DeepSeek-V2-Lite", 15.7065),
        ("Gemma-3-1B", 0.99989),
        ("gpt-oss-20b", 20.91),
    ],
)
def test_parameters_are_those_that_the_model_cards_tell(name: str, billions: float) -> None:
    assert shape(name).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_grouped_query_attention_is_one_group() -> None:
    (group,) = shape("Qwen2.5-7B").groups(16, "bfloat16", 1)
    assert len(group.layers) == 28
    assert group.spec.page_size_bytes == 16 * 4 * 2 * 128 * 2


def test_a_latent_is_one_head_on_every_rank() -> None:
    for ranks in (1, 8):
        (group,) = shape("DeepSeek-V2-Lite").groups(64, "bfloat16", ranks)
        assert (group.spec.num_kv_heads, group.spec.page_size_bytes) == (1, 64 * 576 * 2)


def test_one_full_layer_in_six_makes_groups_as_long_as_there_are_full_layers() -> None:
    groups = shape("Gemma-3-1B").groups(16, "bfloat16", 1)
    assert [group.spec.kind for group in groups] == [WINDOW] * 6 + [FULL]
    assert max(len(group.layers) for group in groups) == 4
    assert sorted(int(layer.split(".")[1]) for group in groups for layer in group.layers) == list(range(26))
    assert groups[-1].layers == ("layers.5", "layers.11", "layers.17", "layers.23")


def test_nearly_as_many_layers_of_both_kinds_are_padded() -> None:
    kinds = ["sliding_attention"] * 12 + ["full_attention"] * 13
    found = read_shape(config("gpt-oss-20b") | {"layer_types": kinds, "num_hidden_layers": 25})
    assert [len(group.layers) for group in found.groups(16, "bfloat16", 1)] == [12, 13]


def test_ranks_share_heads_or_replicate_them() -> None:
    model = shape("Qwen2.5-7B")
    heads = {ranks: model.groups(16, "bfloat16", ranks)[0].spec.num_kv_heads for ranks in (1, 2, 4, 8)}
    assert heads == {1: 4, 2: 2, 4: 1, 8: 1}
    with pytest.raises(ModelError, match="4 KV heads cannot be divided among 3 tensor parallel ranks"):
        model.groups(16, "bfloat16", 3)


def test_a_window_that_is_switched_off_is_none() -> None:
    assert set(shape("Qwen2.5-7B").kinds) == {FULL}
    switched_on = read_shape(config("Qwen2.5-7B") | {"use_sliding_window": True, "max_window_layers": 20})
    assert [switched_on.kinds.count(kind) for kind in (FULL, WINDOW)] == [20, 8]


def test_a_multimodal_config_keeps_its_decoder_inside() -> None:
    assert read_shape({"text_config": config("Gemma-3-1B")}) == shape("Gemma-3-1B")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers = None"),
        ({"hidden_size": "576"}, "hidden_size = '576'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"layers_block_type": ["mamba"]}, "recurrent state"),
        ({"layer_types": ["linear_attention"] * 30}, "linear_attention of them unknown"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 30 layers"),
    ],
)
def test_what_cannot_be_planned_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_shape(config("SmolLM2-135M") | change)


def test_blocks_of_a_request() -> None:
    model = shape("Gemma-3-1B")
    groups = model.groups(16, "bfloat16", 1)
    # One full group: 8,192 / 16. Six of windows: 511 + 2,048 tokens, beginning anywhere in a block. The null block.
    assert model.request_blocks(groups, 8192, 2048) == 512 + 6 * (160 + 1) + 1


def _safetensors(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_weights_are_counted_from_the_headers(tmp_path: Path) -> None:
    assert weights_bytes(tmp_path, 2) is None
    first = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [10, 3], "data_offsets": [0, 120]}}
    second = {"q": {"dtype": "I8", "shape": [7], "data_offsets": [0, 7]}, "s": {"dtype": "F16", "shape": []}}
    _safetensors(tmp_path / "model-1.safetensors", json.dumps(first).encode())
    _safetensors(tmp_path / "model-2.safetensors", json.dumps(second).encode())
    assert weights_bytes(tmp_path, 2) == 30 * 2 + 7 + 2


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\x05" + b"\0" * 7 + b"no {}", b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        weights_bytes(tmp_path, 2)


def test_a_config_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is no JSON"):
        read_config(tmp_path / "config.json")
