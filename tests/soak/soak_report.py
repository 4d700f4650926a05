"""What a soak run has shown: how its processes looked between laps, whether they grew, and the row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_GROWTH = 0.05
"""Of resident memory, from the first look to any in the last tenth."""
SLACK = {"file descriptors": 4, "threads": 0, "shared memory mappings": 0, "mappings": 8}
"""Fewer than one at each kill of the long run."""
LOOSE_OBJECTS, OBJECTS_PER_HAND_OFF = 500, 0.05
"""How many objects a process may have gained in the second half of a run: Python itself still finds some to keep."""


@dataclass(frozen=True)
class Look:
    """What processes hold after so many hand-offs, when all is at rest: by engine, what `SoakEngine.look` says."""

    hand_offs: int
    engines: Mapping[str, Mapping[str, int]]


def growths(looks: Sequence[Look]) -> list[str]:
    """What has grown that must not, in words; nothing when all is well."""
    last = looks[-1].hand_offs
    return [
        f"{engine}: {problem}"
        for engine in looks[0].engines
        for problem in _growths_of(
            [(look.hand_offs, look.engines[engine]) for look in looks],
            [look.engines[engine] for look in looks if look.hand_offs > 0.9 * last],
        )
    ]


def _growths_of(looks: Sequence[tuple[int, Mapping[str, int]]], ends: Sequence[Mapping[str, int]]) -> list[str]:
    (_, first), (hand_offs, last), (middle_at, middle) = looks[0], looks[-1], looks[(len(looks) - 1) // 2]
    found = []
    resident = max(look["resident"] for look in ends)
    if resident > first["resident"] * (1 + MOST_GROWTH):
        found.append(f"resident memory grew from {first['resident']} to {resident} bytes")
    gained = last["objects"] - middle["objects"]
    if gained > LOOSE_OBJECTS + OBJECTS_PER_HAND_OFF * (hand_offs - middle_at):
        found.append(f"{gained} objects more in the last {hand_offs - middle_at} hand-offs")
    found += [
        f"{last[what] - first[what]} {what} more" for what, slack in SLACK.items() if last[what] > first[what] + slack
    ]
    return found


def memory_of(looks: Sequence[Look]) -> dict[str, Any]:
    """The first look and the last, engine by engine."""
    return {
        engine: {f"after {look.hand_offs}": dict(look.engines[engine]) for look in (looks[0], looks[-1])}
        for engine in looks[0].engines
    } if looks else {}  # fmt: skip


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as text."""
    failed = [f"{count} {cause} ({why})" for why, causes in row["failures"].items() for cause, count in causes.items()]
    memory = row["memory"].get("decode", {})
    resident = " -> ".join(f"{look['resident'] / 2**20:.1f}" for look in memory.values())
    return [
        f"{row['connector']}: {row['hand_offs']} hand-offs in {row['duration_s']:.0f} s, {row['kills']} kills",
        f"  received {row['received']}, aborts {sum(row['aborts'].values())}, released unread {row['released_unread']}",
        f"  failed: {', '.join(failed) or 'none'}",
        f"  digests compared {row['digests']['compared']}, differing {row['digests']['differing']}; "
        f"answers wrong {row['answers_wrong']}",
        f"  decode's resident memory {resident} MiB",
        *[f"  PROBLEM: {problem}" for problem in row["problems"]],
    ]
