"""What an engine needs before it may listen where others can reach it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fake_connector import FakeConnector

from kvx import door
from kvx.addresses import AllowedHosts
from kvx.connector import Connector
from kvx.engine_side import HandoffSettings
from kvx.errors import ConnectorError, HandshakeError
from kvx.registry import connector_class
from kvx.secret import Secret

SECRET = Secret(b"a secret of tests")


def off_loopback(**given: Any) -> HandoffSettings:
    return HandoffSettings(**{"side_channel_host": "0.0.0.0", **given})


def reaches(hosts: AllowedHosts, address: str) -> bool:
    try:
        hosts.require(address, address)
    except HandshakeError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_on_loopback_hand_offs_stay_there_unless_told_otherwise(host: str, caplog: pytest.LogCaptureFixture) -> None:
    for secret in (None, SECRET):
        here = HandoffSettings(side_channel_host=host)
        assert not reaches(door.allowed_hosts(here, secret), "10.0.0.1")
        assert reaches(door.allowed_hosts(here, secret), "127.0.0.1")
        door.prepare(here, [FakeConnector()])
        door.warn_of_strangers(here, secret)
    wider = HandoffSettings(side_channel_host=host, allowed_hosts=("10.0.0.0/8",))
    assert reaches(door.allowed_hosts(wider, None), "10.0.0.1")
    assert not reaches(door.allowed_hosts(wider, None), "127.0.0.1")
    assert not caplog.records


def test_off_loopback_networks_or_a_secret_are_needed() -> None:
    with pytest.raises(
        ConnectorError, match=r"side_channel_host 0\.0\.0\.0 is not loopback.* in allowed_hosts, or set"
    ):
        door.allowed_hosts(off_loopback(), None)
    assert reaches(door.allowed_hosts(off_loopback(), SECRET), "10.0.0.1")
    for secret in (None, SECRET):
        hosts = door.allowed_hosts(off_loopback(allowed_hosts=("10.0.0.0/8",)), secret)
        assert reaches(hosts, "10.0.0.1")
        assert not reaches(hosts, "11.0.0.1")


def test_off_loopback_without_a_secret_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    door.warn_of_strangers(off_loopback(), SECRET)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        door.warn_of_strangers(off_loopback(), None)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the side channel listens on 0.0.0.0 without a secret, so whoever reaches it may read and free held KV cache: "
        "set KVX_SECRET_FILE"
    )


@pytest.mark.parametrize(
    ("name", "ports"),
    [("nixl", "ports of UCX's choice"), ("mooncake", "two TCP ports of Mooncake's choice"), ("ipc", ""),
     ("cpu_offload", "")],
)  # fmt: skip
def test_ports_that_authenticate_nobody_must_be_allowed_off_loopback(name: str, ports: str) -> None:
    connector = connector_class(name)()
    assert connector.capabilities.opens_ports == bool(ports)
    if ports:
        with pytest.raises(ConnectorError, match=f"connector {name} opens {ports}.* set allow_unauthenticated_data"):
            door.prepare(off_loopback(), [connector])
    door.prepare(off_loopback(allow_unauthenticated_data_plane=True), [connector])
    assert connector.data_address == "0.0.0.0"


def test_ports_that_cannot_be_kept_on_loopback_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    mooncake, nixl = connector_class("mooncake")(), connector_class("nixl")()
    door.prepare(HandoffSettings(), [mooncake, nixl])
    (record,) = caplog.records
    assert "connector mooncake opens two TCP ports of Mooncake's choice, on every interface" in record.getMessage()
    door.prepare(HandoffSettings(allow_unauthenticated_data_plane=True), [mooncake, nixl])
    assert len(caplog.records) == 1


def test_a_connector_that_says_nothing_counts_as_one_that_opens_ports() -> None:
    connector: Connector = FakeConnector()
    with pytest.raises(ConnectorError, match="connector fake opens network ports of its library"):
        door.prepare(off_loopback(), [connector])
