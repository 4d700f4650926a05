"""The conformance kit: test classes to subclass, for authors of connectors and drivers.

    from kvx.testing import ConnectorTests

    class TestMine(ConnectorTests):
        def make_connector(self):
            return MyConnector()

The pytest plug-in that brings its fixtures and its table is found by entry point, and so this package is imported in
every pytest run, also where nothing tests a connector: what is named here is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvx.testing.connectors import ConnectorTests
    from kvx.testing.drivers import DriverTests
    from kvx.testing.fault_tests import FaultTests

__all__ = ["ConnectorTests", "DriverTests", "FaultTests"]

_HOMES = {"ConnectorTests": "connectors", "DriverTests": "drivers", "FaultTests": "fault_tests"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
