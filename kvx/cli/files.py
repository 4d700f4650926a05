"""Report files of the commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvx.errors import EngineError, KVXError


def require_writable(path: Path | None) -> None:
    """Trigger of EngineError: the file cannot be written; better known before half an hour of work than after."""
    if path is None:
        return
    with _told_if_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()


@contextlib.contextmanager
def kept_writable(path: Path | None) -> Iterator[None]:
    """`require_writable`; and no empty file is left where what is done meanwhile fails."""
    is_new = path is not None and not path.exists()
    require_writable(path)
    try:
        yield
    except BaseException:
        if path is not None and is_new:
            path.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Trigger of EngineError: the file cannot be written."""
    with _told_if_unwritable(path):
        path.write_text(text, encoding="utf-8")


def write_json(path: Path | None, found: Mapping[str, Any]) -> None:
    """Writes a report, if a file is named. Trigger of EngineError: it cannot be written."""
    if path is not None:
        write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _told_if_unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}; name a file that can be") from error


def read_object(path: Path, error_type: type[KVXError], *, wanted: str, holds: str) -> dict[str, Any]:
    """The JSON object in a file.

    Trigger of `error_type`: no such file or no JSON (`wanted`: what to give), or something else in it (`holds`: what
    it needs).
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"{path}: {error.strerror}; give {wanted}") from None
    except ValueError as error:
        raise error_type(f"{path} is no JSON ({error}); give {wanted}") from None
    if not isinstance(found, dict):
        raise error_type(f"{path} holds a {type(found).__name__}; {holds}")
    return found
