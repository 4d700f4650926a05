"""The order of a verified run, with stand-ins for engines: nothing real is started."""

import dataclasses
import threading
from typing import ClassVar

import pytest

from kvx.errors import EngineError, HandshakeError
from kvx.verify import engines, runner
from kvx.verify.client import Answer
from kvx.verify.questions import own_problems, own_shots

GOOD = Answer(prompt_tokens=(1, 2), tokens=(3,), text="3", finish_reason="stop")


class Quiet:
    def __init__(self):
        self.stages = []
        self.done = []

    def stage(self, text):
        self.stages.append(text)

    def waiting(self, server, seconds):
        pass

    def answered(self, done, total):
        self.done.append((done, total))


@dataclasses.dataclass
class FakeServer:
    settings: engines.EngineSettings
    alive: bool = True

    @property
    def url(self):
        return self.settings.name

    def check(self):
        if not self.alive:
            raise EngineError(f"the {self.settings.name} engine ended")


class FakeServers:
    """Remembers which engines ran at once."""

    peak_memory_bytes = 7

    def __init__(self, logs=None):
        self.running = []
        self.together = []
        self.waited = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop_all()

    def watch_memory(self):
        pass

    def start(self, settings):
        self.running.append(FakeServer(settings))
        self.together.append([server.settings.name for server in self.running])
        return self.running[-1]

    def wait_healthy(self, **_):
        self.waited.append([server.settings.name for server in self.running])

    def stop_all(self):
        self.running.clear()


@pytest.fixture
def world(monkeypatch, tmp_path):
    servers = FakeServers()
    monkeypatch.setattr(runner, "Servers", lambda _logs: servers)
    monkeypatch.setattr(runner, "Client", FakeClient)
    monkeypatch.setattr(runner, "request_status", lambda host, port: {"handoff": {"holds": 0}})
    monkeypatch.setattr(runner, "SETTLE_S", 0.3)
    FakeClient.failing = set()
    return servers


class FakeClient:
    failing: ClassVar[set[str]] = set()

    def close(self):
        pass

    def ask_single(self, url, ask):
        return Answer(error="refused") if url in self.failing else GOOD

    def ask_pair(self, prefill_url, decode_url, ask):
        return self.ask_single(decode_url, ask)

    def counters(self, url):
        return {}


@pytest.fixture
def settings(tmp_path):
    run = engines.RunSettings(model=tmp_path)
    return runner.VerifySettings(run=run, problems=own_problems()[:3], shots=own_shots())


def test_baseline_is_gone_before_the_pair_starts(world, settings):
    progress = Quiet()
    report = runner.verify(settings, progress)
    assert world.together == [["baseline"], ["prefill"], ["prefill", "decode"]]
    assert report["identical"] == 3
    assert report["memory"]["peak_bytes"] == 7
    assert progress.done == [(1, 3), (2, 3), (3, 3)] * 2
    assert len(report["answers"]) == 3
    assert not report["passed"], "the stand-ins give no cache status"


@pytest.mark.parametrize(
    ("device", "kv_space_gib", "waits"), [("cpu", 1, []), ("cpu", None, [["prefill"]]), ("cuda", 1, [["prefill"]])]
)
def test_engines_that_measure_what_is_free_start_one_after_the_other(world, settings, device, kv_space_gib, waits):
    run = dataclasses.replace(settings.run, device=device, kv_space_gib=kv_space_gib)
    report = runner.verify(dataclasses.replace(settings, run=run), Quiet())
    assert world.waited == [["baseline"], *waits, ["prefill", "decode"]]
    assert report["settings"]["device"] == device
    assert report["settings"]["arguments"] == []


BYTES = ("--kv-cache-memory-bytes=1G",)


@pytest.mark.parametrize(
    ("device", "arguments", "waits"),
    [("cuda", BYTES, 1), ("cuda", ("--seed", "1"), 4), ("cpu", BYTES, 2)],
)
def test_pairs_on_a_gpu_that_measure_nothing_start_at_once(world, settings, device, arguments, waits):
    run = dataclasses.replace(settings.run, device=device, arguments=arguments)
    pairs = [engines.kvx_pair(run, digests=False), engines.stock_pair(run)]
    started = engines.start_pairs(run, world, pairs, lambda _server, _seconds: None)
    assert [[server.settings.name for server in pair] for pair in started] == [
        ["prefill", "decode"],
        ["stock-prefill", "stock-decode"],
    ]
    assert len(world.waited) == waits


def test_a_refused_question_is_a_difference_and_the_run_goes_on(world, settings):
    FakeClient.failing = {"decode"}
    report = runner.verify(settings, Quiet())
    assert report["identical"] == 0
    assert report["differences"][0]["candidate"] == "refused"


def test_an_engine_that_died_ends_the_run(world, settings):
    FakeClient.failing = {"baseline"}
    world.start = lambda found: FakeServer(found, alive=False)
    with pytest.raises(EngineError, match="baseline engine ended"):
        runner.verify(settings, Quiet())


def test_status_is_awaited_until_nothing_is_held(world, settings, monkeypatch):
    held = iter([1, 1, 1, 0, 0, 0])
    monkeypatch.setattr(runner, "request_status", lambda host, port: {"handoff": {"holds": next(held)}})
    assert runner.verify(settings, Quiet())["engines"]["prefill"]["handoff"]["holds"] == 0


def test_an_engine_without_a_side_channel_fails_the_run(world, settings, monkeypatch):
    def silent(host, port):
        raise HandshakeError("no answer")

    monkeypatch.setattr(runner, "request_status", silent)
    report = runner.verify(settings, Quiet())
    assert report["engines"] == {}
    assert not report["passed"]


def test_questions_are_asked_side_by_side(world, settings, monkeypatch):
    barrier = threading.Barrier(3, timeout=10)

    def ask(self, url, ask):
        barrier.wait()
        return GOOD

    monkeypatch.setattr(FakeClient, "ask_single", ask)
    assert runner.verify(dataclasses.replace(settings, concurrency=3), Quiet())["identical"] == 3


def test_every_engine_computes_on_as_many_cores_and_in_the_same_way(settings, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    alone = engines.baseline(settings.run)
    pair = engines.kvx_pair(settings.run, digests=True)
    stock = engines.stock_pair(settings.run)
    for engine in (*pair.engines, *stock.engines):
        assert len(engine.cores) == len(alone.cores) == 2
        same = ("dtype", "block_size_tokens", "max_model_len_tokens", "max_num_seqs", "kv_space_gib", "model")
        assert [getattr(engine, name) for name in same] == [getattr(alone, name) for name in same]
    assert alone.environment["VLLM_PLUGINS"] == ""
    assert alone.kv_transfer is None
    assert pair.prefill.kv_transfer["kv_connector"] == "KvxConnector"
    assert stock.prefill.kv_transfer["kv_connector"] == "NixlConnector"
    assert pair.prefill.kv_transfer["engine_id"] != pair.decode.kv_transfer["engine_id"]


def test_digests_and_faults_reach_both_engines(settings):
    run = dataclasses.replace(settings.run, inject="stale", connectors=("a", "b"), layout="LBHNC")
    pair = engines.kvx_pair(run, digests=False)
    for engine in pair.engines:
        extra = engine.kv_transfer["kv_connector_extra_config"]
        assert (extra["verify"], extra["inject"], extra["connectors"]) == ("off", "stale", ["a", "b"])
        assert engine.environment["VLLM_KV_CACHE_LAYOUT"] == "LBHNC"
    assert pair.prefill_side_port != pair.decode_side_port


def test_given_ports_are_used_in_order(settings, monkeypatch):
    monkeypatch.setattr(engines, "require_free_port", lambda host, port: None)
    pair = engines.kvx_pair(dataclasses.replace(settings.run, first_port=7000), digests=True)
    assert [pair.prefill.port, pair.decode.port, pair.prefill_side_port, pair.decode_side_port] == [*range(7000, 7004)]
    with pytest.raises(EngineError, match="below 65536"):
        engines.require_ports(dataclasses.replace(settings.run, first_port=65534))
