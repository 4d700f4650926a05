"""The measurement scripts without a GPU: their commands are ones that there are, and nothing that was found is lost."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from kvx.cli.app import app

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_devices  # noqa: E402
import gpu_stage  # noqa: E402
import merge_measurements  # noqa: E402
from stage import Stage  # noqa: E402

SPREAD = {"median": 2e9, "lowest": 1e9, "highest": 3e9}
RATIO = {"median": 0.9, "lowest": 0.8, "highest": 1.0, "upper_quartile": 0.95}


def stage_of(tmp_path: Path, name: str, *words: str) -> Stage:
    given = [name, str(tmp_path / "model"), str(tmp_path / "q.jsonl"), str(tmp_path / "out"), *words]
    return Stage(name, gpu_stage.arguments(given), machine={"gpu": "none"})


def transfer_report(*sides: str) -> dict[str, Any]:
    rows = [
        {
            "block_bytes": size << 10, "permuted": permuted, "single_transfer_s": {"median": 2e-3},
            "bytes_per_s": dict.fromkeys(("connector", *sides), SPREAD), "ratio": dict.fromkeys(sides, RATIO),
        }
        for size in (64, 256) for permuted in (False, True)
    ]  # fmt: skip
    return {"kvx": "0.1.0", "rows": rows}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("transfer", 3), ("offload", 1), ("two-gpus", 2), ("pd", 5), ("tests", 4), ("identity", 10), ("memory", 9)],
)
def test_every_command_is_one_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: int
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    commands: list[list[str]] = []

    def command(self: Stage, run: str, words: list[str], **environment: str) -> dict[str, Any]:
        commands.append(words)
        self.log(run).write_text("")
        return {"status": 0, "error": ""}

    def forked(self: Stage, run: str, words: list[str], environment: object) -> dict[str, Any]:
        return command(self, run, [sys.executable, "gpu_engine.py", *words])

    monkeypatch.setattr(Stage, "command", command)
    monkeypatch.setattr(Stage, "forked", forked)
    stage = stage_of(tmp_path, name)
    gpu_stage.STAGES[name](stage)
    assert len(commands) == expected == len(stage.runs)
    for words in commands:
        if words[1:3] == ["-m", "kvx.cli.main"]:
            parse(words[3:])
        elif words[1].endswith("gpu_engine.py"):
            import gpu_engine

            gpu_engine.arguments(words[2:])
        else:
            assert words[1:3] == ["-m", "pytest"]
            assert all((SCRIPTS.parent / word).exists() for word in words if word.startswith("tests/"))


def parse(words: list[str]) -> None:
    """As the command line does, without running anything; click.UsageError where it does not know a word."""
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    command.make_context("kvx", list(words))


def test_only_some_runs_of_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(Stage, "forked", lambda _, run, *__: ran.append(run) or {"status": 0})
    monkeypatch.setattr(Stage, "command", lambda _, run, *__: ran.append(run) or {"status": 0})
    stage = stage_of(tmp_path, "memory", "--only", "ngram-stock-0.99")
    stage.log("ngram-stock-0.99").write_text("")
    gpu_stage.memory(stage)
    stage = stage_of(tmp_path, "identity", "--only", "stock-fp8,fp8")
    for name in ("stock-fp8", "fp8"):
        stage.log(name).write_text("")
        stage.path(name).write_text('{"tokens": [[1, 2], [3]]}')
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # the stand-in's answers are there already
    gpu_stage.identity(stage)
    assert ran == ["ngram-stock-0.99", "stock-fp8", "fp8"]
    assert stage.measurements == {"vllm.identical.fp8": 2, "vllm.identical.questions": 2}


def test_copies_have_a_key_for_each_case(tmp_path: Path) -> None:
    found = gpu_devices.rates("transfer.ipc", transfer_report("memcpy"))
    assert len(found) == 4
    assert found["transfer.ipc.permuted_64_kib"] == {
        "gb_per_s": {"median": 2.0, "lowest": 1.0, "highest": 3.0}, "alone_ms": {"median": 2.0}, "of_memcpy": RATIO,
    }  # fmt: skip
    assert gpu_devices.rates("x", transfer_report("memcpy"), side="raw library") == {}
    raw = gpu_devices.rates("transfer.nixl_raw", transfer_report("raw library", "memcpy"), side="raw library")
    assert raw["transfer.nixl_raw.in_order_256_kib"] == {"gb_per_s": {"median": 2.0, "lowest": 1.0, "highest": 3.0}}
    sides = {"kvx": SPREAD, "swap_blocks_batch": SPREAD}
    row = {"block_bytes": 32 << 10, "direction": "to host", "bytes_per_s": sides, "ratio": {"swap_blocks_batch": RATIO}}
    assert list(gpu_devices.offload_rates({"rows": [row]})) == ["offload.to_host_32_kib"]
    row = {
        "layout": "BLHNC",
        "bytes_per_s": {"all": SPREAD, "off": SPREAD},
        "ratio": RATIO,
        "digest_bytes_per_s": SPREAD,
    }
    assert gpu_devices.verify_rates({"rows": [row]})["verify.blhnc"]["of_off"] == RATIO
    report = {"questions": 64, "identical": 63, "passed": False}
    assert gpu_devices.verified("pd.ipc_two_gpus", report)["pd.ipc_two_gpus.identical"] == 63
    assert gpu_devices.verified("pd.ipc_two_gpus", {"status": -9}) == {}


def test_pytest_is_understood_as_far_as_it_got() -> None:
    log = (
        "tests/gpu/test_a.py::test_one PASSED [ 20%]\n"
        "tests/gpu/test_a.py::test_two[a b] FAILED [ 40%]\n"
        "tests/gpu/test_a.py::test_three SKIPPED (no GPU) [ 60%]\n"
        "tests/gpu/test_a.py::test_four ERROR\n"
        "tests/gpu/test_a.py::test_five "
    )
    assert gpu_devices.outcomes(log) == {
        "passed": 1,
        "skipped": ["tests/gpu/test_a.py::test_three"],
        "failed": ["tests/gpu/test_a.py::test_two[a b]", "tests/gpu/test_a.py::test_four"],
    }


def test_a_command_ends_with_its_stage_and_what_it_wrote_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(tmp_path, "transfer", "--minutes", "1")
    monkeypatch.setattr("stage._LEAST_S", 0.0)
    report = stage.path("ipc")
    command = stage.command

    def in_its_place(name: str, words: object, **environment: str) -> dict[str, Any]:
        report.write_text(json.dumps(transfer_report("memcpy")))
        stage.started_s = time.monotonic() - 60 + 1  # a second is left
        return command(name, [sys.executable, "-c", "import time; time.sleep(600)"], **environment)

    monkeypatch.setattr(stage, "command", in_its_place)
    stage.options.only = ["ipc"]
    gpu_devices.transfer(stage)
    written = json.loads((tmp_path / "out" / "transfer.json").read_text())
    assert written["runs"]["ipc"]["status"] != 0
    assert "time of this stage is up" in written["runs"]["ipc"]["error"]
    assert len(written["measurements"]) == 4
    monkeypatch.setattr("stage._LEAST_S", 20.0)
    assert "not run" in command("nixl", ["false"])["error"]


def engine_found(seconds: float, ready_s: float) -> dict[str, Any]:
    return {"status": 0, "decode": {"seconds": [seconds, seconds]}, "ready_s": ready_s}


def test_pairs_add_up_over_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pair of each warms up and is not counted; a pair with one side is none."""

    def engine(self: Stage, name: str, *flags: str, **_: object) -> dict[str, Any]:
        found = engine_found(1.0, 30.0) if name.startswith("stock") else engine_found(1.25, 31.0)
        self.runs[name] = found
        ran.append(name)
        return found

    monkeypatch.setattr(Stage, "engine", engine)
    ran: list[str] = []
    stage = stage_of(tmp_path, "bench", "--pairs", "2")
    gpu_stage.bench(stage)
    assert stage.measurements["vllm.throughput_ratio"]["pairs"] == 2
    ran = []
    stage = stage_of(tmp_path, "bench", "--pairs", "4", "--resume")
    gpu_stage.bench(stage)
    assert ran == ["kvx-0", "stock-0", "stock-3", "kvx-3", "kvx-4", "stock-4"]
    assert stage.measurements["vllm.throughput_ratio"] == {
        "median": 0.8, "lowest": 0.8, "highest": 0.8, "pairs": 4,
    }  # fmt: skip
    assert stage.measurements["vllm.extra_start_s"]["median"] == 1.0
    assert gpu_stage.paired({"kvx-1": engine_found(1, 1), "stock-0": engine_found(1, 1)}) == {}


def test_results_of_a_session_are_merged_and_those_of_others_stay(tmp_path: Path) -> None:
    docs, session = tmp_path / "docs", tmp_path / "session"
    docs.mkdir()
    old = {"pd.nixl.identical": {"value": 64}, "transfer.ipc.permuted_64_kib": {"value": 1}}
    (docs / "measurements.json").write_text(json.dumps(old))

    def write(place: str, date: str, **measurements: Any) -> None:
        path = session / place
        path.parent.mkdir(parents=True, exist_ok=True)
        runs = {"ipc": {"kvx": "0.1.0", "torch": "2.11"}}
        about = {"date": date, "command": "scripts/gpu.sh transfer", "machine": {"gpu": "H200"}, "runs": runs}
        path.write_text(json.dumps({**about, "measurements": measurements}))

    write("b/transfer.json", "2026-01-01", **{"transfer.ipc.permuted_64_kib": 2})
    write("a/transfer.json", "2026-01-02", **{"transfer.ipc.permuted_64_kib": 3, "offload.to_host_32_kib": 4})
    write("c/pd.json", "2026-01-02")
    (session / "logs").mkdir()
    (session / "logs" / "transfer-ipc.json").write_text("")  # a run that had not begun to write
    assert merge_measurements.merge(session, "h200-9", docs) == 3
    merged = json.loads((docs / "measurements.json").read_text())
    assert merged["pd.nixl.identical"] == {"value": 64}
    assert merged["offload.to_host_32_kib"]["value"] == 4
    newest = merged["transfer.ipc.permuted_64_kib"]
    assert (newest["value"], newest["raw"]) == (3, "measurements/h200-9-a-transfer.json")
    assert newest["versions"] == {"gpu": "H200", "kvx": "0.1.0", "torch": "2.11"}
    assert (docs / newest["raw"]).read_bytes() == (session / "a" / "transfer.json").read_bytes()
    merge_measurements.merge(session, "h200-9", docs)  # again is harmless
    write("a/transfer.json", "2026-01-03", x=1)
    with pytest.raises(ValueError, match="another --name"):
        merge_measurements.merge(session, "h200-9", docs)
