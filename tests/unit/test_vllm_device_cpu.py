"""What a CPU engine plans its cache with; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvx.drivers.base import MemoryInfo
from kvx.errors import ConnectorError
from kvx.vllm import device_cpu, settings
from kvx.vllm.device_cpu import CpuSide

GIB = 1 << 30


def config(extra: dict[str, Any], cache_bytes: int | None = None) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="KvxConnector", kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=cache_bytes),
        parallel_config=SimpleNamespace(world_size=1),
    )


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(device_cpu, "read_host_memory", lambda: MemoryInfo(8 * GIB, 16 * GIB))
    monkeypatch.setattr(device_cpu, "resident_bytes", lambda: GIB)
    monkeypatch.delenv("KVX_HOST_ENGINES", raising=False)

    def of(vllm_config: Any) -> int:
        worker = SimpleNamespace(vllm_config=vllm_config, _should_warm_up_model=lambda: False)
        return CpuSide(worker).capacity_bytes(None)

    return of


def test_host_memory_to_offload_to_comes_out_of_what_is_measured(capacity: Any) -> None:
    plain = capacity(config({"connectors": ["nixl"]}))
    offloading = capacity(config({"connectors": ["nixl", "cpu_offload"], "offload_bytes": 2 * GIB}))
    assert plain - offloading == 2 * GIB


def test_an_explicit_cache_space_is_the_caches_alone(capacity: Any) -> None:
    explicit = {"connectors": ["cpu_offload"], "offload_bytes": 2 * GIB}
    assert capacity(config(explicit, 3 * GIB)) == capacity(config({"connectors": ["nixl"]}, 3 * GIB)) == 3 * GIB


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("offload_bytes", 0, "offload_bytes is 0; it needs a whole number of bytes"),
        ("offload_bytes", 1.5, "offload_bytes is 1.5"),
        ("offload_bytes", True, "offload_bytes is True"),
        ("offload_eviction", "fifo", "offload_eviction is 'fifo'; it needs 'lru' or 'arc'"),
    ],
)
def test_options_of_offload_are_checked(option: str, value: Any, words: str) -> None:
    with pytest.raises(ConnectorError, match=words):
        settings.from_vllm(config({option: value}))


def test_what_is_not_configured_takes_nothing() -> None:
    assert settings.offload_bytes_of(config({"connectors": ["nixl"], "offload_bytes": 5})) == 0
    assert settings.offload_bytes_of(config({"connectors": ["cpu_offload"], "offload_bytes": 5})) == 5
    assert settings.offload_bytes_of(SimpleNamespace(kv_transfer_config=None)) == 0


def test_ranks_that_only_offload_need_no_port_that_others_can_count_from() -> None:
    for connectors in (["nixl"], ["cpu_offload"], ["nixl", "cpu_offload"]):
        several = config({"connectors": connectors})
        several.parallel_config = SimpleNamespace(world_size=2, data_parallel_size=1, data_parallel_index=0)
        if connectors == ["cpu_offload"]:
            assert settings.engine_port(several) == 0
        else:
            with pytest.raises(ConnectorError, match="side_channel_port is 0 with 2 ranks"):
                settings.engine_port(several)
