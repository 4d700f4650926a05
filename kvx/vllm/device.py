"""What the seam needs to know of a worker's device: its memory calls, what may be planned, what warm-up left."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from .. import sizing
from ..cache import ExtensibleKVCache
from ..drivers.base import Driver
from ..errors import SizingError

logger = logging.getLogger("vllm.kvx")

GRANULARITY_BYTES = 2 << 20
"""Of both kinds of device: the engine core plans the capacity with it, and no device is at hand there."""
MARGIN_ENVIRONMENT = "KVX_MARGIN"
"""The margin policy: `default` or `peak`."""


Warned = TypeVar("Warned", sizing.Budget, sizing.Sizing)


@dataclass(frozen=True)
class Measurement:
    """One rank's own count and ledger, and whether an option fixed the size or limited it."""

    sizing: sizing.Sizing
    explicit_size: bool


class DeviceSide(ABC):
    """One worker's device, made before its model is loaded."""

    #: The longest that a step which computes nothing waits for a transfer: a new request waits as long at the most.
    idle_wait_s: ClassVar[float]

    @abstractmethod
    def driver(self) -> Driver:
        """The memory calls; asked for when the device has been initialised."""

    def requested_bytes(self, free_bytes: int, total_bytes: int) -> int:
        """The budget, where vLLM asks for it: on GPUs only."""
        raise NotImplementedError(f"vLLM asks {type(self).__name__} for no share of {free_bytes} of {total_bytes}")

    @abstractmethod
    def capacity_bytes(self, profile: Any) -> int:
        """Bytes to plan the capacity with. `profile` is vLLM's own `determine_available_memory`."""

    @abstractmethod
    def blocks_for_warmup(self, kv_cache_config: Any) -> int:
        """Blocks to commit first, so that warm-up touches no other."""

    @abstractmethod
    def measure(self, cache: ExtensibleKVCache, kv_cache_config: Any, fixed_blocks: int | None) -> Measurement:
        """The final count, once warm-up is over; with `fixed_blocks` (vLLM's override) it is that.

        Raises:
            SizingError: what is left cannot hold one request of `max_model_len`.
        """

    def keep_stock(self) -> None:
        """vLLM allocates as without kvx; undo what was prepared for a growing cache."""
        return

    @abstractmethod
    def register(self, views: Any) -> None:
        """Let vLLM's runner use the connector that has just been created, over these views."""


def largest_batch_blocks(worker: Any, kv_cache_config: Any) -> int:
    """Blocks that the tokens of one full batch take over all layer groups, and vLLM's null block."""
    tokens: int = worker.scheduler_config.max_num_batched_tokens
    return 1 + sum(-(-tokens // int(group.kv_cache_spec.block_size)) for group in kv_cache_config.kv_cache_groups)


def longest_request(vllm_config: Any, kv_cache_config: Any) -> sizing.Request:
    """Blocks that one request of `max_model_len` takes over all groups, and vLLM's null block."""
    blocks = 1
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        blocks += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
    return sizing.Request(blocks, vllm_config.model_config.max_model_len)


def margin_policy() -> sizing.MarginPolicy:
    """The policy that `KVX_MARGIN` names."""
    text = os.environ.get(MARGIN_ENVIRONMENT, sizing.MarginPolicy.DEFAULT.value)
    try:
        return sizing.MarginPolicy(text)
    except ValueError:
        known = ", ".join(policy.value for policy in sizing.MarginPolicy)
        raise SizingError(f"{MARGIN_ENVIRONMENT} is {text!r}; it needs one of {known}") from None


def said(found: Warned) -> Warned:
    """The same, its warnings logged."""
    for warning in found.warnings:
        logger.warning("kvx: %s", warning)
    return found
