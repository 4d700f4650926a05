"""Any sequence of calls, with driver faults, full memory and refusing connectors, against a simple model of a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_helpers import FakeConnector, FaultyDriver, small_geometry

from kvx.cache import CacheState, ExtensibleKVCache
from kvx.drivers.base import MemoryInfo
from kvx.drivers.host import HEADROOM_BYTES, HostDriver
from kvx.errors import CacheStateError, DriverError, LayoutError
from kvx.layout import KVCacheLayout
from kvx.tensor import views_of

GRANULE = 4096
UNKNOWN = None  # content that nobody may rely on
NEW, RESERVED, WARMING, READY, ASLEEP, CLOSED = CacheState
faults = st.just(0) | st.integers(1, 6) | st.integers(7, 20)  # the number of the driver call that fails; 0: none


class CacheMachine(RuleBasedStateMachine):
    """The model: a state, a count, a final count, and one value per committed block."""

    @initialize(
        layout=st.sampled_from(KVCacheLayout),
        dirty=st.booleans(),
        limit_granules=st.sampled_from([1000, 30, 12]),
        calls=st.integers(0, 3),
    )
    def start(self, layout: KVCacheLayout, dirty: bool, limit_granules: int, calls: int) -> None:
        """A new cache, and as many calls of its life as lead to NEW, RESERVED, WARMING or READY."""
        self.limit_bytes = limit_granules * GRANULE
        self.driver = FaultyDriver(HostDriver(GRANULE, self.memory), dirty=dirty)
        self.geometry = small_geometry(layout, blocks=24)
        self.cache = ExtensibleKVCache(self.driver, self.geometry.segment_table)
        self.views: dict[str, torch.Tensor] = {}
        self.kept: torch.Tensor | None = None
        self.connectors: list[FakeConnector] = []
        self.state, self.count, self.final = NEW, 0, 0
        self.content: list[float | None] = []
        self.base = 0
        self.generation = 0
        for step in [lambda: self.open(0), lambda: self.commit(2, 0), lambda: self.extend(1, False, 0)][:calls]:
            step()

    @precondition(lambda self: self.state is CLOSED)
    @rule(dirty=st.booleans(), calls=st.integers(1, 3))
    def another(self, dirty: bool, calls: int) -> None:
        self.start(self.geometry.layout, dirty, 1000, calls)

    def memory(self) -> MemoryInfo:
        free = self.limit_bytes - sum(self.driver.allocated.values())
        return MemoryInfo(free + HEADROOM_BYTES, self.limit_bytes + HEADROOM_BYTES)

    def attempt(self, call, fault: int) -> bool:
        """True when the call went through; a fault, full memory or a refusing connector is False."""
        if any(connector.fail_open or connector.fail_close for connector in self.connectors):
            fault = 0  # a fault in an undo cannot be undone
        opened = [connector for connector in self.connectors if connector.is_open]
        self.driver.arm(fault)
        try:
            call()
        except (DriverError, RuntimeError) as error:
            if not isinstance(error, DriverError) and "cannot" not in str(error):
                raise
            if self.cache.state is READY:
                assert all(c.is_open for c in opened), "what was open before a failed call is open after it"
            return False
        finally:
            self.driver.arm(0)
        return True

    def is_stuck(self) -> bool:
        """One connector did not open, and one that did would not close: the call cannot be undone."""
        opened = [connector for connector in self.connectors if connector.is_open and connector.fail_close]
        return self.state is not READY and bool(opened) and any(c.fail_open for c in self.connectors)

    @precondition(lambda self: self.state is NEW)
    @rule(fault=faults)
    def open(self, fault: int) -> None:
        if self.attempt(self.cache.open, fault):
            self.state, self.base = RESERVED, self.cache.base_address
            self.views = views_of(self.cache.buffer, self.geometry)
            self.cache.set_views(self.views)

    @precondition(lambda self: self.state is RESERVED)
    @rule(count=st.integers(1, 24), fault=faults)
    def commit(self, count: int, fault: int) -> None:
        if self.attempt(lambda: self.cache.commit(count), fault):
            self.state, self.count, self.content = WARMING, count, [0.0] * count

    @precondition(lambda self: self.state in (WARMING, READY))
    @rule(more=st.integers(0, 12), live=st.booleans(), fault=faults)
    def extend(self, more: int, live: bool, fault: int) -> None:
        count = min(self.count + more, self.cache.capacity_blocks)
        keep = live or self.state is READY
        if self.attempt(lambda: self.cache.extend_kv_cache(count, live=live), fault) or self.is_stuck():
            old = self.content if keep else [0.0] * self.count
            self.content = old + [0.0] * (count - self.count)
            self.state, self.count, self.final = READY, count, count
        elif not keep:
            self.content = [UNKNOWN] * self.count

    @precondition(lambda self: self.state is READY)
    @rule(fault=faults)
    def sleep(self, fault: int) -> None:
        if self.attempt(self.cache.sleep, fault) or self.cache.state is ASLEEP:
            self.state, self.count, self.content = ASLEEP, 0, []

    @precondition(lambda self: self.state is ASLEEP)
    @rule(fault=faults)
    def wake(self, fault: int) -> None:
        if self.attempt(self.cache.wake, fault) or self.is_stuck():
            self.state, self.count, self.content = READY, self.final, [0.0] * self.final

    @precondition(lambda self: self.state in (WARMING, READY))
    @rule(data=st.data(), value=st.integers(1, 100))
    def write(self, data: st.DataObject, value: int) -> None:
        block = data.draw(st.integers(0, self.count - 1))
        for view in self.views.values():
            view[block] = value
        self.content[block] = float(value)

    @precondition(lambda self: self.state is not CLOSED and len(self.connectors) < 3)
    @rule(refuses=st.booleans())
    def attach(self, refuses: bool) -> None:
        connector = FakeConnector(fail_open=refuses)
        if self.attempt(lambda: self.cache.attach(connector), 0):
            self.connectors.append(connector)

    @precondition(lambda self: self.connectors and self.state is not CLOSED)
    @rule(data=st.data(), opens=st.booleans(), closes=st.booleans())
    def change_connector(self, data: st.DataObject, opens: bool, closes: bool) -> None:
        connector = data.draw(st.sampled_from(self.connectors))
        # One that is open now must be able to open again: a connector that cannot is not the cache's to repair.
        connector.fail_open, connector.fail_close = not opens and not connector.is_open, not closes

    @precondition(lambda self: self.connectors and self.state is not CLOSED)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        connector = data.draw(st.sampled_from(self.connectors))
        if self.attempt(lambda: self.cache.detach(connector), 0):
            self.connectors.remove(connector)
            assert not connector.is_open

    @precondition(lambda self: self.state not in (NEW, CLOSED))
    @rule()
    def keep_a_view(self) -> None:
        self.kept = self.views["layer0"]

    @precondition(lambda self: self.state is not CLOSED)
    @rule(call=st.sampled_from(["open", "commit", "extend_kv_cache", "sleep", "wake"]))
    def call_out_of_order(self, call: str) -> None:
        allowed = {NEW: ["open"], RESERVED: ["commit"], WARMING: ["extend_kv_cache"], ASLEEP: ["wake"]}
        if call in allowed.get(self.state, []) or (self.state is READY and call in ("extend_kv_cache", "sleep")):
            return
        with pytest.raises(CacheStateError):
            getattr(self.cache, call)(*([1] if call in ("commit", "extend_kv_cache") else []))

    @precondition(lambda self: self.state in (READY, ASLEEP, CLOSED))
    @rule(fault=faults)
    def close(self, fault: int) -> None:
        self.views.clear()
        if self.attempt(self.cache.close, fault):
            self.finish()
        elif self.cache.state is CLOSED:
            self.cache.close()
            self.finish()
        elif self.state is not NEW:
            self.views = views_of(self.cache.buffer, self.geometry)

    def finish(self) -> None:
        if self.kept is not None and self.content and self.content[0] is not UNKNOWN:
            assert float(self.kept[0].mean()) == self.content[0], "a kept view stays readable"
        self.kept = None
        assert self.driver.books() == ({}, [], {})
        self.state, self.count, self.content = CLOSED, 0, []

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check_integrity()
        assert (cache.state, cache.committed_blocks) == (self.state, self.count)
        assert cache.final_blocks == self.final
        assert self.state in (NEW, CLOSED) or cache.base_address == self.base
        assert cache.generation >= self.generation
        self.generation = cache.generation
        assert cache.committed_bytes == sum(self.driver.allocated.values()), "nothing is held that is not accounted for"
        for index, view in enumerate(self.views.values()):
            if self.content:
                blocks = view[: self.count].reshape(self.count, -1)
                low, high = blocks.amin(1).tolist(), blocks.amax(1).tolist()
                wanted = [low[i] if value is UNKNOWN else value for i, value in enumerate(self.content)]
                assert low == wanted, (index, self.content)
                assert all(h == w for h, w, v in zip(high, wanted, self.content, strict=True) if v is not UNKNOWN)
        for bad in (-1, self.count):
            with pytest.raises(LayoutError):
                cache.check_block_ids([bad])
        cache.check_block_ids(range(self.count))

    @invariant()
    def connectors_are_open_exactly_when_ready(self) -> None:
        for connector in getattr(self, "connectors", []):
            if self.state is not READY:
                assert not connector.is_open
            elif connector.is_open:
                nbytes, generation = connector.opened[-1]
                assert nbytes == self.count * self.geometry.block_bytes
                assert generation <= self.cache.generation

    def teardown(self) -> None:
        for connector in getattr(self, "connectors", []):
            connector.fail_close = False
        if hasattr(self, "cache"):
            self.views.clear()
            self.kept = None
            self.cache.close()
            assert self.driver.books() == ({}, [], {})


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=20, deadline=None, derandomize=True)
