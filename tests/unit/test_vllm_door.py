"""The bridge's half of the door: what may be configured where, and what travels over HTTP."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from test_pulls import Pair

from kvx.engine_side import HandoffEvents
from kvx.errors import ConnectorError
from kvx.secret import Secret
from kvx.ticket import read_ticket
from kvx.vllm import settings
from kvx.vllm.bridge_scheduler import BridgeScheduler, PullWork, RemotePrefill

KEY = "a secret for tests, and for nothing else"


def vllm_config(**extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector="KvxConnector", engine_id="prefill", kv_connector_extra_config=extra)
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0, tensor_parallel_size=1)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


@pytest.mark.parametrize("name", ["secret", "secret_file", "KVX_SECRET", "kvx_secret_file"])
def test_a_secret_among_the_options_is_refused_by_name_and_not_shown(name: str) -> None:
    with pytest.raises(ConnectorError, match=f"has {name}, and vLLM logs all of it") as raised:
        settings.from_vllm(vllm_config(**{name: KEY}))
    assert KEY not in str(raised.value)


def prefilled(monkeypatch: pytest.MonkeyPatch, secret: str | None = KEY) -> dict[str, Any]:
    """The kv_transfer_params of a finished prefill."""
    monkeypatch.delenv("KVX_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("KVX_SECRET", secret)
    scheduler = BridgeScheduler(
        vllm_config(side_channel_host="127.0.0.1", side_channel_port=5600, lease_s=20.0), CacheConfig()
    )
    scheduler.listens_at(5600, ["first", "second"])
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=32,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"), num_prompt_tokens=32,
    )  # fmt: skip
    is_kept, params = scheduler.finished(request, [[1, 2]])
    assert is_kept
    assert params is not None
    return params


class CacheConfig:
    transfer_groups = (SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16)),)

    def select_transfer_block_ids(self, blocks: list[list[int]]) -> list[list[int]]:
        return blocks


def test_prefill_signs_a_ticket_beside_vllms_own_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = prefilled(monkeypatch, secret=None)
    params = prefilled(monkeypatch)
    assert {name: value for name, value in params.items() if name != "kvx_ticket"} == plain
    before = time.time()
    ticket = read_ticket(Secret(KEY.encode()), params["kvx_ticket"], request_id="r", engine_id="prefill")
    assert (ticket.instances, ticket.host, ticket.port, ticket.num_tokens) == (
        ("first", "second"),
        "127.0.0.1",
        5600,
        32,
    )
    assert 295 < ticket.expires_s - before <= 300, "as long as a hold can be renewed: max_hold_s"
    assert KEY not in json.dumps(params)


@pytest.mark.parametrize(
    ("sent", "taken"), [("text", "text"), (None, ""), (5, ""), (["text"], ""), ("x" * 10_000, ""), ({}, "")]
)
def test_decode_takes_a_ticket_that_is_a_text_and_no_more(
    monkeypatch: pytest.MonkeyPatch, sent: object, taken: str
) -> None:
    params = prefilled(monkeypatch, secret=None)
    found = RemotePrefill.from_params(params | {"kvx_ticket": sent})
    assert (found.malformed, found.ticket) == ("", taken)
    scheduler = BridgeScheduler(vllm_config(), CacheConfig())
    request = SimpleNamespace(
        request_id="d", kv_transfer_params=params | {"kvx_ticket": sent}, num_computed_tokens=0, num_prompt_tokens=32
    )
    scheduler.blocks_allocated(request, [[5, 6]], 31)
    (work,) = scheduler._work.pulls
    assert work.remote.ticket == taken


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"remote_engine_id": None}, "remote_engine_id is NoneType, needs str"),
        ({"remote_request_id": ""}, "remote_request_id is empty, needs str"),
        ({"remote_request_id": "x" * 1025}, "remote_request_id has 1025 characters, at most 1024 fit"),
        ({"remote_host": ["10.0.0.1"]}, "remote_host is list, needs str"),
        ({"remote_host": "h" * 254}, "name 'hhhh.* and a port, which are no address"),
        ({"remote_port": "5600"}, "remote_port is str, needs int"),
        ({"remote_port": True}, "remote_port is bool, needs int"),
        ({"remote_port": 65536}, "'127.0.0.1' and a port, which are no address"),
        ({"remote_port": -1}, "which are no address"),
        ({"remote_port": 10**5000}, "which are no address"),
        ({"tp_size": 0}, "tp_size is 0, needs a number from 1 to 1024"),
        ({"tp_size": 1025}, "tp_size is 1025, needs"),
        ({"tp_size": True}, "tp_size is True, needs"),
        ({"tp_size": "2"}, "tp_size is '2', needs"),
        ({"tp_size": [2] * 99}, "tp_size is .*, needs"),
    ],
)
def test_what_leads_nowhere_is_a_hand_off_that_fails(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], what: str
) -> None:
    """Not a prompt that is computed here whatever the policy says."""
    params = prefilled(monkeypatch, secret=None) | changed
    scheduler = BridgeScheduler(vllm_config(), CacheConfig())
    request = SimpleNamespace(request_id="d", kv_transfer_params=params, num_computed_tokens=0, num_prompt_tokens=32)
    scheduler.added(request)
    assert scheduler._work.waits == [], "nobody to be asked for a longer lease"
    assert scheduler.match(request, 16) == (16, True)
    scheduler.blocks_allocated(request, [[5, 6]], 16)
    (work,) = scheduler._work.pulls
    assert re.search(what, work.remote.malformed)
    assert "pass kv_transfer_params on as prefill gave them" in work.remote.malformed
    assert (work.num_tokens, work.remote.host, work.remote.port) == (16, "unknown", 0)
    scheduler.arrived(["d"], ["d"], None)
    assert scheduler.match(request, 16) == (0, False), "never offered again"


def test_what_leads_nowhere_is_nothing_where_nothing_is_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = BridgeScheduler(vllm_config(), CacheConfig())
    for name, step in (("cached", scheduler.blocks_allocated), ("aborted", None)):
        params = prefilled(monkeypatch, secret=None) | {"remote_port": 0}
        request = SimpleNamespace(request_id=name, kv_transfer_params=params, num_prompt_tokens=32)
        if step is not None:
            step(request, [[5, 6]], 0)
        else:
            assert scheduler.finished(request, [[5, 6]]) == (False, None)
        assert scheduler._work.pulls == []


def asked_by_decode(params: dict[str, Any]) -> PullWork:
    """What decode's scheduler asks its workers for, of a request with these kv_transfer_params."""
    scheduler = BridgeScheduler(vllm_config(), CacheConfig())
    request = SimpleNamespace(
        request_id="r", kv_transfer_params=dict(params), num_computed_tokens=0, num_prompt_tokens=32
    )
    scheduler.blocks_allocated(request, [[7, 8]], 32)
    (work,) = scheduler._work.pulls
    return work


@pytest.mark.parametrize(
    ("altered", "cause"),
    [
        ({"remote_host": "10.0.0.66"}, "leads to 127.0.0.1 port 5600, not to 10.0.0.66"),
        ({"remote_host": "unknown.example"}, "not to unknown.example"),
        ({"remote_port": 5599}, "not to 127.0.0.1 port 5599"),
        ({"remote_request_id": "another"}, "is for request r of engine prefill, not for another"),
        ({"remote_engine_id": "another"}, "not for r of another"),
        ({"kvx_ticket": None}, "has no ticket"),
        ({"kvx_ticket": "no ticket at all"}, "is not one that an engine with our secret signed"),
        ({"kvx_ticket": lambda ticket: ticket[:-8] + "AAAAAAAA"}, "is not one that an engine with our secret signed"),
        ({"kvx_ticket": lambda ticket: ticket[:60]}, "is not one that an engine with our secret signed"),
    ],
    ids=["host", "unknown host", "port", "another request", "another engine", "none", "text", "altered", "cut"],
)  # fmt: skip
def test_what_an_http_client_alters_fails_that_hand_off_and_connects_to_nothing(
    monkeypatch: pytest.MonkeyPatch, altered: dict[str, Any], cause: str
) -> None:
    params = prefilled(monkeypatch)
    for name, value in altered.items():
        params[name] = value(params[name]) if callable(value) else value
    failed = pulled(asked_by_decode(params))
    assert cause in failed.failure()
    assert failed.links == []


def test_another_requests_blocks_are_not_to_be_had_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever numbers a client sends, decode asks for the request, and the owner answers with its own."""
    params = prefilled(monkeypatch)
    right = asked_by_decode(params)
    for blocks in ([[5, 6]], [[2, 1]], [], "none", None):
        assert asked_by_decode(params | {"remote_block_ids": blocks, "remote_num_tokens": 10**6}) == right
    begun = pulled(right)
    assert [link.host for link in begun.links] == ["127.0.0.1"]
    assert begun.events() == HandoffEvents()


def pulled(work: PullWork) -> Pair:
    """A reader's half that has begun it, as the bridge's worker would."""
    pair = Pair()
    pair.side.secret, remote = Secret(KEY.encode()), work.remote
    pair.start(
        request_id=work.request_id, remote_request_id=remote.request_id, remote_engine_id=remote.engine_id,
        host=remote.host, port=remote.port, blocks=work.blocks, first_token=work.first_token,
        num_tokens=work.num_tokens, ticket=remote.ticket,
    )  # fmt: skip
    return pair


def test_allowed_hosts_come_as_a_list_of_json() -> None:
    assert settings.from_vllm(vllm_config(allowed_hosts=["10.0.0.0/8"])).allowed_hosts == ("10.0.0.0/8",)
    with pytest.raises(ConnectorError, match="allowed_hosts has '10/8'"):
        settings.from_vllm(vllm_config(allowed_hosts=["10/8"]))
