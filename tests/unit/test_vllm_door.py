"""The bridge's half of the door: what may be configured where, and what travels over HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvx.errors import ConnectorError
from kvx.vllm import settings

KEY = "a secret for tests, and for nothing else"


def vllm_config(**extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector="KvxConnector", engine_id="prefill", kv_connector_extra_config=extra)
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0, tensor_parallel_size=1)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


@pytest.mark.parametrize("name", ["secret", "secret_file", "KVX_SECRET", "kvx_secret_file"])
def test_a_secret_among_the_options_is_refused_by_name_and_not_shown(name: str) -> None:
    with pytest.raises(ConnectorError, match=f"has {name}, and vLLM logs all of it") as raised:
        settings.from_vllm(vllm_config(**{name: KEY}))
    assert KEY not in str(raised.value)
