"""The conformance kit on NIXL."""

from __future__ import annotations

from typing import ClassVar

import pytest
from kvx_connectors.nixl import NixlConnector

from kvx.connector import Connector
from kvx.testing import ConnectorTests, FaultTests

pytestmark = [pytest.mark.transfer, pytest.mark.slow]


class TestNixl(ConnectorTests):
    """As it is used within one host."""

    environ: ClassVar = {"UCX_TLS": "tcp,self,cma", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}

    def make_connector(self) -> Connector:
        return NixlConnector()


@pytest.mark.matrix
class TestNixlOverTCP(TestNixl):
    """Bytes move with the peer's help here, so that a stopped one stops a transfer half way."""

    environ: ClassVar = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}


class TestNixlFaults(FaultTests):
    kit = TestNixl
