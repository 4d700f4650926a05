"""Where the commands write: styled on a terminal, plain elsewhere, and plain on a terminal too where NO_COLOR asks."""

from __future__ import annotations

import os

from rich.console import Console
from typer import rich_utils


def output() -> Console:
    """Standard output: results."""
    return _console(stderr=False)


def alarms() -> Console:
    """Standard error: progress, and what went wrong."""
    return _console(stderr=True)


def make_help_plain() -> None:
    """Where it is asked for, in what typer writes by itself: help, and errors of usage."""
    if _is_plain():
        rich_utils.COLOR_SYSTEM = None


def _console(*, stderr: bool) -> Console:
    return Console(stderr=stderr, color_system=None if _is_plain() else "auto")


def _is_plain() -> bool:
    """As https://no-color.org has it: set, and not empty. Then nothing is bold or dim either."""
    return bool(os.environ.get("NO_COLOR"))
