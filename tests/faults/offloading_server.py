"""One real vLLM server whose cache is too small for what it is asked: blocks leave for host memory and come back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from network import until
from servers_world import DEADLINE_S, DRAIN_S, OPTIONS, Answers, Question, ask_of, tokens_of

from kvx.handshake import request_status
from kvx.servers import Servers
from kvx.verify import engines
from kvx.verify.client import Ask, Client
from kvx.verify.offload import block_bytes

CACHE_BLOCKS, HOST_BLOCKS = 9, 16
TOKENS = 5 * 128 + 40
TRIES = 30


class OffloadingServer:
    """`connector` is what offloads; as ServersWorld, as far as both go."""

    def __init__(self, connector: str, model: Path, logs: Path, answers: Answers) -> None:
        run = engines.RunSettings(
            model=model, connectors=(connector,), offloading=(connector,), max_model_len_tokens=7 * 128,
            small_blocks=CACHE_BLOCKS, options=OPTIONS,
        )  # fmt: skip
        run = replace(run, offload_bytes=HOST_BLOCKS * block_bytes(run))
        self._settings, self._side_port = engines.kvx_single(run, digests=True)
        self._servers, self._client, self._answers = Servers(logs), Client(), answers
        self._numbers, self.sound = itertools.count(100_000), True

    @property
    def url(self) -> str:
        return f"http://{self._settings.host}:{self._settings.port}"

    def open(self) -> None:
        self._servers.__enter__()
        self._servers.start(self._settings)
        self._servers.wait_healthy()

    def close(self) -> None:
        self._client.close()
        self._servers.__exit__(None, None, None)

    def right(self, ask: Ask) -> tuple[int, ...]:
        return self._answers.of(ask)

    def fill_beyond_the_cache(self) -> list[Ask]:
        """Requests whose blocks are all in host memory, and not in the cache but for the last one's."""
        asks = [ask_of(next(self._numbers), TOKENS) for _ in range(3)]
        for ask in asks:
            self._require_right(ask)
        return asks

    def hang_up_in_a_load(self, ask: Ask, other: Ask) -> None:
        """Ask for blocks that are in host memory, and go; again until some of them came back all the same."""
        for _ in range(TRIES):
            self._require_right(other)
            before = self._settled()["reloads"]
            question = Question(self.url, ask)
            until(lambda seen=before: self._requests_inside() or self._offload()["reloads"] > seen, 30.0)
            is_early = not question.has_answer()
            question.hang_up()
            if self._settled()["reloads"] > before and is_early:
                return
        raise AssertionError(f"the load was never met in {TRIES} tries")

    def require_all_back(self) -> None:
        found = self._settled()
        assert found["failed"] == found["digests"]["mismatched"] == 0, found
        until(lambda: not self._usage(), DEADLINE_S + DRAIN_S)

    def _require_right(self, ask: Ask) -> None:
        status, found = Question(self.url, ask).answer()
        assert (status, tokens_of(found)) == (200, self.right(ask))

    def _settled(self) -> dict[str, Any]:
        """The status when nothing is pinned any more, and the last step has told its counters."""
        seen: list[dict[str, Any]] = [{}]

        def is_settled() -> bool:
            found = self._offload()
            seen.append(found)
            is_idle = not (found["pinned"] or found["in_flight"] or self._requests_inside())
            return is_idle and found == seen[-2]

        until(is_settled, DEADLINE_S + DRAIN_S, lambda: f"{seen[-1]}")
        return seen[-1]

    def _offload(self) -> dict[str, Any]:
        found: dict[str, Any] = request_status(engines.HOST, self._side_port)["offload"]
        return found

    def _requests_inside(self) -> float:
        counters = self._client.counters(self.url)
        return counters["vllm:num_requests_running"] + counters["vllm:num_requests_waiting"]

    def _usage(self) -> float:
        return self._client.counters(self.url)["vllm:kv_cache_usage_perc"]
