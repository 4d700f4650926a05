"""One real vLLM engine on a GPU, in this process: how many blocks it has, what stays idle, what it answers.

    python scripts/gpu_engine.py MODEL QUESTIONS.jsonl RESULT.json [--kvx] [--limit 64] [--sleep LEVEL] [--load]
                                 [--decode] [--engine '{"max_num_seqs": 256}']

Stock vLLM without `--kvx`. `scripts/gpu.sh` runs it in pairs and compares the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that this process sees the engine's own objects
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

SEED = 0
DECODED_REQUESTS, DECODED_TOKENS = 256, 192


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--kvx", action="store_true", help="with the growing cache; without: stock vLLM")
    parser.add_argument("--limit", type=int, default=0, help="questions, asked one at a time")
    parser.add_argument("--sleep", type=int, choices=(1, 2), help="sleep and wake after half of the questions")
    parser.add_argument("--load", action="store_true", help="200 mixed requests at once after the questions")
    parser.add_argument("--decode", action="store_true", help="time a batch that mostly decodes")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    import torch
    import vllm
    from vllm import LLM

    more = {"additional_config": {"kvx": {}}} if options.kvx else {}
    if options.sleep:
        more["enable_sleep_mode"] = True
    started_s = time.monotonic()
    llm = LLM(model=options.model, **more, **options.engine)
    ready_s = time.monotonic() - started_s
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size_tokens": config.cache_config.block_size,
        "idle_gib": idle_gib(),
        "total_gib": torch.cuda.mem_get_info()[1] / 2**30,
        "ready_s": ready_s,
        "cache": cache_report(llm),
    }
    found |= ask(llm, options)
    if options.load:
        found["load"] = load(llm)
        found["idle_after_load_gib"] = idle_gib()
    if options.decode:
        found["decode"] = decode(llm)
    options.result.write_text(json.dumps(found))
    del llm
    gc.collect()


def idle_gib() -> float:
    import torch

    return float(torch.cuda.mem_get_info()[0]) / 2**30


def cache_report(llm: Any) -> dict[str, Any] | None:
    """kvx's own numbers, where kvx holds the cache."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    seam = getattr(worker, "kvx_seam", None)
    return None if seam is None else dict(seam.report(0))


def ask(llm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The questions, one at a time and greedy; asleep in between where that is asked for."""
    lines = options.questions.read_text().splitlines()[: options.limit]
    prompts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    half = len(prompts) // 2 if options.sleep else len(prompts)
    started_s = time.monotonic()
    tokens = answers(llm, prompts[:half])
    found: dict[str, Any] = {}
    if options.sleep:
        found["sleep"] = sleep(llm, options.sleep)
        tokens += answers(llm, prompts[half:])
    return {**found, "tokens": tokens, "questions_s": time.monotonic() - started_s}


def answers(llm: Any, prompts: Sequence[str]) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=64)
    return [list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]


def sleep(llm: Any, level: int) -> dict[str, Any]:
    """Down and up again: what is idle meanwhile, and whether the cache is back at its addresses."""
    before, started_s = cache_report(llm), time.monotonic()
    llm.sleep(level)
    slept_s, asleep_gib = time.monotonic() - started_s, idle_gib()
    started_s = time.monotonic()
    llm.wake_up(["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights")
    weights_gib = idle_gib()
    llm.wake_up(["kv_cache"])
    after = cache_report(llm)
    return {
        "level": level,
        "sleep_s": slept_s,
        "wake_s": time.monotonic() - started_s,
        "idle_asleep_gib": asleep_gib,
        "idle_with_weights_gib": weights_gib,
        "idle_awake_gib": idle_gib(),
        "committed_bytes": [report and report["committed_bytes"] for report in (before, after)],
        "base_address_unchanged": after and after["base_address_unchanged"],
    }


def load(llm: Any) -> dict[str, Any]:
    """200 requests of mixed length at once: prompt log-probabilities, top-k, the longest prompt that fits."""
    from vllm import SamplingParams

    numbers = random.Random(SEED)
    longest = llm.llm_engine.vllm_config.model_config.max_model_len - 40
    lengths = [longest, *(numbers.randrange(1, longest // 2) for _ in range(199))]
    prompts = [{"prompt_token_ids": numbers.choices(range(1000, 20000), k=length)} for length in lengths]
    params = [
        SamplingParams(
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


def decode(llm: Any) -> dict[str, Any]:
    """Tokens a second of a batch of short prompts, the second time that it runs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=DECODED_TOKENS, ignore_eos=True)
    # As vLLM's own engine processes do: a full collection of vLLM's heap takes 0.3 s, and would hit some runs and not
    # others (in one process of their own, engines leave the heap unfrozen).
    gc.collect()
    gc.freeze()
    seconds = []
    for turn in range(3):
        numbers = random.Random(turn)
        prompts = [{"prompt_token_ids": numbers.choices(range(1000, 20000), k=16)} for _ in range(DECODED_REQUESTS)]
        started_s = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.monotonic() - started_s)
    return {"tokens": DECODED_REQUESTS * DECODED_TOKENS, "seconds": seconds[1:]}


if __name__ == "__main__":
    main()
