"""Deliberate faults for negative controls: proof that the digests would notice. Off unless a name is given.

Each fault is injected once, into the first hand-off that offers a place for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch

from kvx.errors import ConnectorError
from kvx.geometry import GroupGeometry

logger = logging.getLogger(__name__)

# How long the owner waits for its engine to reuse a freed block before this module reuses it itself.
STALE_WAIT_S = 2.0


class Fault(StrEnum):
    FLIP_BYTE = "flip-byte"  # a byte changed in flight
    SWAP_BLOCKS = "swap-blocks"  # two block ids exchanged
    STALE = "stale"  # a block read after its owner freed and reused it


USED = "-used"
"""Behind a fault's name: what differs is counted, and used all the same, so that an answer may show it. Without, no
fault changes an answer: bytes that differ fail their hand-off or load."""
INJECTIONS = (*(fault.value for fault in Fault), *(fault.value + USED for fault in Fault))


class Injector:
    """Hands out its one fault once. `uses_what_differs`: the negative control of the comparison of answers."""

    def __init__(self, name: str | None) -> None:
        if name is not None and name not in INJECTIONS:
            raise ConnectorError(f"unknown injection {name!r}; known: {', '.join(INJECTIONS)}")
        self._fault = Fault(name.removesuffix(USED)) if name is not None else None
        self.uses_what_differs = name is not None and name.endswith(USED)

    def take(self, fault: Fault) -> bool:
        """Whether to inject `fault` now."""
        if self._fault is not fault:
            return False
        self._fault = None
        logger.warning("injecting the fault %s, as configured", fault.value)
        return True


def flip_byte(views: Mapping[str, torch.Tensor], group: GroupGeometry, block: int, token: int) -> None:
    """Change one byte of the last layer at `token` (counted over the request) in `block`."""
    kernel = group.kernel_block_size_tokens
    inside = token % group.block_size_tokens
    row = block * (group.block_size_tokens // kernel) + inside // kernel
    page = views[group.layers[-1]].view(torch.uint8)[row, 0]
    if group.transposed_bytes:  # of what is there token after token
        page = page.reshape(-1)[kernel * group.transposed_bytes :].view(kernel, -1)
    content = page[inside % kernel]
    content[0] ^= 0x40
    content[0].item()  # it has happened now: on a GPU digests are taken on another stream


def swapped(blocks: Sequence[int], wanted: Sequence[int], num_blocks: int) -> list[int]:
    """The source block list with the first two wanted entries exchanged; a lone one takes its neighbour's block."""
    result = list(blocks)
    if len(wanted) >= 2:
        first, second = wanted[0], wanted[1]
        result[first], result[second] = result[second], result[first]
    else:
        result[wanted[0]] = (result[wanted[0]] + 1) % num_blocks
    return result


def overwrite(views: Mapping[str, torch.Tensor], group: GroupGeometry, block: int) -> None:
    """Reuse a freed block: other bytes in all of it."""
    ratio = group.block_size_tokens // group.kernel_block_size_tokens
    for layer in group.layers:
        views[layer][block * ratio : (block + 1) * ratio].view(torch.uint8).bitwise_xor_(0x5A)
