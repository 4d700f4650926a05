"""The engine core's half of offload with requests that the test plays: what is stored, loaded, and pinned meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvx.vllm.bridge_offload import OffloadScheduler, OffloadWork, RankReport
from kvx.vllm.bridge_scheduler import BridgeScheduler

SIZE = 4
NULL_BLOCKS = 1


class BlockPool:
    """vLLM's reference counts of cache blocks."""

    def __init__(self, num_blocks: int = 64, hash_block_size: int = SIZE) -> None:
        self.hash_block_size = hash_block_size
        self.blocks = [SimpleNamespace(block_id=index, ref_cnt=0) for index in range(num_blocks)]
        self.freed: list[int] = []

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def take(self, count: int) -> list[int]:
        free = [block for block in self.blocks[NULL_BLOCKS:] if block.ref_cnt == 0][:count]
        assert len(free) == count, "the test's cache is too small"
        self.touch(free)
        return [block.block_id for block in free]

    @property
    def used(self) -> int:
        return sum(block.ref_cnt for block in self.blocks)


def config(*block_sizes: int) -> Any:
    groups = tuple(SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in block_sizes or (SIZE,))
    return SimpleNamespace(transfer_groups=groups, select_transfer_block_ids=tuple)


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    hash_size: int = SIZE
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: Any = None
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    num_prompt_tokens = num_tokens

    @property
    def block_hashes(self) -> list[Any]:
        size = self.hash_size
        return [tuple(self.tokens[: at + size]) for at in range(0, len(self.tokens) - size + 1, size)]


class Engine:
    """vLLM's scheduler as far as offload sees it. `report` plays the workers."""

    def __init__(self, *, ranks: int = 1, host_blocks: int = 16, num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.offload = OffloadScheduler(config(), eviction="lru", num_ranks=ranks)
        self.offload.bind(self.pool)
        self.host_blocks, self.generation = host_blocks, 1
        self.report()

    def report(self, stored: dict[str, int] | None = None, unstored: set[str] | None = None) -> None:
        self.offload.heard(RankReport(self.generation, self.host_blocks, stored or {}, unstored or set()))

    def admit(self, request: Request, computed: int = 0, external: int = 0) -> None:
        if not request.blocks:
            request.blocks = self.pool.take(-(-request.num_tokens // SIZE))
        self.offload.admitted(request, [request.blocks], external)
        request.num_computed_tokens = computed + external

    def step(self, **scheduled: int) -> OffloadWork:
        """Schedule so many tokens of requests, by their ids."""
        requests = {name: self.offload._requests[name].request for name in scheduled}
        work = self.offload.take_work(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (requests[name].blocks,)),
            )
        )
        for name, count in scheduled.items():
            requests[name].num_computed_tokens += count
        return work

    def free(self, request: Request) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(request.blocks)])
        request.blocks = []

    def prefill(self, request: Request) -> None:
        """Admit, compute and store all of it."""
        self.admit(request)
        work = self.step(**{request.request_id: request.num_tokens})
        self.report({copy.name: 1 for copy in work.stores})
        self.free(request)
        self.offload.finished(request)

    @property
    def pins(self) -> int:
        """Tickets that are not finished, but for those of requests that have not been admitted yet."""
        return self.offload._pool.num_in_use - len(self.offload._matched)


def request(name: str, num_tokens: int, first: int = 0) -> Request:
    return Request(name, list(range(first, first + num_tokens)))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_step_stores_the_blocks_that_it_fills_once(engine: Engine) -> None:
    asked = request("r", 11)
    engine.admit(asked)
    (copy,) = engine.step(r=7).stores
    assert copy.blocks == ((asked.blocks[0],),)
    (later,) = engine.step(r=4).stores
    assert later.blocks == ((asked.blocks[1],),)
    assert set(later.host_blocks).isdisjoint(copy.host_blocks)
    asked.tokens.append(11)  # sampled: the third block has its hash, and is full once that token is computed
    assert engine.step(r=0).stores == []
    (last,) = engine.step(r=1).stores
    assert last.blocks == ((asked.blocks[2],),)


def test_tokens_that_are_not_known_yet_are_not_stored(engine: Engine) -> None:
    asked = request("r", 3)
    engine.admit(asked)
    assert engine.step(r=4).stores == [], "one of them is a placeholder"
    asked.tokens.append(3)
    assert len(engine.step(r=1).stores) == 1


def test_a_block_that_host_memory_has_is_not_stored_again(engine: Engine) -> None:
    engine.prefill(request("a", 8))
    asked = request("b", 12)
    engine.admit(asked)
    (copy,) = engine.step(b=12).stores
    assert copy.blocks == ((asked.blocks[2],),)
    other = request("c", 12)
    engine.admit(other)
    assert engine.step(c=12).stores == [], "the store of its third block is on its way"


def test_both_sides_are_pinned_until_the_store_has_ended(engine: Engine) -> None:
    asked = request("r", 8)
    engine.admit(asked)
    (copy,) = engine.step(r=8).stores
    blocks = list(asked.blocks)
    assert not engine.offload.frees_blocks_soon
    engine.free(asked)  # preempted, or ended
    assert [engine.pool.blocks[block].ref_cnt for block in blocks] == [1, 1]
    assert engine.offload.frees_blocks_soon
    assert engine.offload.is_busy
    engine.report({copy.name: 1})
    assert engine.pool.used == engine.pins == 0
    assert engine.pool.freed[-2:] == blocks[::-1], "the last block of a prefix is to be reused first"
    assert not engine.offload.frees_blocks_soon


def test_a_block_is_there_when_all_ranks_have_stored_it() -> None:
    engine = Engine(ranks=2)
    asked = request("r", 9)
    engine.admit(asked)
    (copy,) = engine.step(r=9).stores
    engine.report({copy.name: 1})
    assert engine.offload.match(request("x", 9), 0) == 0
    engine.report({copy.name: 1})
    assert engine.offload.match(request("x", 9), 0) == 8
    assert engine.pool.used == len(asked.blocks)


def test_one_rank_that_failed_is_enough_for_a_block_not_to_be_there() -> None:
    engine = Engine(ranks=2)
    engine.admit(request("r", 9))
    (copy,) = engine.step(r=9).stores
    engine.report({copy.name: 2}, {copy.name})
    assert engine.offload.match(request("x", 9), 0) == 0
    assert engine.pins == 0


def test_a_load_brings_what_is_missing_and_leaves_a_token_to_compute(engine: Engine) -> None:
    engine.prefill(request("a", 16))
    asked = request("b", 16)
    assert engine.offload.match(asked, 0) == 12
    assert engine.offload.match(asked, 4) == 8
    engine.admit(asked, computed=4, external=8)
    (copy,) = engine.step().loads
    assert copy.blocks == ((asked.blocks[1],), (asked.blocks[2],))
    assert (copy.name, copy.generation, copy.first_token) == ("b", 1, 4)
    assert engine.pins == 1
    engine.offload.arrived(["b"], [])
    assert engine.pins == 0
    engine.admit(asked, computed=12)
    assert engine.step(b=4).stores == []


def test_tokens_are_counted_as_vllm_counts_external_hits(engine: Engine) -> None:
    engine.prefill(request("a", 13))
    for name, preemptions, failed in (("b", 0, []), ("c", 1, []), ("d", 0, ["d"])):
        asked = request(name, 13)
        asked.num_preemptions = preemptions
        engine.admit(asked, external=engine.offload.match(asked, 0))
        engine.offload.arrived([name], failed)
    counters = engine.step().counters
    assert counters is not None
    assert (counters["external_tokens"], counters["reloads"], counters["hits"]) == (12, 6, 9)


def test_what_was_matched_stays_until_vllm_loads_it_or_does_not(engine: Engine) -> None:
    """vLLM may let steps pass between the two, and these may store other blocks."""
    engine.prefill(request("a", 9))
    asked, other = request("b", 9), request("c", 9)
    for waiting in (asked, asked, other):
        assert engine.offload.match(waiting, 0) == 8
    for number in range(20):
        engine.prefill(request(f"other {number}", 8, first=100 * (number + 1)))
    engine.admit(asked, external=8)
    (copy,) = engine.step().loads
    assert len(copy.host_blocks) == 2
    engine.offload.arrived(["b"], [])
    engine.offload.finished(other)
    assert engine.offload._pool.num_in_use == 0


def test_vllm_may_load_less_than_was_matched(engine: Engine) -> None:
    engine.prefill(request("a", 13))
    asked = request("b", 13)
    assert engine.offload.match(asked, 0) == 12
    engine.admit(asked, external=8)
    (copy,) = engine.step().loads
    assert copy.blocks == ((asked.blocks[0],), (asked.blocks[1],))
    assert engine.offload.match(asked, 0) == 12, "and it may ask anew"
    engine.admit(asked)
    engine.offload.arrived(["b"], [])
    assert engine.offload._pool.num_in_use == 0


def test_a_hole_ends_what_is_offered(engine: Engine) -> None:
    engine.prefill(request("a", 8))
    other = request("b", 16)
    other.tokens[5] = 99
    assert engine.offload.match(other, 0) == 4
    assert engine.offload.match(request("c", 16, first=1), 0) == 0


def test_a_failed_load_is_not_offered_again(engine: Engine) -> None:
    engine.prefill(request("a", 9))
    asked = request("b", 9)
    assert engine.offload.match(asked, 0) == 8
    engine.admit(asked, external=8)
    engine.offload.arrived(["b"], ["b"])
    assert engine.pins == 0
    assert engine.offload.match(asked, 0) == 0
    assert engine.offload.match(request("c", 9), 0) == 8, "to others it is"
    engine.offload.finished(asked)
    assert engine.offload.match(request("b", 9), 0) == 8, "nor is a later request of that name kept from it"


def test_a_request_that_is_aborted_while_it_loads_leaves_no_pin(engine: Engine) -> None:
    engine.prefill(request("a", 9))
    asked = request("b", 9)
    engine.offload.match(asked, 0)
    engine.admit(asked, external=8)
    engine.offload.finished(asked)
    assert engine.pins == 1, "until the copy has ended"
    engine.offload.arrived(["b"], ["b"])
    assert engine.pins == 0
    assert not engine.offload._requests
    assert not engine.offload._failed


def test_what_was_lost_between_match_and_load_is_a_failure_and_no_wait_for_ever(engine: Engine) -> None:
    engine.prefill(request("a", 9))
    asked = request("b", 9)
    engine.offload.match(asked, 0)
    engine.offload.reset()
    engine.admit(asked, external=8)
    (copy,) = engine.step().loads
    assert copy.generation != engine.generation, "the workers refuse it"
    engine.offload.arrived(["b"], ["b"])
    assert engine.offload.match(asked, 0) == 0


def test_new_host_memory_has_nothing_of_the_old(engine: Engine) -> None:
    engine.prefill(request("a", 9))
    engine.admit(asked := request("b", 9, first=50))
    (copy,) = engine.step(b=9).stores
    engine.generation, engine.host_blocks = 2, 8
    engine.report({copy.name: 1}, {copy.name})
    assert engine.offload.match(request("x", 9), 0) == 0
    engine.free(asked)
    assert engine.pool.used == engine.pins == 0
    engine.host_blocks = 0  # asleep
    engine.report()
    assert engine.offload.match(request("x", 9), 0) == 0
    assert engine.step().stores == []


def test_without_host_blocks_nothing_happens() -> None:
    engine = Engine(host_blocks=0)
    asked = request("r", 8)
    engine.admit(asked)
    work = engine.step(r=8)
    assert (work.loads, work.stores) == ([], [])
    assert engine.offload.match(asked, 0) == 0
    engine.host_blocks = 4
    engine.report()
    asked.tokens += [8]
    (copy,) = engine.step(r=1).stores
    assert len(copy.blocks) == 2, "what was computed before there were any is stored too"


def test_the_workers_hear_of_counters_that_have_changed(engine: Engine) -> None:
    counters = engine.step().counters
    assert counters is not None
    assert counters["blocks"] == 16
    assert not engine.offload.is_busy
    assert engine.step().counters is None
    engine.prefill(request("a", 8))
    assert engine.offload.is_busy, "one more step tells them"
    counters = engine.step().counters
    assert counters is not None
    assert (counters["stores"], counters["used"], counters["pinned"]) == (2, 2, 0)
    assert not engine.offload.is_busy


def test_a_host_block_holds_a_block_of_every_group() -> None:
    offload = OffloadScheduler(config(8, 4), eviction="arc", num_ranks=1)
    pool = BlockPool(hash_block_size=2)
    offload.bind(pool)
    offload.heard(RankReport(1, 4))
    asked = Request("r", list(range(17)), hash_size=2)
    ids = [[10, 11, 12], [20, 21, 22, 23, 24]]
    offload.admitted(asked, ids, 0)
    state = SimpleNamespace(get_block_ids=lambda _: ids)
    (copy,) = offload.take_work(SimpleNamespace(num_scheduled_tokens={"r": 17}, kv_connector_block_state=state)).stores
    assert copy.blocks == ((10, 20, 21), (11, 22, 23))
    offload.heard(RankReport(1, 4, {copy.name: 1}))
    other = Request("x", list(range(17)), hash_size=2)
    assert offload.match(other, 0) == 16
    assert offload.match(other, 4) == 0, "not at the start of a host block"


def test_hashes_of_more_tokens_than_a_block_harm_nobody_who_offloads_nothing() -> None:
    """As with decode context parallelism, which cpu_offload refuses, but which other connectors may be used with."""
    offload = OffloadScheduler(config(8), eviction="lru", num_ranks=1)
    offload.bind(BlockPool(hash_block_size=16))
    asked = Request("r", list(range(40)), hash_size=16)
    assert offload.match(asked, 0) == 0
    offload.admitted(asked, [[1, 2, 3, 4, 5]], 0)
    state = SimpleNamespace(get_block_ids=lambda _: [[1, 2, 3, 4, 5]])
    offload.take_work(SimpleNamespace(num_scheduled_tokens={"r": 40}, kv_connector_block_state=state))
    offload.finished(asked)


def test_a_reset_is_no_work_and_is_told_with_the_next_step() -> None:
    """vLLM resets an engine that it pauses, and refuses what comes next when it does not idle then."""
    engine = Engine()
    first = request("a", 9)
    engine.admit(first)
    (copy,) = engine.step(a=9).stores
    engine.report({copy.name: 1})
    engine.step()
    assert not engine.offload.is_busy
    engine.offload.reset()
    assert not engine.offload.is_busy
    counters = engine.step().counters
    assert counters is not None
    assert counters["used"] == 0


def test_reports_of_several_ranks_are_joined() -> None:
    joined = RankReport(1, 5, {"a": 1, "b": 1}).merged(RankReport(1, 3, {"a": 1}, {"a"}))
    assert joined == RankReport(1, 3, {"a": 2, "b": 1}, {"a"})
    assert RankReport(1, 5).merged(RankReport(2, 5)) == RankReport(2, 0)


def bridge() -> BridgeScheduler:
    transfer = SimpleNamespace(
        kv_connector="KvxConnector", engine_id="e", kv_connector_extra_config={"connectors": ["nixl", "cpu_offload"]}
    )
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0, tensor_parallel_size=1)
    made = BridgeScheduler(SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel), config())
    made.offload.bind(BlockPool())
    made.offload.heard(RankReport(1, 8))
    return made


def test_a_hand_off_comes_before_host_memory_which_comes_when_it_failed() -> None:
    scheduler = bridge()
    first = request("a", 9)
    scheduler.blocks_allocated(first, [[1, 2, 3]], 0)
    state = SimpleNamespace(get_block_ids=lambda _: [[1, 2, 3]])
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 9}, kv_connector_block_state=state, total_num_scheduled_tokens=9
    )
    (copy,) = scheduler.take_work(output).offload.stores
    scheduler.arrived([], [], RankReport(1, 8, {copy.name: 1}))

    asked = request("b", 9)
    asked.kv_transfer_params = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "x", "remote_host": "h",
        "remote_port": 1,
    }  # fmt: skip
    assert scheduler.match(asked, 0) == (9, True)
    scheduler.blocks_allocated(asked, [[4, 5, 6]], 9)
    output = SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=state, total_num_scheduled_tokens=0)
    work = scheduler.take_work(output)
    assert [pull.num_tokens for pull in work.pulls] == [9]
    assert work.offload.loads == []
    scheduler.arrived(["b"], ["b"], None)
    assert scheduler.match(asked, 0) == (8, True)
    scheduler.blocks_allocated(asked, [[4, 5, 6]], 8)
    work = scheduler.take_work(output)
    assert work.pulls == []
    assert [load.blocks for load in work.offload.loads] == [((4,), (5,))]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_requests_no_pin_is_left(seed: int) -> None:
    """Requests that share prefixes are admitted, computed, preempted and aborted; copies end late, well or not."""
    chance = random.Random(seed)
    engine = Engine(host_blocks=6, num_blocks=200)
    waiting: list[Request] = []
    running: list[Request] = []
    loading: dict[str, Request] = {}
    stores: list[str] = []
    for number in range(120):
        if chance.random() < 0.4:
            waiting.append(request(f"r{number}", chance.randint(1, 24), first=chance.choice([0, 0, 100])))
        if waiting:
            asked = waiting.pop()
            found = engine.offload.match(asked, 0)
            assert found < asked.num_tokens
            if chance.random() < 0.2:  # no blocks for it in this step
                waiting.insert(0, asked)
                continue
            engine.admit(asked, external=found)
            if found:
                loading[asked.request_id] = asked
            else:
                running.append(asked)
        scheduled = {
            r.request_id: chance.randint(1, r.num_tokens - r.num_computed_tokens)
            for r in running
            if r.num_computed_tokens < r.num_tokens
        }
        stores += [copy.name for copy in engine.step(**scheduled).stores]
        for asked in [r for r in running if chance.random() < 0.3]:
            running.remove(asked)
            engine.free(asked)
            asked.num_computed_tokens, asked.num_preemptions = 0, 1
            if chance.random() < 0.5:
                engine.offload.finished(asked)
            else:
                waiting.append(asked)
        for name in [name for name in loading if chance.random() < 0.5]:
            asked, failed = loading.pop(name), chance.random() < 0.3
            if chance.random() < 0.3:
                engine.offload.finished(asked)
                engine.free(asked)
            elif failed:
                engine.free(asked)
                asked.num_computed_tokens = 0
                waiting.append(asked)
            else:
                running.append(asked)
            engine.offload.arrived([name], [name] if failed else [])
        ended = [name for name in stores if chance.random() < 0.5]
        stores = [name for name in stores if name not in ended]
        if chance.random() < 0.05:
            engine.generation += 1
        engine.report(dict.fromkeys(ended, 1), {name for name in ended if chance.random() < 0.2})
        engine.offload._pool.check_integrity()
    for asked in [*running, *loading.values()]:
        engine.offload.finished(asked)
        engine.free(asked)
    for asked in waiting:
        engine.offload.finished(asked)
    engine.offload.arrived(list(loading), [])
    engine.report(dict.fromkeys(stores, 1))
    assert engine.pool.used == engine.offload._pool.num_in_use == 0
    assert engine.offload._pool.counters.reloads > 0
    assert engine.offload._pool.counters.evictions > 0
