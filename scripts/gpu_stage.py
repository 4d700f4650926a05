"""One stage of the measurements on a GPU, in engines of their own: `scripts/gpu.sh` sets it up.

    python scripts/gpu_stage.py memory|identity|bench|pd MODEL QUESTIONS.jsonl FOLDER [--pairs 7] [--limit 64]
                                [--only NAMES]

Writes FOLDER/STAGE.json after every engine, so that a stage which is cut short loses nothing. `measurements` in it has
the names of docs/measurements.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from say import say

from kvx.spread import spread

HERE = Path(__file__).resolve().parent
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SAME_BLOCKS = 300_000
HIGHEST_FIRST = (0.995, 0.99, 0.985, 0.98)
NGRAM = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 100, "prompt_lookup_max": 4},
    "max_num_batched_tokens": 256,
}
PD_ARGUMENTS = "--gpu-memory-utilization 0.3 --attention-backend TRITON_ATTN"
FORK_REFUSED = "re-initialize CUDA in forked subprocess"  # torch's words, where an import has started CUDA after all
# Of one size, so that nothing is measured and the four engines may start at once.
BENCH_PD_ARGUMENTS = "--gpu-memory-utilization 0.2 --kv-cache-memory-bytes 8589934592"


@dataclass
class Stage:
    """What has been found so far, and where it is written."""

    name: str
    options: argparse.Namespace
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: dict[str, Any] = field(default_factory=dict)

    def skips(self, name: str) -> bool:
        """Whether `--only` leaves a run out."""
        return bool(self.options.only) and name not in self.options.only

    def engine(
        self, name: str, *flags: str, engine: Mapping[str, Any] | None = None, fork: bool = True, **environment: str
    ) -> dict[str, Any]:
        """Run one engine; what it found, or `{"error": its last lines}`. `fork`: in a copy of this process, whose
        imports are done already; without, in a fresh one, whose status shows how it ended."""
        if self.skips(name):
            return {}
        result = self.options.folder / f"{self.name}-{name}.json"
        result.unlink(missing_ok=True)
        words = [self.options.model, str(self.options.questions), str(result), *flags]
        if engine:
            words += ["--engine", json.dumps(engine)]
        if fork:
            found = self.forked(name, words, environment)
            fork = FORK_REFUSED not in self.log(name).read_text(errors="replace")
        if not fork:
            found = self.command(name, [sys.executable, str(HERE / "gpu_engine.py"), *words], **environment)
        if result.exists():
            found = {"status": found["status"], **json.loads(result.read_text())}
        self.note(name, found)
        return found

    def command(self, name: str, command: Sequence[str], **environment: str) -> dict[str, Any]:
        log = self.log(name)
        started_s = time.monotonic()
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        return self.ended(name, done.returncode, started_s)

    def forked(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """vLLM starts no CUDA when it is imported, so a fork after the import may."""
        import gpu_engine
        from vllm import LLM  # noqa: F401  (the imports are what the fork saves)

        gc.collect()
        gc.freeze()  # or each child would walk the imports' heap, and copy its pages, in every full collection
        started_s = time.monotonic()
        process = os.fork()
        if process == 0:
            with self.log(name).open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.environ.update(environment)
            try:
                gpu_engine.main(words)
            except BaseException:  # noqa: BLE001  (the child must end here, whatever happened)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        return self.ended(name, os.waitstatus_to_exitcode(status), started_s)

    def log(self, name: str) -> Path:
        return self.options.folder / f"{self.name}-{name}.log"

    def ended(self, name: str, status: int, started_s: float) -> dict[str, Any]:
        say(f"{self.name} {name}: status {status} after {time.monotonic() - started_s:.0f} s")
        return {"status": status, "error": last_error(self.log(name).read_text(errors="replace"))}

    def note(self, name: str, found: dict[str, Any]) -> None:
        self.runs[name] = {key: value for key, value in found.items() if key != "tokens"}
        say(json.dumps({key: found.get(key) for key in ("runner", "blocks", "idle_gib", "ready_s", "sleep", "error")}))
        self.write()

    def measured(self, **values: Any) -> None:
        self.measurements.update({name.replace("__", "."): value for name, value in values.items()})
        say(json.dumps(values))
        self.write()

    def write(self) -> None:
        found = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["scripts/gpu.sh", self.name]),
            "measurements": self.measurements,
            "runs": self.runs,
        }
        (self.options.folder / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")


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
    """Start-up and decoding beside stock at one block count: alternating pairs after one that is not counted."""
    same = {"num_gpu_blocks_override": SAME_BLOCKS}
    tokens_per_s: list[float] = []
    extra_s: list[float] = []
    for number in range(stage.options.pairs + 1):
        pair = {}
        for kind in ("stock", "kvx") if number % 2 else ("kvx", "stock"):
            flags = ("--decode", "--kvx") if kind == "kvx" else ("--decode",)
            pair[kind] = stage.engine(f"{kind}-{number}", *flags, engine=same)
        if number and all("decode" in found for found in pair.values()):
            tokens_per_s.append(min(pair["stock"]["decode"]["seconds"]) / min(pair["kvx"]["decode"]["seconds"]))
            extra_s.append(pair["kvx"]["ready_s"] - pair["stock"]["ready_s"])
            stage.measured(vllm__throughput_ratio=over_pairs(tokens_per_s), vllm__extra_start_s=over_pairs(extra_s))


def pd(stage: Stage) -> None:
    """A prefill/decode pair on this GPU: answers, digests, the negative controls, and its times beside stock's."""
    options = stage.options
    kvx = [sys.executable, "-m", "kvx.cli.main"]
    shared = ["--model", options.model]
    report = options.folder / "pd-verify.json"
    verify = [*kvx, "verify", *shared, "--dataset", str(options.questions), "--concurrency", "1"]
    verify += ["--engine-args", PD_ARGUMENTS]
    logs = ["--logs", str(options.folder / "pd-logs")]
    if not stage.skips("verify"):
        command = [*verify, "--limit", str(options.limit), "--report", str(report), *logs]
        found = stage.command("verify", command)
        stage.note("verify", found | (json.loads(report.read_text()) if report.exists() else {}))
    if report.exists():
        said = json.loads(report.read_text())
        stage.measured(
            pd__nixl__questions=said["questions"],
            pd__nixl__identical=said["identical"],
            pd__nixl__baseline="one stock server, float32, Triton attention, graphs",
            pd__nixl__passed=said["passed"],
        )
    if not stage.skips("bench"):
        bench_pd(stage, [*kvx, "bench", "pd", *shared, *logs])
    for fault in ("flip-byte", "swap-blocks", "stale"):
        if not stage.skips(fault):
            negative_control(stage, fault, [*verify, "--eager", *logs])


def bench_pd(stage: Stage, command: Sequence[str]) -> None:
    """Inside one host NIXL has only a slow way to memory that grows, so a deployment there takes `auto`: ipc."""
    report = stage.options.folder / "pd-bench.json"
    words = ["--connector", "auto", "--dtype", "bfloat16", "--engine-args", BENCH_PD_ARGUMENTS]
    found = stage.command("bench", [*command, *words, "--json", str(report)])
    stage.note("bench", found | (json.loads(report.read_text()) if report.exists() else {}))
    if report.exists():
        metrics = json.loads(report.read_text())["metrics"]
        stage.measured(
            pd__ttft_ratio=metrics["first_token_s"]["ratio"], pd__handoff_p50_ratio=metrics["handoff_p50_s"]["ratio"]
        )


def negative_control(stage: Stage, fault: str, verify: Sequence[str]) -> None:
    report = stage.options.folder / f"pd-{fault}.json"
    command = [*verify, "--limit", "4", "--no-judge-answers", "--inject", fault, "--report", str(report)]
    stage.note(fault, stage.command(fault, command))
    if report.exists():  # without one the engines did not get so far, which is no finding
        digests = json.loads(report.read_text())["digests"]
        found = {"status": stage.runs[fault]["status"], "mismatched": digests["mismatched"]}
        found["first"] = next(iter(digests["mismatches"]), None)
        stage.measured(**{f"pd__nixl__{fault.replace('-', '_')}": found})


STAGES: dict[str, Callable[[Stage], None]] = {"memory": memory, "identity": identity, "bench": bench, "pd": pd}


def over_pairs(values: Sequence[float]) -> dict[str, float]:
    return {**spread(values), "pairs": len(values)}


def last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if "Error" in line or "kvx:" in line]
    return lines[-1][-500:] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--only", type=lambda names: names.split(","), help="runs of the stage, by their names")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    STAGES[options.stage](Stage(options.stage, options))


if __name__ == "__main__":
    main()
