"""Two real vLLM servers that hand off either way: what becomes of a failure is the reader's policy.

One fails, the other one recomputes, so that both policies need one start. A third, stock server without any plug-in
says what is right; it is frozen while nobody asks it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import random
import select
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from network import LINK, Hosts, until

from kvx.engine_settings import EngineSettings
from kvx.handshake import request_status
from kvx.servers import Server, Servers
from kvx.verify import engines
from kvx.verify.client import ASK_FOR_HOLD, Ask, Client
from kvx.verify.places import DECODE, PREFILL, Place

DEADLINE_S, LEASE_S, GRACE_S, DRAIN_S = 5.0, 8.0, 1.0, 5.0
ANSWER_S = 60.0
"""What a busy machine with two cores needs to compute a prompt again, besides all others."""
RECOVERY_S = 30.0
BLOCKS = 24
TOKENS, FEW_TOKENS = 1000, 150
SECRET = "tickets of the servers that faults come to"
OPTIONS = {
    "transfer_deadline_s": DEADLINE_S, "lease_s": LEASE_S, "grace_s": GRACE_S, "max_hold_s": LEASE_S,
    "allow_unauthenticated_data_plane": True,
}  # fmt: skip


class Question:
    """A request to one server, which has been asked and not been answered."""

    def __init__(self, url: str, ask: Ask, **more: Any) -> None:
        self.started = time.monotonic()
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S + ANSWER_S)
        headers = {"Content-Type": "application/json", "X-Request-Id": ask.request_id}
        self._connection.request("POST", "/v1/completions", json.dumps(ask.body(**more)), headers)

    def answer(self) -> tuple[int, dict[str, Any]]:
        """HTTP's status, and the body. TimeoutError when there is none in time."""
        response = self._connection.getresponse()
        found = json.loads(response.read())
        self._connection.close()
        return response.status, found

    def has_answer(self) -> bool:
        return bool(select.select([self._connection.sock], [], [], 0)[0])

    def hang_up(self) -> None:
        self._connection.close()


@dataclass
class Side:
    """One of the two servers, whichever of its processes is alive. `starts` are numbered in the names of its logs."""

    index: int
    policy: str
    settings: EngineSettings
    side_channel: tuple[str, int]
    server: Server | None = None
    starts: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.settings.port}"

    def status(self) -> dict[str, Any]:
        return request_status(*self.side_channel)

    def kill(self) -> None:
        assert self.server is not None
        for process in self.server.processes():
            process.kill()


class ServersWorld:
    """`has_link`: the two are on two hosts, and what they say goes over a link that can be slow, or cut."""

    def __init__(self, connector: str, model: Path, logs: Path, answers: Answers) -> None:
        self.connector, self.has_link = connector, connector in ("nixl", "mooncake")
        self.servers, self.hosts, self.client = Servers(logs), Hosts(), Client()
        self._answers, self._numbers, self.sound = answers, itertools.count(), True
        self._run = engines.RunSettings(
            model=model, connectors=(connector,), max_model_len_tokens=1536, explicit_blocks=BLOCKS, options=OPTIONS,
            places=places_of(self.hosts) if self.has_link else {},
        )  # fmt: skip

    def open(self) -> None:
        if self.has_link:
            self.hosts.open()
        self.servers.__enter__()
        pair = engines.kvx_pair(self._run, digests=True, environment={"KVX_SECRET": SECRET})
        ports = pair.prefill_side_port, pair.decode_side_port
        roles = ((PREFILL, "fail"), (DECODE, "recompute"))
        self.sides = [
            Side(index, policy, _with_policy(engine, policy), (self._run.place(role).side_channel_host, port))
            for index, ((role, policy), engine, port) in enumerate(zip(roles, pair.engines, ports, strict=True))
        ]
        for side in self.sides:
            self.begin_start(side)
        self.servers.wait_healthy()

    def close(self) -> None:
        self.client.close()
        self.servers.__exit__(None, None, None)
        if self.has_link:
            self.hosts.close()

    def with_policy(self, policy: str) -> tuple[Side, Side]:
        """(owner, reader): the reader's policy counts."""
        reader = next(side for side in self.sides if side.policy == policy)
        return self.sides[1 - reader.index], reader

    def begin_start(self, side: Side) -> None:
        """Under its name and at its ports, as ever."""
        if side.server is not None:
            self.servers.stop(side.server)
        side.server = self.servers.start(replace(side.settings, name=f"{side.settings.name}-{next(side.starts)}"))

    def start_again(self, side: Side) -> None:
        self.begin_start(side)
        self.servers.wait_healthy()

    # Requests

    def ask(self, num_tokens: int = TOKENS) -> Ask:
        """One that nobody has asked before: no cache knows a block of it."""
        return ask_of(next(self._numbers), num_tokens)

    def right(self, ask: Ask) -> tuple[int, ...]:
        return self._answers.of(ask)

    def hold(self, owner: Side, ask: Ask) -> dict[str, Any]:
        """What prefill says of the blocks that it holds."""
        status, found = Question(owner.url, ask, kv_transfer_params=ASK_FOR_HOLD, max_tokens=1).answer()
        assert status == 200, found
        params: dict[str, Any] = found["kv_transfer_params"]
        assert params["do_remote_prefill"]
        return params

    def recover(self, owner: Side, reader: Side) -> float:
        """The next requests are handed off again, by themselves: seconds until the first one was."""
        started = time.monotonic()
        while True:
            ask, before = self.ask(FEW_TOKENS), reader.status()["transfer"]["received"]
            status, found = Question(reader.url, ask, kv_transfer_params=self.hold(owner, ask)).answer()
            if status == 200:
                assert tokens_of(found) == self.right(ask)
            if reader.status()["transfer"]["received"] > before:
                return time.monotonic() - started
            assert time.monotonic() - started < RECOVERY_S, found

    # What must hold afterwards

    def require_blocks_back(self) -> None:
        """Within deadline, lease and drain, says vLLM and say the hand-offs."""
        kept: dict[str, Any] = {}

        def is_back() -> bool:
            for side in self.sides:
                usage = self.client.counters(side.url)["vllm:kv_cache_usage_perc"]
                kept[side.settings.name] = usage, side.status()["handoff"]["holds"]
            return all(not any(found) for found in kept.values())

        until(is_back, DEADLINE_S + LEASE_S + GRACE_S + DRAIN_S, lambda: f"(usage, holds): {kept}")

    def require_no_internal_errors(self) -> None:
        for side in self.sides:
            status = side.status()
            assert status["side_channel"]["internal_errors"] == 0
            assert status["digests"]["mismatched"] == 0


class Answers:
    """Those of a stock server."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._servers, self._client = Servers(logs), Client()
        self._run = engines.RunSettings(model=model, max_model_len_tokens=1536, explicit_blocks=BLOCKS)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._servers)
            self._server = self._servers.start(engines.baseline(self._run))
            self._servers.wait_healthy()
            self._server.pause()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._servers.__exit__(None, None, None)

    @functools.cache  # noqa: B019  it lives as long as the tests
    def of(self, ask: Ask) -> tuple[int, ...]:
        self._server.resume()
        found = self._client.ask_single(self._server.url, ask)
        self._server.pause()
        assert found.tokens, found.error
        return found.tokens


def places_of(hosts: Hosts) -> dict[str, Place]:
    """Prefill on one of two hosts, decode on the other; UCX is told of their link alone."""
    environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
    return {
        role: Place(prefix=("ip", "netns", "exec", name), host=host, side_channel_host=address, environment=environment)
        for role, name, host, address in zip((PREFILL, DECODE), hosts.names, hosts.http, hosts.addresses, strict=True)
    }


def ask_of(number: int, num_tokens: int) -> Ask:
    prompt = random.Random(number).choices(range(1000, 20000), k=num_tokens)
    return Ask(f"request-{number}", tuple(prompt), 8, ignore_eos=True)


def tokens_of(found: dict[str, Any]) -> tuple[int, ...]:
    return tuple(found["choices"][0]["token_ids"])


def _with_policy(engine: EngineSettings, policy: str) -> EngineSettings:
    assert engine.kv_transfer is not None
    extra = {**engine.kv_transfer["kv_connector_extra_config"], "failure_policy": policy}
    return replace(engine, kv_transfer={**engine.kv_transfer, "kv_connector_extra_config": extra})
