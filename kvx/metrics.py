"""What the hand-off counts: read by `status`, on the side channel and by tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

KEPT_DURATIONS = 1000
KEPT_MISMATCHES = 100


def is_logged(count: int) -> bool:
    """Of things that others can bring about, only the 1st, 2nd, 4th, 8th … are worth a line of the log."""
    return count & (count - 1) == 0


@dataclass
class DigestMetrics:
    """Digests of what has moved: how many were to be compared, were compared, and differed, and the first of those."""

    digests_expected: int = 0
    digests_checked: int = 0
    digests_mismatched: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def mismatch(self, request_id: str, layer_group: str, position: int) -> None:
        """One request whose digests differ, first at this token position."""
        if len(self.mismatches) < KEPT_MISMATCHES:
            self.mismatches.append({"request": request_id, "layer_group": layer_group, "position": position})

    def digests_as_status(self) -> dict[str, Any]:
        """Plain values for msgpack and JSON."""
        return {
            "expected": self.digests_expected,
            "checked": self.digests_checked,
            "mismatched": self.digests_mismatched,
            "mismatches": list(self.mismatches),
        }


@dataclass
class HandoffMetrics(DigestMetrics):
    """Counters since the start. `released_only`: pulls of no tokens, which only tell the owner to free its blocks.
    `failures`: `failed` by cause.

    Written by the hand-off thread alone; reading them from another one is harmless.
    """

    released: int = 0
    expired: int = 0
    renewed: int = 0
    received: int = 0
    released_only: int = 0
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    transfers: int = 0
    bytes: int = 0
    blocks: int = 0
    descriptors: int = 0
    by_connector: dict[str, int] = field(default_factory=dict)
    messages_refused: int = 0
    refused_by_cause: dict[str, int] = field(default_factory=dict)
    internal_errors: int = 0
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_DURATIONS))
    spans_s: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=KEPT_DURATIONS))

    def failure(self, cause: str) -> None:
        """One pull that failed, for a cause that an error of kvx names."""
        self.failed += 1
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def refuse(self, cause: str) -> int:
        """One message of the side channel, in or out, that was not taken: how many of this cause there are now."""
        self.messages_refused += 1
        self.refused_by_cause[cause] = self.refused_by_cause.get(cause, 0) + 1
        return self.refused_by_cause[cause]

    def as_status(self, holds: int) -> dict[str, Any]:
        """Plain values for msgpack and JSON. `holds`: how many are kept now."""
        return {
            "handoff": {"holds": holds, "released": self.released, "expired": self.expired, "renewed": self.renewed},
            "transfer": {
                "bytes": self.bytes,
                "blocks": self.blocks,
                "count": self.transfers,
                "received": self.received,
                "failed": self.failed,
                "failures": dict(self.failures),
                "released_only": self.released_only,
                "descriptors": self.descriptors,
                "by_connector": dict(self.by_connector),
            },
            "digests": self.digests_as_status(),
            "side_channel": {"refused": self.messages_refused, "internal_errors": self.internal_errors},
            "messages_refused": dict(self.refused_by_cause),
            "handoff_s": list(self.durations_s),
            "spans_s": list(self.spans_s),
        }
