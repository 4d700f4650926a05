"""What the scripts say as it comes: a run that is cut short has said what it found."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
