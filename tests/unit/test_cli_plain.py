"""On a terminal the commands write in colour, unless NO_COLOR is set: then not even bold."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

STYLED = re.compile(r"\x1b\[[0-9;]*m")
COMMANDS = ["doctor --quick", "plan --help", "plan /nowhere"]


def seen(words: str, **environment: str) -> str:
    """All that a command has written to a terminal of its own."""
    master, slave = pty.openpty()
    there = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvx.cli.main", *words.split()],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**there, "TERM": "xterm", **environment},
    ):
        os.close(slave)
        text = b""
        while True:
            try:
                text += os.read(master, 65536)
            except OSError:  # it has ended
                break
    os.close(master)
    return text.decode(errors="replace")


@pytest.mark.parametrize("words", COMMANDS)
def test_no_color_is_plain_text(words: str) -> None:
    plain = seen(words, NO_COLOR="1")
    assert len(plain) > 20
    assert STYLED.findall(plain) == []


def test_a_terminal_shows_colours_otherwise() -> None:
    assert STYLED.findall(seen("plan /nowhere", NO_COLOR="")), "empty is not set"
