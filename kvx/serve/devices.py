"""Which GPUs the engines of a deployment compute on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvx.errors import EngineError


def deal_out(devices: Sequence[int], worlds: Sequence[int]) -> list[tuple[int, ...]]:
    """GPUs for engines of so many ranks each: in order, and from the start again when there are no more.

    Trigger of EngineError: an engine needs more than all.
    """
    most = max(worlds)
    if most > len(devices):
        raise EngineError(f"an engine of {most} ranks needs as many GPUs, and there are {len(devices)}; see --gpus")
    dealt, at = [], 0
    for world in worlds:
        if at + world > len(devices):
            at = 0
        dealt.append(tuple(devices[at : at + world]))
        at += world
    return dealt


def visible_devices() -> list[int]:
    """All GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        numbers = [word.strip() for word in named.split(",") if word.strip()]
        if not all(number.isdigit() for number in numbers):
            raise EngineError(f"CUDA_VISIBLE_DEVICES is {named!r}; give the GPUs by number with --gpus")
        return [int(number) for number in numbers]
    import torch  # seconds to import, and needed here only

    return list(range(torch.cuda.device_count()))
