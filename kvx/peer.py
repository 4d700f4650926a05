"""What is known about an engine and about a connected peer: data only, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvx.errors import LayoutError, PeerMismatch
from kvx.geometry import GroupGeometry

Int64s = npt.NDArray[np.int64]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who an engine's rank is, and what must be equal for two engines to exchange KV."""

    engine_id: str
    model: str
    dtype: str
    kv_cache_dtype: str
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


# Ranks and tensor parallel sizes may differ: the plan copies the heads that both hold.
COMPARED_FIELDS = ("model", "dtype", "kv_cache_dtype", "pp_rank", "pp_size")


@dataclass(frozen=True, kw_only=True)
class PeerDescriptor:
    """What an engine says of itself in the handshake. `instance` is new with every start of its process."""

    info: EngineInfo
    instance: str
    generation: int
    layout: str
    groups: tuple[GroupGeometry, ...]
    num_blocks: int
    digests: bool
    connectors: Mapping[str, bytes]


def require_compatible(ours: PeerDescriptor, theirs: PeerDescriptor) -> None:
    """PeerMismatch naming every field in which the two engines differ and must not."""
    differing = [name for name in COMPARED_FIELDS if getattr(ours.info, name) != getattr(theirs.info, name)]
    here = {name: getattr(ours.info, name) for name in differing}
    there = {name: getattr(theirs.info, name) for name in differing}
    our_groups, their_groups = ([group.name for group in side.groups] for side in (ours, theirs))
    if our_groups != their_groups:
        differing.append("layer groups")
        here["layer groups"], there["layer groups"] = our_groups, their_groups
    if ours.digests and not theirs.digests:
        differing.append("verify")
        here["verify"], there["verify"] = "all", "off"
    if len(differing) == 1:
        raise PeerMismatch(differing[0], here[differing[0]], there[differing[0]])
    if differing:
        raise PeerMismatch(", ".join(differing), here, there)


@dataclass(frozen=True)
class RegionTable:
    """The registered byte ranges of one side, as offsets from its reservation's base, sorted and disjoint."""

    base_address: int
    starts: Int64s
    ends: Int64s

    @classmethod
    def of(cls, base_address: int, ranges: Sequence[tuple[int, int]]) -> RegionTable:
        """From (offset, nbytes) pairs; LayoutError when one is empty, negative or overlaps another."""
        table = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2)
        starts, ends = table[:, 0], table[:, 0] + table[:, 1]
        if base_address < 0 or (table[:, 0] < 0).any() or (table[:, 1] <= 0).any() or (starts[1:] < ends[:-1]).any():
            raise LayoutError("registered regions must be non-empty, non-negative and disjoint")
        return cls(base_address, starts, ends)

    @property
    def registered_bytes(self) -> int:
        return int((self.ends - self.starts).sum())

    def require_inside(self, offsets: Int64s, lengths: Int64s, side: str) -> None:
        """LayoutError naming the first byte range that does not lie in one registered region."""
        if not len(self.starts):
            raise LayoutError(f"no memory of the {side} is registered for transfers")
        index = np.searchsorted(self.starts, offsets, side="right") - 1
        outside = (index < 0) | (offsets + lengths > self.ends[index])
        if outside.any():
            first = int(outside.argmax())
            raise LayoutError(
                f"bytes [{offsets[first]}, {offsets[first] + lengths[first]}) of the {side} reservation are not "
                "registered for transfers; only committed blocks of the present generation are"
            )


@dataclass(eq=False)
class Peer:
    """One connector's connection to one engine. `name` is what the transfer library calls it."""

    name: str
    generation: int
    regions: RegionTable
    connected: bool = True
    library: object = field(default=None, repr=False)
