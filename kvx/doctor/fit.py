"""Whether two engines can exchange KV: by their handshakes, or by one and what the other will be started with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvx.digest import DIGEST_NAME
from kvx.doctor.findings import Finding, error, ok, warning
from kvx.errors import START_ALIKE, LayoutError, PeerMismatch
from kvx.geometry import GroupGeometry, HeadRange
from kvx.peer import PeerDescriptor, VerifyMode, require_compatible
from kvx.ranks import shares

_WHY = "the first hand-off ends with this, and so does every other; prompts are computed again"


@dataclass(frozen=True)
class Wanted:
    """What the engine of this side will be; None where the peer's own value is meant."""

    model: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size_tokens: int | None = None
    layout: str | None = None
    tp_size: int | None = None

    @property
    def is_given(self) -> bool:
        return self != Wanted()

    def beside(self, theirs: PeerDescriptor) -> PeerDescriptor:
        """Our engine's first rank: the peer's descriptor but for what is given. LayoutError: no such engine can be."""
        tp_size = self.tp_size or theirs.info.tp_size
        info = msgspec.structs.replace(
            theirs.info,
            model=self.model or theirs.info.model,
            dtype=self.dtype or theirs.info.dtype,
            kv_cache_dtype=self.kv_cache_dtype or theirs.info.kv_cache_dtype,
            tp_size=tp_size,
        )
        groups = tuple(self._group(group, theirs.info.tp_size, tp_size) for group in theirs.groups)
        return replace(theirs, info=info, groups=groups, layout=self.layout or theirs.layout)

    def _group(self, group: GroupGeometry, their_tp: int, our_tp: int) -> GroupGeometry:
        """With our block size, and our rank's heads; strides as they would be for pages in one run."""
        tokens = self.block_size_tokens or group.block_size_tokens
        heads = group.heads
        if our_tp != their_tp:
            if heads.total % our_tp and our_tp % heads.total:
                raise LayoutError(f"{heads.total} KV heads do not divide over {our_tp} ranks")
            heads = HeadRange(0, max(1, heads.total // our_tp), heads.total)
        if (tokens, heads) == (group.block_size_tokens, group.heads):
            return group
        kernel = group.kernel_block_size_tokens if tokens % group.kernel_block_size_tokens == 0 else tokens
        head_bytes = kernel * group.content_bytes
        return replace(
            group,
            block_size_tokens=tokens,
            kernel_block_size_tokens=kernel,
            heads=heads,
            block_stride_bytes=tokens // kernel * heads.count * head_bytes,
            kernel_block_stride_bytes=heads.count * head_bytes,
            head_stride_bytes=head_bytes,
            token_stride_bytes=group.content_bytes,
        )


def check_wanted(
    name: str, theirs: PeerDescriptor, wanted: Wanted, connectors: Sequence[str], verify: VerifyMode
) -> Finding:
    """A peer, and the engine that will be started here with these connectors."""
    check = f"compatibility with {name}"
    try:
        ours = replace(
            wanted.beside(theirs), connectors=dict.fromkeys(connectors, b""), verify=verify, digest=DIGEST_NAME
        )
    except LayoutError as problem:
        return error(check, str(problem), _WHY, "choose a tensor parallel size that divides the heads")
    found = _judge(check, "here", ours, name, theirs)
    if found.is_trouble or wanted.is_given:
        return found
    return ok(check, "connectors and verify agree; for more, give this engine's --model, --block-size, --layout, --tp")


def check_pair(first: tuple[str, PeerDescriptor], second: tuple[str, PeerDescriptor]) -> Finding:
    """Two running engines, of which either may read. Fewer heads at one of them stand against one direction only."""
    check = f"compatibility of {first[0]} and {second[0]}"
    differ = first[1].verify != second[1].verify
    sides = [(name, replace(side, verify="off") if differ else side) for name, side in (first, second)]
    found = [_judge(check, *reader, *owner) for reader, owner in (sides, reversed(sides))]
    good = [finding for finding in found if not finding.is_trouble]
    if good and differ:
        return warning(
            check,
            f"verify: {first[1].verify} at {first[0]}, {second[1].verify} at {second[0]}",
            "an engine that asks for more digests than the other one takes refuses to read from it",
            "start both engines with the same verify",
        )
    return good[0] if good else found[0]


def _judge(check: str, our_name: str, ours: PeerDescriptor, their_name: str, theirs: PeerDescriptor) -> Finding:
    """Whether ours can read from theirs."""
    try:
        require_compatible(ours, theirs, _heads_read(ours, theirs))
    except PeerMismatch as problem:
        is_one, plain = "," not in problem.field, problem.what_to_do == START_ALIKE
        return error(
            check,
            f"{problem.field}: {_short(problem.ours)} at {our_name}, {_short(problem.theirs)} at {their_name}",
            _WHY,
            "start both engines with the same value" if is_one and plain else problem.what_to_do,
        )
    packed = any(group.page_format is not None for group in theirs.groups)
    if packed and ours.layout != theirs.layout:
        return error(
            check,
            f"layout: {ours.layout} at {our_name}, {theirs.layout} at {their_name}, with packed pages",
            _WHY,
            "start both engines with VLLM_KV_CACHE_LAYOUT=LBHNC, or without it",
        )
    return ok(check, f"{our_name} can read {their_name}{_converts(ours, theirs)}")


def _heads_read(ours: PeerDescriptor, theirs: PeerDescriptor) -> Sequence[HeadRange | None] | None:
    """By layer group, what our rank reads of theirs, which is one of several; None: all that ours has."""
    totals = [group.heads.total for group in ours.groups]
    if ours.info.tp_size == theirs.info.tp_size or totals != [group.heads.total for group in theirs.groups]:
        return None
    try:
        found = shares(totals, ours.info.tp_rank, ours.info.tp_size, theirs.info.tp_size)
    except LayoutError:
        return None  # the comparison names heads that are missing
    return next((share.heads for share in found if share.owner_rank == theirs.info.tp_rank), [None] * len(totals))


def _converts(ours: PeerDescriptor, theirs: PeerDescriptor) -> str:
    """What differs and may."""
    sizes = [tuple(group.block_size_tokens for group in side.groups) for side in (ours, theirs)]
    found = [
        f"{what} {a} and {b}"
        for what, a, b in (
            ("layouts", ours.layout, theirs.layout),
            ("block sizes", *(", ".join(map(str, size)) for size in sizes)),
            ("tensor parallel sizes", ours.info.tp_size, theirs.info.tp_size),
        )
        if a != b
    ]
    return f"; {' and '.join(found)} differ, which only costs smaller copies" if found else ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
