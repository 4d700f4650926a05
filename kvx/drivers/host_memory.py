"""How much host memory this process may still take: /proc/meminfo and the control groups above it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvx.drivers.base import MemoryInfo

_NO_LIMIT_BYTES = 1 << 60  # version 1 of control groups writes "no limit" as a huge number


def read_host_memory(root: Path = Path("/")) -> MemoryInfo:
    """The tightest of the machine's own memory and every control group above this process.

    `root` is where proc and sys are looked for (a test gives a folder of its own).
    """
    fields = _table(root / "proc/meminfo")
    free = fields.get("MemAvailable:", fields.get("MemFree:", 0)) * 1024
    total = fields.get("MemTotal:", 0) * 1024
    for limit, used in _group_limits(root):
        free = min(free, max(0, limit - used))
        total = min(total, limit)
    return MemoryInfo(free, total)


def resident_bytes(root: Path = Path("/")) -> int:
    """This process's resident memory now, in bytes."""
    return _table(root / "proc/self/status").get("VmRSS:", 0) * 1024


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group of this process, up to the root group, where it has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit_name, used_name, cache_name = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit_name, used_name, cache_name = (
                "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
            )  # fmt: skip
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            limit = _text(root / top / folder / limit_name).strip()
            used = _text(root / top / folder / used_name).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT_BYTES:
                # Clean file pages count as used but are dropped on demand, as MemAvailable assumes too.
                cache = _table(root / top / folder / "memory.stat").get(cache_name, 0)
                yield int(limit), max(0, int(used) - cache)


def _table(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a file as a dict; lines of another form are left out."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a file system that does not show this one: it sets no limit that could be read
        return ""
