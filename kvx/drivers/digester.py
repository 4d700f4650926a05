"""Digests of content where it lies: `digester_for(device)`. On the host by numpy, on CUDA by `cuda_digester`'s kernel.

A digest is of one piece of bytes for each layer. A piece is read as little-endian words of 8 bytes, with zeros up to a
multiple of 16 bytes. With w[1], w[2] ... the words of all layers in their order, the digest is two sums modulo 2**64:

    k[0][0] + sum of k[i][0] * w[i]        k[0][1] + sum of k[i][1] * (w[i] with its bytes in reverse order)

The keys k are the outputs of SplitMix64 from the state 0, in the order k[0][0], k[0][1], k[1][0] ... A sum does not
mind in which order its parts are added, so any number of threads may work on one. What it proves, and what not: ADR 18.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvx.errors import DriverUnavailable

DIGEST_BYTES: Final = 16
DIGEST_NAME: Final = "sums-2x64.1"
"""Of this function, in the handshake: another function needs another name."""
# So much is gathered at once on the host: what stays in a core's own cache is read once from memory and no more.
CHUNK_BYTES: Final = 256 << 10
_WORD_BYTES: Final = 8

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Transposed:
    """What comes first of each piece: elements that lie apart, the first of token t at token_offsets[t]."""

    token_offsets: Int64s
    num_elements: int
    element_bytes: int
    element_stride_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class Content:
    """Digest (h, t) is of `content_bytes` at layer_addresses[l] + token_offsets[t] + h * head_stride_bytes, all l.

    Where something is `transposed`, it comes before them, from the same layer and head.
    """

    layer_addresses: Int64s
    token_offsets: Int64s
    num_heads: int
    head_stride_bytes: int
    content_bytes: int
    transposed: Transposed | None = None

    @property
    def piece_bytes(self) -> int:
        """Of one head, token and layer."""
        return self.content_bytes + (0 if self.transposed is None else self.transposed.num_bytes)

    @property
    def words_per_piece(self) -> int:
        return -(-self.piece_bytes // 16) * 2

    @property
    def num_words(self) -> int:
        """Of one digest."""
        return len(self.layer_addresses) * self.words_per_piece


class Digester(ABC):
    """One device's digests. Any thread may call."""

    def mark(self) -> object:
        """What this thread's stream has queued by now, as `after` of a later `take` on any thread."""
        return None

    @abstractmethod
    def take(self, contents: Sequence[Content], *, after: object = None) -> list[Bytes]:
        """[H, n, 16] for each of `contents`; returns when they are there.

        Addresses are not checked: whoever calls knows that all of it is committed, and that nobody writes there.
        `after`: a `mark`; reading begins when what it stands for has run. `DriverError` when the device has failed.
        `DriverUnavailable`: something is transposed, and this digester cannot read that.
        """


@lru_cache(maxsize=16)
def digester_for(device: str) -> Digester:
    """The digester of a device as torch names it: "cpu", "cuda", "cuda:1". It lives as long as the process.

    `DriverUnavailable` when there is none.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return HostDigester()
    if kind != "cuda":
        raise DriverUnavailable(f"device {device!r}", "kvx takes no digests there", "set verify to off")
    from kvx.drivers.cuda_digester import CudaDigester

    return CudaDigester(int(index or 0))


@lru_cache(maxsize=16)
def keys_of(num_words: int) -> Words:
    """[1 + num_words, 2]; read-only, since many share it."""
    numbers = np.arange(1, 2 * num_words + 3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    numbers.flags.writeable = False
    return numbers.reshape(-1, 2)


class HostDigester(Digester):
    """numpy, inside the call."""

    def take(self, contents: Sequence[Content], *, after: object = None) -> list[Bytes]:
        del after  # a host has no streams
        return [_digests_of(content) for content in contents]


def _digests_of(content: Content) -> Bytes:
    heads, words = content.num_heads, content.words_per_piece
    keys = keys_of(content.num_words)
    straight, turned = (np.ascontiguousarray(keys[1:, column]).reshape(-1, words) for column in (0, 1))
    sums = np.empty((heads, len(content.token_offsets), 2), np.uint64)
    sums[:] = keys[0]
    step = max(1, CHUNK_BYTES // (heads * words * _WORD_BYTES))
    for start in range(0, len(content.token_offsets), step):
        chosen = slice(start, start + step)
        part = sums[:, chosen]
        for layer, address in enumerate(content.layer_addresses.tolist()):
            found = _words_at(address, chosen, content)
            part[..., 0] += np.einsum("rw,w->r", found, straight[layer]).reshape(-1, heads).T
            part[..., 1] += np.einsum("rw,w->r", found.byteswap(inplace=True), turned[layer]).reshape(-1, heads).T
    return sums.view(np.uint8)


def _words_at(address: int, chosen: slice, content: Content) -> Words:
    """[n * H, words]: a copy of one layer's pieces."""
    heads, size, offsets = content.num_heads, content.content_bytes, content.token_offsets[chosen]
    shape = (int(offsets.max()) + 1, heads, size)
    found: Bytes = np.asarray(_Memory(address, "|u1", shape, (1, content.head_stride_bytes, 1)))[offsets]
    if content.piece_bytes != content.words_per_piece * _WORD_BYTES or content.transposed is not None:
        padded = np.zeros((len(offsets), heads, content.words_per_piece * _WORD_BYTES), np.uint8)
        padded[..., content.piece_bytes - size : content.piece_bytes] = found
        if content.transposed is not None:
            padded[..., : content.piece_bytes - size] = _gathered(address, chosen, content, content.transposed)
        found = padded
    return found.reshape(len(offsets) * heads, -1).view("<u8")


def _gathered(address: int, chosen: slice, content: Content, transposed: Transposed) -> Bytes:
    """[n, H, bytes]: one layer's elements that lie apart. They are aligned, so each is read as one number."""
    size, offsets = transposed.element_bytes, transposed.token_offsets[chosen] // transposed.element_bytes
    shape = (int(offsets.max()) + 1, content.num_heads, transposed.num_elements)
    strides = (size, content.head_stride_bytes, transposed.element_stride_bytes)
    found = np.asarray(_Memory(address, f"<u{size}", shape, strides))[offsets]
    return found.view(np.uint8).reshape(*found.shape[:2], -1)


class _Memory:
    """Memory of this process, as numpy takes it."""

    def __init__(self, address: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3, "typestr": kind, "data": (address, True), "shape": shape, "strides": strides,
        }  # fmt: skip
