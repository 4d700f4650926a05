"""A prefill/decode pair on one GPU beside a single stock server: the same questions, token for token, with digests.

    python scripts/gpu_pd.py MODEL QUESTIONS.jsonl RESULT.json [--limit 16] [--connector nixl]

float32 on vLLM's Triton attention, so that a token can differ only where bytes do.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvx.handshake import request_status
from kvx.servers import EngineSettings, Servers
from kvx.verify import engines
from kvx.verify.client import Ask, Client

ARGUMENTS = ("--gpu-memory-utilization", "0.3", "--attention-backend", "TRITON_ATTN")
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "UCX_TLS": "tcp,self,cma,cuda_copy,cuda_ipc"}


def on_gpu(engine: EngineSettings) -> EngineSettings:
    return replace(engine, arguments=ARGUMENTS, cores=(), environment={**engine.environment, **ENVIRONMENT})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--connector", default="nixl")
    options = parser.parse_args()
    run = engines.RunSettings(model=options.model, connectors=(options.connector,), kv_space_gib=None)
    questions = [json.loads(line)["question"] for line in options.questions.read_text().splitlines()][: options.limit]
    asks = [Ask(f"question-{i}", f"Question: {q}\nAnswer:", 48) for i, q in enumerate(questions)]
    logs = options.result.parent
    found: dict[str, Any] = {}
    client = Client()
    with Servers(logs) as servers:
        started_s = time.monotonic()
        single = servers.start(on_gpu(engines.baseline(run)))
        servers.wait_healthy()
        found["single_ready_s"] = time.monotonic() - started_s
        alone = [client.ask_single(single.url, ask) for ask in asks]
        servers.stop_all()
        pair = engines.kvx_pair(run, digests=True)
        prefill = servers.start(on_gpu(pair.prefill))
        servers.wait_healthy()
        decode = servers.start(on_gpu(pair.decode))
        servers.wait_healthy()
        handed = [client.ask_pair(prefill.url, decode.url, ask) for ask in asks]
        found["status"] = request_status(engines.HOST, pair.decode_side_port)
        found["prefill"] = request_status(engines.HOST, pair.prefill_side_port)
    found["errors"] = [answer.error for answer in (*alone, *handed) if answer.error]
    found["identical"] = sum(a.tokens == b.tokens and not b.error for a, b in zip(alone, handed, strict=True))
    found["questions"] = len(asks)
    options.result.write_text(json.dumps(found))
    client.close()


if __name__ == "__main__":
    main()
