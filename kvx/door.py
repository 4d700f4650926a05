"""Whom an engine talks to, and from where it can be reached: decided before anything of it listens or connects."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvx.addresses import AllowedHosts, is_loopback, look_up, numeric_address
from kvx.connector import Connector
from kvx.engine_side import HandoffSettings
from kvx.errors import ConnectorError
from kvx.secret import Secret

logger = logging.getLogger(__name__)


def prepare(settings: HandoffSettings, connectors: Iterable[Connector]) -> None:
    """Tell connectors where they may listen; before they are opened.

    ConnectorError: one opens ports of a library that authenticates nobody, off loopback, and nobody allowed that.
    """
    address = _address(settings)
    for connector in connectors:
        connector.data_address = address
        needs = connector.capabilities
        if not needs.opens_ports or settings.allow_unauthenticated_data_plane:
            continue
        if is_loopback(address) and needs.ports_everywhere:
            logger.warning(
                "connector %s opens %s, where its library authenticates nobody: keep strangers out of this network, "
                "and set allow_unauthenticated_data_plane",
                connector.name,
                needs.ports,
            )
        elif not is_loopback(address):
            raise ConnectorError(
                f"connector {connector.name} opens {needs.ports}, where its library authenticates nobody, and "
                f"side_channel_host {settings.side_channel_host} is not loopback; keep strangers out of that network "
                "and set allow_unauthenticated_data_plane"
            )


def allowed_hosts(settings: HandoffSettings, secret: Secret | None) -> AllowedHosts:
    """Where hand-offs may lead. May wait for the resolver, where the settings hold names.

    ConnectorError: the side channel is not on loopback, and neither networks nor a secret say who may hand off.
    """
    if settings.allowed_hosts:
        return AllowedHosts.of(settings.allowed_hosts)
    if is_loopback(_address(settings)):
        return AllowedHosts.loopback()
    if secret is None:
        raise ConnectorError(
            f"side_channel_host {settings.side_channel_host} is not loopback, and kv_transfer_params, which come from "
            "HTTP clients, may name any host; name the engines' networks in allowed_hosts, or set KVX_SECRET_FILE"
        )
    return AllowedHosts.anywhere()  # tickets say where


def warn_of_strangers(settings: HandoffSettings, secret: Secret | None) -> None:
    """One sentence, when others than this host's processes reach the side channel and nothing keeps them out."""
    if secret is None and not is_loopback(_address(settings)):
        logger.warning(
            "the side channel listens on %s without a secret, so whoever reaches it may read and free held KV cache: "
            "set KVX_SECRET_FILE",
            settings.side_channel_host,
        )


def _address(settings: HandoffSettings) -> str:
    host = settings.side_channel_host
    return numeric_address(host) or look_up(host)
