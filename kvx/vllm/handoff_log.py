"""Times the hand-offs of any vLLM connector, so that kvx and vLLM's stock connector are measured by one definition.

Set `KVX_HANDOFF_LOG=FILE` and the decode engine appends a JSON line `{"request", "asked_s", "arrived_s"}` for each
hand-off: from the moment its scheduler has given the request blocks to load into, to the moment the scheduler learns
that everything has arrived. Used by `kvx bench pd`; it changes nothing else.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

ENVIRONMENT = "KVX_HANDOFF_LOG"
MODULE = "vllm.distributed.kv_transfer.kv_connector.factory"
NAME = "KVConnectorFactory.create_connector"


def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `KVConnectorFactory.create_connector`: times the connector when it is the scheduler's."""
    connector = original(*args, **kwargs)
    path = os.environ.get(ENVIRONMENT)
    if path and connector.role.name == "SCHEDULER":
        _time(connector, path)
    return connector


def _time(connector: Any, path: str) -> None:
    asked: dict[str, float] = {}
    update_state_after_alloc = connector.update_state_after_alloc
    update_connector_output = connector.update_connector_output

    def timed_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            asked.setdefault(request.request_id, time.monotonic())
        update_state_after_alloc(request, blocks, num_external_tokens)

    def timed_output(connector_output: Any) -> None:
        now = time.monotonic()
        arrived = [r for r in connector_output.finished_recving or () if r in asked]
        if arrived:
            with open(path, "a", encoding="utf-8") as log:
                for request in arrived:
                    line = {"request": request, "asked_s": asked.pop(request), "arrived_s": now}
                    log.write(json.dumps(line) + "\n")
        update_connector_output(connector_output)

    connector.update_state_after_alloc = timed_alloc
    connector.update_connector_output = timed_output
