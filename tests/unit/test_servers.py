import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvx.engine_log import meaningful_lines
from kvx.engine_settings import EngineSettings
from kvx.errors import EngineError
from kvx.servers import (
    Servers,
    free_ports,
    require_free_port,
    require_known_vllm,
    share_cores,
)

pytestmark = pytest.mark.usefixtures("short_stop")

FAKE = Path(__file__).with_name("fake_engine.py")


@dataclass(frozen=True, kw_only=True)
class FakeSettings(EngineSettings):
    mode: str = "good"

    def command(self):
        return [sys.executable, str(FAKE), str(self.port), self.mode]


@pytest.fixture
def short_stop(monkeypatch):
    monkeypatch.setattr("kvx.servers.STOP_DEADLINE_S", 0.5)
    monkeypatch.setattr("kvx.processes.CHILDREN_DEADLINE_S", 20.0)  # what ends by itself needs no time, but a processor


def fake(mode="good", name="engine"):
    return FakeSettings(name=name, model=Path("m"), port=free_ports(1)[0], mode=mode)


def said(log):
    """What the fake engine printed about itself."""
    words = log.read_text().split()
    return {word: words[i + 1] for i, word in enumerate(words) if word in ("SHARED", "UNMAPPED", "CHILD", "TMP")}


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def eventually(is_so, deadline_s=30):
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def require_all_gone(server, found):
    assert not is_alive(server.pid)
    assert not is_alive(int(found["CHILD"]))
    assert not Path("/dev/shm", found["SHARED"]).exists()
    assert not Path("/dev/shm", found["UNMAPPED"]).exists()
    assert not Path(found["TMP"]).exists()


@pytest.mark.parametrize("mode", ["good", "stubborn"])
def test_everything_started_is_gone_afterwards(tmp_path, mode):
    with Servers(tmp_path) as servers:
        server = servers.start(fake(mode))
        servers.wait_healthy(30)
        found = said(server.log)
        assert len(server.processes()) >= 2
        assert server.memory_bytes() > 0
    require_all_gone(server, found)


def test_everything_is_gone_after_an_exception(tmp_path):
    with pytest.raises(KeyboardInterrupt), Servers(tmp_path) as servers:
        server = servers.start(fake())
        servers.wait_healthy(30)
        found = said(server.log)
        raise KeyboardInterrupt
    require_all_gone(server, found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_everything_is_gone_after_a_signal(tmp_path, number):
    """Of SIGKILL the run hears nothing: its guard clears away."""
    program = f"""
        import sys; sys.path.insert(0, {str(FAKE.parent)!r})
        import signal, time, test_servers
        from pathlib import Path
        from kvx import servers
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for its background jobs
        servers.STOP_DEADLINE_S = 0.5
        with servers.Servers(Path({str(tmp_path)!r})) as running:
            running.start(test_servers.fake())
            running.wait_healthy(30)
            print("ready", flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"ready\n"
        (engine,) = [p for p in psutil.Process(run.pid).children() if str(FAKE) in p.cmdline()]
        found = said(tmp_path / "engine.log")
        helpers = psutil.Process(run.pid).children()
        run.send_signal(number)
        assert run.wait(60) != 0
    eventually(lambda: not any(is_alive(helper.pid) for helper in helpers))
    require_all_gone(engine, found)


def test_one_that_was_killed_is_replaced_under_its_name_and_port(tmp_path):
    settings = fake()
    with Servers(tmp_path) as servers:
        server = servers.start(settings)
        servers.wait_healthy(30)
        found = said(server.log)
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: not server.is_running())
        servers.stop(server)
        require_all_gone(server, found)
        servers.start(settings)
        servers.wait_healthy(30)


def test_a_run_that_ends_well_leaves_no_guard(tmp_path):
    before = set(psutil.Process().children())
    with Servers(tmp_path):
        (guard,) = set(psutil.Process().children()) - before
        assert "kvx.guard" in guard.cmdline()
        assert os.getsid(guard.pid) == guard.pid, "a signal for our group is not for it"
    assert not is_alive(guard.pid)


def test_a_crash_leaves_nothing_behind(tmp_path):
    with pytest.raises(EngineError, match="ended with status -9"), Servers(tmp_path) as servers:
        server = servers.start(fake())
        servers.wait_healthy(30)
        found = said(server.log)
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: not server.is_running())
        server.check()
    require_all_gone(server, found)


def test_a_failed_start_shows_its_cause_and_ends_the_others(tmp_path):
    with pytest.raises(EngineError) as caught, Servers(tmp_path) as servers:
        other = servers.start(fake(name="other"))
        servers.start(fake("fail", name="failing"))
        servers.wait_healthy(30)
    message = str(caught.value)
    assert "failing engine ended with status 3" in message
    assert "ValueError: no room for one request" in message
    assert "Traceback" not in message
    assert not is_alive(other.pid)


def test_an_engine_that_never_answers_is_given_up(tmp_path):
    seconds = []
    with pytest.raises(EngineError, match="was not ready after"), Servers(tmp_path) as servers:
        servers.start(fake("mute"))
        servers.wait_healthy(0.5, lambda server, spent: seconds.append(spent))
    assert seconds


def test_a_paused_engine_does_not_answer_until_resumed_and_can_be_stopped(tmp_path):
    with Servers(tmp_path) as servers:
        server = servers.start(fake())
        servers.wait_healthy(30)
        server.pause()
        eventually(lambda: {p.status() for p in server.processes()} == {psutil.STATUS_STOPPED})
        server.resume()
        assert server.is_healthy()
        server.pause()
    assert not is_alive(server.pid)


def test_one_engine_that_was_killed_is_started_again_beside_the_others(tmp_path):
    with Servers(tmp_path) as servers:
        killed, other = servers.start(fake(name="killed")), servers.start(fake(name="other"))
        servers.wait_healthy(30)
        for process in killed.processes():
            process.kill()
        eventually(lambda: not killed.is_running())
        with pytest.raises(EngineError, match="killed engine ended with status -9"):
            servers.wait_healthy(30)
        servers.stop(killed)
        servers.start(fake(name="again"))
        servers.wait_healthy(30)
        assert other.is_running()


def test_a_prefix_goes_before_the_whole_command(tmp_path):
    settings = dataclasses.replace(fake(), prefix=("env", "KVX_PREFIXED=1"))
    with Servers(tmp_path) as servers, socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.port))  # where the prefix leads, it may be free: the engine itself will say
        server = servers.start(settings)
        eventually(lambda: psutil.Process(server.pid).environ().get("KVX_PREFIXED") == "1")
        assert str(FAKE) in psutil.Process(server.pid).cmdline()


def test_a_prefix_that_is_no_command_is_one_sentence(tmp_path):
    settings = dataclasses.replace(fake(name="prefill"), prefix=("/no/such/command", "here"))
    with Servers(tmp_path) as servers, pytest.raises(EngineError) as raised:
        servers.start(settings)
    assert "'/no/such/command here' cannot be run before the prefill engine" in str(raised.value)


def test_peak_memory_is_watched(tmp_path):
    with Servers(tmp_path) as servers:
        servers.watch_memory(0.05)
        servers.start(fake())
        servers.wait_healthy(30)
        eventually(lambda: servers.peak_memory_bytes)
    assert servers.peak_memory_bytes > 2**20


def test_port_in_use_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 cannot be used"):
            require_free_port("127.0.0.1", port)
        with pytest.raises(EngineError, match=f"port {port}"), Servers(tmp_path) as servers:
            servers.start(dataclasses.replace(fake(), port=port))


def test_a_foreign_host_is_one_sentence():
    with pytest.raises(EngineError, match=r"192\.0\.2\.1 cannot be used"):
        require_free_port("192.0.2.1", 0)


def test_free_ports_differ():
    assert len(set(free_ports(20))) == 20


@pytest.mark.parametrize(
    ("given", "allowed"), [("12000 60999\n", range(10_000, 12_000)), ("1024 65535\n", range(1024, 65_536))]
)
def test_free_ports_are_none_that_a_connection_may_be_given_meanwhile(monkeypatch, tmp_path, given, allowed):
    """Where there are others."""
    path = tmp_path / "range"
    path.write_text(given)
    monkeypatch.setattr("kvx.servers._GIVEN_PORTS", path)
    found = free_ports(20)
    assert len(set(found)) == 20
    assert set(found) <= set(allowed)


@pytest.mark.parametrize(
    ("cores", "shares"),
    [({0, 1}, [(0,), (1,)]), ({3}, [(3,), (3,)]), ({0, 1, 2, 5, 7}, [(0, 1), (2, 5)])],
)
def test_cores_are_dealt_out_evenly(monkeypatch, cores, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores)
    assert share_cores(2) == shares


@pytest.mark.parametrize(
    ("version", "device"), [("0.31.2", None), ("0.32.0+cpu", "cpu"), ("0.33.0", "cuda"), ("0.34.0", None)]
)
def test_unknown_vllm_is_one_sentence_naming_the_known_ones(monkeypatch, version, device):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: version)
    if device:
        assert require_known_vllm() == device
    else:
        with pytest.raises(EngineError, match=r"does not know vLLM 0\.3.*0\.32, 0\.33"):
            require_known_vllm()


def test_missing_vllm_says_what_to_install(monkeypatch):
    def version(name):
        import importlib.metadata

        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(EngineError, match=r"pip install 'kvx\[vllm\]'"):
        require_known_vllm()


def test_command_and_environment():
    settings = EngineSettings(
        name="e",
        model=Path("/m"),
        port=80,
        cores=(2, 3),
        kv_space_gib=2,
        explicit_blocks=50,
        kv_transfer={"kv_connector": "KvxConnector"},
        environment={"VLLM_PLUGINS": ""},
        eager=False,
        arguments=("--seed", "7"),
    )
    command = settings.command()
    assert "--enforce-eager" not in command
    assert command[-2:] == ["--seed", "7"]
    assert command[command.index("--num-gpu-blocks-override") + 1] == "50"
    assert json.loads(command[command.index("--kv-transfer-config") + 1]) == {"kv_connector": "KvxConnector"}
    environment = settings.full_environment(Path("/scratch"))
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["VLLM_PLUGINS"] == ""
    assert environment["TMPDIR"] == "/scratch"


def test_a_gpu_engine_gets_transports_for_its_memory_and_nothing_that_is_for_cpus(monkeypatch):
    for name in ("UCX_TLS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    settings = EngineSettings(name="e", model=Path("/m"), port=80, device="cuda", cores=(0,), kv_space_gib=1)
    environment = settings.full_environment(Path("/s"))
    assert "cuda_copy" in environment["UCX_TLS"]
    assert not [name for name in environment if name.startswith("VLLM_CPU")]


def test_an_unset_size_is_left_to_vllm(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    settings = EngineSettings(name="e", model=Path("/m"), port=80)
    assert "--num-gpu-blocks-override" not in settings.command()
    assert "--kv-transfer-config" not in settings.command()
    assert "--enforce-eager" in settings.command()
    assert "VLLM_CPU_KVCACHE_SPACE" not in settings.full_environment(Path("/s"))


def test_meaningful_lines_without_an_exception_are_the_last_ones():
    assert meaningful_lines("a\nb\n\nc\nd\n") == ["b", "c", "d"]
    assert meaningful_lines("") == ["(the log is empty)"]


def test_meaningful_lines_prefer_the_cause_over_its_consequences():
    log = """
(Worker pid=9) ERROR 01-01 00:00:00 [w.py:1] kvx.errors.SizingError: 12 blocks fit, 16 are needed
(EngineCore pid=8) ERROR 01-01 00:00:00 [core.py:1] RuntimeError: Engine core initialization failed. See root cause
Traceback (most recent call last):
  File "api_server.py", line 1, in <module>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
[rank0]: leaked
"""
    assert meaningful_lines(log) == ["kvx.errors.SizingError: 12 blocks fit, 16 are needed"]
