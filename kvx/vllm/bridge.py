"""`KvxConnector`, the one class that vLLM loads. It hosts kvx's connectors and translates vLLM's calls.

Configure it with `--kv-transfer-config '{"kv_connector": "KvxConnector", "kv_role": "kv_both",
"kv_connector_module_path": "kvx.vllm.bridge", "kv_connector_extra_config": {"connectors": ["nixl"]}}'`.
It speaks vLLM's own `kv_transfer_params`, so routers made for vLLM's connectors work unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ..errors import EngineError
from ..handoff import Failure
from .bridge_metrics import KvxPromMetrics, KvxStats
from .bridge_offload import RankReport
from .bridge_scheduler import BridgeScheduler, StepWork
from .bridge_worker import BridgeWorker


class KvxMetadata(KVConnectorMetadata):
    """What the scheduler's half tells the worker's half in one step."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class KvxReport(KVConnectorWorkerMetadata):
    """What a worker's half tells the scheduler's half after a step; vLLM joins those of all ranks.

    `step`: its number. `report` is None where nothing is offloaded. `failures`: why hand-offs failed, by request.
    """

    def __init__(self, step: int, report: RankReport | None, failures: Mapping[str, Failure]) -> None:
        self.step = step
        self.report = report
        self.failures = failures

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvxReport)
        reports = [report for report in (self.report, other.report) if report is not None]
        joined = reduce(RankReport.merged, reports) if reports else None
        return KvxReport(min(self.step, other.step), joined, {**other.failures, **self.failures})


@dataclass(frozen=True)
class SideChannelAddress(KVConnectorHandshakeMetadata):
    """Where a worker listens: only the worker knows when the configured port is 0."""

    host: str
    port: int
    instance: str


class KvxConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector interface over `BridgeScheduler` (in the engine core) and `BridgeWorker` (in each worker)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: BridgeScheduler | None = None
        self._worker: BridgeWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = BridgeScheduler(vllm_config, kv_cache_config)
        else:
            self._worker = BridgeWorker(vllm_config, kv_cache_config)

    # --- scheduler half ---------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> BridgeScheduler:
        if self._scheduler is None:
            raise EngineError("this half of the bridge lives in a worker; only the engine core's may be asked this")
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.offload.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # A hand-off brings the request's own blocks of every group, not only the prefix-cacheable ones; what can be
        # offloaded has no others.
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.blocks_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvxMetadata(self.scheduler.take_work(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvxReport):
            self.scheduler.steps.was_read(told.step)
            self.scheduler.failed(told.failures)
        self.scheduler.arrived(
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            told.report if isinstance(told, KvxReport) else None,
        )

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.offload.frees_blocks_soon

    def has_pending_push_work(self) -> bool:
        return self.scheduler.offload.is_busy

    def reset_cache(self) -> bool | None:
        self.scheduler.offload.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.scheduler.listens_at(*_listening([metadata[rank] for rank in sorted(metadata)]))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # By (pipeline stage, tensor parallel rank): in this order they listen one after the other.
        self.scheduler.listens_at(*_listening([metadata[place] for place in sorted(metadata)]))

    # --- worker half ------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> BridgeWorker:
        if self._worker is None:
            raise EngineError("this half of the bridge lives in the engine core; only a worker's may be asked this")
        return self._worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.worker.open(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return SideChannelAddress(*self.worker.address, self.worker.handoff.instance)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Before the forward pass: a hold that waited for it would keep decode waiting for another request's prefill.
        super().bind_connector_metadata(connector_metadata)
        self.worker.start(_work_of(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # Everything has been started already; a step that computes nothing may wait here for what is on its way.
        self.worker.wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        # After the forward pass, and on its stream: a store begins when what wrote its blocks has run.
        self.worker.store(_work_of(self._get_connector_metadata()))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, failures, steps = self.worker.take_report(), self.worker.take_failures(), self.worker.steps
        return KvxReport(steps.step, report, failures) if steps.tells or report is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self._worker is None else self._worker.take_stats()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        outcome = self.worker.take_outcome()
        return KVConnectorTransferResults(
            finished_sending=set(outcome.sent),
            finished_recving=set(outcome.received | outcome.failed),
            failed_recving=set(outcome.failed),
        )

    # --- frontend ---------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvxStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return KvxPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- both -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _listening(ranks: list[KVConnectorHandshakeMetadata]) -> tuple[int, list[str]]:
    """The first one's port, and who they are."""
    addresses = [address for address in ranks if isinstance(address, SideChannelAddress)]
    assert len(addresses) == len(ranks), "every worker's half is ours"
    return addresses[0].port, [address.instance for address in addresses]


def _work_of(metadata: KVConnectorMetadata) -> StepWork:
    if not isinstance(metadata, KvxMetadata):
        raise EngineError(f"vLLM handed the bridge a {type(metadata).__name__} of another connector")
    return metadata.work
