"""One real vLLM engine on a GPU, in this process: how many blocks it has, what stays idle, what it answers.

    python scripts/gpu_engine.py MODEL QUESTIONS.jsonl RESULT.json [--kvx] [--load] [--engine '{"max_num_seqs": 256}']

Run once without `--kvx` for stock vLLM and once with it, and compare the results (`scripts/gpu.sh memory`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that this process sees the engine's own objects
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--kvx", action="store_true", help="with the growing cache; without: stock vLLM")
    parser.add_argument("--limit", type=int, default=64, help="questions, asked one at a time")
    parser.add_argument("--load", action="store_true", help="200 mixed requests at once after the questions")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    import torch
    from vllm import LLM, SamplingParams

    started_s = time.monotonic()
    more = {"additional_config": {"kvx": {}}} if options.kvx else {}
    llm = LLM(model=options.model, **more, **options.engine)
    ready_s = time.monotonic() - started_s
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    config = llm.llm_engine.vllm_config.cache_config
    found: dict[str, Any] = {
        "blocks": config.num_gpu_blocks,
        "block_size_tokens": config.block_size,
        "idle_gib": free_bytes / 2**30,
        "total_gib": total_bytes / 2**30,
        "ready_s": ready_s,
        "cache": cache_report(llm),
    }
    questions = [json.loads(line)["question"] for line in options.questions.read_text().splitlines()][: options.limit]
    greedy = SamplingParams(temperature=0, max_tokens=64)
    asked_s = time.monotonic()
    found["tokens"] = [
        list(llm.generate([f"Question: {q}\nAnswer:"], greedy, use_tqdm=False)[0].outputs[0].token_ids)
        for q in questions
    ]
    found["questions_s"] = time.monotonic() - asked_s
    if options.load:
        found["load"] = load(llm, SamplingParams)
        found["idle_after_load_gib"] = torch.cuda.mem_get_info()[0] / 2**30
    options.result.write_text(json.dumps(found))
    del llm
    gc.collect()


def cache_report(llm: Any) -> dict[str, Any] | None:
    """kvx's own numbers, where kvx holds the cache."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    seam = getattr(worker, "kvx_seam", None)
    return None if seam is None else dict(seam.report(0))


def load(llm: Any, sampling: Any) -> dict[str, Any]:
    """200 requests of mixed length at once: prompt log-probabilities, top-k, the longest prompt that fits."""
    numbers = random.Random(0)
    longest = llm.llm_engine.vllm_config.model_config.max_model_len - 40
    lengths = [longest, *(numbers.randrange(1, longest // 2) for _ in range(199))]
    prompts = [{"prompt_token_ids": numbers.choices(range(1000, 20000), k=length)} for length in lengths]
    params = [
        sampling(
            temperature=0.8,
            top_k=50,
            seed=index,
            max_tokens=32,
            ignore_eos=True,
            prompt_logprobs=2 if index % 4 == 0 else None,
        )
        for index in range(len(prompts))
    ]
    started_s = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "requests": len(outputs),
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "seconds": time.monotonic() - started_s,
    }


if __name__ == "__main__":
    main()
