"""The scheduler's half of the bridge: which requests hold blocks, which pull them, and what travels over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EngineError
from ..handoff import Failure
from ..ranks import MOST_RANKS
from ..secret import read_secret
from ..ticket import LONGEST_TICKET, Ticket, write_ticket
from . import allocation, settings
from .bridge_offload import OffloadScheduler, OffloadWork, RankReport
from .steps import CoreSteps

ABSENT = -1
#: vLLM's BlockPool keeps block 0 back and puts it where a sliding window has let a block go.
NULL_BLOCK = 0
LONGEST_HOST = 253
#: Of engines and requests, as the side channel takes them.
LONGEST_NAME = 1024
#: Where a request's `kv_transfer_params` say that it was computed here because its hand-off failed, and why.
FAILURE = "kvx_failure"
#: kvx's own field of `kv_transfer_params`, beside vLLM's.
TICKET = "kvx_ticket"


@dataclass(frozen=True)
class HoldWork:
    """Keep a finished prefill's blocks until decode has read them. `blocks[group]` is indexed by position."""

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int


@dataclass(frozen=True)
class RemotePrefill:
    """The hand-off that `kv_transfer_params` describe. They come from an HTTP client: checked, not trusted."""

    engine_id: str
    request_id: str
    host: str
    port: int
    #: Checked by the worker's half, where its failure is a failed hand-off; empty where the client sent none.
    ticket: str = ""
    #: Its tensor parallel size, whose ranks listen one after the other; None where nobody said: the same as ours.
    tp_size: int | None = None
    #: What is wrong with the rest, in words: it fails as any other hand-off, under the same policy.
    malformed: str = ""

    @classmethod
    def of(cls, request: Any) -> RemotePrefill | None:
        """Where a request's KV is to come from; None where it asks for no hand-off, or has had its one."""
        params = request.kv_transfer_params
        return cls.from_params(params) if params and params.get("do_remote_prefill") else None

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RemotePrefill:
        """With the name of a field that is missing or of the wrong kind in `malformed`."""
        wanted = {"remote_engine_id": str, "remote_request_id": str, "remote_host": str, "remote_port": int}
        for name, kind in wanted.items():
            value = params.get(name)
            if not isinstance(value, kind) or not value or isinstance(value, bool):
                found = "empty" if isinstance(value, kind) and not value else type(value).__name__
                return cls.nowhere(f"kv_transfer_params.{name} is {found}, needs {kind.__name__}")
            if isinstance(value, str) and len(value) > LONGEST_NAME:
                return cls.nowhere(f"kv_transfer_params.{name} has {len(value)} characters, at most {LONGEST_NAME} fit")
        host, port = params["remote_host"], params["remote_port"]
        if not 0 < port < 65536 or len(host) > LONGEST_HOST:
            return cls.nowhere(f"kv_transfer_params name {host!r:.80} and a port, which are no address")
        ticket, tp_size = params.get(TICKET), params.get("tp_size")
        if tp_size is not None and (type(tp_size) is not int or not 0 < tp_size <= MOST_RANKS):
            return cls.nowhere(f"kv_transfer_params.tp_size is {tp_size!r:.80}, needs a number from 1 to {MOST_RANKS}")
        return cls(
            params["remote_engine_id"],
            params["remote_request_id"],
            params["remote_host"],
            params["remote_port"],
            ticket if isinstance(ticket, str) and len(ticket) <= LONGEST_TICKET else "",
            tp_size,
        )

    @classmethod
    def nowhere(cls, malformed: str) -> RemotePrefill:
        """Its fields are fit for a log; nothing is connected to."""
        what_to_do = "pass kv_transfer_params on as prefill gave them"
        return cls("unknown", "unknown", "unknown", 0, malformed=f"{malformed}; {what_to_do}")


@dataclass(frozen=True)
class PullWork:
    """Read `num_tokens` from `first_token` on; with none to read, only tell the owner that it may free its blocks."""

    request_id: str
    remote: RemotePrefill
    blocks: tuple[tuple[int, ...], ...]
    first_token: int
    num_tokens: int


@dataclass(frozen=True)
class WaitWork:
    """Renew the hold of a request until its pull begins."""

    request_id: str
    remote: RemotePrefill


@dataclass
class StepWork:
    """All that one engine step hands to the workers."""

    holds: list[HoldWork] = field(default_factory=list)
    pulls: list[PullWork] = field(default_factory=list)
    waits: list[WaitWork] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    offload: OffloadWork = field(default_factory=OffloadWork)
    #: Nothing is scheduled in this step, so a worker may wait for a transfer instead of spinning.
    idle: bool = False
    #: The step's number, and up to which one the engine core has read what steps told.
    number: int = 0
    read: int = 0


class BridgeScheduler:
    """Knows requests and block ids; touches no memory and no socket."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._kv_cache_config = kv_cache_config
        self._settings = settings.from_vllm(vllm_config)
        self._secret = read_secret()
        self._port = settings.engine_port(vllm_config)
        self._instances: tuple[str, ...] = ()
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._scratch_blocks = allocation.scratch_blocks(kv_cache_config)
        self._left_tokens = allocation.left_tokens(kv_cache_config)
        self._work = StepWork()
        self.steps = CoreSteps()
        self._pulling: dict[str, dict[str, Any]] = {}  # request -> its kv_transfer_params
        self.offload = OffloadScheduler(
            kv_cache_config,
            eviction=self._settings.offload_eviction,
            num_ranks=vllm_config.parallel_config.world_size,
        )

    def listens_at(self, port: int, instances: Sequence[str]) -> None:
        """The first rank's side channel port, which a configured 0 leaves to the system; and who the ranks are."""
        self._port, self._instances = port, tuple(instances)

    def added(self, request: Any) -> None:
        """vLLM has queued the request; when it will have blocks for it nobody knows."""
        if self._left_tokens and (request.kv_transfer_params or {}).get("do_remote_decode"):
            _leave_last_token(request)
        remote = RemotePrefill.of(request)
        if remote is not None and not remote.malformed:
            self._work.waits.append(WaitWork(request.request_id, remote))

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond those already here, and whether they load in background.

        From the prefill side where there is one, otherwise from host memory.
        """
        if RemotePrefill.of(request) is not None:
            tokens = self._handed_off_tokens(request) - num_computed_tokens
        else:
            tokens = self.offload.match(request, num_computed_tokens)
        return (tokens, True) if tokens > 0 else (0, False)

    def blocks_allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Called when vLLM has given the request its blocks; once more after the load, with nothing left to do."""
        params = request.kv_transfer_params
        remote = RemotePrefill.of(request)
        if remote is not None:
            # Once: a hand-off that failed is never offered again.
            params["do_remote_prefill"] = False
            params.pop(FAILURE, None)  # ours to say
        chosen = self._kv_cache_config.select_transfer_block_ids([list(group) for group in block_ids])
        self.offload.admitted(request, chosen, 0 if remote is not None else num_external_tokens)
        if remote is None or (remote.malformed and not num_external_tokens):
            return
        end = self._handed_off_tokens(request)
        first_token = end - num_external_tokens
        blocks = self._positions(block_ids, end)
        if num_external_tokens > 0:
            self._require_states(request.request_id, blocks)
            self._pulling[request.request_id] = params
        self._work.pulls.append(PullWork(request.request_id, remote, blocks, first_token, num_external_tokens))

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks stay, and the parameters that lead the decode side to them."""
        self.offload.finished(request)
        params = request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            # It ended before its hand-off began: the prefill side need not keep the blocks.
            remote = RemotePrefill.from_params(params)
            params["do_remote_prefill"] = False
            if not remote.malformed:
                self._work.pulls.append(PullWork(request.request_id, remote, (), 0, 0))
            return False, None
        if request.request_id in self._pulling:
            self._work.cancels.append(request.request_id)
            return False, None
        told = {FAILURE: params[FAILURE]} if FAILURE in params and not params.get("do_remote_decode") else None
        # A prefill that was aborted, or that produced nothing, hands nothing over.
        if not params.get("do_remote_decode") or request.status.name not in (
            "FINISHED_LENGTH_CAPPED",
            "FINISHED_STOPPED",
        ):
            return False, told
        return self._hold(request, block_ids)

    def failed(self, failures: Mapping[str, Failure]) -> None:
        """Why hand-offs have failed; it comes no later than `arrived` of the same requests.

        It goes into the request's own parameters, and from there into its answer where vLLM gives one.
        """
        for request_id, failure in failures.items():
            params = self._pulling.get(request_id)
            if params is not None:
                params[FAILURE] = {"cause": failure.cause, "peer": failure.peer}

    def arrived(self, request_ids: Iterable[str], failed: Iterable[str], report: RankReport | None) -> None:
        """These pulls and loads have ended, one way or the other; and what the ranks say of their host blocks."""
        for request_id in request_ids:
            self._pulling.pop(request_id, None)
        self.offload.arrived(request_ids, failed)
        if report is not None:
            self.offload.heard(report)

    def take_work(self, scheduler_output: Any) -> StepWork:
        """What has gathered since the last step, and the stores of this one."""
        work, self._work = self._work, StepWork()
        begun = {pull.request_id for pull in work.pulls}
        work.waits = [wait for wait in work.waits if wait.request_id not in begun]
        work.offload = self.offload.take_work(scheduler_output)
        work.idle = scheduler_output.total_num_scheduled_tokens == 0
        work.number, work.read = self.steps.hand_out()
        return work

    def _hold(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        blocks = self._positions(block_ids, request.num_computed_tokens)
        if not any(block != ABSENT for group in blocks for block in group):
            return False, None
        self._work.holds.append(HoldWork(request.request_id, blocks, request.num_computed_tokens))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._settings.side_channel_host,
            "remote_port": self._port,
            "remote_block_ids": [
                list(group if scratch is None else group[-1:])
                for group, scratch in zip(blocks, self._scratch_blocks, strict=True)
            ],
            "remote_num_tokens": request.num_computed_tokens,
            "tp_size": self._tp_size,
            **self._ticket(request.request_id, request.num_computed_tokens),
        }

    def _ticket(self, request_id: str, num_tokens: int) -> dict[str, str]:
        if self._secret is None:
            return {}
        ticket = Ticket(
            request_id=request_id,
            engine_id=self._engine_id,
            instances=self._instances,
            host=self._settings.side_channel_host,
            port=self._port,
            num_tokens=num_tokens,
            expires_s=time.time() + max(self._settings.lease_s, self._settings.max_hold_s),  # renewals count
        )
        return {TICKET: write_ticket(self._secret, ticket)}

    def _handed_off_tokens(self, request: Any) -> int:
        """Of a prompt, those that come from the prefill side where nothing is cached here."""
        return max(0, int(request.num_prompt_tokens) - self._left_tokens)

    def _require_states(self, request_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """EngineError: no block for a state. Nothing would be brought then, and nobody would miss it."""
        for group, scratch in zip(blocks, self._scratch_blocks, strict=True):
            if scratch is not None and (not group or group[-1] == ABSENT):
                raise EngineError(
                    f"vLLM has given request {request_id} no block for a state, so kvx cannot load it: run this model "
                    "without the bridge"
                )

    def _positions(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Block lists of the transferable groups, by position; vLLM's null block is where a window has moved on.

        A state is at the position of the last of the `num_tokens` that it has taken in.
        """
        chosen = self._kv_cache_config.select_transfer_block_ids([list(group) for group in block_ids])
        lists = (tuple(ABSENT if block == NULL_BLOCK else block for block in group) for group in chosen)
        return tuple(
            group if scratch is None else _state_at(group, scratch, num_tokens)
            for group, scratch in zip(lists, self._scratch_blocks, strict=True)
        )


def _state_at(group: tuple[int, ...], scratch: int, num_tokens: int) -> tuple[int, ...]:
    """vLLM keeps a request's running state in the last block before those for drafts, whatever is before it."""
    blocks = group[: max(1, len(group) - scratch)]
    return (ABSENT,) * (num_tokens - 1) + blocks[-1:] if blocks and num_tokens else ()


def _leave_last_token(request: Any) -> None:
    """Have prefill compute a prompt of several tokens up to its last one, and nothing behind that: `left_tokens`.

    vLLM has built the request already, and reads these fields in each step.
    """
    if request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache():
        return  # decode loads nothing of it
    if request.resumable:
        return  # more of its prompt is to come behind this token
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        prompt = getattr(request, name)
        if prompt is not None:
            setattr(request, name, prompt[:-1])
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
