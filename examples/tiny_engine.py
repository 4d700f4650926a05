"""The smallest engine that adopts kvx's cache: what an engine other than vLLM has to do, from top to bottom.

    python examples/tiny_engine.py --prompt "Why is the sky blue?"          one engine
    python examples/tiny_engine.py --prompt "Why is the sky blue?" --pd     two: prefill hands off to decode

Read it in this order:

    tiny_paging.py         the model's attention over kvx's views; which request has which blocks
    TinyEngine.start       the cache's life: reserve -> commit -> warm up -> measure -> extend
    TinyEngine.generate    greedy decoding, on a GPU by replaying one captured CUDA graph
    prefill and resume     the two halves of a hand-off
    answer_by_two          two engines in two processes, and the little that a router does between them

It computes right answers and is no faster than it has to be: no scheduler, no prefix cache, no attention kernel of its
own. kvx is in the same places in an engine that has all of these.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from tiny_paging import ATTENTION, NULL_BLOCK, Batch, BlockAllocator, Request
from tiny_process import Remote
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from kvx import door
from kvx.cache import ExtensibleKVCache
from kvx.curve import read_curve
from kvx.drivers.base import Driver
from kvx.drivers.host_memory import resident_bytes
from kvx.drivers.select import driver_for
from kvx.errors import TransferError
from kvx.geometry import group_geometry
from kvx.handoff import CacheFollower, EngineInfo, HandoffSettings, HandoffWorker, Pull
from kvx.layout import require_block_compact, resolve_layout
from kvx.registry import connector_classes, need_shareable_memory
from kvx.secret import read_secret
from kvx.sizing import Budget, Measured, Sizing, capacity_for, final_count, gpu_budget, host_budget
from kvx.sizing import Request as LongestRequest
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup, align_capacity
from kvx.tensor import torch_dtype, views_of
from kvx.verify.model import default_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine's. `cache_mib` is the budget on a CPU, `utilization` the share of memory on a GPU (None: all)."""

    model: Path
    device: str = "cpu"
    dtype: str = "float32"
    engine_id: str = "tiny"
    block_size_tokens: int = 16
    max_tokens: int = 512  # of one request, prompt and answer
    max_requests: int = 4  # in one decode step
    cache_mib: int = 256
    utilization: float | None = None
    layout: str | None = None
    connectors: tuple[str, ...] = ("nixl",)
    verify: Literal["off", "all"] = "all"
    transfer_deadline_s: float = 10.0


@dataclass(frozen=True)
class Ticket:
    """What prefill gives the router for decode: where the KV is held, and the token that prefill found anyway.

    No block ids: decode gets those from the engine that owns them, never from what travelled through a router.
    """

    request_id: str
    engine_id: str
    host: str
    port: int
    num_tokens: int
    first_token: int
    signed: str


class TinyEngine:
    """One model on one device, with one growing cache. All calls come from one thread."""

    def __init__(self, settings: Settings) -> None:
        disable_progress_bar()
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if settings.device == "cpu":
            os.environ.setdefault("UCX_TLS", "tcp,self,cma")  # NIXL's fast choice between processes of one host
        self.settings = settings
        self.device = torch.device(settings.device)
        self._handoff = HandoffSettings(
            connectors=settings.connectors, verify=settings.verify, transfer_deadline_s=settings.transfer_deadline_s
        )
        self._undo = contextlib.ExitStack()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: dict[str, list[int]] = {}
        self._ids = itertools.count()

    # Its life: reserve -> commit -> warm up -> measure -> extend -> (work) -> close

    def start(self) -> None:
        """Leaves an engine that is ready to answer and to hand off, on as many blocks as there is room for."""
        self.driver = make_driver(self.device, self.settings.connectors)
        self._before_load = self.driver.memory_info()
        self._load_model()
        self._reserve()
        self._commit()
        self._warm_up()
        self.sizing = self._measure()
        self._extend(self.sizing.num_blocks)

    @torch.no_grad()
    def _load_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            self.settings.model, dtype=torch_dtype(self.settings.dtype), attn_implementation=ATTENTION
        ).to(self.device)
        # Weights are mapped from their file. Read once now, they cannot look like memory that warm-up took.
        for weights in self.model.parameters():
            weights.sum()
        end = self.model.generation_config.eos_token_id
        self._end_tokens = {end} if isinstance(end, int) else set(end or ())

    def _reserve(self) -> None:
        """Reserves addresses for the largest cache that the budget could ever allow. That takes no memory.

        The views on them never change, so everything that captures their addresses stays valid for ever.
        """
        config, settings = self.model.config, self.settings
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        spec = KVCacheSpec.full_attention(
            block_size_tokens=settings.block_size_tokens, num_kv_heads=heads, head_size=size, dtype=settings.dtype
        )
        layers = tuple(f"layer.{index}" for index in range(config.num_hidden_layers))
        self.layout = resolve_layout(override=settings.layout)
        require_block_compact(self.layout)  # connectors copy whole pages
        segments = self.layout.segments(len(layers), heads)
        strides = [len(layers) * spec.page_size_bytes // segments] * segments
        granularity = self.driver.granularity_bytes
        self.budget = self._find_budget()
        # At least what warm-up commits: with a budget below that, measuring has to say so and not this line.
        least = align_capacity(self._blocks_of_longest() + 1, strides, granularity, up=True)
        capacity = max(least, capacity_for(self.budget.nbytes, strides, granularity))
        self.geometry = CacheGeometry(
            layout=self.layout,
            groups=(LayerGroup("full", layers, spec),),
            capacity_blocks=capacity,
            granularity_bytes=granularity,
        )
        self.cache = ExtensibleKVCache(self.driver, self.geometry.segment_table)
        self.cache.open()
        self._undo.callback(self.cache.close)
        self.views = views_of(self.cache.buffer, self.geometry)  # layer -> [B, H, N, C], B = capacity
        self.cache.set_views(self.views)  # from these, never from the buffer's size, comes what connectors register
        # Attached now, opened by the cache itself, and only once it has grown: a transfer library would pin or refuse
        # memory that is to be replaced, and addresses that have none.
        self.connectors = [connector_class() for connector_class in connector_classes(settings.connectors)]
        door.prepare(self._handoff, self.connectors)
        for connector in self.connectors:
            self.cache.attach(connector)

    def _find_budget(self) -> Budget:
        free, total = self._before_load.free_bytes, self._before_load.total_bytes
        if self.device.type == "cpu":
            space = self.settings.cache_mib << 20
            return host_budget(free_bytes=free, total_bytes=total, cache_space_bytes=space)
        return gpu_budget(free_bytes=free, total_bytes=total, utilization=self.settings.utilization)

    def _commit(self) -> None:
        """Backs as many blocks as warm-up addresses, and not one more: they count against what is measured."""
        self.cache.commit(self._blocks_of_longest() + 1)
        self.allocator = BlockAllocator(self.cache.committed_blocks)

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Runs the largest steps over the real views, at the real addresses, and captures the decode step there."""
        self._resident_before = resident_bytes()
        longest = self._admit([0] * (self.settings.max_tokens - 1), 1)
        self._prefill(longest)
        self._finish(longest)
        self._static = self._make_batch([], self.settings.max_requests, self._blocks_of_longest())
        self._static_next = self._next_tokens(self._static)  # the null block is as good as any
        if self.device.type != "cuda":
            return
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(self._graph):
            self._static_next = self._next_tokens(self._static)

    def _measure(self) -> Sizing:
        """What is left *now* is the cache's, less a margin; the ledger (`sizing.ledger`) names every byte.

        On a GPU, torch's allocator keeps what the largest steps took, and so does the graph's pool: all of it is in
        use at this moment, and nothing had to be guessed. The blocks that are committed count back into the cache.
        """
        if self.device.type == "cpu":
            used = {"growth of resident memory in warm-up": max(0, resident_bytes() - self._resident_before)}
        else:
            taken = self._before_load.free_bytes - self.driver.memory_info().free_bytes - self.cache.committed_bytes
            used = {"weights, activations, graph": max(0, taken)}
        measured = Measured(used, transient_peak_bytes=0, proven_blocks=self.cache.committed_blocks)
        longest = LongestRequest(self._blocks_of_longest() + 1, self.settings.max_tokens)
        sizing = final_count(self.budget, measured, self.geometry.segment_table, longest)
        for warning in sizing.warnings:
            logger.warning(warning)
        return sizing

    def _extend(self, num_blocks: int) -> None:
        """Grows the cache in place. Warm-up's garbage is gone, everything reads as zeros, the connectors open.

        The hand-off starts last: from its first message on, peers may read our memory.
        """
        self.cache.extend_kv_cache(num_blocks)
        self.allocator = BlockAllocator(num_blocks)
        info = EngineInfo(  # what two engines compare before the first byte moves
            engine_id=self.settings.engine_id, model=self.settings.model.name, dtype=self.settings.dtype,
            kv_cache_dtype=self.settings.dtype,
        )  # fmt: skip
        secret = read_secret()
        self.worker = HandoffWorker(self._handoff, info, self.connectors, secret=secret, curve=read_curve(secret))
        self._undo.callback(self.worker.close)
        groups = [group_geometry(self.geometry, 0)]
        self.worker.open(groups, self.views, num_blocks, self.cache.generation, self.layout.name)
        # From here on the cache tells the hand-off when memory goes and when there is some again.
        self.cache.attach(CacheFollower(self.worker, lambda: self.cache.committed_blocks))

    def sleep(self) -> None:
        """Gives the cache's memory back; its content is lost, its addresses stay. No request may be in flight."""
        if self._held or self.allocator.num_free != self.allocator.num_blocks - 1:
            raise RuntimeError("requests still have blocks; finish them before the cache sleeps")
        self.cache.sleep()

    def wake(self) -> None:
        """Memory at the same addresses again: the captured graph needs nothing, peers shake hands again."""
        self.cache.wake()

    def close(self) -> None:
        """The hand-off first, which reads the cache; then the cache. Views that live on keep its addresses."""
        self._undo.close()

    # One engine

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy answers, token ids."""
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self._admit(prompt, max_new_tokens))
                requests[-1].tokens.append(self._prefill(requests[-1]))
            self._decode(requests)
        finally:
            for request in requests:
                self._finish(request)
        return [request.answer for request in requests]

    def _admit(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Takes all blocks that the request can need. A real engine takes them one by one, and preempts."""
        end = len(prompt) + max_new_tokens
        if not prompt or max_new_tokens < 1 or end > self.settings.max_tokens:
            raise ValueError(
                f"{len(prompt)} prompt and {max_new_tokens} new tokens: needs at least 1 of each and at most "
                f"{self.settings.max_tokens} in all"
            )
        return Request(list(prompt), len(prompt), end, self.allocator.take(self._num_blocks(end)))

    def _finish(self, request: Request) -> None:
        self.allocator.give_back(request.blocks)

    @torch.no_grad()
    def _prefill(self, request: Request) -> int:
        """Stores the KV of the whole prompt and returns the first token of the answer."""
        ids = torch.tensor([request.tokens])
        positions = torch.arange(len(request.tokens))[None]
        table = torch.tensor([request.blocks])[:, : self._num_blocks(len(request.tokens))]
        batch = Batch(ids.to(self.device), positions.to(self.device), table.to(self.device))
        return int(self._next_tokens(batch)[0])

    def _decode(self, requests: Sequence[Request]) -> None:
        """One token for every request that has not ended, until all have."""
        while running := [request for request in requests if not self._has_ended(request)]:
            for at in range(0, len(running), self.settings.max_requests):
                some = running[at : at + self.settings.max_requests]
                for request, token in zip(some, self._decode_step(some), strict=True):
                    request.tokens.append(token)

    def _has_ended(self, request: Request) -> bool:
        return len(request.tokens) >= request.end or request.tokens[-1] in self._end_tokens

    @torch.no_grad()
    def _decode_step(self, requests: Sequence[Request]) -> list[int]:
        if self._graph is None:  # no larger than these requests need
            width = max(self._num_blocks(len(request.tokens)) for request in requests)
            batch = self._make_batch(requests, len(requests), width)
            return [int(token) for token in self._next_tokens(batch)]
        # The graph reads where it was captured: the same input tensors, and the views, whose addresses have not moved
        # although most of the memory behind them came after the capture.
        batch = self._make_batch(requests, *self._static.table.shape)
        self._static.copy_(batch)
        self._graph.replay()
        return [int(token) for token in self._static_next[: len(requests)].tolist()]

    def _make_batch(self, requests: Sequence[Request], rows: int, width: int) -> Batch:
        """A decode step's input. Rows without a request, and positions without a block, are the null block's."""
        ids, positions = torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int64)
        table = torch.full((rows, width), NULL_BLOCK)
        for row, request in enumerate(requests):
            ids[row, 0], positions[row, 0] = request.tokens[-1], len(request.tokens) - 1
            blocks = torch.tensor(request.blocks[:width])
            table[row, : len(blocks)] = blocks
        return Batch(ids.to(self.device), positions.to(self.device), table.to(self.device))

    def _next_tokens(self, batch: Batch) -> torch.Tensor:
        """[R]. Launches work and waits for nothing, as a graph's capture demands."""
        out = self.model(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, logits_to_keep=1,
            batch=batch, views=list(self.views.values()),
        )  # fmt: skip
        return torch.argmax(out.logits[:, -1], dim=-1)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.block_size_tokens)

    def _blocks_of_longest(self) -> int:
        return self._num_blocks(self.settings.max_tokens)

    # Hand-off: prefill's half

    def prefill(self, prompt: Sequence[int]) -> Ticket:
        """Computes a prompt and holds its blocks for a reader, under a lease."""
        self.collect()
        request = self._admit(prompt, 1)
        first_token = self._prefill(request)  # has waited for the device: the KV is there before a peer may read it
        request_id = f"{self.settings.engine_id}-{next(self._ids)}"
        self._held[request_id] = request.blocks
        self.worker.hold(request_id, [request.blocks[: self._num_blocks(len(prompt))]], len(prompt))
        host, port = self._handoff.side_channel_host, self.worker.port
        signed = self.worker.ticket(request_id, len(prompt))  # empty without a secret
        return Ticket(request_id, self.settings.engine_id, host, port, len(prompt), first_token, signed)

    def collect(self, timeout_s: float = 0.0) -> int:
        """Frees what readers have fetched, or what nobody fetched within the lease. Returns how many are still held.

        An engine that works calls this between steps; one that has nothing to do waits here, without spinning.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            events = self.worker.poll()
            for request_id in events.released | events.expired:
                self.allocator.give_back(self._held.pop(request_id))
            left_s = deadline - time.monotonic()
            if not self._held or left_s <= 0:
                return len(self._held)
            self.worker.wait(left_s)

    # Hand-off: decode's half

    def resume(self, prompt: Sequence[int], ticket: Ticket, max_new_tokens: int) -> list[int]:
        """Fetches the prompt's KV into blocks of our own, and goes on where prefill stopped.

        A real engine computes for other requests while the KV is on its way; this one waits.
        """
        request = self._admit(prompt, max_new_tokens)
        try:
            self._pull(request, ticket)
            request.tokens.append(ticket.first_token)
            self._decode([request])
        finally:
            self._finish(request)
        return request.answer

    def _pull(self, request: Request, ticket: Ticket) -> None:
        name = f"{self.settings.engine_id}-{next(self._ids)}"
        self.worker.pull(
            Pull(
                request_id=name, remote_request_id=ticket.request_id, remote_engine_id=ticket.engine_id,
                host=ticket.host, port=ticket.port, blocks=[request.blocks[: self._num_blocks(ticket.num_tokens)]],
                first_token=0, num_tokens=ticket.num_tokens, ticket=ticket.signed,
            )
        )  # fmt: skip
        while True:  # every step has a deadline, so one of the two comes
            self.worker.wait(60.0)
            events = self.worker.poll()
            if name in events.received:
                return
            if name in events.failed:  # told only once nothing can write into our blocks any more
                raise TransferError(events.failed[name])

    def status(self) -> dict[str, Any]:
        """What the hand-off counted, and the cache's three numbers."""
        cache = {
            "warm_up_blocks": self._blocks_of_longest() + 1,
            "final_blocks": self.cache.final_blocks,
            "capacity_blocks": self.cache.capacity_blocks,
            "free_blocks": self.allocator.num_free,
        }
        return {**self.worker.status(), "cache": cache}


def make_driver(device: torch.device, connectors: Sequence[str]) -> Driver:
    """The memory calls of a device. `DriverUnavailable` says what is missing."""
    driver = driver_for(str(device), shareable=need_shareable_memory(connectors))
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return driver


# The command


def main(
    prompt: str = "Why is the sky blue?",
    pd: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    model: Path | None = None,
    max_new_tokens: int = 32,
    block_size: int = 16,
    decode_block_size: int | None = None,
    cache_mib: int = 256,
    utilization: float | None = None,
) -> None:
    """Answers a prompt with one engine or, with --pd, with two, whose block sizes may differ."""
    settings = Settings(
        model=model or default_model(), device=device, dtype=dtype, block_size_tokens=block_size,
        cache_mib=cache_mib, utilization=utilization,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    text = prompt
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not pd:
        typer.echo(tokenizer.decode(answer_alone(settings, ids, max_new_tokens)))
        return
    by_two, alone, clean = answer_by_two(settings, decode_block_size or block_size, ids, max_new_tokens)
    identical = by_two == alone
    typer.echo(f"prefill + decode: {tokenizer.decode(by_two)}\none engine:       {tokenizer.decode(alone)}")
    typer.echo("identical" if identical else "NOT identical")
    raise typer.Exit(0 if identical and clean else 1)


def answer_alone(settings: Settings, prompt: list[int], max_new_tokens: int) -> list[int]:
    """One engine in this process; shows how its cache came about."""
    engine = TinyEngine(settings)
    engine.start()
    [answer] = engine.generate([prompt], max_new_tokens)
    for event in engine.cache.events:
        typer.echo(f"{event.name:<8} {event.duration_s * 1000:9.2f} ms")
    typer.echo(f"{engine.status()['cache']}\n{engine.sizing.ledger.table()}\n")
    engine.close()
    return answer


def answer_by_two(
    settings: Settings, decode_block_size: int, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], list[int], bool]:
    """Prefill hands off to decode; then prefill answers alone, from KV that it computes again: (both answers, clean).

    In this order, so that decode's cache has never held this prompt: it has nothing but what was handed off.
    """
    settings = replace(settings, utilization=settings.utilization or 0.4)  # two engines on one GPU
    with (
        Remote(TinyEngine, replace(settings, engine_id="prefill")) as prefill,
        Remote(TinyEngine, replace(settings, engine_id="decode", block_size_tokens=decode_block_size)) as decode,
    ):
        for engine in (prefill, decode):  # not at once: each measures what the device has left
            engine.call("start")
        ticket = prefill.call("prefill", prompt)
        by_two = decode.call("resume", prompt, ticket, max_new_tokens)
        held = prefill.call("collect", 10.0)
        [alone] = prefill.call("generate", [prompt], max_new_tokens)
        digests = decode.call("status")["digests"]
    typer.echo(f"digests: {digests['checked']} checked, {digests['mismatched']} differ; requests still held: {held}")
    return by_two, alone, digests["checked"] > 0 and not digests["mismatched"] and not held


if __name__ == "__main__":
    typer.run(main)
