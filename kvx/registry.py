"""Connectors by name, from the entry points `kvx.connectors`; a connector is imported when it is first asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points

from kvx.connector import Connector
from kvx.errors import ConnectorError, ConnectorUnavailable

ENTRY_POINT_GROUP = "kvx.connectors"
AUTO = "auto"
"""Stands for the connectors of AUTO_ORDER that are installed; each peer is read through the first that reaches it."""
AUTO_ORDER = ("ipc", "nixl")

logger = logging.getLogger(__name__)


def known_connectors() -> tuple[str, ...]:
    """The names that can be asked for, whether or not their libraries are installed."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def connector_class(name: str) -> type[Connector]:
    """ConnectorError for an unknown name; ConnectorUnavailable, with a hint, when its library is missing."""
    found = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not found:
        known = ", ".join(known_connectors()) or "none; is kvx installed?"
        raise ConnectorError(f"unknown connector {name!r}; known connectors: {known}")
    point = next(iter(found))
    try:
        loaded = point.load()
    except ImportError as error:
        raise ConnectorUnavailable(f"connector {name!r} is not installed ({error})", _hint(point)) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Connector)):
        raise ConnectorError(f"entry point {point.value!r} of connector {name!r} is no kvx.Connector subclass")
    return loaded


def connector_classes(names: Sequence[str]) -> list[type[Connector]]:
    """The classes of configured names, each once, `auto` replaced by what it stands for.

    ConnectorError for an unknown name, or when `auto` finds nothing; ConnectorUnavailable when the library of a
    connector that was named is missing.
    """
    found: dict[str, type[Connector]] = {}
    for name in names:
        classes = list(_automatic()) if name == AUTO else [connector_class(name)]
        found |= {found_class.name: found_class for found_class in classes}
    return list(found.values())


def need_shareable_memory(names: Sequence[str]) -> bool:
    """Whether one of the connectors needs memory that other processes can map. Errors as in `connector_classes`."""
    return any(found.capabilities.shares_memory for found in connector_classes(names))


def _automatic() -> Iterator[type[Connector]]:
    missing = []
    for name in AUTO_ORDER:
        try:
            yield connector_class(name)
        except ConnectorUnavailable as error:
            missing.append(str(error))
            logger.warning("auto goes without connector %s: %s", name, error)
    if len(missing) == len(AUTO_ORDER):
        raise ConnectorError(f"auto finds no connector: {'; '.join(missing)}")


def _hint(point: EntryPoint) -> str:
    distribution = point.dist.name if point.dist is not None else "kvx"
    return f"pip install '{distribution}[{point.name}]'"
