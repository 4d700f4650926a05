"""The conformance kit on Mooncake over TCP."""

from __future__ import annotations

import pytest
from kvx_connectors.mooncake import MooncakeConnector

from kvx.connector import Connector
from kvx.testing import ConnectorTests, FaultTests

pytestmark = [pytest.mark.transfer, pytest.mark.slow]


class TestMooncake(ConnectorTests):
    def make_connector(self) -> Connector:
        return MooncakeConnector()


class TestMooncakeFaults(FaultTests):
    kit = TestMooncake
