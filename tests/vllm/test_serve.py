"""`kvx serve` as a user runs it: on a terminal, through the router, ended by Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from kvx.handshake import request_status
from kvx.serve.ports import LOOPBACK, free_run
from kvx.servers import require_free_port
from kvx.verify.client import Client
from kvx.verify.report import EXTERNAL_HITS

from .test_verify import MARK, left_over

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEADLINE_S = 600
TEXT = "Once upon a time a small dragon lived on a hill and counted the sheep below it, one by one. " * 12
MESSAGES = [{"role": "user", "content": f"{TEXT} What did the dragon count?"}]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command with a terminal of its own, on which Ctrl-C can be typed."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self._seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._seen += os.read(self._master, 65536)
            except OSError:  # the last process with this terminal has ended
                return

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._seen.decode(errors="replace"))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, is_there: Callable[[str], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_there(self.text):
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < end_s, self.text[-4000:]
            time.sleep(0.2)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._reader.join(10)
        os.close(self._master)


def shared_memory_of(pids: list[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        found |= set(re.findall(r"(/dev/shm/\S+)$", maps, flags=re.MULTILINE))
    return found


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[tuple[Terminal, int, str]]:
    """A deployment of one and one that is ready, the first of its ports, and the mark of its processes."""
    first = free_run(5, set())
    mark = f"{os.getpid()}-{tmp_path.name}"
    command = [sys.executable, "-m", "kvx.cli.main", "serve", "--prefill", "1", "--decode", "1"]
    command += [
        "--first-port",
        str(first),
        "--port",
        str(first + 4),
        "--logs",
        str(tmp_path),
        "--",
        "--max-num-seqs",
        "4",
    ]
    environment = {**os.environ, MARK: mark, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    terminal = Terminal(command, environment)
    try:
        terminal.wait_for(lambda text: "ready: " in text)
        yield terminal, first, f"{MARK}={mark}"
    finally:
        terminal.close()


@pytest.mark.timeout(DEADLINE_S + 300)
def test_a_client_is_answered_through_the_router_and_ctrl_c_leaves_nothing(
    served: tuple[Terminal, int, str],
) -> None:
    terminal, first, mark = served
    prefill, decode, decode_side = f"http://{LOOPBACK}:{first}", f"http://{LOOPBACK}:{first + 1}", first + 3
    found = re.search(r"ready: (http://\S+/v1), model (\S+);", terminal.text)
    assert found is not None
    url, name = found.groups()
    assert url == f"http://{LOOPBACK}:{first + 4}/v1"

    ask = {"model": name, "temperature": 0.0, "max_tokens": 24}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == [name]
        whole = client.completions.create(prompt=TEXT, **ask).choices[0].text
        pieces = [part.choices[0].text for part in client.completions.create(prompt=TEXT, stream=True, **ask)]
        answer = client.chat.completions.create(messages=MESSAGES, **ask)
        streamed = client.chat.completions.create(messages=MESSAGES, stream=True, **ask)
        spoken = "".join(part.choices[0].delta.content or "" for part in streamed)
    alone = httpx.post(f"{prefill}/v1/completions", json={"prompt": TEXT, **ask}, timeout=60).json()
    assert whole == "".join(pieces) == alone["choices"][0]["text"] != ""
    assert len(pieces) > 1
    assert answer.choices[0].message.content == spoken != ""

    # All of them were prefilled elsewhere: decode loaded their prompts, and computed nothing again.
    engine = Client(10)
    counters = engine.counters(decode)
    engine.close()
    assert counters[EXTERNAL_HITS] > 0
    assert counters["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 0
    assert request_status(LOOPBACK, decode_side)["transfer"]["failures"] == {}
    external = str(int(counters[EXTERNAL_HITS]))
    terminal.wait_for(lambda text: any("decode-0" in line and external in line for line in text.splitlines()))

    pids = left_over(mark)
    assert len(pids) >= 8  # kvx, the router, and three of each engine
    shared = shared_memory_of([pid for pid in pids if psutil.pid_exists(pid)])
    terminal.type(b"\x03")
    assert terminal.process.wait(120) == 0, terminal.text[-4000:]
    assert not left_over(mark)
    assert not [path for path in shared if Path(path).exists()]
    for port in range(first, first + 5):
        require_free_port(LOOPBACK, port)
