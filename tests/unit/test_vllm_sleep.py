"""The hooks around a GPU worker's sleep, wake-up and discard, over a real cache in host memory. Needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from memory_helpers import FakeConnector, FaultyDriver, opened_cache, small_geometry

from kvx.cache import CacheState
from kvx.drivers.host import HostDriver
from kvx.errors import DriverError
from kvx.layout import KVCacheLayout
from kvx.vllm import worker_side


class Engine:
    """A worker with a grown cache, and what vLLM's own functions saw of it when they were called."""

    def __init__(self) -> None:
        self.driver = FaultyDriver(HostDriver(4096))
        self.cache, self.views = opened_cache(self.driver, small_geometry(KVCacheLayout.LBHNC))
        self.connector = FakeConnector()
        self.cache.attach(self.connector)
        self.cache.commit(2)
        self.cache.extend_kv_cache(8)
        self.worker = SimpleNamespace(kvx_seam=SimpleNamespace(cache=self.cache))
        self.seen: list[tuple[str, CacheState, Any]] = []

    def called(self, name: str) -> Any:
        def original(worker: Any, argument: Any = None) -> None:
            assert worker is self.worker
            assert self.connector.is_open == (self.cache.state is CacheState.READY)
            self.seen.append((name, self.cache.state, argument))

        return original


@pytest.fixture
def engine() -> Any:
    made = Engine()
    yield made
    made.cache.close()


def test_the_cache_goes_before_vllm_sleeps_and_is_back_before_vllm_wakes(engine: Engine) -> None:
    base, blocks = engine.cache.base_address, engine.cache.committed_blocks
    for view in engine.views.values():
        view[:blocks] = 1.0
    worker_side.sleep(engine.called("sleep"), engine.worker, 1)
    assert engine.cache.committed_bytes == 0
    worker_side.wake_up(engine.called("wake"), engine.worker, None)
    assert engine.seen == [("sleep", CacheState.ASLEEP, 1), ("wake", CacheState.READY, None)]
    assert (engine.cache.base_address, engine.cache.committed_blocks) == (base, blocks)
    assert all(float(view[:blocks].abs().max()) == 0.0 for view in engine.views.values())
    assert [generation for _, generation in engine.connector.opened] == [1, 2]
    assert engine.connector.is_open


def test_only_the_tag_of_the_cache_wakes_the_cache(engine: Engine) -> None:
    worker_side.sleep(engine.called("sleep"), engine.worker, 2)
    worker_side.wake_up(engine.called("wake"), engine.worker, ["weights"])
    assert engine.seen[-1] == ("wake", CacheState.ASLEEP, ["weights"])
    worker_side.wake_up(engine.called("wake"), engine.worker, ["kv_cache"])
    assert engine.seen[-1] == ("wake", CacheState.READY, ["kv_cache"])


def test_discard_gives_the_cache_back_where_it_is_named_and_a_sleep_after_it_is_fine(engine: Engine) -> None:
    worker_side.discard(engine.called("discard"), engine.worker, ("weights",))
    assert engine.cache.state is CacheState.READY
    worker_side.discard(engine.called("discard"), engine.worker, ("kv_cache",))
    worker_side.sleep(engine.called("sleep"), engine.worker, 1)
    assert engine.seen[1:] == [("discard", CacheState.ASLEEP, ("kv_cache",)), ("sleep", CacheState.ASLEEP, 1)]


def test_a_wake_up_without_memory_leaves_the_cache_asleep_and_can_be_tried_again(engine: Engine) -> None:
    worker_side.sleep(engine.called("sleep"), engine.worker, 1)
    engine.driver.arm(1)
    with pytest.raises(DriverError):
        worker_side.wake_up(engine.called("wake"), engine.worker, None)
    assert engine.cache.state is CacheState.ASLEEP
    assert [name for name, *_ in engine.seen] == ["sleep"]
    engine.driver.arm(0)
    worker_side.wake_up(engine.called("wake"), engine.worker, None)
    assert engine.cache.state is CacheState.READY


def fails(_worker: Any, _argument: Any = None) -> None:
    raise ValueError("vLLM cannot")


def test_a_sleep_that_vllm_fails_leaves_the_cache_awake(engine: Engine) -> None:
    with pytest.raises(ValueError, match="vLLM cannot"):
        worker_side.sleep(fails, engine.worker, 2)
    assert engine.cache.state is CacheState.READY
    assert engine.connector.is_open


def test_a_sleep_after_a_discard_that_vllm_fails_leaves_the_cache_asleep(engine: Engine) -> None:
    worker_side.discard(engine.called("discard"), engine.worker, ("kv_cache",))
    with pytest.raises(ValueError, match="vLLM cannot"):
        worker_side.sleep(fails, engine.worker, 1)
    assert engine.cache.state is CacheState.ASLEEP


def test_a_wake_up_that_vllm_fails_leaves_both_asleep_and_can_be_tried_again(engine: Engine) -> None:
    worker_side.sleep(engine.called("sleep"), engine.worker, 1)
    with pytest.raises(ValueError, match="vLLM cannot"):
        worker_side.wake_up(fails, engine.worker, None)
    assert engine.cache.state is CacheState.ASLEEP
    assert engine.cache.committed_bytes == 0
    worker_side.wake_up(engine.called("wake"), engine.worker, None)
    assert engine.cache.state is CacheState.READY


def test_a_worker_without_kvx_is_left_alone() -> None:
    worker = SimpleNamespace()
    assert worker_side.sleep(lambda _worker, level: level, worker, 1) == 1
    assert worker_side.wake_up(lambda _worker, tags: tags, worker, ["weights"]) == ["weights"]
    assert worker_side.discard(lambda _worker, tags: tags, worker, ("kv_cache",)) == ("kv_cache",)
