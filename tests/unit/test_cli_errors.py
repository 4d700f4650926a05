"""Wrong uses of every command: one sentence that says what to do, never a traceback, and nothing is started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from map_cases import report

from kvx.cli import main

# {...}: what `things` makes. Each with the words that say what to do.
PLAN = "plan {good} --device-memory 80GiB"
VERIFY = "verify --model {model}"
BENCH = "bench pd --model {model}"
DOCTOR = "doctor --quick"
SERVE = "serve --model {model} --no-router"
WRONG = {
    "plan {folder}": "give a checkpoint folder",
    "plan {broken}": "give a checkpoint folder",
    "plan {binary}": "give a checkpoint folder",
    "plan {list}": "a config.json holds an object",
    "plan {good} --device-memory lots": "write it as 80GiB",
    "plan {good} --device-memory 0": "write it as 80GiB",
    "plan {good} --device-memory 1.2.3GiB": "write it as 80GiB",
    "plan {good} --device-memory 99999999999999TiB": "write it as 80GiB",
    "plan {good} --device-memory 1MiB": "raise the budget",
    f"{PLAN} --block-size 0": "greater than or equal to 1",
    f"{PLAN} --layout XYZ": "use one of LBHNC",
    f"{PLAN} --dtype float7": "use one of float64",
    f"{PLAN} --tensor-parallel 7": "take a number of ranks that divides the heads",
    f"{PLAN} --prompt-tokens 999999999999": "less than or equal to 4194304",
    f"{PLAN} --max-model-len 99999999999": "lower the maximum model length",
    f"{PLAN} --server localhost": "for example 127.0.0.1:5600",
    f"{PLAN} --json {{folder}}": "name a file that can be",
    f"{PLAN} --json {{broken}}/r.json": "name a file that can be",
    "map": "give a report of kvx verify, or --server",
    "map {broken} --server 127.0.0.1:5600": "both are given",
    "map {folder}/nowhere": "give a file that kvx verify --report has written",
    "map {broken}": "give a file that kvx verify --report has written",
    "map {binary}": "give a file that kvx verify --report has written",
    "map {good}": "give a report that kvx verify --report has written",
    "map {half}": "kvx map needs a report as it was written",
    "map {answers}": "give a file that kvx verify --report has written",
    "plan {weights} --device-memory 80GiB": "it is no safetensors file",
    "map --server localhost": "give the address of an engine's side channel",
    "map --server 127.0.0.1:99999": "use one of 1 to 65535",
    "map --server nowhere.invalid:5600": "use an address of a host",
    "map {report} --html {folder}": "name a file that can be",
    f"{VERIFY} --dataset {{folder}}/nowhere": "give a gsm8k JSONL file",
    f"{VERIFY} --dataset {{empty}}": "one JSON object a line is needed",
    f"{VERIFY} --dataset {{binary}}": "a gsm8k JSONL file is needed",
    f"{VERIFY} --few-shot {{broken}}": "one JSON object a line is needed",
    f"{VERIFY} --places {{broken}}": "--places needs a TOML file",
    f"{VERIFY} --places {{options}}": "kv_connector_extra_config has no option nope; it has",
    f"{VERIFY} --dtype float7": "is none of float32",
    f"{VERIFY} --device tpu": "is none of cpu, cuda",
    f"{VERIFY} --device cuda": "leave it out",
    f"{VERIFY} --gpus 0,1": "or leave it out",
    f"{VERIFY} --report {{folder}}": "name a file that can be",
    f"{VERIFY} --first-port {{port}}": "give another one",
    f"{VERIFY} --first-port 65534": "give a lower one",
    f"{VERIFY} --logs {{broken}}": "give another",
    "verify --model {folder}": "needs a folder with config.json and weights",
    "verify --model {unreadable}": "download the model again",
    f"{BENCH} --connector nope": "known connectors:",
    f"{BENCH} --json {{folder}}": "name a file that can be",
    f"{BENCH} --first-port {{port}}": "give another one",
    f"{BENCH} --prompt-tokens 99999": "do not fit into --max-model-len",
    f"{BENCH} --logs {{broken}}": "give another",
    "bench extend --device tpu": "name cpu, or cuda:0",
    "bench extend --device cuda:99": "name cpu, or one of them",
    "bench extend --device cpu --gib 1e30": "ask for less",
    "bench extend --device cpu --json {folder}": "name a file that can be",
    "bench bandwidth --device cpu:7": "name cpu, or cuda:0",
    "bench transfer --connector cpu_offload": "take one that does, as ipc",
    "bench transfer --connector nixl,ipc": "known connectors:",
    "bench transfer --peer-device tpu": "name cpu, or cuda:0",
    "bench transfer --mib 1 --block 9999": "no whole number of blocks",
    "bench offload --device cuda:99": "name cpu, or one of them",
    "bench verify --connector cpu_offload": "take one that does, as ipc",
    "bench verify --device tpu": "name cpu, or cuda:0",
    f"{DOCTOR} --config {{{{": "give an object, or @FILE",
    f"{DOCTOR} --config @{{folder}}": "give @FILE",
    f"{DOCTOR} --config []": "it needs a JSON object",
    f"{DOCTOR} --peer localhost": "for example 10.0.0.7:5600",
    f"{DOCTOR} --device tpu": "is none of cpu, cuda",
    f"{DOCTOR} --layout XYZ": "use one of LBHNC",
    f"{DOCTOR} --json {{folder}}": "name a file that can be",
    f"{DOCTOR} --connector nope": "or install its package",
    "new-connector Bad-Name": "small letters and digits are needed",
    "new-connector nixl": "choose another name",
    "new-connector x --to {broken}": "choose another name or --to",
    f"{SERVE} --host nowhere.invalid": "give an address of this machine",
    f"{SERVE} --host 203.0.113.1": "give an address of this machine",
    f"{SERVE} --port {{port}}": "give another one",
    f"{SERVE} --first-port {{port}}": "give another one",
    f"{SERVE} --connector nope": "known connectors:",
    f"{SERVE} --logs {{broken}}": "give another",
    f"{SERVE} --config {{broken}}": "--config needs a TOML file",
    f"{SERVE} --config {{folder}}": "--config needs a TOML file",
    f"{SERVE} --handoff nonsense": "for example verify=all",
    f"{SERVE} --handoff lease_s=x": "it needs seconds",
    f"{SERVE} --prefill 0": "needs at least one engine of each role",
    "serve --model {unreadable} --no-router": "download the model again",
}


@pytest.fixture
def things(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Files and folders that are not what they should be, and a port that is taken."""
    contents = {
        "broken": b"{",
        "binary": b"\xff\xfe\x00",
        "empty": b"",
        "options": b"[options]\nnope = 1\n",
        "list": b"[]",
        "half": b'{"engines": {"decode": {"cache": {"blocks_final": 1}}}}',
        "answers": json.dumps({**report(), "answers": [{"question": 1}]}).encode(),
        "report": b'{"engines": {}}',
        "good": (Path(__file__).parent / "configs" / "SmolLM2-135M.json").read_bytes(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name, config in (("model", "{}"), ("unreadable", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_text("weights")
    for name in ("folder", "weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "weights" / "config.json").write_bytes(contents["good"])
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b'{"a": 1}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = {name: str(tmp_path / name) for name in (*contents, "model", "unreadable", "folder", "weights")}
        yield {**made, "port": str(taken.getsockname()[1])}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_use_is_a_sentence_that_says_what_to_do(
    words: str,
    things: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvx", *words.format(**things).split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capfd.readouterr()
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", said.out + said.err).split())
    assert ended.value.code in (1, 2)
    assert WRONG[words] in text
    assert "Traceback" not in text
    assert "\x1b" not in said.out + said.err, "not a terminal"
    assert not os.path.exists(tmp_path / "kvx-x")


def test_a_full_disk_is_a_sentence_too(things: dict[str, str]) -> None:
    words = PLAN.format(**things).split()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvx.cli.main", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("kvx: No space left on device while writing the results; make room there")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_trouble(things: dict[str, str]) -> None:
    words = PLAN.format(**things)
    command = f"{sys.executable} -m kvx.cli.main {words} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "kvx plan" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["plan", "map", "verify", "bench pd", "bench transfer", "doctor", "serve"])
def test_there_are_many_of_each_command(command: str) -> None:
    assert sum(words.startswith(command) for words in WRONG) >= (3 if command.startswith("bench") else 8)
