"""The conformance kit on offload: the peer is host memory of this process."""

from __future__ import annotations

import pytest
from kvx_connectors.cpu_offload import CpuOffloadConnector

from kvx.connector import Connector
from kvx.testing import ConnectorTests, FaultTests

pytestmark = [pytest.mark.transfer, pytest.mark.slow]


class TestCpuOffload(ConnectorTests):
    def make_connector(self) -> Connector:
        return CpuOffloadConnector()

    def wait_for_own_memory(self, connector: Connector) -> None:
        assert isinstance(connector, CpuOffloadConnector)
        connector.wait_ready()


class TestCpuOffloadFaults(FaultTests):
    kit = TestCpuOffload
