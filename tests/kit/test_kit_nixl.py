"""The conformance kit on NIXL."""

from __future__ import annotations

import pytest
from kvx_connectors.nixl import NixlConnector

from kvx.connector import Connector
from kvx.testing import ConnectorTests

pytestmark = pytest.mark.transfer


class TestNixl(ConnectorTests):
    """As it is used within one host."""

    environ = {"UCX_TLS": "tcp,self,cma", "NIXL_LOG_LEVEL": "WARN"}

    def make_connector(self) -> Connector:
        return NixlConnector()
