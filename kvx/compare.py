"""Whether two engines' layer groups can be copied from one to the other: every field that stands against it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvx.errors import START_ALIKE, PeerMismatch
from kvx.geometry import GroupGeometry, HeadRange

# Of the text of a mismatch, which should fit on a screen.
MOST_LINES: Final = 20
MOST_CHARACTERS: Final = 80


@dataclass(frozen=True)
class Difference:
    """A field in which two engines differ: `is_bridged` where hand-offs convert one to the other, else they must not.

    Its text is for a person, so values are shortened.
    """

    field: str
    ours: object
    theirs: object
    what_to_do: str = START_ALIKE
    is_bridged: bool = False

    def __str__(self) -> str:
        ours, theirs = (_shortened(repr(value)) for value in (self.ours, self.theirs))
        found = f"{self.field} differs: here {ours}, at the peer {theirs}"
        return f"bridged: {found}" if self.is_bridged else f"refused: {found}; {self.what_to_do}"


def group_differences(ours: GroupGeometry, theirs: GroupGeometry) -> list[Difference]:
    """In what two sides of one layer group differ, whatever heads they hold; not in strides, which follow from it."""
    packed = ours.page_format or theirs.page_format
    fields = [
        *(Difference(name, getattr(ours, name), getattr(theirs, name)) for name in ("kind", "dtype", "content_bytes")),
        Difference("heads.total", ours.heads.total, theirs.heads.total),
        *(
            Difference(name, getattr(ours, name), getattr(theirs, name))
            for name in ("sliding_window_tokens", "page_format", "transposed_bytes")
        ),
        *(
            Difference(
                name,
                getattr(ours, name),
                getattr(theirs, name),
                f"pages packed as {packed} cannot be split, so start both engines with the same value",
                is_bridged=packed is None,
            )
            for name in ("block_size_tokens", "kernel_block_size_tokens")
        ),
    ]
    found = [item for item in fields if item.ours != item.theirs]
    if set(ours.layers) != set(theirs.layers):
        found.insert(0, Difference("layers", _layers(ours, theirs), _layers(theirs, ours)))
    return found


def head_difference(ours: HeadRange, theirs: HeadRange) -> Difference | None:
    """Heads of ours that the other side does not hold are refused: nobody would bring them."""
    if ours.total != theirs.total or ours == theirs:
        return None
    return Difference("heads", str(ours), str(theirs), is_bridged=theirs.start <= ours.start and ours.end <= theirs.end)


def require_equal(differences: Sequence[Difference]) -> None:
    """One PeerMismatch that names all differences and says which of them are bridged, if there is one that is not."""
    refused = [item for item in differences if not item.is_bridged]
    if not refused:
        return
    text = _text_of(differences) if len(differences) > 1 else ""
    if len(refused) == 1:
        only = refused[0]
        raise PeerMismatch(only.field, only.ours, only.theirs, only.what_to_do, text)
    raise PeerMismatch(
        ", ".join(item.field for item in refused),
        {item.field: item.ours for item in refused},
        {item.field: item.theirs for item in refused},
        text=text,
    )


def _text_of(differences: Sequence[Difference]) -> str:
    lines = [str(item) for item in sorted(differences, key=lambda item: item.is_bridged)]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"and {len(lines) - MOST_LINES + 1} more"]
    return "\n  ".join(["the two engines cannot exchange KV:", *lines])


def _layers(side: GroupGeometry, other: GroupGeometry) -> str:
    """How many, and which the other side has not: a list of all would fill screens."""
    alone = [layer for layer in side.layers if layer not in set(other.layers)]
    if not alone:
        return f"{len(side.layers)} layers"
    more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
    return f"{len(side.layers)} layers, {alone[0]}{more} only here"


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
