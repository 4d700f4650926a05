"""Stages that run commands as they are: copies between processes, to the host, between two GPUs; tests; `kvx verify`.

Their reports come row by row, so that one which is cut short has what it had measured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage import Stage

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = [word for kib in (64, 256, 2048) for word in ("--block", str(kib))]
TRITON = "--attention-backend TRITON_ATTN"  # takes float32
PD_ARGUMENTS = f"--gpu-memory-utilization 0.3 {TRITON}"
BASELINE = "one stock server, float32, Triton attention, graphs"
TESTS = {
    "offload": ["tests/gpu/test_gpu_offload.py"],
    "tiny-engine": ["tests/examples", "-m", "gpu"],
    "unequal": ["tests/vllm/test_unequal_gpu.py", "-rP"],
    "gpu": ["tests/gpu", "-m", "not slow", "--ignore", "tests/gpu/test_gpu_offload.py"],
}
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def transfer(stage: Stage) -> None:
    """Between two processes on one GPU: `ipc`; NIXL over memory that grows, bare NIXL over torch's; with digests."""
    device = ["--device", stage.options.device, "--pairs", str(stage.options.pairs)]
    mib, few = stage.options.mib or 1024, min(stage.options.mib or 64, 64)
    if not stage.skips("ipc"):
        words = ["--connector", "ipc", *device, "--mib", str(mib), *BLOCKS, "--in-flight", "4"]
        stage.measure(rates("transfer.ipc", stage.kvx("ipc", "bench", "transfer", *words)))
    if not stage.skips("nixl"):  # at 0.4 GB/s
        words = ["--connector", "nixl", *device, "--mib", str(few), *BLOCKS]
        found = stage.kvx("nixl", "bench", "transfer", *words)
        stage.measure({**rates("transfer.nixl", found), **rates("transfer.nixl_raw", found, side="raw library")})
    if not stage.skips("verify"):
        words = ["--connector", "ipc", *device, *(["--mib", str(stage.options.mib)] if stage.options.mib else [])]
        stage.measure(verify_rates(stage.kvx("verify", "bench", "verify", *words)))


def offload(stage: Stage) -> None:
    """Shuffled blocks to host memory and back, beside vLLM's `swap_blocks_batch`."""
    words = ["--device", stage.options.device, "--mib", str(stage.options.mib or 1024)]
    found = stage.kvx("offload", "bench", "offload", *words, "--pairs", str(stage.options.pairs))
    stage.measure(offload_rates(found))


def tests(stage: Stage) -> None:
    """Tests that only a GPU can run; those that others of these stages run anyway come last."""
    for name, words in TESTS.items():
        if stage.skips(name):
            continue
        command = [sys.executable, "-m", "pytest", *words, "-v", "-W", "default", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(stage.path(name).with_suffix(""))]
        found = stage.command(name, command, KVX_TEST_MODEL=stage.options.model)
        found |= outcomes(stage.log(name).read_text(errors="replace"))
        stage.note(name, found)
        stage.measure({f"tests.{name.replace('-', '_')}": {key: found[key] for key in ("status", "passed", "failed")}})


def two_gpus(stage: Stage) -> None:
    """From GPU 0 to GPU 1: copies between two processes, and a prefill/decode pair of vLLM servers."""
    first, second = "cuda:0", "cuda:1"
    if stage.options.device == "cpu":
        first = second = "cpu"
    if not stage.skips("transfer"):
        words = ["--connector", "ipc", "--device", second, "--peer-device", first, "--in-flight", "4", *BLOCKS]
        words += ["--mib", str(stage.options.mib or 1024), "--pairs", str(stage.options.pairs)]
        stage.measure(rates("transfer.ipc_two_gpus", stage.kvx("transfer", "bench", "transfer", *words)))
    if not stage.skips("pd"):
        words = ["--model", stage.options.model, "--dataset", str(stage.options.questions), "--connector", "ipc"]
        words += ["--limit", str(stage.options.limit), "--concurrency", "1", "--logs", str(stage.options.logs / "pd")]
        if first != second:
            words += ["--gpus", "0,1", "--engine-args", PD_ARGUMENTS]
        stage.measure(verified("pd.ipc_two_gpus", stage.kvx("pd", "verify", *words, option="--report")))


def rates(prefix: str, report: Mapping[str, Any], side: str = "connector") -> dict[str, Any]:
    """A key for each case that `kvx bench transfer` has measured: GB/s, and beside what; ms of one transfer alone."""
    found = {}
    for row in report.get("rows", ()):
        if side not in row["bytes_per_s"]:
            continue
        value = {"gb_per_s": scaled(row["bytes_per_s"][side], 1e-9)}
        if side == "connector":
            value["alone_ms"] = scaled(row["single_transfer_s"], 1e3)
            value |= {f"of_{name.replace(' ', '_')}": scaled(ratio, 1) for name, ratio in row["ratio"].items()}
        order = "permuted" if row["permuted"] else "in_order"
        found[f"{prefix}.{order}_{row['block_bytes'] >> 10}_kib"] = value
    return found


def offload_rates(report: Mapping[str, Any]) -> dict[str, Any]:
    """A key for each size and way that `kvx bench offload` has measured."""
    found = {}
    for row in report.get("rows", ()):
        value = {"gb_per_s": scaled(row["bytes_per_s"]["kvx"], 1e-9)}
        for name, ratio in row["ratio"].items():
            value |= {f"{name}_gb_per_s": scaled(row["bytes_per_s"][name], 1e-9), f"of_{name}": scaled(ratio, 1)}
        found[f"offload.{row['direction'].replace(' ', '_')}_{row['block_bytes'] >> 10}_kib"] = value
    return found


def verify_rates(report: Mapping[str, Any]) -> dict[str, Any]:
    """A key for each case that `kvx bench verify` has measured: hand-offs with digests of everything, beside none."""
    return {
        f"verify.{row['layout'].lower()}": {
            "gb_per_s": scaled(row["bytes_per_s"]["all"], 1e-9), "of_off": scaled(row["ratio"], 1),
            "digests_gb_per_s": scaled(row["digest_bytes_per_s"], 1e-9),
        }
        for row in report.get("rows", ())
    }  # fmt: skip


def verified(prefix: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """What `kvx verify` found; nothing where it did not come to an end."""
    if "identical" not in report:
        return {}
    return {
        f"{prefix}.questions": report["questions"],
        f"{prefix}.identical": report["identical"],
        f"{prefix}.baseline": BASELINE,
        f"{prefix}.passed": report["passed"],
    }


def outcomes(log: str) -> dict[str, Any]:
    """What `pytest -v` has said of each test so far."""
    found = [match.groups() for match in map(_OUTCOME.match, log.splitlines()) if match]
    return {
        "passed": sum(outcome in ("PASSED", "XFAIL") for _, outcome in found),
        "skipped": [name for name, outcome in found if outcome == "SKIPPED"],
        "failed": [name for name, outcome in found if outcome in ("FAILED", "ERROR", "XPASS")],
    }


def scaled(summary: Mapping[str, float], factor: float) -> dict[str, float]:
    return {key: round(value * factor, 4) for key, value in summary.items()}
