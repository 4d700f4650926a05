"""What a diagnosis says: one finding for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """`SKIPPED`: it does not concern this machine or these settings, or could not be looked at; no trouble."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    ERROR = "error"


EXIT_STATUS = {Level.OK: 0, Level.SKIPPED: 0, Level.WARNING: 1, Level.ERROR: 2}


@dataclass(frozen=True)
class Finding:
    """`check` names what was looked at, `found` says what is there. Trouble also has why it matters and the fix."""

    check: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.is_trouble == bool(self.why and self.fix), "trouble, and nothing else, comes with why and a fix"

    @property
    def is_trouble(self) -> bool:
        return self.level in (Level.WARNING, Level.ERROR)


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def skipped(check: str, found: str) -> Finding:
    return Finding(check, Level.SKIPPED, found)


def warning(check: str, found: str, why: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, found, why, fix)


def error(check: str, found: str, why: str, fix: str) -> Finding:
    return Finding(check, Level.ERROR, found, why, fix)


def exit_status(findings: Iterable[Finding]) -> int:
    """0: no trouble. 1: warnings. 2: at least one error."""
    return max((EXIT_STATUS[finding.level] for finding in findings), default=0)
