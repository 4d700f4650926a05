"""`ConnectorTests`: all that the kit asks of a connector."""

from __future__ import annotations

import pytest

from kvx.testing.data import DataTests
from kvx.testing.failures import FailureTests
from kvx.testing.life import LifeTests
from kvx.testing.machine import MachineTests
from kvx.testing.metadata import MetadataTests
from kvx.testing.resources import ResourceTests


@pytest.mark.usefixtures("kvx_kit_environ")
class ConnectorTests(MachineTests, ResourceTests, FailureTests, DataTests, MetadataTests, LifeTests):
    """Subclass it and write `make_connector`; the other hooks are in `kvx.testing.kit.Kit`.

    The subclass must be importable by itself: peers are made from it in second processes.
    """

    @classmethod
    def kvx_kit_subject(cls) -> str:
        """What the table calls the connector."""
        return cls().make_connector().name
