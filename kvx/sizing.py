"""How many blocks the cache may have: budgets, margins and the ledger. Pure: every measured number is an argument.

budget   what kvx may plan with                         gpu_budget, host_budget
capacity what address space is reserved for             capacity_for
final    budget - used - growth in warm-up - margin     final_count (measured), fixed_count (explicit sizes)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvx.errors import SizingError
from kvx.spec import SegmentTable, align_capacity

MIB, GIB = 1 << 20, 1 << 30
STOCK_UTILIZATION = 0.92
"""vLLM's own default share of a GPU, which holds where the cache is not extensible."""


class MarginPolicy(StrEnum):
    """How much stays free on purpose after measuring."""

    DEFAULT = "default"
    PEAK = "peak"


@dataclass(frozen=True)
class Budget:
    """Memory that kvx may plan with: `nbytes` of the `free_bytes` of a device (or process limit) of `total_bytes`."""

    nbytes: int
    free_bytes: int
    total_bytes: int
    source: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One consumer and its bytes."""

    consumer: str
    nbytes: int


@dataclass(frozen=True)
class Ledger:
    """Names every byte of the device once: the rows add up to `total_bytes`."""

    rows: tuple[Row, ...]
    total_bytes: int

    def __post_init__(self) -> None:
        found = sum(row.nbytes for row in self.rows)
        assert found == self.total_bytes, f"the ledger's rows add up to {found}, not to {self.total_bytes}"

    def as_dicts(self) -> list[dict[str, str | int]]:
        """The rows for a report in JSON."""
        return [{"consumer": row.consumer, "bytes": row.nbytes} for row in self.rows]

    def table(self) -> str:
        """The rows for a person, in MiB, with a line for the sum."""
        lines = [*self.rows, Row("total", self.total_bytes)]
        width = max(len(row.consumer) for row in lines)
        text = [f"{row.consumer:<{width}}  {row.nbytes / MIB:>12,.1f} MiB" for row in lines]
        return "\n".join([*text[:-1], "-" * len(text[-1]), text[-1]])


@dataclass(frozen=True)
class Sizing:
    """The final count and how it came about. Warnings are for the operator to see, not for a debug log."""

    num_blocks: int
    ledger: Ledger
    warnings: tuple[str, ...]
    explicit: str | None = None
    """The option that fixed the count, or None where it was measured."""


@dataclass(frozen=True)
class Measured:
    """What warm-up showed. `used` names consumers (weights, growth in warm-up, ...) that the budget has to pay for;
    the first commit is not one of them: it counts back into what the cache may take."""

    used: Mapping[str, int]
    transient_peak_bytes: int
    proven_blocks: int
    """Blocks that warm-up ran with: the count never ends below them."""


@dataclass(frozen=True)
class Request:
    """The longest request that must fit: `num_blocks` blocks, over all layer groups, for `max_model_len` tokens."""

    num_blocks: int
    max_model_len_tokens: int


def gpu_budget(
    *,
    free_bytes: int,
    total_bytes: int,
    utilization: float | None,
    extensible: bool = True,
    other_processes: int = 0,
) -> Budget:
    """The budget of a GPU, with `free_bytes` read before the engine loads.

    `utilization` is the share that the user gave, None where nobody gave one. Whether somebody did must be read where
    arguments are parsed: merged with defaults, an explicit 0.92 and no value look the same.
    """
    if utilization is not None and not 0 < utilization <= 1:
        raise SizingError(f"a memory utilization of {utilization}: needs a share above 0 and at most 1")
    if utilization is None and extensible:
        if other_processes:
            raise SizingError(
                f"{other_processes} other process(es) hold memory on this device, and what is free now may not stay "
                "so; give an explicit memory utilization"
            )
        return Budget(free_bytes, free_bytes, total_bytes, "what was free before the engine loaded")
    share = STOCK_UTILIZATION if utilization is None else utilization
    who = "the default" if utilization is None else "an explicit"
    return _limited(int(share * total_bytes), free_bytes, total_bytes, f"{who} utilization of {share}")


def host_budget(*, free_bytes: int, total_bytes: int, cache_space_bytes: int | None, engines: int = 1) -> Budget:
    """The budget of a host: an explicit cache space, else what the process may still take, over the declared engines.

    With an explicit space the budget is the cache's alone: weights are not its business, growth in warm-up is.
    """
    if engines < 1:
        raise SizingError(f"{engines} engines share this host: needs at least 1")
    if cache_space_bytes is None:
        share = "" if engines == 1 else f", shared by {engines} engines"
        return Budget(free_bytes // engines, free_bytes, total_bytes, f"what was free{share}")
    if cache_space_bytes <= 0:
        raise SizingError(
            f"a cache space of {cache_space_bytes} bytes: needs more than 0; unset it to use what is free"
        )
    return _limited(cache_space_bytes, free_bytes, total_bytes, "an explicit cache space")


def margin_bytes(policy: MarginPolicy, *, transient_peak_bytes: int, budget_bytes: int) -> int:
    """What stays free on purpose after measuring."""
    if policy is MarginPolicy.PEAK:
        return transient_peak_bytes + max(GIB, transient_peak_bytes * 3 // 4)
    wanted = max(150 * MIB, transient_peak_bytes // 5, budget_bytes // 50)
    return min(wanted, budget_bytes // 10)


def capacity_for(kv_bytes: int, block_strides_bytes: Sequence[int], granularity_bytes: int) -> int:
    """Blocks to reserve for a cache that can never be larger than `kv_bytes` (budget less what is surely used).

    `block_strides_bytes` has one entry a segment. Rounded up to whole granules: address space costs nothing.
    """
    blocks = kv_bytes // sum(block_strides_bytes)
    if blocks < 1:
        left = f"{kv_bytes} bytes" if kv_bytes >= 0 else f"no bytes ({-kv_bytes} too few)"
        raise SizingError(
            f"{left} are left for the cache, and one block takes {sum(block_strides_bytes)}; raise the budget, "
            "or use a smaller model"
        )
    return align_capacity(blocks, block_strides_bytes, granularity_bytes, up=True)


def final_count(
    budget: Budget,
    measured: Measured,
    table: SegmentTable,
    request: Request,
    policy: MarginPolicy = MarginPolicy.DEFAULT,
) -> Sizing:
    """The measured count: what the budget leaves after `used` and the margin, in whole committed granules."""
    margin = margin_bytes(policy, transient_peak_bytes=measured.transient_peak_bytes, budget_bytes=budget.nbytes)
    room = budget.nbytes - sum(measured.used.values()) - margin
    num_blocks = bisect_right(range(table.capacity_blocks + 1), room, key=table.committed_bytes) - 1
    warnings = budget.warnings
    if num_blocks < measured.proven_blocks:
        num_blocks = measured.proven_blocks
        warnings += (
            f"measuring left {_mib(room)} for the cache, less than the {measured.proven_blocks} blocks that warm-up "
            f"ran with; these are kept, and the margin of {_mib(margin)} is not whole: raise the budget, or lower "
            "the number of tokens in a batch",
        )
    _require_request(num_blocks, request, f"{_mib(budget.nbytes)} ({budget.source})")
    return Sizing(num_blocks, _ledger(budget, measured.used, margin, table, num_blocks), warnings)


def fixed_count(
    budget: Budget,
    used: Mapping[str, int],
    table: SegmentTable,
    request: Request,
    *,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
) -> Sizing:
    """The count that the user fixed, by a number of blocks or by bytes: exactly that, nothing measured."""
    if (num_blocks is None) == (kv_bytes is None):
        raise SizingError("the size was fixed both by blocks and by bytes, or by neither; give one of the two")
    if num_blocks is None:
        assert kv_bytes is not None
        found, explicit = kv_bytes // table.block_bytes, f"an explicit {kv_bytes} bytes"
    else:
        found, explicit = num_blocks, f"an explicit {num_blocks} blocks"
    if not 1 <= found <= table.capacity_blocks:
        raise SizingError(f"{explicit} make {found} blocks: needs at least 1 and at most {table.capacity_blocks}")
    _require_request(found, request, explicit)
    return Sizing(found, _ledger(budget, used, 0, table, found), budget.warnings, explicit)


def agreed_count(sizing: Sizing, num_blocks: int, table: SegmentTable) -> Sizing:
    """This rank's sizing with the smallest count of all ranks; what it gives up becomes a row of its own."""
    if num_blocks == sizing.num_blocks:
        return sizing
    if num_blocks > sizing.num_blocks:
        raise SizingError(f"ranks agreed on {num_blocks} blocks, but this one has room for {sizing.num_blocks} only")
    others = tuple(row for row in sizing.ledger.rows if not row.consumer.startswith(_CACHE))
    cache = _cache_rows(table, num_blocks)
    given_up = sizing.ledger.total_bytes - sum(row.nbytes for row in (*others, *cache))
    rows = (*others, *cache, Row("given up: another rank has room for fewer blocks", given_up))
    return Sizing(num_blocks, Ledger(rows, sizing.ledger.total_bytes), sizing.warnings, sizing.explicit)


_CACHE = "KV cache"


def _cache_rows(table: SegmentTable, num_blocks: int) -> tuple[Row, Row]:
    dense = num_blocks * table.block_bytes
    rounding = table.committed_bytes(num_blocks) - dense
    return Row(f"{_CACHE}: {num_blocks} blocks", dense), Row(f"{_CACHE}: rounding to granules", rounding)


def _ledger(budget: Budget, used: Mapping[str, int], margin: int, table: SegmentTable, num_blocks: int) -> Ledger:
    """What the budget has left after the cache is the margin first, then memory that nobody claims."""
    left = budget.nbytes - sum(used.values()) - table.committed_bytes(num_blocks)
    kept = max(0, min(margin, left))
    rows = [
        Row("in use before the engine loaded", budget.total_bytes - budget.free_bytes),
        Row("outside the budget", budget.free_bytes - budget.nbytes),
        *(Row(consumer, nbytes) for consumer, nbytes in used.items()),
        *_cache_rows(table, num_blocks),
        Row("margin", kept),
        Row("left over" if left >= 0 else "taken beyond the budget", left - kept),
    ]
    return Ledger(tuple(rows), budget.total_bytes)


def _limited(wanted: int, free_bytes: int, total_bytes: int, source: str) -> Budget:
    if wanted <= free_bytes:
        return Budget(wanted, free_bytes, total_bytes, source)
    warning = f"{source} asks for {_mib(wanted)}, but {_mib(free_bytes)} are free; the budget is lowered to that"
    return Budget(free_bytes, free_bytes, total_bytes, f"{source}, lowered to what was free", (warning,))


def _require_request(num_blocks: int, request: Request, source: str) -> None:
    if num_blocks < request.num_blocks:
        raise SizingError(
            f"{source} leaves room for {num_blocks} blocks, but one request of {request.max_model_len_tokens} tokens "
            f"needs {request.num_blocks}; lower the maximum model length, or give the cache more memory"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB"
