"""A deployment of stand-in engines and a stand-in router: its order, what ends it, and that nothing is left."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from kvx.cli.serve import ConsoleView, table_of
from kvx.engine_settings import EngineSettings
from kvx.serve.deployment import STOP_ORDER, Deployment, Member
from kvx.serve.options import ServeOptions
from kvx.serve.router import RouterSettings
from kvx.serve.run import Instance, serve
from kvx.servers import Server, free_ports

FAKE = Path(__file__).with_name("fake_engine.py")
NAMES = ("prefill-0", "decode-0", "router")


@dataclass(frozen=True, kw_only=True)
class FakeEngine(EngineSettings):
    mode: str = "good"

    def command(self):
        return [sys.executable, str(FAKE), str(self.port), self.mode]


@dataclass(frozen=True, kw_only=True)
class FakeRouter(RouterSettings):
    mode: str = "good"

    def command(self):
        return [sys.executable, str(FAKE), str(self.port), self.mode]


@pytest.fixture(autouse=True)
def short_stop(monkeypatch):
    monkeypatch.setattr("kvx.servers.STOP_DEADLINE_S", 0.2)
    monkeypatch.setattr("kvx.processes.CHILDREN_DEADLINE_S", 20.0)  # what is killed needs no time, but a processor


def deployment(prefill="good", decode="good", router="good"):
    ports = free_ports(6)
    members = []
    for role, mode, port in (("prefill", prefill, ports[0]), ("decode", decode, ports[1])):
        engine = FakeEngine(name=f"{role}-0", model="m", port=port, mode=mode, stop_order=STOP_ORDER[role])
        members.append(Member(role, engine, ports[2]))
    front = FakeRouter(port=ports[3], metrics_port=ports[4], prefill_urls=[], decode_urls=[], mode=router)
    return Deployment(tuple(members), front if router else None, "some-model")


class Recorder:
    """A view that keeps what it is shown, and acts at what it is told to wait for."""

    wants_counts = False

    def __init__(self, at=None):
        self.changes, self.said, self.instances = [], [], []
        self._at = dict(at or {})

    def show(self, instances):
        self.instances = list(instances)
        for one in instances:
            if (one.name, one.state) not in self.changes:
                self.changes.append((one.name, one.state))
                if action := self._at.pop((one.name, one.state), None):
                    action(one)

    def say(self, text, *, alarm=False):
        self.said.append((text, alarm))
        if action := self._at.pop(text.split(":")[0], None):
            action(None)


def interrupt(_one):
    signal.raise_signal(signal.SIGINT)


def run(tmp_path, plan, view, **options):
    try:
        return serve(ServeOptions(logs=str(tmp_path), **options), plan, view)
    finally:
        for name in NAMES:
            require_gone(tmp_path / f"{name}.log")


def require_gone(log):
    """Neither the process that wrote the log nor its child nor their shared memory is there any more."""
    words = log.read_text().split() if log.exists() else []
    found = {word: words[i + 1] for i, word in enumerate(words) if word in ("SHARED", "CHILD", "TMP")}
    if found:
        assert not is_alive(int(found["CHILD"]))
        assert not Path("/dev/shm", found["SHARED"]).exists()
        assert not Path(found["TMP"]).exists()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def interruptible():
    """A shell ignores SIGINT for its background jobs, and they inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_each_is_started_when_the_one_before_is_healthy_and_an_interrupt_is_a_good_end(tmp_path):
    view = Recorder({"ready": interrupt})
    plan = deployment()
    assert run(tmp_path, plan, view) == 0
    started = [(name, state) for name, state in view.changes if state in ("starting", "ready")]
    assert started == [(name, state) for name in NAMES for state in ("starting", "ready")]
    assert view.said[0][0] == f"ready: http://127.0.0.1:{plan.router.port}/v1, model some-model; Ctrl-C stops it"
    assert {one.state for one in view.instances} == {"stopped"}


def test_sigterm_is_a_good_end_too(tmp_path):
    view = Recorder({"ready": lambda _: signal.raise_signal(signal.SIGTERM)})
    assert run(tmp_path, deployment(), view) == 0


def test_servers_end_in_order_router_decode_prefill(tmp_path, monkeypatch):
    """Each of them is asked to end only when the one before is gone."""
    alive_when_asked, terminate, view = {}, Server.terminate, Recorder({"ready": interrupt})

    def ask(server):
        (name,) = [one.name for one in view.instances if one.server is server]
        alive_when_asked.setdefault(name, {one.name for one in view.instances if is_alive(one.server.pid)})
        terminate(server)

    monkeypatch.setattr(Server, "terminate", ask)
    assert run(tmp_path, deployment(), view) == 0
    assert list(alive_when_asked.items()) == [
        ("router", {"router", "decode-0", "prefill-0"}), ("decode-0", {"decode-0", "prefill-0"}),
        ("prefill-0", {"prefill-0"}),
    ]  # fmt: skip


def test_without_a_router_all_urls_are_named(tmp_path):
    view = Recorder({"ready, but without vllm-router (pip install 'kvx[router]') there is no one URL": interrupt})
    plan = deployment(router=None)
    assert run(tmp_path, plan, view) == 0
    for member in plan.members:
        assert f"http://127.0.0.1:{member.engine.port}" in view.said[0][0]


@pytest.mark.parametrize("lost", ["decode-0", "router"])
def test_a_server_that_dies_ends_all_with_its_last_lines(tmp_path, lost):
    def kill(_):
        os.kill(next(one for one in view.instances if one.name == lost).server.pid, signal.SIGKILL)

    view = Recorder({"ready": kill})
    assert run(tmp_path, deployment(), view) == 1
    (alarm,) = [text for text, alarm in view.said if alarm]
    assert f"the {lost}{'' if lost == 'router' else ' engine'} ended with status -9" in alarm
    assert "TMP" in alarm  # the log's last line
    assert {one.name: one.state for one in view.instances}[lost] == "ended"


def test_with_keep_going_the_others_stay_until_the_end(tmp_path):
    def kill(_):
        os.kill(view.instances[0].server.pid, signal.SIGKILL)

    def look_again(_):
        assert [one.server.is_running() for one in view.instances] == [False, True, True]
        interrupt(None)

    view = Recorder({"ready": kill, ("prefill-0", "ended"): look_again})
    assert run(tmp_path, deployment(), view, keep_going=True) == 1


def test_a_start_that_fails_says_why_and_ends_the_others(tmp_path):
    view = Recorder()
    assert run(tmp_path, deployment(decode="fail"), view) == 1
    (alarm,) = [text for text, alarm in view.said if alarm]
    assert "the decode-0 engine ended with status 3" in alarm
    assert "ValueError: no room for one request" in alarm
    assert [one.state for one in view.instances] == ["stopped", "ended", "waiting"]


def test_a_start_that_takes_too_long_says_what_was_found(tmp_path):
    def await_its_word(one):
        end_s = time.monotonic() + 30
        while one.log.read_text() != "starting\n":
            assert time.monotonic() < end_s
            time.sleep(0.01)

    view = Recorder({("prefill-0", "starting"): await_its_word})
    assert run(tmp_path, deployment(prefill="mute"), view, start_timeout=0.5) == 1
    (alarm,) = [text for text, alarm in view.said if alarm]
    assert "the prefill-0 engine was not ready after" in alarm
    assert alarm.endswith("prefill-0.log: starting")


def test_a_second_interrupt_kills_at_once(tmp_path):
    """Engines that ignore SIGTERM would be given a minute; the second Ctrl-C does not wait for it."""
    program = f"""
        import sys; sys.path.insert(0, {str(FAKE.parent)!r})
        import signal, test_serve_run as t
        from kvx import processes, servers
        signal.signal(signal.SIGINT, signal.default_int_handler)
        servers.STOP_DEADLINE_S = processes.CHILDREN_DEADLINE_S = 100
        class View(t.Recorder):
            def say(self, text, *, alarm=False):
                print(text.split(":")[0], flush=True)
        terminate = servers.Server.terminate
        def asked(server):
            terminate(server)
            print("asked", flush=True)
        servers.Server.terminate = asked
        sys.exit(t.serve(t.ServeOptions(logs={str(tmp_path)!r}), t.deployment(*["stubborn"] * 3), View()))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline() == b"stopping\n"
        assert running.stdout.readline() == b"asked\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
    for name in NAMES:
        require_gone(tmp_path / f"{name}.log")


def test_without_a_terminal_each_change_is_one_plain_line(tmp_path, capsys):
    one = Instance("decode-0", "decode", "http://h:1", 5, tmp_path / "decode-0.log")
    with ConsoleView(Console(), Console(stderr=True)) as view:
        assert not view.wants_counts
        for state in ("waiting", "starting", "starting", "ready"):
            one.become(state)
            view.show([one])
        view.say("all is well")
        view.say("all is not", alarm=True)
    said = capsys.readouterr()
    log = tmp_path / "decode-0.log"
    assert said.out.splitlines() == [
        "decode-0: waiting",
        f"decode-0: starting at http://h:1, side channel 5, log {log}",
        "decode-0: ready",
        "all is well",
    ]
    assert said.err == "all is not\n"


def test_the_table_has_a_row_for_each_server_and_says_where_logs_are(tmp_path):
    engine = Instance("decode-0", "decode", "http://h:1", 5, tmp_path / "decode-0.log", "ready", 0.0, 12, 3, 456)
    router = Instance("router", "router", "http://h:2", None, tmp_path / "router.log")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table_of([engine, router]))
    text = console.export_text()
    row = next(line for line in text.splitlines() if "decode-0" in line)
    assert [word for word in ("http://h:1", "ready", "12", "3", "456") if word in row]
    assert "router" in text
    assert f"{tmp_path}/NAME.log" in text


def test_a_line_above_the_table_leaves_the_table_as_it_is(tmp_path):
    engine = Instance("decode-0", "decode", "http://h:1", 5, tmp_path / "decode-0.log", "ready", 0.0, 12, 3, 456)
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    with ConsoleView(console, Console(stderr=True)) as view:
        view.show([engine])
        view.say("ready: [all of it]")
    assert "[green]" not in console.file.getvalue()
    assert "ready: [all of it]" in console.file.getvalue()
