"""`kvx serve` as a user runs it: on a terminal, through the router, ended by Ctrl-C."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
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

from .terminal import Terminal, shared_memory_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEADLINE_S = 600
TEXT = "Once upon a time a small dragon lived on a hill and counted the sheep below it, one by one. " * 12
MESSAGES = [{"role": "user", "content": f"{TEXT} What did the dragon count?"}]


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[tuple[Terminal, int]]:
    """A deployment of one and one that is ready, and the first of its ports."""
    first = free_run(5, set())
    ports = ["--first-port", str(first), "--port", str(first + 4)]
    words = ["serve", "--prefill", "1", "--decode", "1", *ports, "--logs", str(tmp_path), "--", "--max-num-seqs", "4"]
    terminal = Terminal([sys.executable, "-m", "kvx.cli.main", *words])
    try:
        terminal.wait_for(lambda text: "ready: " in text, DEADLINE_S)
        yield terminal, first
    finally:
        terminal.close()


@pytest.mark.timeout(DEADLINE_S + 300)
def test_a_client_is_answered_through_the_router_and_ctrl_c_leaves_nothing(
    served: tuple[Terminal, int],
) -> None:
    terminal, first = served
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
    terminal.wait_for(lambda text: any("decode-0" in line and external in line for line in text.splitlines()), 60)

    # Not by a mark in their environment: processes that renamed themselves have none any more.
    processes = psutil.Process(terminal.process.pid).children(recursive=True)
    assert len(processes) >= 5  # the router, and of each engine the server and its core
    shared = shared_memory_of(processes)
    terminal.type(b"\x03")
    assert terminal.process.wait(120) == 0, terminal.text[-4000:]
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not [path for path in shared if Path(path).exists()]
    for port in range(first, first + 5):
        require_free_port(LOOPBACK, port)
