import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvx.errors import EngineError
from kvx.verify.client import Ask, Client, parse_counters

HELD = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}


class Engine:
    """A tiny stand-in for vLLM's completions API: remembers what it was asked, answers what it is told to."""

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.status = 200
        self.hold = HELD
        self.tokens = [7, 8]
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.bodies.append(body)
                engine.headers.append(dict(self.headers))
                self.send_response(engine.status)
                self.end_headers()
                self.wfile.write(engine.answer(body).encode())

            def do_GET(self):
                self.send_response(engine.status)
                self.end_headers()
                self.wfile.write(b'# HELP x\nvllm:hits_total{engine="0",source="a"} 2.0\n')

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def answer(self, body):
        choice = {"text": " ok", "token_ids": self.tokens, "prompt_token_ids": [1], "finish_reason": "stop"}
        if body.get("stream"):
            events = [{"choices": [{"token_ids": [t], "text": "x"}]} for t in self.tokens] + [{"choices": []}]
            return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return json.dumps({"choices": [choice], "kv_transfer_params": self.hold})

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def engines():
    made = Engine(), Engine()
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def client():
    made = Client(deadline_s=10)
    yield made
    made.close()


ASK = Ask("question-3", "How many?", max_tokens=2, stop=("\nQuestion:",))


def test_single_is_greedy_and_named(engines, client):
    answer = client.ask_single(engines[0].url, ASK)
    assert (answer.tokens, answer.text, answer.prompt_tokens, answer.error) == ((7, 8), " ok", (1,), "")
    body = engines[0].bodies[0]
    assert (body["temperature"], body["max_tokens"], body["return_token_ids"]) == (0.0, 2, True)
    assert "kv_transfer_params" not in body
    assert {k.lower(): v for k, v in engines[0].headers[0].items()}["x-request-id"] == "question-3"


def test_pair_holds_at_prefill_and_passes_its_word_on(engines, client):
    prefill, decode = engines
    assert client.ask_pair(prefill.url, decode.url, ASK).tokens == (7, 8)
    assert prefill.bodies[0]["max_tokens"] == 1
    assert prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.bodies[0]["max_tokens"] == 2
    assert decode.bodies[0]["kv_transfer_params"] == HELD


def test_a_prefill_without_a_hold_is_an_error_not_an_answer(engines, client):
    prefill, decode = engines
    prefill.hold = None
    answer = client.ask_pair(prefill.url, decode.url, ASK)
    assert "holds no blocks" in answer.error
    assert decode.bodies == []


def test_a_refusal_or_a_dead_engine_is_in_the_answer(engines, client):
    engines[1].status = 500
    assert "answered 500" in client.ask_pair(engines[0].url, engines[1].url, ASK).error
    assert "did not answer" in client.ask_single("http://127.0.0.1:9", ASK).error


def test_timing_counts_tokens_of_the_stream(engines, client):
    timing = client.time_pair(engines[0].url, engines[1].url, Ask("q", [5, 6], max_tokens=2, ignore_eos=True))
    assert timing.first_token_s > 0
    assert len(timing.gaps_s) == 1
    assert engines[1].bodies[0]["prompt"] == [5, 6]


def test_too_few_tokens_are_not_timed(engines, client):
    with pytest.raises(EngineError, match="2 tokens came of 3"):
        client.time_pair(engines[0].url, engines[1].url, Ask("q", "p", max_tokens=3))


def test_counters_sum_over_engines_and_keep_other_labels(engines, client):
    text = """# TYPE vllm:a counter
vllm:a{engine="0",model_name="kvx",source="x"} 2.0
vllm:a{engine="1",model_name="kvx",source="x"} 3.0
vllm:b_total{engine="0"} 1e3
plain 4
"""
    assert parse_counters(text) == {"vllm:a{source=x}": 5.0, "vllm:b_total": 1000.0, "plain": 4.0}
    assert client.counters(engines[0].url) == {"vllm:hits_total{source=a}": 2.0}
    engines[0].status = 500
    with pytest.raises(EngineError, match="metrics"):
        client.counters(engines[0].url)
