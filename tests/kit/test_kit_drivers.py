"""The conformance kit on the host's memory driver."""

from __future__ import annotations

from kvx.drivers.base import Driver
from kvx.drivers.host import HostDriver
from kvx.drivers.shared_host import SharedHostDriver
from kvx.testing import DriverTests


class TestHostDriver(DriverTests):
    def make_driver(self) -> Driver:
        return HostDriver()


class TestHostDriverWithSmallGranules(DriverTests):
    def make_driver(self) -> Driver:
        return HostDriver(1 << 16)


class TestSharedHostDriver(DriverTests):
    def make_driver(self) -> Driver:
        return SharedHostDriver()
