"""What a model keeps in the cache and what it weighs, read from its `config.json`. Pure: no weights, no device.

The field names are those of Hugging Face `transformers`; how layers become layer groups is vLLM's rule
(`vllm/v1/core/kv_cache_utils.py`, 0.32 and 0.33), since it is vLLM's block tables that an operator plans for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvx.errors import ModelError
from kvx.layout import KVCacheLayout
from kvx.spec import AttentionKind, CacheGeometry, KVCacheSpec, LayerGroup, align_capacity

Config = Mapping[str, Any]

_KINDS = {"full_attention": AttentionKind.FULL_ATTENTION, "sliding_attention": AttentionKind.SLIDING_WINDOW}
_LAYERS_OF_NO_MORE_THAN = 1.5
"""Where the most frequent kind has fewer layers than this times the rarest, vLLM pads the rarest up to it."""


_TIED_WHERE_NOTHING_IS_SAID = ("gemma",)
"""Model types whose config files leave out that input and output embeddings are one."""


@dataclass(frozen=True)
class ModelShape:
    """The attention of a decoder: `kinds` has one entry a layer, in order."""

    kinds: tuple[AttentionKind, ...]
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    parameters: int
    sliding_window_tokens: int | None = None
    latent_size: int | None = None
    max_model_len_tokens: int | None = None

    def spec(self, kind: AttentionKind, block_size_tokens: int, dtype: str, tp_size: int) -> KVCacheSpec:
        """What one layer stores on each of `tp_size` ranks; fewer heads than ranks are held by several.

        Raises:
            ModelError: the heads cannot be divided among the ranks.
        """
        if kind is AttentionKind.MLA:
            assert self.latent_size is not None, "a shape with MLA layers has the size of its latent"
            return KVCacheSpec.mla(block_size_tokens=block_size_tokens, latent_size=self.latent_size, dtype=dtype)
        larger, smaller = max(self.num_kv_heads, tp_size), min(self.num_kv_heads, tp_size)
        if larger % smaller:
            raise ModelError(
                f"{self.num_kv_heads} KV heads cannot be divided among {tp_size} tensor parallel ranks; "
                "take a number of ranks that divides the heads, or a multiple of them"
            )
        heads = max(1, self.num_kv_heads // tp_size)
        if kind is AttentionKind.SLIDING_WINDOW:
            assert self.sliding_window_tokens is not None, "a shape with sliding windows has their size"
            return KVCacheSpec.sliding_window(
                block_size_tokens=block_size_tokens,
                num_kv_heads=heads,
                head_size=self.head_size,
                dtype=dtype,
                sliding_window_tokens=self.sliding_window_tokens,
            )
        return KVCacheSpec.full_attention(
            block_size_tokens=block_size_tokens, num_kv_heads=heads, head_size=self.head_size, dtype=dtype
        )

    def groups(self, block_size_tokens: int, dtype: str, tp_size: int) -> tuple[LayerGroup, ...]:
        """Layer groups as vLLM makes them: of equal length, so that all share one pool of blocks."""
        found: list[LayerGroup] = []
        by_kind = {kind: [n for n, one in enumerate(self.kinds) if one is kind] for kind in dict.fromkeys(self.kinds)}
        counts = [len(layers) for layers in by_kind.values()]
        size = max(counts) if max(counts) < min(counts) * _LAYERS_OF_NO_MORE_THAN else min(counts)
        for kind, layers in by_kind.items():
            spec, number = self.spec(kind, block_size_tokens, dtype, tp_size), -(-len(layers) // size)
            for first in range(number):
                names = tuple(f"layers.{layer}" for layer in layers[first::number])
                found.append(LayerGroup(f"group{len(found)}", names, spec))
        return tuple(found)

    def geometry(
        self, layout: KVCacheLayout, groups: tuple[LayerGroup, ...], blocks: int, granularity_bytes: int
    ) -> CacheGeometry:
        """A cache of at least `blocks` blocks in which every segment starts on a granule."""
        smallest = CacheGeometry(layout, groups, 1, 1)
        strides = [segment.block_stride_bytes for segment in smallest.segment_table.segments]
        capacity = align_capacity(max(1, blocks), strides, granularity_bytes, up=True)
        return CacheGeometry(layout, groups, capacity, granularity_bytes)

    def request_blocks(self, groups: Sequence[LayerGroup], num_tokens: int, batch_tokens: int) -> int:
        """Blocks that one request of `num_tokens` takes over all groups, and vLLM's null block.

        A sliding window holds its window and the tokens of the batch that is being computed, and begins anywhere in
        its first block.
        """
        blocks = 1
        for group in groups:
            window, tokens = group.spec.sliding_window_tokens, num_tokens
            if window is not None:
                tokens = min(num_tokens, window - 1 + batch_tokens)
                blocks += 1
            blocks += -(-tokens // group.spec.block_size_tokens)
        return blocks


def read_shape(config: Config) -> ModelShape:
    """The shape of a decoder with attention layers.

    Raises:
        ModelError: a field that is missing or of the wrong kind, or layers that keep something else than keys and
            values of full or sliding attention, or a latent (MLA).
    """
    text: Config = config.get("text_config") or config
    layers, hidden, heads = (
        _number(text, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = _number(text, "num_key_value_heads", heads)
    head_size = _number(text, "head_dim", hidden // heads)
    latent = text.get("kv_lora_rank")
    window = _window(text)
    return ModelShape(
        kinds=_kinds(text, layers, window),
        num_kv_heads=kv_heads,
        head_size=head_size,
        hidden_size=hidden,
        intermediate_size=_number(text, "intermediate_size", 4 * hidden),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"),
        parameters=_parameters(text, layers, hidden, heads, kv_heads, head_size),
        sliding_window_tokens=window,
        latent_size=None if latent is None else _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim"),
        max_model_len_tokens=text.get("max_position_embeddings"),
    )


def _number(text: Config, name: str, default: int | None = None) -> int:
    found = text.get(name)
    found = default if found is None else found
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelError(f"config.json has {name} = {text.get(name)!r}; a decoder's config has a positive number there")
    return found


def _window(text: Config) -> int | None:
    """Qwen's configs name a window that `use_sliding_window` switches off."""
    if text.get("use_sliding_window") is False or text.get("sliding_window") is None:
        return None
    return _number(text, "sliding_window")


def _kinds(text: Config, layers: int, window: int | None) -> tuple[AttentionKind, ...]:
    for name in ("layers_block_type", "hybrid_override_pattern", "attn_layer_indices", "linear_num_key_heads"):
        if text.get(name) is not None:
            raise ModelError(f"config.json has {name}: this model keeps recurrent state, which kvx cannot plan yet")
    if text.get("kv_lora_rank") is not None:
        return (AttentionKind.MLA,) * layers
    if text.get("layer_types") is not None:
        names = list(text["layer_types"])
        unknown = sorted(set(map(str, names)) - set(_KINDS))
        if unknown or len(names) != layers:
            raise ModelError(
                f"config.json has {len(names)} layer_types for {layers} layers, {', '.join(unknown) or 'none'} of them "
                f"unknown; kvx plans {' and '.join(_KINDS)}"
            )
        kinds = tuple(_KINDS[name] for name in names)
        return kinds if window is not None else (AttentionKind.FULL_ATTENTION,) * layers
    if window is None:
        return (AttentionKind.FULL_ATTENTION,) * layers
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if pattern is not None:  # every so manyth layer is a full one
        every = int(pattern)
        full = AttentionKind.FULL_ATTENTION
        return tuple(AttentionKind.SLIDING_WINDOW if (n + 1) % every else full for n in range(layers))
    first = int(text.get("max_window_layers") or 0) if text.get("use_sliding_window") else 0
    return (AttentionKind.FULL_ATTENTION,) * first + (AttentionKind.SLIDING_WINDOW,) * (layers - first)


def _parameters(text: Config, layers: int, hidden: int, heads: int, kv_heads: int, head_size: int) -> int:
    """Parameters of a decoder with gated feed-forward layers, dense or of experts; norms of two a layer."""
    vocabulary = _number(text, "vocab_size")
    tied = bool(text.get("tie_word_embeddings", str(text.get("model_type")).startswith(_TIED_WHERE_NOTHING_IS_SAID)))
    attention = 2 * hidden * heads * head_size + 2 * hidden * kv_heads * head_size
    if text.get("kv_lora_rank") is not None:
        attention = _latent_attention(text, hidden, heads)
    dense = 3 * hidden * _number(text, "intermediate_size", 4 * hidden)
    experts = text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts")
    feed_forward = layers * dense
    if experts:
        each = 3 * hidden * _number(text, "moe_intermediate_size", _number(text, "intermediate_size", 4 * hidden))
        plain = min(int(text.get("first_k_dense_replace") or 0), layers)
        routed = (int(experts) + int(text.get("n_shared_experts") or 0)) * each + int(experts) * hidden
        feed_forward = plain * dense + (layers - plain) * routed
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return embeddings + layers * (attention + 2 * hidden) + feed_forward + hidden


def _latent_attention(text: Config, hidden: int, heads: int) -> int:
    latent, rope = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
    nope, value = _number(text, "qk_nope_head_dim"), _number(text, "v_head_dim")
    query_rank = text.get("q_lora_rank")
    query = heads * (nope + rope)
    queries = hidden * query if not query_rank else int(query_rank) * (hidden + query)
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
