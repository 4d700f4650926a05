"""Connectors by name: found lazily, and every reason for not having one in a sentence."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from kvx import registry
from kvx.engine_side import HandoffSettings
from kvx.errors import ConnectorError, ConnectorUnavailable
from kvx.registry import (
    ENTRY_POINT_GROUP,
    connector_class,
    connector_classes,
    known_connectors,
    need_shareable_memory,
)


def points_of(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    class Installed:
        name = "kvx"
        entry_points = EntryPoints(EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in values.items())

    monkeypatch.setattr(registry, "distributions", lambda: [Installed()])


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> None:
    points_of(
        monkeypatch,
        absent="no_such_library.connector:Connector",
        wrong="pathlib:Path",
        abstract="kvx.connector:Connector",
    )


def test_names_are_known_without_importing_anything(points: None) -> None:
    assert known_connectors() == ("absent", "abstract", "wrong")
    assert "no_such_library" not in sys.modules
    with pytest.raises(ConnectorError, match="lacks the methods _cancel, _close, _connect"):
        connector_class("abstract")


def test_an_unknown_name_lists_the_known_ones(points: None) -> None:
    with pytest.raises(ConnectorError, match="unknown connector 'nxil'; known connectors: absent, abstract, wrong"):
        connector_class("nxil")


def test_a_missing_library_says_what_to_install(points: None) -> None:
    with pytest.raises(ConnectorUnavailable) as raised:
        connector_class("absent")
    assert raised.value.hint == "pip install 'kvx[absent]'"
    assert "'absent' of distribution kvx is not installed (No module named 'no_such_library')" in str(raised.value)


def test_something_else_under_the_name_is_refused(points: None) -> None:
    with pytest.raises(
        ConnectorError, match="connector 'wrong' of distribution kvx cannot be used: 'pathlib:Path' is no"
    ):
        connector_class("wrong")


def test_auto_stands_for_what_is_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    points_of(monkeypatch, ipc="kvx_connectors.ipc:IpcConnector", nixl="no_such_library:NixlConnector")
    assert [found.name for found in connector_classes(["auto", "ipc"])] == ["ipc"]
    assert "auto goes without connector nixl" in caplog.text
    assert need_shareable_memory(["auto"])


def test_auto_without_anything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    points_of(monkeypatch, ipc="no_such_library:Ipc", nixl="no_such_library:Nixl")
    with pytest.raises(
        ConnectorError, match=r"auto finds no connector: .*'ipc' of distribution kvx is not installed.*'nixl'"
    ):
        connector_classes(["auto"])


def test_only_some_connectors_need_memory_of_a_special_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    points_of(monkeypatch, fake="fake_connector:FakeConnector", ipc="kvx_connectors.ipc:IpcConnector")
    assert not need_shareable_memory(["fake"])
    assert need_shareable_memory(["fake", "ipc"])
    assert not need_shareable_memory([])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lease_s", 0, "lease_s is 0; it needs seconds"),
        ("lease_s", "30", "lease_s is '30'"),
        ("transfer_deadline_s", -1, "transfer_deadline_s is -1"),
        ("grace_s", float("nan"), "grace_s is nan"),
        ("verify", "some", "verify is 'some'; it needs 'off', 'sample' or 'all'"),
        ("side_channel_port", 70000, "side_channel_port is 70000"),
        ("side_channel_port", True, "side_channel_port is True"),
        ("side_channel_host", "", "side_channel_host is ''; it needs an address of this machine"),
        ("side_channel_host", " ", "side_channel_host is ' '"),
        ("side_channel_host", None, "side_channel_host is None"),
        ("lease_s", True, "lease_s is True; it needs seconds, more than 0, at most 3600"),
        ("grace_s", False, "grace_s is False; it needs seconds, 0 or more, at most 3600"),
        ("auth_window_s", 0, "auth_window_s is 0; it needs seconds, more than 0"),
        ("allowed_hosts", ["10.0.0.1"], "allowed_hosts is ['10.0.0.1']; it needs a tuple"),
        ("allowed_hosts", ("10.0.0.0/40",), "allowed_hosts has '10.0.0.0/40'"),
        ("allow_unauthenticated_data_plane", 1, "allow_unauthenticated_data_plane is 1; it needs true or false"),
        ("connectors", (), "connectors is ()"),
        ("connectors", "nixl", "connectors is 'nixl'"),
        ("inject", ["stale"], "inject is ['stale']"),
        ("inject", "flip-byte", "inject is 'flip-byte' but verify is 'off'"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConnectorError) as raised:
        HandoffSettings(**{field: value})
    assert message in str(raised.value)


def test_no_grace_is_a_setting() -> None:
    assert HandoffSettings(grace_s=0, lease_s=3600).grace_s == 0


def test_an_unknown_injection_lists_the_known_ones() -> None:
    with pytest.raises(ConnectorError, match="unknown injection 'flip'; known: flip-byte, swap-blocks, stale"):
        HandoffSettings(verify="all", inject="flip")
