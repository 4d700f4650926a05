"""Mooncake's environment, checked before the library, which takes nearly anything, sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvx_connectors import mooncake_settings
from kvx_connectors.mooncake_settings import Settings, settings_of_environment

from kvx.errors import ConnectorError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("KVX_MOONCAKE_PROTOCOL", "KVX_MOONCAKE_HOST", "KVX_MOONCAKE_DEVICE", "MC_TCP_PROTO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mooncake_settings, "_NICS", tmp_path / "infiniband")
    return monkeypatch


def test_the_default_is_tcp_on_this_host() -> None:
    assert settings_of_environment() == Settings("tcp", "127.0.0.1", "")


def test_a_name_becomes_the_address_that_peers_connect_to(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("KVX_MOONCAKE_HOST", "localhost")
    assert settings_of_environment().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "host"), [("::1", "127.0.0.1"), ("127.0.0.2", "127.0.0.1"), ("192.0.2.7", "192.0.2.7")]
)
def test_peers_connect_to_where_the_side_channel_is(environment: pytest.MonkeyPatch, address: str, host: str) -> None:
    environment.setattr(mooncake_settings, "_own_address", lambda given: given)
    assert settings_of_environment(address).host == host
    environment.setenv("KVX_MOONCAKE_HOST", "192.0.2.8")
    assert settings_of_environment(address).host == "192.0.2.8"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PROTOCOL": "udp"}, "KVX_MOONCAKE_PROTOCOL is 'udp'; it needs 'tcp' or 'rdma'"),
        ({"PROTOCOL": ""}, "KVX_MOONCAKE_PROTOCOL is ''"),
        ({"DEVICE": "mlx5_0"}, "KVX_MOONCAKE_DEVICE is 'mlx5_0', which only RDMA uses"),
        ({"PROTOCOL": "rdma"}, "RDMA NICs of this machine: none"),
        ({"HOST": "192.0.2.1"}, "KVX_MOONCAKE_HOST is '192.0.2.1'; it needs an IPv4 address of this machine"),
        ({"HOST": "0.0.0.0"}, "KVX_MOONCAKE_HOST is '0.0.0.0'; it needs an IPv4 address"),
        ({"HOST": ""}, "KVX_MOONCAKE_HOST is ''; it needs an IPv4 address"),
        ({"HOST": "a" * 70}, "KVX_MOONCAKE_HOST is 'aaa"),
    ],
)
def test_bad_values_are_one_sentence(environment: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    for name, value in variables.items():
        environment.setenv(f"KVX_MOONCAKE_{name}", value)
    with pytest.raises(ConnectorError) as raised:
        settings_of_environment()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rdma_takes_the_nics_that_are_there(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    environment.setenv("KVX_MOONCAKE_PROTOCOL", "rdma")
    assert settings_of_environment().device == ""
    environment.setenv("KVX_MOONCAKE_DEVICE", "mlx5_1,mlx5_0")
    assert settings_of_environment().device == "mlx5_1,mlx5_0"
    environment.setenv("KVX_MOONCAKE_DEVICE", "mlx5_0,mlx5_2")
    with pytest.raises(ConnectorError, match=r"DEVICE 'mlx5_0,mlx5_2'; RDMA NICs of this machine: mlx5_0, mlx5_1"):
        settings_of_environment()


def test_the_framing_that_does_not_acknowledge_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConnectorError, match="MC_TCP_PROTO=1 makes a WRITE end before its bytes have arrived"):
        settings_of_environment()
