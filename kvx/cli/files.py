"""Report files of the commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvx.errors import EngineError


def require_writable(path: Path | None) -> None:
    """Trigger of EngineError: the file cannot be written; better known before half an hour of work than after."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path | None, found: Mapping[str, Any]) -> None:
    """Writes a report, if a file is named."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
