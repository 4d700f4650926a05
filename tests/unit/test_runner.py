"""The order of a verified run, with stand-ins for engines: nothing real is started."""

import dataclasses
import threading
from typing import ClassVar

import pytest

from kvx.errors import EngineError, HandshakeError
from kvx.verify import engines, offload, runner
from kvx.verify.client import Answer
from kvx.verify.places import Place
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
    [("cuda", BYTES, 1), ("cuda", ("--num-gpu-blocks-override", "9"), 4), ("cpu", BYTES, 2)],
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


def test_each_engine_of_a_pair_may_have_a_gpu_of_its_own(world, settings):
    """Decode's is the first that it sees, and prefill's memory can be mapped there; what is measured is apart."""
    run = dataclasses.replace(settings.run, device="cuda", gpus=("0", "1"))
    for pair in (engines.kvx_pair(run, digests=False), engines.stock_pair(run)):
        assert [engine.environment["CUDA_VISIBLE_DEVICES"] for engine in pair.engines] == ["0,1", "1,0"]
    alone = (engines.baseline(run), engines.kvx_single(run, digests=False)[0])
    assert [engine.environment["CUDA_VISIBLE_DEVICES"] for engine in alone] == ["0,1", "0,1"]
    runner.verify(dataclasses.replace(settings, run=run), Quiet())
    assert world.waited == [["baseline"], ["prefill", "decode"]]
    pairs = [engines.kvx_pair(run, digests=False), engines.stock_pair(run)]
    engines.start_pairs(run, world, pairs, lambda _server, _seconds: None)
    one = ["prefill", "decode"]
    assert world.waited[2:] == [one, [*one, "stock-prefill", "stock-decode"]]


def test_without_gpus_named_the_environment_stays(settings):
    assert "CUDA_VISIBLE_DEVICES" not in engines.kvx_pair(settings.run, digests=False).decode.environment


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


def test_engines_run_and_are_found_where_their_places_say(world, settings, monkeypatch):
    there = Place(
        prefix=("ip", "netns", "exec", "far"),
        host="10.0.0.1",
        side_channel_host="10.1.0.1",
        environment={"UCX_TLS": "tcp"},
    )
    run = dataclasses.replace(settings.run, places={"decode": there}, options={"lease_s": 7, "verify": "sample"})
    asked = set()
    monkeypatch.setattr(
        runner, "request_status", lambda host, port: asked.add((host, port)) or {"handoff": {"holds": 0}}
    )
    started = []
    start = world.start
    monkeypatch.setattr(world, "start", lambda found: started.append(found) or start(found))
    report = runner.verify(dataclasses.replace(settings, run=run), Quiet())
    alone, prefill, decode = started
    assert (alone.prefix, alone.host, prefill.prefix, prefill.host) == ((), "127.0.0.1", (), "127.0.0.1")
    assert (decode.prefix, decode.host) == (there.prefix, "10.0.0.1")
    assert decode.environment["UCX_TLS"] == "tcp"
    assert "UCX_TLS" not in prefill.environment
    extras = [engine.kv_transfer["kv_connector_extra_config"] for engine in (prefill, decode)]
    assert [extra["side_channel_host"] for extra in extras] == ["127.0.0.1", "10.1.0.1"]
    assert [(extra["lease_s"], extra["verify"]) for extra in extras] == [(7, "sample")] * 2
    assert asked == {(extra["side_channel_host"], extra["side_channel_port"]) for extra in extras}
    assert report["settings"]["places"]["decode"]["prefix"] == ["ip", "netns", "exec", "far"]
    assert report["settings"]["options"] == {"lease_s": 7, "verify": "sample"}


def test_one_engine_that_offloads_is_asked_twice_backwards_the_second_time(world, settings, monkeypatch):
    asked = []

    def ask(self, url, ask):
        asked.append((url, ask.request_id, ask.prompt))
        return dataclasses.replace(GOOD, prompt_tokens=tuple(range(len(asked), len(asked) + 700)))

    monkeypatch.setattr(FakeClient, "ask_single", ask)
    run = dataclasses.replace(settings.run, connectors=("cpu_offload",), offloading=("cpu_offload",), offload_bytes=99)
    report = runner.verify(dataclasses.replace(settings, run=run, concurrency=1), Quiet())
    assert world.together == [["baseline"], ["single"]]
    assert [name for url, name, _ in asked if url == "single"] == [
        "question-0", "question-1", "question-2", "question-2-again", "question-1-again", "question-0-again",
    ]  # fmt: skip
    beginnings = {text[:12] for _, _, text in asked}
    assert len(beginnings) == 3, "no two prompts begin alike"
    assert all(len(text) > 2000 for _, _, text in asked)
    assert report["settings"]["offload_bytes"] == 99
    assert report["settings"]["max_model_len_tokens"] == 896
    assert report["settings"]["small_blocks"] == 9


def test_a_pair_that_offloads_has_a_small_cache_on_the_prefill_side_only(settings):
    run = dataclasses.replace(
        settings.run, connectors=("nixl", "cpu_offload"), offloading=("cpu_offload",), small_blocks=8, offload_bytes=5
    )
    assert run.hands_off
    pair = engines.kvx_pair(run, digests=True)
    assert (pair.prefill.explicit_blocks, pair.decode.explicit_blocks) == (8, None)
    for engine in pair.engines:
        extra = engine.kv_transfer["kv_connector_extra_config"]
        assert (extra["offload_bytes"], extra["offload_eviction"]) == (5, "lru")
    alone, port = engines.kvx_single(dataclasses.replace(run, connectors=("cpu_offload",)), digests=True)
    assert alone.explicit_blocks == 8
    assert alone.kv_transfer["kv_connector_extra_config"]["side_channel_port"] == port
    assert (
        "offload_bytes"
        not in engines.kvx_pair(settings.run, digests=True).prefill.kv_transfer["kv_connector_extra_config"]
    )


def answered(first, count):
    return Answer(prompt_tokens=tuple(range(first, first + count)), tokens=(1,), text="t", finish_reason="stop")


def test_sizes_make_blocks_leave_the_cache_and_host_memory(settings, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}'
    )
    answers = [answered(1000 * index, 600) for index in range(4)]
    assert offload.distinct_blocks(answers, 128) == 16
    assert offload.distinct_blocks([answered(0, 600), answered(0, 300), answered(0, 127)], 128) == 4
    assert offload.distinct_blocks([answered(0, 128), answered(0, 0)], 128) == 1
    run = offload.fitted(settings.run, answers, 40)
    assert (run.max_model_len_tokens, run.small_blocks) == (640, 7)
    assert run.offload_bytes == 11 * (2 * 2 * 2 * 8 * 4 * 128)
    with pytest.raises(EngineError, match="ask more questions"):
        offload.fitted(settings.run, answers[:2], 40)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="--offload-mib"):
        offload.fitted(settings.run, answers, 40)
