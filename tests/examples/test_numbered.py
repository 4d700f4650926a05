"""The numbered examples run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = {"01_grow_a_cache.py": [[]], "02_hand_off.py": [[], ["nixl"], ["mooncake"]]}
SAID = {"01_grow_a_cache.py": "grown to 2048 blocks", "02_hand_off.py": "differ"}
pytestmark = [pytest.mark.transfer, pytest.mark.slow]


def run(name: str, *words: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_numbered_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("[0-9]*")} == set(WORDS) == set(SAID)


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, all_words in WORDS.items() for words in all_words])
def test_an_example_runs(name: str, words: list[str]) -> None:
    said = run(name, *words)
    assert SAID[name] in said
    if name == "02_hand_off.py":
        assert said.endswith(" 0 differ\n")
        assert said.splitlines()[-2].startswith(words[0] if words else "ipc")
