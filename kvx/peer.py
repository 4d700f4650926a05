"""What is known about an engine and about a connected peer: data only, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from kvx.compare import Difference, group_differences, head_difference, require_equal
from kvx.errors import LayoutError
from kvx.geometry import GroupGeometry, HeadRange
from kvx.layout import KVCacheLayout

Int64s = npt.NDArray[np.int64]
MOST_BYTES = 1 << 62
"""Sums of two such numbers still fit in 64 bits with a sign."""
_MOST_BUCKETS = 1 << 18


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who an engine's rank is, and what must be equal for two engines to exchange KV.

    `speculation`: of a drafter that keeps KV of its own, which then is handed off with the model's; empty without one.
    """

    engine_id: str
    model: str
    dtype: str
    kv_cache_dtype: str
    speculation: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


VerifyMode = Literal["off", "sample", "all"]
_MODES = get_args(VerifyMode)
# Ranks and tensor parallel sizes may differ, where one owner holds all heads of the reader.
COMPARED_FIELDS = ("model", "dtype", "kv_cache_dtype", "speculation", "pp_rank", "pp_size")


@dataclass(frozen=True, kw_only=True)
class PeerDescriptor:
    """What an engine says of itself in the handshake. `instance` is new with every start of its process.

    `verify`: of what it holds it takes digests of nothing, of a sample, or of all; the reader may ask for less.
    `digest`: the name of the function; digests of two functions say nothing about each other.
    """

    info: EngineInfo
    instance: str
    generation: int
    layout: str
    groups: tuple[GroupGeometry, ...]
    num_blocks: int
    verify: VerifyMode
    digest: str
    connectors: Mapping[str, bytes]

    @property
    def opening(self) -> tuple[str, int]:
        """Of which process's memory, and after how many changes of its regions."""
        return self.instance, self.generation


def require_compatible(
    ours: PeerDescriptor, theirs: PeerDescriptor, needed: Sequence[HeadRange | None] | None = None
) -> list[Difference]:
    """In what two engines differ and may; ours is the one that reads. PeerMismatch names all, where one must not.

    `needed`: the heads that are read of this owner, by layer group, None where none are; by default all of ours. They
    must be among theirs: heads that it lacks would stay as they were.
    """
    found = [Difference(name, getattr(ours.info, name), getattr(theirs.info, name)) for name in COMPARED_FIELDS]
    our_groups, their_groups = ([group.name for group in side.groups] for side in (ours, theirs))
    found.append(Difference("layer groups", our_groups, their_groups))
    if our_groups == their_groups:
        pairs = list(zip(ours.groups, theirs.groups, strict=True))
        found += _differences_of_groups(pairs)
        found += _differences_of_ranks(ours, theirs, needed)
    found.append(_layouts(ours, theirs))
    takes_fewer = _MODES.index(ours.verify) > _MODES.index(theirs.verify)
    found.append(Difference("verify", ours.verify, theirs.verify, is_bridged=not takes_fewer))
    found.append(
        Difference(
            "digest",
            ours.digest,
            theirs.digest,
            "use one version of kvx, or set verify to off",
            is_bridged=ours.verify == "off",
        )
    )
    our_names, their_names = (", ".join(sorted(side.connectors)) for side in (ours, theirs))
    common = bool(set(ours.connectors) & set(theirs.connectors))
    found.append(
        Difference("connectors", our_names, their_names, "configure one connector that both have", is_bridged=common)
    )
    found = [item for item in found if item.ours != item.theirs]
    require_equal(found)
    return found


def _differences_of_groups(pairs: Sequence[tuple[GroupGeometry, GroupGeometry]]) -> list[Difference]:
    """With the names of their groups: an engine may have several, which differ alike."""
    groups: dict[Difference, list[str]] = {}
    for ours, theirs in pairs:
        for item in group_differences(ours, theirs):
            groups.setdefault(item, []).append(ours.name)
    return [
        replace(item, field=f"{item.field} of layer group{'s' if len(names) > 1 else ''} {', '.join(names)}")
        for item, names in groups.items()
    ]


def _differences_of_ranks(
    ours: PeerDescriptor, theirs: PeerDescriptor, needed: Sequence[HeadRange | None] | None
) -> list[Difference]:
    """The first heads that are missing, or that are only some of theirs, and the tensor parallel sizes behind it."""
    wanted = [group.heads for group in ours.groups] if needed is None else needed
    pairs = zip(wanted, theirs.groups, strict=True)
    heads = [
        item for our, their in pairs if our is not None and (item := head_difference(our, their.heads)) is not None
    ]
    first = min(heads, key=lambda item: item.is_bridged, default=None)
    is_bridged = first is None or first.is_bridged
    sizes = Difference("tp_size", ours.info.tp_size, theirs.info.tp_size, is_bridged=is_bridged)
    return [sizes] if first is None else [first, sizes]


def _layouts(ours: PeerDescriptor, theirs: PeerDescriptor) -> Difference:
    known = [layout.name for layout in KVCacheLayout if layout.is_block_compact]
    return Difference(
        "layout",
        ours.layout,
        theirs.layout,
        f"each page has to be one run of bytes, as in {', '.join(known)}",
        is_bridged={ours.layout, theirs.layout} <= set(known),
    )


@dataclass(frozen=True)
class RegionTable:
    """The registered byte ranges of one side, as offsets from its reservation's base, sorted and disjoint."""

    base_address: int
    starts: Int64s
    ends: Int64s

    @classmethod
    def of(cls, base_address: int, ranges: Sequence[tuple[int, int]]) -> RegionTable:
        """From (offset, nbytes) pairs; LayoutError when one is empty, negative or overlaps another."""
        if max([abs(base_address), *(abs(number) for pair in ranges for number in pair)]) >= MOST_BYTES:
            raise LayoutError(f"registered regions with addresses or sizes of {MOST_BYTES} bytes and more")
        table = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2)
        starts, ends = table[:, 0], table[:, 0] + table[:, 1]
        if base_address < 0 or (table[:, 0] < 0).any() or (table[:, 1] <= 0).any() or (starts[1:] < ends[:-1]).any():
            raise LayoutError("registered regions must be non-empty, non-negative and disjoint")
        return cls(base_address, starts, ends)

    @property
    def registered_bytes(self) -> int:
        return int((self.ends - self.starts).sum())

    def holds(self, offsets: Int64s, lengths: Int64s) -> bool:
        """Whether every byte range lies in one registered region."""
        if not len(offsets):
            return True
        ends = offsets + lengths
        if not len(self.starts) or offsets.min() < self.starts[0] or ends.max() > self.ends[-1]:
            return False
        return (
            len(self.starts) == 1 or self._is_inside_buckets(offsets, ends) or not self._outside(offsets, lengths).any()
        )

    def _is_inside_buckets(self, offsets: Int64s, ends: Int64s) -> bool:
        """For ranges between the first start and the last end: whether that is enough, seen with much less work.

        It is where regions touch one another and no range leaves its bucket, which has bytes of one region only.
        """
        if self._buckets is None or (self.starts[1:] != self.ends[:-1]).any():
            return False
        return bool(((ends - 1) ^ offsets).max() >> self._buckets[0] == 0)

    def numbers_of(self, offsets: Int64s) -> Int64s:
        """For each offset the number of the last region that starts at or before it, or of the first region."""
        if self._buckets is None:
            return np.maximum(np.searchsorted(self.starts, offsets, side="right") - 1, 0)
        shift, region = self._buckets
        return region.take(offsets >> shift, mode="clip")

    def require_inside(self, offsets: Int64s, lengths: Int64s, side: str) -> None:
        """LayoutError naming the first byte range that does not lie in one registered region."""
        if not len(self.starts):
            raise LayoutError(f"no memory of the {side} is registered for transfers")
        outside = self._outside(offsets, lengths)
        if outside.any():
            first = int(outside.argmax())
            raise LayoutError(
                f"bytes [{offsets[first]}, {offsets[first] + lengths[first]}) of the {side} reservation are not "
                "registered for transfers; only committed blocks of the present generation are"
            )

    def _outside(self, offsets: Int64s, lengths: Int64s) -> npt.NDArray[np.bool_]:
        index = self.numbers_of(offsets)
        return (offsets < self.starts[index]) | (offsets + lengths > self.ends[index])

    @cached_property
    def _buckets(self) -> tuple[int, Int64s] | None:
        """(shift, the region of `offset >> shift`), which is many times faster than to search for each of many offsets.

        Buckets are as large as the regions' starts allow, so that none has bytes of two; None where they are too many.
        """
        aligned = int(np.bitwise_or.reduce(self.starts))
        shift = (aligned & -aligned).bit_length() - 1 if aligned else 62
        first = self.starts >> shift
        if first[-1] >= _MOST_BUCKETS:
            return None
        first[0] = 0
        return shift, np.repeat(np.arange(len(first)), np.diff(first, append=first[-1] + 1))


@dataclass(eq=False)
class Peer:
    """One connector's connection to one engine. `name` is what the transfer library calls it."""

    name: str
    generation: int
    regions: RegionTable
    connected: bool = True
    library: object = field(default=None, repr=False)
