"""One stage of the measurements on a GPU, in engines of their own: `scripts/gpu.sh` sets it up.

    python scripts/gpu_stage.py STAGE MODEL QUESTIONS.jsonl FOLDER [--pairs 7] [--limit 64] [--only NAMES] [--minutes 8]
                                [--resume] [--logs FOLDER]

Writes FOLDER/STAGE.json after every engine and every row, so that a stage which is cut short loses nothing; nothing is
begun, and nothing goes on, after its minutes. `measurements` in it has the names of docs/measurements.json. Logs lie in
FOLDER/logs, or where `--logs` says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gpu_devices
from gpu_devices import PD_ARGUMENTS, TRITON
from say import say
from stage import Stage, over_pairs

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SAME_BLOCKS = 300_000
HIGHEST_FIRST = (0.995, 0.99, 0.985, 0.98)
NGRAM = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 100, "prompt_lookup_max": 4},
    "max_num_batched_tokens": 256,
}
# Of one size, so that nothing is measured and the engines of a pair, or of two, may start at once.
FIXED_SIZE = "--gpu-memory-utilization 0.2 --kv-cache-memory-bytes 8589934592"


def memory(stage: Stage) -> None:
    """Blocks and idle memory beside stock, and what comes only after profiling."""
    ours = stage.engine("kvx", "--kvx", "--load", fork=False)
    stock = stage.engine("stock", "--load")
    if ours and stock:
        stage.measured(
            vllm__stock_blocks=stock.get("blocks"),
            vllm__stock_idle_gib=stock.get("idle_gib"),
            vllm__blocks=ours.get("blocks"),
            vllm__idle_gib=ours.get("idle_gib"),
        )
    for share in HIGHEST_FIRST:
        found = stage.engine(f"stock-{share}", "--load", engine={"gpu_memory_utilization": share})
        if "blocks" in found:
            stage.measured(vllm__stock_highest_share=share, vllm__stock_highest_blocks=found["blocks"])
            break
    after = stage.engine("ngram-kvx", "--kvx", "--load", engine=NGRAM)
    if after:
        stage.measured(vllm__ngram_blocks=after.get("blocks"), vllm__ngram_idle_gib=after.get("idle_after_load_gib"))
    for share in (0.92, 0.99):
        found = stage.engine(f"ngram-stock-{share}", "--load", engine={**NGRAM, "gpu_memory_utilization": share})
        if found:
            key = f"vllm__ngram_stock_{share}".replace(".", "_")
            stage.measured(**{key: found.get("blocks") or found.get("error")})
            stage.measured(**{f"{key}_idle_gib": found.get("idle_after_load_gib")})


def identity(stage: Stage) -> None:
    """The same questions, token for token, in every way that the cache comes and goes."""
    limit = ("--limit", str(stage.options.limit))
    expected = stage.engine("stock", *limit).get("tokens")
    size = {"kv_cache_memory_bytes": 20 << 30}

    def compare(name: str, *flags: str, engine: Mapping[str, Any] | None = None, **environment: str) -> None:
        tokens = stage.engine(name.replace("_", "-"), "--kvx", *limit, *flags, engine=engine, **environment).get(
            "tokens"
        )
        if expected and tokens:
            identical = sum(ours == theirs for ours, theirs in zip(expected, tokens, strict=True))
            stage.measured(**{f"vllm__identical__{name}": identical, "vllm__identical__questions": len(expected)})

    compare("plain")
    compare("sleep", "--sleep", "1")
    compare("sleep_2", "--sleep", "2")
    compare("explicit", engine=size)
    expected = stage.engine("stock-v1", *limit, **V1).get("tokens")
    compare("v1", **V1)
    compare("v1_sleep", "--sleep", "1", **V1)
    expected = stage.engine("stock-fp8", *limit, engine={"kv_cache_dtype": "fp8"}).get("tokens")
    compare("fp8", engine={"kv_cache_dtype": "fp8"})


def bench(stage: Stage) -> None:
    """Start-up and decoding beside stock at one block count: alternating pairs after one that is not counted.

    As many as there is time for; with `--resume`, in addition to those that the stage's file has.
    """
    same = {"num_gpu_blocks_override": SAME_BLOCKS}
    earlier, longest_s = stage.earlier(), 0.0
    for number in range(stage.options.pairs + 1):
        kinds = ("stock", "kvx") if number % 2 else ("kvx", "stock")
        done = {kind: earlier.get(f"{kind}-{number}", {}) for kind in kinds}
        if number and all("decode" in found for found in done.values()):
            stage.runs |= {f"{kind}-{number}": found for kind, found in done.items()}
        elif stage.left_s() < longest_s:
            say(f"no time is left for pair {number}; go on with --resume")
            break
        else:
            started_s = time.monotonic()
            for kind in kinds:
                flags = ("--decode", "--kvx") if kind == "kvx" else ("--decode",)
                stage.engine(f"{kind}-{number}", *flags, engine=same)
            longest_s = (time.monotonic() - started_s) * (1.2 if number else 0.6)  # the first one compiles
        stage.measure(paired(stage.runs))


def paired(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of all pairs that have both sides, the first one left out."""
    tokens_per_s, extra_s = [], []
    numbers = sorted(int(name.partition("-")[2]) for name in runs if name.startswith("kvx-"))
    for number in numbers:
        ours, stock = (runs.get(f"{kind}-{number}", {}) for kind in ("kvx", "stock"))
        if number and "decode" in ours and "decode" in stock:
            tokens_per_s.append(min(stock["decode"]["seconds"]) / min(ours["decode"]["seconds"]))
            extra_s.append(ours["ready_s"] - stock["ready_s"])
    if not extra_s:
        return {}
    return {"vllm.throughput_ratio": over_pairs(tokens_per_s), "vllm.extra_start_s": over_pairs(extra_s)}


def pd(stage: Stage) -> None:
    """A prefill/decode pair on this GPU: answers, digests, the negative controls, and its times beside stock's."""
    options = stage.options
    shared = ["--model", options.model, "--logs", str(options.logs / "pd")]
    verify = ["verify", *shared, "--dataset", str(options.questions), "--concurrency", "1", "--engine-args"]
    if not stage.skips("verify"):
        found = stage.kvx("verify", *verify, PD_ARGUMENTS, "--limit", str(options.limit), option="--report")
        stage.measure(gpu_devices.verified("pd.nixl", found))
    if not stage.skips("bench"):
        bench_pd(stage, shared)
    for fault in ("flip-byte", "swap-blocks", "stale"):
        if not stage.skips(fault):
            negative_control(stage, fault, [*verify, f"{FIXED_SIZE} {TRITON}", "--eager"])


def bench_pd(stage: Stage, shared: Sequence[str]) -> None:
    """Inside one host NIXL has only a slow way to memory that grows, so a deployment there takes `auto`: ipc."""
    words = ["--connector", "auto", "--dtype", "bfloat16", "--engine-args", FIXED_SIZE]
    found = stage.kvx("bench", "bench", "pd", *shared, *words, "--pairs", str(stage.options.pairs))
    if "metrics" in found:
        metrics = found["metrics"]
        stage.measured(
            pd__ttft_ratio=metrics["first_token_s"]["ratio"], pd__handoff_p50_ratio=metrics["handoff_p50_s"]["ratio"]
        )


def negative_control(stage: Stage, fault: str, verify: Sequence[str]) -> None:
    words = ["--limit", "4", "--no-judge-answers", "--inject", fault]
    found = stage.kvx(fault, *verify, *words, option="--report")
    if "digests" in found:  # without a report the engines did not get so far, which is no finding
        digests = found["digests"]
        said = {"status": found["status"], "mismatched": digests["mismatched"]}
        said["first"] = next(iter(digests["mismatches"]), None)
        stage.measured(**{f"pd__nixl__{fault.replace('-', '_')}": said})


STAGES: dict[str, Callable[[Stage], None]] = {
    "memory": memory,
    "identity": identity,
    "bench": bench,
    "pd": pd,
    "transfer": gpu_devices.transfer,
    "offload": gpu_devices.offload,
    "tests": gpu_devices.tests,
    "two-gpus": gpu_devices.two_gpus,
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--only", type=lambda names: names.split(","), help="runs of the stage, by their names")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--resume", action="store_true", help="bench: add pairs to those that FOLDER has")
    parser.add_argument("--device", default="cuda:0", help="transfer and offload: cpu tries the stage out")
    parser.add_argument("--mib", type=int, help="transfer and offload: MiB of a transfer")
    parser.add_argument("--logs", type=Path, help="by default FOLDER/logs")
    options = parser.parse_args(words)
    options.model = str(Path(options.model).resolve())
    options.questions, options.folder = options.questions.resolve(), options.folder.resolve()
    options.logs = (options.logs or options.folder / "logs").resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = arguments()
    if "ipc" not in {point.name for point in entry_points(group="kvx.connectors")}:
        sys.exit("kvx is not installed, only importable, and so has no connectors: pip install --no-deps its wheel")
    STAGES[options.stage](Stage(options.stage, options))


if __name__ == "__main__":
    main()
