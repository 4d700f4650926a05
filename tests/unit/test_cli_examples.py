"""Every command's --help has an example, and it works: run here, or on real engines where it starts some."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from map_cases import report

from kvx.cli.app import app

CONFIG = Path(__file__).parent / "configs" / "Qwen2.5-7B.json"
ON_ENGINES = {
    "kvx verify --limit 8 --report r.json": "make verify, and tests/vllm/test_verify.py",
    "kvx bench pd --pairs 3 --requests 4": "make bench",
    "kvx serve --prefill 1 --decode 1 -- --max-num-seqs 8": "tests/vllm/test_serve.py",
}
"""These start vLLM; what runs them."""
OF_ITS_OWN = {"kvx doctor --connector ipc,nixl": "tests/transfer/test_doctor.py"}
"""These take a test of their own."""


def commands(found: Any = None, words: tuple[str, ...] = ("kvx",)) -> Iterator[tuple[str, Any]]:
    found = typer.main.get_command(app) if found is None else found
    for name, command in getattr(found, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


def example_of(command: Any) -> str:
    text = " ".join(filter(None, (command.help, command.epilog)))
    match = re.search(r"Example: (kvx .+?)(?:\.? *\n|\. |\.?$)", text + "\n")
    assert match, f"{command.name} has no example"
    return match[1]


COMMANDS = dict(commands())
EXAMPLES = {name: example_of(command) for name, command in COMMANDS.items()}


def test_each_example_is_of_its_own_command() -> None:
    assert len(EXAMPLES) >= 11
    for name, example in EXAMPLES.items():
        assert example.startswith(name)


def test_what_is_not_run_here_is_run_elsewhere() -> None:
    assert set(ON_ENGINES) | set(OF_ITS_OWN) <= set(EXAMPLES.values())
    for where in (*ON_ENGINES.values(), *OF_ITS_OWN.values()):
        for path in re.findall(r"tests/\S+\.py", where):
            assert (CONFIG.parents[3] / path).is_file()


@pytest.mark.slow
@pytest.mark.transfer
@pytest.mark.parametrize("example", sorted(set(EXAMPLES.values()) - set(ON_ENGINES) - set(OF_ITS_OWN)))
def test_an_example_works(example: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(report()))
    folder = tmp_path / "Qwen2.5-7B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG.read_text())
    command = [sys.executable, "-m", "kvx.cli.main", *shlex.split(example)[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr, "in a pipe everything is plain text"
    assert done.stdout.strip()


@pytest.mark.parametrize("example", sorted(ON_ENGINES))
def test_an_example_for_engines_names_options_that_exist(example: str) -> None:
    words = shlex.split(example)
    name = max((name for name in COMMANDS if example.startswith(name)), key=len)
    given = {word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")}
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert given <= options
