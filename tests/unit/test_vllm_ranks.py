"""Which ranks of prefill a worker of decode asks, by the tensor parallel size that kv_transfer_params name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_digest import cache

from kvx.errors import KVXError
from kvx.geometry import HeadRange
from kvx.handoff import Pull, Waiting
from kvx.layout import KVCacheLayout
from kvx.vllm.bridge_scheduler import PullWork, RemotePrefill, WaitWork

# vLLM takes long to import, and warns of things of its own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Asked:
    """The hand-off of a worker, which only writes down."""

    def __init__(self) -> None:
        self.pulls: list[Pull] = []
        self.kept: list[Waiting] = []
        self.counted: list[KVXError] = []

    def pull(self, pull: Pull) -> None:
        self.pulls.append(pull)

    def keep(self, waiting: Waiting) -> None:
        self.kept.append(waiting)

    def count_failure(self, error: KVXError) -> None:
        self.counted.append(error)


def worker(rank: int, tp_size: int, heads: tuple[int, ...] = (4,), pp_size: int = 1) -> tuple[Any, Asked]:
    from kvx.vllm.bridge_worker import BridgeWorker

    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
    made: Any = object.__new__(BridgeWorker)
    asked = Asked()
    made._vllm_config = SimpleNamespace(parallel_config=parallel)
    made._kv_cache_config = SimpleNamespace(transfer_groups=heads)
    made._counts_on_zeros = False
    made._geometries = tuple(SimpleNamespace(heads=HeadRange(0, 1, total)) for total in heads)
    made._tokens_asked, made._refused = {}, {}
    made._handoff = asked
    return made, asked


def remote(tp_size: int | None) -> RemotePrefill:
    return RemotePrefill("p", "theirs", "h", 5600, "ticket", tp_size)


def pulled(rank: int, tp_size: int, theirs: int | None, heads: tuple[int, ...] = (4,)) -> Pull:
    made, asked = worker(rank, tp_size, heads)
    made._pull(PullWork("r", remote(theirs), ((1, 2),) * len(heads), 0, 32))
    (pull,) = asked.pulls
    return pull


def read(pull: Pull) -> list[tuple[int, tuple[HeadRange | None, ...], int]]:
    return [(pull.port + share.owner_rank, share.heads, share.claims) for share in pull.shares]


@pytest.mark.parametrize("counts_on_zeros", [True, False])
def test_where_vllm_counts_on_zeros_the_tail_is_zero_before_the_pull_begins(counts_on_zeros: bool) -> None:
    made, asked = worker(0, 1)
    made._views, geometry = cache(KVCacheLayout.LBHNC, 8)
    made._geometries, made._counts_on_zeros = (geometry,), counts_on_zeros
    for view in made._views.values():
        view.fill_(1.0)
    tails = []
    asked.pull = lambda _: tails.append(made._views["a"][2, :, 5:].sum().item())  # type: ignore[method-assign]
    made._pull(PullWork("told", remote(1), (), 0, 0))
    made._pull(PullWork("r", remote(1), ((1, 2),), 0, 13))
    assert tails == [2 * 3 * 8, 0 if counts_on_zeros else 2 * 3 * 8]
    assert made._views["a"].sum().item() == 2 * (16 * 8 - (3 if counts_on_zeros else 0)) * 8


@pytest.mark.parametrize("theirs", [2, None])
@pytest.mark.parametrize("rank", [0, 1])
def test_as_many_ranks_are_asked_one_by_one(theirs: int | None, rank: int) -> None:
    pull = pulled(rank, 2, theirs)
    assert (pull.port, pull.shares, pull.ticket) == (5600 + rank, (), "ticket")


def test_one_rank_reads_all_heads_of_two() -> None:
    assert read(pulled(0, 1, 2)) == [(5600, (HeadRange(0, 2, 4),), 1), (5601, (HeadRange(2, 2, 4),), 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_read_half_of_one_each_and_it_waits_for_both(rank: int) -> None:
    assert read(pulled(rank, 2, 1)) == [(5600, (HeadRange(2 * rank, 2, 4),), 2)]


def test_a_head_that_two_ranks_have_is_read_from_one_and_the_other_is_told() -> None:
    assert read(pulled(0, 1, 2, heads=(1,))) == [(5600, (HeadRange(0, 1, 1),), 1), (5601, (None,), 1)]


def test_the_ranks_of_a_later_stage_are_counted_from_that_stage() -> None:
    made, asked = worker(1, 1, pp_size=2)  # the one rank of the second stage
    made._pull(PullWork("r", remote(2), ((1, 2),), 0, 32))
    assert [port for port, _, _ in read(asked.pulls[0])] == [5602, 5603]


def test_heads_that_cannot_be_dealt_out_fail_that_hand_off() -> None:
    made, asked = worker(0, 1, heads=(4,))
    made._pull(PullWork("r", remote(3), ((1, 2),), 0, 32))
    assert asked.pulls == []
    assert "4 KV heads cannot be dealt out to 3 ranks" in made._refused["r"].text
    assert len(asked.counted) == 1
    made._keep(WaitWork("w", remote(3)))
    assert asked.kept == [], "its pull will say why"


@pytest.mark.parametrize(
    ("rank", "tp_size", "theirs", "first", "ranks"),
    [(0, 1, 2, 5600, (0, 1)), (1, 2, 1, 5600, (0,)), (1, 2, 2, 5601, (0,)), (1, 2, None, 5601, (0,))],
)
def test_the_holds_of_all_ranks_that_will_be_asked_are_renewed(
    rank: int, tp_size: int, theirs: int | None, first: int, ranks: tuple[int, ...]
) -> None:
    made, asked = worker(rank, tp_size)
    made._keep(WaitWork("w", remote(theirs)))
    assert asked.kept == [Waiting("w", "theirs", "p", "h", first, "ticket", ranks)]


def test_what_is_not_worth_reading_is_told_to_all_ranks() -> None:
    made, asked = worker(0, 1)
    made._pull(PullWork("r", remote(2), (), 0, 0))
    assert [pull.num_tokens for pull in asked.pulls] == [0]
    assert [port for port, _, _ in read(asked.pulls[0])] == [5600, 5601]
