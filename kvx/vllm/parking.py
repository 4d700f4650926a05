"""Lets a waiting process of a CPU engine sleep at once, where vLLM would first spin for a second.

An engine's core and its workers wait for each other by reading shared memory in a loop; a process that has waited for
a second sleeps until it is notified. On a CPU engine those loops take the cores that attention and transfers compute
on: on 2 cores, a hand-off's copy ran at half its speed. A wake-up costs some 0.1 ms, a step there tens of milliseconds.
"""

from __future__ import annotations

import time
from typing import Any

# vLLM's notifications are dropped while an older one is unread, so of messages that follow each other closely many come
# without; those are found by looking again. It is as much delay at the most, and 2 % of a core for the first second.
RECHECK_MS = 1

_on = False


def use(device_type: str) -> None:
    """From now on, processes like this one sleep when they wait, if their engine computes on the CPU."""
    global _on
    _on = device_type == "cpu"


def wait(original: Any, condition: Any, timeout_ms: int | None = None) -> None:
    """Around `SpinCondition.wait`: sleeps where vLLM would spin."""
    if not _on or time.monotonic() > condition.last_read + condition.busy_loop_s:
        original(condition, timeout_ms)
        return
    spinning_s, condition.busy_loop_s = condition.busy_loop_s, -1.0
    try:
        original(condition, RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS))
    finally:
        condition.busy_loop_s = spinning_s
