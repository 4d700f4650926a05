"""Digests on an NVIDIA GPU: one launch of kvx's own kernel for all layer groups of a call (digest_kernel.cu).

The kernel reads the content where it lies, through the addresses of its layers and the offsets of its tokens. Its
digests, and nothing else, come to the host in one copy: written there by the kernel, each would cross the bus alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from kvx.drivers.cuda_kernel import CudaKernel, Table
from kvx.drivers.digester import DIGEST_BYTES, Bytes, Content, Digester, keys_of
from kvx.errors import DriverUnavailable

THREADS = 128
WARPS = THREADS // 32
# Tokens of one head that one warp digests: TOKENS in digest_kernel.cu.
WARP_TOKENS = 4


class _Field(IntEnum):
    """Of `Group` in digest_kernel.cu: 8 bytes each."""

    LAYERS = 0
    TOKENS = 1
    KEYS = 2
    OUTPUT = 3
    NUM_LAYERS = 4
    NUM_TOKENS = 5
    NUM_HEADS = 6
    HEAD_STRIDE = 7
    CONTENT_BYTES = 8
    IS_ALIGNED = 9
    FIRST_WARP = 10


class CudaDigester(Digester):
    """One stream of one GPU. `DriverUnavailable` without cuda-bindings, an NVIDIA driver or that GPU."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self._kernel = CudaKernel(index, "digest_kernel.ptx", "kvx_digest", mirrors=True, waits_asleep=True)
        self._lock = threading.Lock()
        self._keys: dict[int, int] = {}  # by number of words: where they are on the device

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def take(self, contents: Sequence[Content], *, after: object = None) -> list[Bytes]:
        if any(content.transposed is not None for content in contents):
            raise DriverUnavailable("transposed pages", "kvx takes no digests of them on a GPU", "set verify to off")
        wanted = [content for content in contents if len(content.token_offsets)]
        taken = iter(self._take(wanted, after) if wanted else [])
        return [
            next(taken) if len(content.token_offsets) else np.empty((content.num_heads, 0, DIGEST_BYTES), np.uint8)
            for content in contents
        ]

    def _take(self, contents: Sequence[Content], after: object) -> list[Bytes]:
        keys = [self._keys_on_device(content.num_words) for content in contents]
        sizes = [content.num_heads * len(content.token_offsets) * DIGEST_BYTES // 8 for content in contents]
        head = _head_words(contents)
        table = self._kernel.take_table((head + sum(sizes)) * 8)
        num_warps = fill(table, contents, keys, [head + sum(sizes[:index]) for index in range(len(sizes))])
        self._kernel.launch(
            table,
            -(-num_warps // WARPS),
            THREADS,
            ((table.mirror, len(contents)), (ctypes.c_void_p, ctypes.c_uint32)),
            after_event=getattr(after, "cuda_event", None),
            mirrored_bytes=head * 8,
            returned_bytes=sum(sizes) * 8,
        )
        self._kernel.wait(table)
        values = table.words[head : head + sum(sizes)].view(np.uint8).copy()
        self._kernel.give_back(table)
        parts = np.split(values, np.cumsum(sizes)[:-1] * 8)
        return [
            part.reshape(content.num_heads, -1, DIGEST_BYTES) for part, content in zip(parts, contents, strict=True)
        ]

    def _keys_on_device(self, num_words: int) -> int:
        """Made once for each shape of content, and kept."""
        with self._lock:
            if num_words not in self._keys:
                self._keys[num_words] = self._kernel.upload(keys_of(num_words))
            return self._keys[num_words]


def _head_words(contents: Sequence[Content]) -> int:
    """Before the digests, which begin at a multiple of 16 bytes: rows of `_Field`, then addresses and offsets."""
    words = sum(len(_Field) + len(content.layer_addresses) + len(content.token_offsets) for content in contents)
    return words + words % 2


def fill(table: Table, contents: Sequence[Content], keys: Sequence[int], outputs: Sequence[int]) -> int:
    """Write what the kernel reads; the number of warps that it needs. `outputs`: words into the table."""
    at, num_warps = len(contents) * len(_Field), 0
    rows = table.words[:at].reshape(-1, len(_Field))
    for row, content, key, output in zip(rows, contents, keys, outputs, strict=True):
        num_layers, num_tokens = len(content.layer_addresses), len(content.token_offsets)
        tokens_at, end = at + num_layers, at + num_layers + num_tokens
        table.words[at:tokens_at] = content.layer_addresses
        table.words[tokens_at:end] = content.token_offsets
        row[_Field.LAYERS], row[_Field.TOKENS] = table.mirror + at * 8, table.mirror + tokens_at * 8
        row[_Field.KEYS], row[_Field.OUTPUT] = key, table.mirror + output * 8
        row[_Field.NUM_LAYERS], row[_Field.NUM_TOKENS] = num_layers, num_tokens
        row[_Field.NUM_HEADS], row[_Field.HEAD_STRIDE] = content.num_heads, content.head_stride_bytes
        row[_Field.CONTENT_BYTES], row[_Field.IS_ALIGNED] = content.content_bytes, is_aligned(content)
        row[_Field.FIRST_WARP] = num_warps
        num_warps += content.num_heads * -(-num_tokens // WARP_TOKENS)
        at = end
    return num_warps


def is_aligned(content: Content) -> bool:
    """Whether all of it can be read 16 bytes at a time."""
    stride = content.head_stride_bytes if content.num_heads > 1 else 0
    bits = int(np.bitwise_or.reduce(content.layer_addresses)) | int(np.bitwise_or.reduce(content.token_offsets))
    return (bits | stride | content.content_bytes) % 16 == 0
