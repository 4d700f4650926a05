"""How the Mooncake connector is configured: the environment, checked before the library sees any of it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kvx.addresses import is_loopback
from kvx.errors import ConnectorError

_NICS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Settings:
    """KVX_MOONCAKE_PROTOCOL, KVX_MOONCAKE_HOST (what peers connect to), KVX_MOONCAKE_DEVICE (NICs, by commas).

    Without KVX_MOONCAKE_HOST, peers connect to where they find the side channel.
    """

    protocol: str = "tcp"
    host: str = "127.0.0.1"
    device: str = ""


def settings_of_environment(data_address: str = "") -> Settings:
    """`data_address`: the side channel's, numeric; empty where nobody has said.

    ConnectorError for a value that the library would misread: it takes nearly anything without a word.
    """
    protocol = os.environ.get("KVX_MOONCAKE_PROTOCOL", Settings.protocol)
    own = Settings.host if not data_address or is_loopback(data_address) else data_address
    host = os.environ.get("KVX_MOONCAKE_HOST", own)
    device = os.environ.get("KVX_MOONCAKE_DEVICE", Settings.device)
    if protocol not in ("tcp", "rdma"):
        raise ConnectorError(f"KVX_MOONCAKE_PROTOCOL is {protocol!r}; it needs 'tcp' or 'rdma'")
    if protocol == "tcp" and device:
        raise ConnectorError(f"KVX_MOONCAKE_DEVICE is {device!r}, which only RDMA uses; set KVX_MOONCAKE_PROTOCOL=rdma")
    if protocol == "rdma":
        _require_nics(device)
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise ConnectorError("MC_TCP_PROTO=1 makes a WRITE end before its bytes have arrived; unset it")
    return Settings(protocol, _own_address(host), device)


def _require_nics(device: str) -> None:
    """Without one, the library reports success all the same."""
    present = sorted(path.name for path in _NICS.iterdir()) if _NICS.is_dir() else []
    if not present or (device and not set(device.split(",")).issubset(present)):
        found = ", ".join(present) or "none"
        raise ConnectorError(
            f"KVX_MOONCAKE_PROTOCOL is 'rdma' and KVX_MOONCAKE_DEVICE {device!r}; RDMA NICs of this machine: {found}"
        )


def _own_address(host: str) -> str:
    """The numeric IPv4 address of a host that is this machine."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            address = str(probe.getsockname()[0])
        if address == "0.0.0.0":
            raise OSError("peers cannot connect to a wildcard")
    except (OSError, UnicodeError) as error:
        raise ConnectorError(
            f"KVX_MOONCAKE_HOST is {host!r}; it needs an IPv4 address of this machine: {error}"
        ) from error
    return address
