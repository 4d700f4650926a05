"""KVCacheLayout: the physical order of the logical axes [L, B, H, N, C] (layers, blocks, heads, tokens, content).

K and V live together in C, and C is always innermost. A *page* (one layer's bytes of one block) is one contiguous
run only in the block-compact layouts; a connector needs one of those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from kvx.errors import LayoutError

LAYOUT_VARIABLE: Final = "VLLM_KV_CACHE_LAYOUT"
_ALIASES: Final = {"NHD": "LBNHC", "HND": "LBHNC"}
_L, _B = 0, 1


class KVCacheLayout(Enum):
    """Six permutations; the value lists the logical axes from the outermost to the innermost, as in vLLM."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)

    @classmethod
    def parse(cls, name: str) -> KVCacheLayout:
        """The layout of that name, in any case; NHD and HND are aliases. LayoutError lists the known names."""
        upper = name.strip().upper()
        try:
            return cls[_ALIASES.get(upper, upper)]
        except KeyError:
            known = ", ".join([*cls.__members__, *_ALIASES])
            raise LayoutError(f"unknown KV cache layout {name!r}; use one of {known}") from None

    @property
    def is_layer_outermost(self) -> bool:
        """Each layer owns address ranges of its own."""
        return bool(self.value[0] == _L)

    @property
    def is_block_outermost(self) -> bool:
        """Each block holds the pages of all layers, and the whole cache is one segment."""
        return bool(self.value[0] == _B)

    @property
    def is_block_compact(self) -> bool:
        """Each page [H, N, C] is one contiguous run."""
        return set(self.value[:2]) == {_L, _B}

    @property
    def is_token_major(self) -> bool:
        """Inside a page the tokens come outside the heads ([N, H, C])."""
        return self in (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)

    def segments(self, num_layers: int, num_heads: int) -> int:
        """How many address runs there are in which block b sits at b * block_stride."""
        if self.is_block_outermost:
            return 1
        return num_layers * (1 if self.is_block_compact else num_heads)


def require_block_compact(layout: KVCacheLayout) -> None:
    """LayoutError when a page of `layout` is not one contiguous run, as every connector needs it to be."""
    if not layout.is_block_compact:
        good = ", ".join(known.name for known in KVCacheLayout if known.is_block_compact)
        raise LayoutError(
            f"KV cache layout {layout.name} scatters each page over the cache; connectors need one of {good}"
        )


def resolve_layout(
    *,
    override: KVCacheLayout | str | None = None,
    backend: KVCacheLayout | str | None = None,
    environ: Mapping[str, str] | None = None,
    preferences: Sequence[KVCacheLayout | str] = (),
) -> KVCacheLayout:
    """The layout when kvx stands alone; inside vLLM, vLLM decides.

    The first that is given wins: `override` (tests), `backend` (what the attention backend requires), the
    environment variable VLLM_KV_CACHE_LAYOUT, the first connector preference, LBHNC.
    """
    variable = (os.environ if environ is None else environ).get(LAYOUT_VARIABLE) or None
    for wanted in (override, backend, variable, *preferences):
        if wanted is not None:
            return wanted if isinstance(wanted, KVCacheLayout) else KVCacheLayout.parse(wanted)
    return KVCacheLayout.LBHNC
