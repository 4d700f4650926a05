"""Report files of the commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvx.errors import EngineError, KVXError


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


def read_object(path: Path, error_type: type[KVXError], *, wanted: str, holds: str) -> dict[str, Any]:
    """The JSON object in a file.

    Trigger of `error_type`: no such file (`wanted`: what to give), no JSON, or something else in it (`holds`: what it
    needs).
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"{path}: {error.strerror}; give {wanted}") from None
    except ValueError as error:
        raise error_type(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise error_type(f"{path} holds a {type(found).__name__}; {holds}")
    return found
