"""Several engines with the bridge that differ from one another, and a stock one: each is started when it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvx.engine_settings import EngineSettings, bridge
from kvx.handshake import request_status
from kvx.servers import Server, Servers, free_ports, free_run, share_cores
from kvx.verify import engines
from kvx.verify.client import Answer, Ask, Client
from kvx.verify.report import EXTERNAL_HITS, LOCAL_HITS

from .conftest import wait_until

CACHE_TOKENS = 16384
MAX_MODEL_LEN_TOKENS = 2304
CONCURRENCY = 4


@dataclass(frozen=True)
class Member:
    """One engine; its connectors in the order in which it prefers them. `measures`: its cache has no explicit size.

    `stages`: of a pipeline. `arguments`: more of vLLM's. `gpus`: those that it sees, and computes on the first of.
    """

    tp_size: int = 1
    stages: int = 1
    block_size_tokens: int = 64
    connectors: tuple[str, ...] = ("nixl",)
    measures: bool = False
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tp_size * self.stages


@dataclass(frozen=True)
class Running:
    server: Server
    first_side_port: int
    member: Member

    @property
    def url(self) -> str:
        return self.server.url

    def statuses(self) -> list[dict[str, Any]]:
        """Of each rank."""
        ports = range(self.first_side_port, self.first_side_port + self.member.ranks)
        return [request_status(engines.HOST, port) for port in ports]

    def sums(self, section: str, name: str) -> list[int]:
        return [status[section][name] for status in self.statuses()]


class Fleet:
    """Of one model; stops all of them at the end. The stock engine is named `stock`.

    `in_turn`: one request at a time, and the stock engine's answer counts whose prompt it had cached but for the last
    token, as decode has it. So what is computed is the same to the last bit, where numbers are rounded too.
    """

    def __init__(
        self, model: Path, logs: Path, members: dict[str, Member], stock: Member | None = None, *,
        dtype: str = "float32", in_turn: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.members, self._stock_member = model, members, stock or Member()
        self._dtype, self._in_turn = dtype, in_turn
        self.servers, self.client = Servers(logs), Client()
        self._running: dict[str, Running] = {}
        self._stock: Server | None = None

    def __enter__(self) -> Fleet:
        self.servers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.servers.__exit__(None, None, None)

    def get(self, *names: str) -> list[Running]:
        """They are started together where they do not run yet. EngineError: one of them ended."""
        for name in names:
            self.begin(name)
        self.servers.wait_healthy()
        return [self._running[name] for name in names]

    def begin(self, name: str) -> Running:
        """Start it where it does not run yet, and do not wait for it."""
        if name not in self._running:
            self._running[name] = self._start(name, self.members[name])
        return self._running[name]

    def stop(self, *names: str) -> None:
        for name in names:
            running = self._running.pop(name, None)
            if running is not None:
                self.servers.stop(running.server)

    def begin_stock(self) -> Server:
        if self._stock is None:
            stock = self._settings("stock", self._stock_member, free_ports(1)[0])
            self._stock = self.servers.start(replace(stock, environment={**stock.environment, "VLLM_PLUGINS": ""}))
        return self._stock

    def stock_answers(self, asks: Sequence[Ask]) -> list[Answer]:
        """What a single server without the plug-in says."""
        url = self.begin_stock().url
        self.servers.wait_healthy()
        if self._in_turn:
            for ask in asks:
                self.client.ask_single(url, ask)
        return [self.client.ask_single(url, ask) for ask in asks]

    def hand_off(self, prefill: Running, decode: Running, asks: Sequence[Ask]) -> list[Answer]:
        with ThreadPoolExecutor(1 if self._in_turn else CONCURRENCY) as pool:
            return list(pool.map(lambda ask: self.client.ask_pair(prefill.url, decode.url, ask), asks))

    def _settings(self, name: str, member: Member, port: int) -> EngineSettings:
        cores = share_cores(member.stages)  # as a tensor parallel engine's ranks have them
        binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, each)) for each in cores)}
        stages = ("--pipeline-parallel-size", str(member.stages)) if member.stages > 1 else ()
        on_cpu = EngineSettings(
            name=name, model=self.model, port=port, tp_size=member.tp_size, cores=share_cores(1)[0], dtype=self._dtype,
            arguments=(*stages, *member.arguments), environment=binding if stages else {},
            block_size_tokens=member.block_size_tokens, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, kv_space_gib=1,
            explicit_blocks=None if member.measures else CACHE_TOKENS // member.block_size_tokens,
        )  # fmt: skip
        if not member.gpus:
            return on_cpu
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, member.gpus))}
        return replace(on_cpu, device="cuda", eager=False, kv_space_gib=None, explicit_blocks=None, environment=visible)

    def _start(self, name: str, member: Member) -> Running:
        taken: set[int] = set()
        port, side_port = free_run(1, taken), free_run(member.ranks, taken)
        options = {"connectors": list(member.connectors), "side_channel_port": side_port, "verify": "all"}
        engine = self._settings(name, member, port)
        environment = {"VLLM_PLUGINS": "kvx", **engine.environment, **member.environment}
        engine = replace(engine, kv_transfer=bridge(name, options), environment=environment)
        return Running(self.servers.start(engine), side_port, member)


@dataclass(frozen=True)
class Moved:
    """Of all ranks together."""

    num_bytes: int = 0
    num_blocks: int = 0
    external_tokens: int = 0


def require_right(
    fleet: Fleet, prefill: Running, decode: Running, asks: Sequence[Ask], *, left_tokens: int = 0
) -> Moved:
    """Every answer is the stock server's, every byte was compared, nothing was computed again or kept.

    `left_tokens`: of each prompt, how many decode has to compute itself.
    """
    expected = fleet.stock_answers(asks)
    before, hits = decode.statuses(), fleet.client.counters(decode.url)
    answers = fleet.hand_off(prefill, decode, asks)
    assert [answer.error for answer in answers] == [""] * len(asks)
    assert [(a.prompt_tokens, a.tokens, a.text) for a in answers] == [
        (a.prompt_tokens, a.tokens, a.text) for a in expected
    ]
    moved = Moved()
    for rank, (old, new) in enumerate(zip(before, decode.statuses(), strict=True)):
        grown = {
            name: new["transfer"][name] - old["transfer"][name] for name in ("received", "failed", "bytes", "blocks")
        }
        digests = {name: new["digests"][name] - old["digests"][name] for name in ("checked", "expected", "mismatched")}
        assert (grown["received"], grown["failed"]) == (len(asks), 0), f"rank {rank}: {grown}"
        assert digests["checked"] == digests["expected"], f"rank {rank}: {digests}"
        assert digests["mismatched"] == 0, f"rank {rank}: {digests}"
        moved = Moved(moved.num_bytes + grown["bytes"], moved.num_blocks + grown["blocks"])
    found = fleet.client.counters(decode.url)
    external, local = (found.get(name, 0) - hits.get(name, 0) for name in (EXTERNAL_HITS, LOCAL_HITS))
    assert external == sum(len(answer.prompt_tokens) - left_tokens for answer in answers) - local > 0
    wait_until(lambda: prefill.sums("handoff", "holds") == [0] * prefill.member.ranks)
    assert prefill.sums("handoff", "expired") == [0] * prefill.member.ranks
    return replace(moved, external_tokens=int(external))
