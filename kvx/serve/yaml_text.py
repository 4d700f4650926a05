"""Values as YAML text. Core kvx has no YAML library, and what is written here is a small part of the language."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

# Words that every reader takes for text; all others are quoted as in JSON, of which YAML 1.2 is a superset.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def documents(values: Sequence[dict[str, Any]]) -> str:
    """One YAML document for each value."""
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(value)) for value in values)


def _lines(value: Any) -> Iterator[str]:
    """A mapping or a sequence in block style; whatever has no parts in the one line that it needs."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _item(f"{_scalar(name)}:", part, deeper=isinstance(part, dict))
    elif isinstance(value, list) and value:
        for part in value:
            first, *rest = _lines(part)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _item(name: str, part: Any, *, deeper: bool) -> Iterator[str]:
    if not (isinstance(part, dict | list) and part):
        yield f"{name} {_scalar(part)}"
        return
    yield name
    yield from (f"{'  ' if deeper else ''}{line}" for line in _lines(part))


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)
