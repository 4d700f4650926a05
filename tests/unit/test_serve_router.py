"""The installed vllm-router between stand-in engines: what kvx counts on, and how it is started for that."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from kvx.serve.router import RouterSettings
from kvx.servers import Servers, free_ports

pytest.importorskip("vllm_router")

HELD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_block_ids": [[3, 1, 2]],
    "remote_request_id": "r-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "kvx_ticket": {"expires": 1796037147.25, "signature": "c2lnbmVk", "tokens": 2**40},
}


class Engine:
    """Answers like vLLM, keeps what it was asked."""

    def __init__(self, name):
        engine, self.asked = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.asked.append((self.path, dict(self.headers), body))
                message = {"role": "assistant", "content": name}
                choice = {"index": 0, "text": name, "message": message, "finish_reason": "stop"}
                held = HELD if body.get("kv_transfer_params", {}).get("do_remote_decode") else None
                self._answer({"id": "x", "model": "m", "choices": [choice], "kv_transfer_params": held})

            def _answer(self, found):
                text = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """A client of the router, the prefill and the decode engine; the user's proxy and key are in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        patch.setenv("OPENAI_API_KEY", "of-openai")
        prefill, decode = Engine("prefill"), Engine("decode")
        port, metrics_port = free_ports(2)
        settings = RouterSettings(
            port=port,
            metrics_port=metrics_port,
            prefill_urls=[prefill.url],
            decode_urls=[decode.url],
            api_key="of-the-engines",
        )
        try:
            with Servers(tmp_path_factory.mktemp("logs")) as servers:
                servers.start(settings)
                servers.wait_healthy(60)
                with httpx.Client(base_url=settings.url, trust_env=False, timeout=30) as client:
                    yield client, prefill, decode
        finally:
            prefill.close()
            decode.close()


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}),
    ],
)
def test_a_request_goes_to_prefill_with_a_hold_and_to_decode_with_what_came_of_it(routed, path, question):
    client, prefill, decode = routed
    prefill.asked.clear()
    decode.asked.clear()
    answer = client.post(path, json={"model": "m", **question})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "decode"
    # One request to each: with another policy, both would be asked to tokenise it first.
    ((asked_path, _, first),), ((decode_path, _, second),) = prefill.asked, decode.asked
    assert asked_path == decode_path == path
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first["max_tokens"] == 1
    assert not first.get("stream")
    assert second["kv_transfer_params"] == HELD
    assert question.items() <= second.items()


def test_engines_are_shown_their_own_key_and_clients_are_asked_for_none(routed):
    client, prefill, decode = routed
    client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
    for engine in (prefill, decode):
        headers = {name.lower(): value for name, value in engine.asked[-1][1].items()}
        assert headers["authorization"] == "Bearer of-the-engines"


def test_models_come_from_an_engine(routed):
    client, _, _ = routed
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["m"]
