"""Connectors by name, from the entry points `kvx.connectors`; a connector is imported when it is first asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from kvx.connector import Connector
from kvx.errors import ConnectorError, ConnectorUnavailable

ENTRY_POINT_GROUP = "kvx.connectors"


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


def create(name: str) -> Connector:
    """A new connector of that name, not open yet."""
    return connector_class(name)()


def _hint(point: EntryPoint) -> str:
    distribution = point.dist.name if point.dist is not None else "kvx"
    return f"pip install '{distribution}[{point.name}]'"
