"""The conformance kit on memory shared within one host."""

from __future__ import annotations

import pytest
from kvx_connectors.ipc import IpcConnector

from kvx.connector import Connector
from kvx.testing import ConnectorTests, FaultTests

pytestmark = [pytest.mark.transfer, pytest.mark.slow]


class TestIpc(ConnectorTests):
    def make_connector(self) -> Connector:
        return IpcConnector()


class TestIpcFaults(FaultTests):
    kit = TestIpc
