"""What the log of a server says about its end."""

from __future__ import annotations

import re

_NOISE = re.compile(
    r'^(File "|Traceback|raise |return |await |\^|~|During handling|The above exception|warnings\.warn)'
)
_PREFIX = re.compile(r"^\s*(\([^)]* pid=\d+\)\s*)?((INFO|WARNING|ERROR|DEBUG|CRITICAL)\s+\S+ \S+ \[[^\]]*\])?\s*")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*\.)?([A-Za-z_]\w*(Error|Exception|Unavailable|Mismatch|OutOfDeviceMemory)): \S"
)
_CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine core proc died")


def meaningful_lines(log: str, count: int = 3) -> list[str]:
    """The lines of an engine's log that say why it ended: the last root-cause errors, else just the last lines."""
    lines = [_PREFIX.sub("", _COLOUR.sub("", line), count=1).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line and not _NOISE.match(line)]
    causes = [line for line in lines if _EXCEPTION.match(line) and not any(c in line for c in _CONSEQUENCES)]
    chosen = list(dict.fromkeys(causes))[-1:] or lines[-count:]
    return [line[:600] for line in chosen] or ["(the log is empty)"]
