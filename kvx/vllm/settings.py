"""The bridge's settings, from `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import ConnectorError
from ..handoff import HandoffSettings
from .activation import settings_of


def from_vllm(vllm_config: Any) -> HandoffSettings:
    """Checked settings.

    Raises:
        ConnectorError: an option that kvx does not have, or a value of the wrong kind; the message names it.
    """
    given = dict(settings_of(vllm_config))
    known = {field.name: field for field in dataclasses.fields(HandoffSettings)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConnectorError(
            f"kv_connector_extra_config has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    if "connectors" in given:
        names = given["connectors"]
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names) or not names:
            raise ConnectorError(f"kv_connector_extra_config.connectors is {names!r}; it needs a list of names")
        given["connectors"] = tuple(names)
    return HandoffSettings(**given)


def for_rank(vllm_config: Any) -> HandoffSettings:
    """This rank's settings: rank r of an engine listens r ports above the configured one.

    Raises:
        ConnectorError: several ranks, but no port that the others could be counted from.
    """
    found = from_vllm(vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return found
    if found.side_channel_port == 0:
        raise ConnectorError(
            f"side_channel_port is 0 with {parallel.tensor_parallel_size} ranks; give the first of as many ports"
        )
    rank = parallel.rank % parallel.tensor_parallel_size
    return dataclasses.replace(found, side_channel_port=found.side_channel_port + rank)
