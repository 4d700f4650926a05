"""Connectors by name, from the entry points `kvx.connectors`; a connector is imported when it is first asked for.

A faulty distribution costs only its own connectors: each refusal is one sentence that names the distribution.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint, distributions

from kvx.connector import Capabilities, Connector, Op
from kvx.errors import ConnectorError, ConnectorUnavailable

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "kvx.connectors"
AUTO = "auto"
"""Stands for the connectors of AUTO_ORDER that are installed; each peer is read through the first that reaches it."""
AUTO_ORDER = ("ipc", "nixl")
MEMORY_KINDS = frozenset({"cpu", "cuda"})


def known_connectors() -> tuple[str, ...]:
    """The names that can be asked for, whether or not their libraries are installed."""
    return tuple(sorted({point.name for point in _points()}))


def connector_class(name: str) -> type[Connector]:
    """ConnectorError for an unknown name or a faulty distribution; ConnectorUnavailable when a library is missing."""
    point = _only_point(name)
    try:
        loaded = point.load()
    except ConnectorUnavailable:
        raise  # it knows best what to install
    except ImportError as error:
        raise ConnectorUnavailable(
            f"connector {name!r} of distribution {_distribution(point)} is not installed ({error})", _hint(point)
        ) from error
    except Exception as error:
        raise _refused(point, f"{point.value!r} fails to import: {type(error).__name__}: {error}") from error
    fault = _fault_of(loaded, name)
    if fault:
        raise _refused(point, f"{point.value!r} {fault}")
    assert isinstance(loaded, type)
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


def may_be_missing(names: Sequence[str], connector: str) -> bool:
    """Whether a connector was not named but stands behind `auto`, which goes on without one that cannot be opened."""
    return AUTO in names and connector in AUTO_ORDER and connector not in names


def need_shareable_memory(names: Sequence[str]) -> bool:
    """Whether one of the connectors needs memory that other processes can map. Errors as in `connector_classes`."""
    return any(found.capabilities.shares_memory for found in connector_classes(names))


def _automatic() -> Iterator[type[Connector]]:
    missing = []
    for name in AUTO_ORDER:
        try:
            yield connector_class(name)
        except ConnectorError as error:  # also one that two distributions give: auto has others
            missing.append(str(error))
            logger.warning("auto goes without connector %s: %s", name, error)
    if len(missing) == len(AUTO_ORDER):
        raise ConnectorError(f"auto finds no connector: {'; '.join(missing)}")


def _points() -> list[EntryPoint]:
    """Of every distribution, the first of its name on sys.path; one whose entry points are unreadable is left out.

    `importlib.metadata.entry_points` would raise for all of them.
    """
    points: list[EntryPoint] = []
    seen: set[str] = set()
    for distribution in distributions():
        try:
            found, name = distribution.entry_points.select(group=ENTRY_POINT_GROUP), distribution.name
        except Exception as error:  # noqa: BLE001  the parsers have no type of their own
            logger.warning(
                "connectors of distribution %s are left out: its metadata is unreadable (%s); reinstall it",
                _place(distribution), error,
            )  # fmt: skip
            continue
        if found and not name:
            logger.warning(
                "connectors of distribution %s are left out: it has no name; reinstall it", _place(distribution)
            )
        elif found and name not in seen:
            seen.add(name)
            points += found
    return points


def _place(distribution: Distribution) -> str:
    """The folder of its metadata, which can be told when nothing in it can be read."""
    return str(distribution.locate_file("") if (path := getattr(distribution, "_path", None)) is None else path.name)


def _only_point(name: str) -> EntryPoint:
    found = [point for point in _points() if point.name == name]
    if not found:
        known = ", ".join(known_connectors()) or "none; is kvx installed?"
        raise ConnectorError(f"unknown connector {name!r}; known connectors: {known}")
    if len(found) > 1:
        by = " and ".join(sorted({_distribution(point) for point in found}))
        raise ConnectorError(f"connector {name!r} is registered twice, by {by}; uninstall or mend one of them")
    return found[0]


def _fault_of(loaded: object, name: str) -> str:
    """What is wrong with a class that an entry point names; empty when it can be used."""
    if not (isinstance(loaded, type) and issubclass(loaded, Connector)):
        return "is no kvx.Connector subclass"
    if inspect.isabstract(loaded):
        return f"lacks the methods {', '.join(sorted(loaded.__abstractmethods__))}"
    declared = getattr(loaded, "name", None)
    if declared != name:
        return f"calls itself {declared!r}, its entry point {name!r}; one name is needed"
    return _overdeclared(getattr(loaded, "capabilities", None))


def _overdeclared(capabilities: object) -> str:
    """The first thing in the capabilities that kvx does not know, and so cannot ask of it."""
    if not isinstance(capabilities, Capabilities):
        return f"has capabilities {capabilities!r}; a kvx.connector.Capabilities is needed"
    operations, memory = capabilities.operations, capabilities.memory
    if not isinstance(operations, frozenset) or not operations or not all(isinstance(item, Op) for item in operations):
        return f"declares the operations {operations!r}; a frozenset of Op.READ, Op.WRITE or both is needed"
    if not isinstance(memory, frozenset) or not memory or memory - MEMORY_KINDS:
        return f"declares the memory kinds {memory!r}; a frozenset of {', '.join(sorted(MEMORY_KINDS))} is needed"
    for flag in ("notify", "shares_memory", "reaches_processes", "opens_ports", "ports_everywhere"):
        if not isinstance(getattr(capabilities, flag), bool):
            return f"declares {flag} as {getattr(capabilities, flag)!r}; True or False is needed"
    return ""


def _refused(point: EntryPoint, fault: str) -> ConnectorError:
    distribution = _distribution(point)
    return ConnectorError(
        f"connector {point.name!r} of distribution {distribution} cannot be used: {fault}; mend or uninstall it"
    )


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "kvx"


def _hint(point: EntryPoint) -> str:
    return f"pip install '{_distribution(point)}[{point.name}]'"
