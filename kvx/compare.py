"""Whether two engines' layer groups can be copied from one to the other: every field that stands against it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvx.errors import PeerMismatch
from kvx.geometry import GroupGeometry, HeadRange


@dataclass(frozen=True)
class Difference:
    """A field in which two engines differ and must not."""

    field: str
    ours: object
    theirs: object
    what_to_do: str = "start both engines alike"


def group_differences(ours: GroupGeometry, theirs: GroupGeometry) -> list[Difference]:
    """In what two sides of one layer group may not differ, whatever heads they hold."""
    pairs = [
        Difference("kind", ours.kind, theirs.kind),
        Difference("layers", sorted(ours.layers), sorted(theirs.layers)),
        Difference("dtype", ours.dtype, theirs.dtype),
        Difference("content_bytes", ours.content_bytes, theirs.content_bytes),
        Difference("heads.total", ours.heads.total, theirs.heads.total),
        Difference("sliding_window_tokens", ours.sliding_window_tokens, theirs.sliding_window_tokens),
        Difference("page_format", ours.page_format, theirs.page_format),
    ]
    if ours.page_format is not None and ours.page_format == theirs.page_format:
        pairs += [
            Difference(
                name, getattr(ours, name), getattr(theirs, name), f"pages packed as {ours.page_format} cannot be split"
            )
            for name in ("block_size_tokens", "kernel_block_size_tokens")
        ]
    return [pair for pair in pairs if pair.ours != pair.theirs]


def head_difference(ours: HeadRange, theirs: HeadRange) -> Difference | None:
    """Heads of ours that the other side does not hold: nobody would bring them."""
    if ours.total != theirs.total or (theirs.start <= ours.start and ours.end <= theirs.end):
        return None
    return Difference("heads", _text(ours), _text(theirs))


def require_equal(differences: Sequence[Difference]) -> None:
    """One PeerMismatch that names all differences, if there is any."""
    if len(differences) == 1:
        only = differences[0]
        raise PeerMismatch(only.field, only.ours, only.theirs, only.what_to_do)
    if differences:
        raise PeerMismatch(
            ", ".join(item.field for item in differences),
            {item.field: item.ours for item in differences},
            {item.field: item.theirs for item in differences},
        )


def _text(heads: HeadRange) -> str:
    return f"heads {heads.start} to {heads.end - 1} of {heads.total}"
