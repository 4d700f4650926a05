"""`kvx serve` on a terminal, with the real router and, instead of vLLM, a package of its name that only answers."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvx.serve.ports import LOOPBACK, free_run
from kvx.servers import require_free_port

from .terminal import Terminal, shared_memory_of

pytest.importorskip("vllm_router")

DEADLINE_S = 120
SERVER = """
    import json, multiprocessing.shared_memory, subprocess, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(b"vllm:num_requests_running 7.0\\n")

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            held = {"do_remote_prefill": True}
            self.answer(json.dumps({"choices": [{"index": 0, "text": "yes"}], "kv_transfer_params": held}).encode())

        def answer(self, body):
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Terminal, int]]:
    """A deployment that is ready, and the first of its ports."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):  # without these, the real vLLM would be found first
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(textwrap.dedent(SERVER))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    first = free_run(5, set())
    ports = ["--first-port", str(first), "--port", str(first + 4)]
    words = ["serve", "--device", "cpu", "--model", str(model), *ports, "--logs", str(tmp_path / "logs")]
    terminal = Terminal([sys.executable, "-m", "kvx.cli.main", *words], PYTHONPATH=str(tmp_path / "path"))
    try:
        terminal.wait_for(lambda text: f"ready: http://{LOOPBACK}:{first + 4}/v1, model model" in text, DEADLINE_S)
        yield terminal, first
    finally:
        terminal.close()


def test_the_table_lives_and_ctrl_c_leaves_nothing(running: tuple[Terminal, int]) -> None:
    terminal, first = running
    answer = httpx.post(f"http://{LOOPBACK}:{first + 4}/v1/completions", json={"model": "model", "prompt": "hi"})
    assert answer.json()["choices"][0]["text"] == "yes"
    terminal.wait_for(lambda text: any({"decode-0", "ready", "7"} <= set(row.split()) for row in text.splitlines()), 60)
    processes = psutil.Process(terminal.process.pid).children(recursive=True)
    shared = shared_memory_of(processes)
    assert len(processes) >= 5
    assert shared
    terminal.type(b"\x03")
    assert terminal.process.wait(DEADLINE_S) == 0, terminal.text[-3000:]
    assert "all of it is stopped" in terminal.text
    assert not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not [path for path in shared if Path(path).exists()]
    for port in range(first, first + 5):
        require_free_port(LOOPBACK, port)
