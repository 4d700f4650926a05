"""Ask engines over vLLM's completions API, alone or as a prefill/decode pair, and read their own counters."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvx.errors import EngineError

REQUEST_DEADLINE_S = 600.0
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")

#: What asks a prefill engine to hold the request's blocks for a decode engine, in vLLM's own words.
ASK_FOR_HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Ask:
    """One request: a prompt as text or token ids, greedy, at most `max_tokens` new tokens."""

    request_id: str
    prompt: str | Sequence[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def body(self, **more: Any) -> dict[str, Any]:
        """The JSON body of `/v1/completions`."""
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        made: dict[str, Any] = {
            "model": "kvx",
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "seed": 0,
        }
        if self.stop:
            made["stop"] = list(self.stop)
        if self.ignore_eos:
            made["ignore_eos"] = True
        return {**made, "return_token_ids": True, **more}


@dataclass(frozen=True)
class Answer:
    """What came back: token ids [n], text, and why it ended; `error` instead of all of them when it failed."""

    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    error: str = ""


@dataclass(frozen=True)
class Timing:
    """One streamed request: seconds from asking prefill to decode's first token, of which until prefill had answered,
    and between the tokens after."""

    first_token_s: float
    prefill_s: float
    gaps_s: tuple[float, ...] = field(default=())


class Client:
    """HTTP to a set of engines. Thread-safe; close it at the end."""

    def __init__(self, deadline_s: float = REQUEST_DEADLINE_S) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(timeout=deadline_s, limits=limits, trust_env=False, verify=False)

    def close(self) -> None:
        self._http.close()

    def ask_single(self, url: str, ask: Ask) -> Answer:
        """Ask one engine. A failure is in the answer's `error`, never an exception."""
        try:
            return _answer_of(self._post(url, ask, ask.body()))
        except EngineError as error:
            return Answer(error=str(error))

    def ask_pair(self, prefill_url: str, decode_url: str, ask: Ask) -> Answer:
        """Ask prefill for one token and a hold, then decode with what prefill said about the hold."""
        try:
            return _answer_of(self._post(decode_url, ask, ask.body(kv_transfer_params=self._hold(prefill_url, ask))))
        except EngineError as error:
            return Answer(error=str(error))

    def time_pair(self, prefill_url: str, decode_url: str, ask: Ask) -> Timing:
        """Like `ask_pair`, streamed and timed. Trigger of EngineError: an engine refuses, or too few tokens come."""
        started_s = time.monotonic()
        body = ask.body(kv_transfer_params=self._hold(prefill_url, ask), stream=True)
        prefill_s = time.monotonic() - started_s
        arrivals: list[float] = []
        try:
            with self._http.stream(
                "POST", f"{decode_url}/v1/completions", json=body, headers=_headers(ask)
            ) as response:
                if response.status_code != 200:
                    raise EngineError(f"{ask.request_id}: {decode_url} answered {response.status_code}")
                for line in response.iter_lines():
                    arrivals += [time.monotonic()] * _tokens_in_event(line)
        except httpx.HTTPError as error:
            raise EngineError(f"{ask.request_id}: {decode_url} did not answer ({error!r})") from error
        if len(arrivals) < ask.max_tokens:
            raise EngineError(f"{ask.request_id}: {len(arrivals)} tokens came of {ask.max_tokens}; the hand-off failed")
        gaps = tuple(after - before for before, after in itertools.pairwise(arrivals))
        return Timing(arrivals[0] - started_s, prefill_s, gaps)

    def counters(self, url: str) -> dict[str, float]:
        """The engine's counters, `name` or `name{label=value}` for every label except engine and model."""
        try:
            response = self._http.get(f"{url}/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{url} did not give its metrics ({error!r})") from error
        return parse_counters(response.text)

    def _hold(self, prefill_url: str, ask: Ask) -> Mapping[str, Any]:
        body = ask.body(kv_transfer_params=ASK_FOR_HOLD, max_tokens=1)
        parameters = self._post(prefill_url, ask, body).get("kv_transfer_params")
        if not isinstance(parameters, dict) or not parameters.get("do_remote_prefill"):
            raise EngineError(
                f"{ask.request_id}: {prefill_url} holds no blocks for decode; is its connector configured?"
            )
        return parameters

    def _post(self, url: str, ask: Ask, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.post(f"{url}/v1/completions", json=body, headers=_headers(ask))
        except httpx.HTTPError as error:
            raise EngineError(f"{ask.request_id}: {url} did not answer ({error!r})") from error
        if response.status_code != 200:
            raise EngineError(f"{ask.request_id}: {url} answered {response.status_code}: {response.text[:300]}")
        found = response.json()
        if not isinstance(found, dict):
            raise EngineError(f"{ask.request_id}: {url} answered no JSON object")
        return found


def parse_counters(text: str) -> dict[str, float]:
    """Prometheus text -> values, summed over engines and models."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        labels = [pair for pair in (match["labels"] or "").split(",") if pair]
        kept = sorted(pair.replace('"', "") for pair in labels if not pair.startswith(("engine=", "model_name=")))
        name = match["name"] + (f"{{{','.join(kept)}}}" if kept else "")
        counters[name] = counters.get(name, 0.0) + float(match["value"])
    return counters


def _headers(ask: Ask) -> dict[str, str]:
    return {"X-Request-Id": ask.request_id}


def _answer_of(found: Mapping[str, Any]) -> Answer:
    choice = found["choices"][0]
    return Answer(
        prompt_tokens=tuple(choice.get("prompt_token_ids") or ()),
        tokens=tuple(choice.get("token_ids") or ()),
        text=choice["text"],
        finish_reason=choice.get("finish_reason") or "",
    )


def _tokens_in_event(line: str) -> int:
    """How many new tokens a line of the event stream brings (usage and end lines: none)."""
    if not line.startswith("data: {"):
        return 0
    choices = json.loads(line.removeprefix("data: ")).get("choices") or ()
    return sum(len(choice.get("token_ids") or ()) for choice in choices)
