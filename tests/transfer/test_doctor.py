"""`kvx doctor` beside twelve faults, each brought about for real: it names the cause and the fix, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.auth
from engine_process import Engine, EngineConfig, Remote, StartEngines

from kvx.cli import main
from kvx.cli.doctor import doctor_command
from kvx.handshake import Fetch, Fetched, ask
from kvx.seal import RequestSeal

pytestmark = pytest.mark.transfer

SECRET, ANOTHER_SECRET = "a secret for the doctor's tests", "another secret for those tests"
ELSEWHERE = "192.0.2.1"  # documentation's own network: nobody is there


@dataclass(frozen=True)
class Report:
    status: int
    findings: dict[str, dict[str, str]]
    said: str

    @property
    def troubles(self) -> set[str]:
        return {name for name, found in self.findings.items() if found["level"] in ("warning", "error")}

    def require(self, check: str, level: str, found: str, fix: str) -> None:
        """This finding and no other trouble. `found` and `fix`: regular expressions."""
        assert self.troubles == {check}, self.said
        self.require_among(check, level, found, fix)
        assert self.status == {"warning": 1, "error": 2}[level]

    def require_among(self, check: str, level: str, found: str, fix: str) -> None:
        finding = self.findings[check]
        assert finding["level"] == level
        assert re.search(found, finding["found"])
        assert re.search(fix, finding["fix"])
        assert finding["why"]


def report_of(status: int, output: str) -> Report:
    return Report(status, {found["check"]: found for found in json.loads(output)["findings"]}, output)


Doctor = Callable[..., Report]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    """The command in this process; what it starts are processes all the same."""
    for name in [name for name in os.environ if name.startswith(("KVX_", "UCX_"))]:
        monkeypatch.delenv(name)

    def call(*words: object) -> Report:
        monkeypatch.setattr(sys, "argv", ["kvx", "doctor", "--json", "-", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert isinstance(ended.value.code, int)
        return report_of(ended.value.code, capfd.readouterr().out)

    return call


def doctor_in_a_child(script: str, *words: object, prefix: tuple[str, ...] = ()) -> Report:
    """The same in a process of its own, in which a script runs first."""
    code = f"import sys\n{script}\nsys.argv = ['kvx', 'doctor', *sys.argv[1:]]\nfrom kvx.cli.main import main\nmain()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVX_", "UCX_"))}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, "--json", "-", *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return report_of(done.returncode, done.stdout)


# Peers


class HalfInAProcess:
    """The half that waits, in a process that a test may do anything to."""

    def __init__(self, config: EngineConfig) -> None:
        from kvx.doctor.half import Half
        from kvx.engine_side import HandoffSettings
        from kvx.secret import read_secret

        self._half = Half(HandoffSettings(connectors=config.connectors), read_secret())
        self._half.open()

    def port(self) -> int:
        return self._half.port

    def engine_id(self) -> str:
        return self._half.engine_id

    def round_trip(self, port: int, engine_id: str) -> Any:
        return self._half.round_trip("127.0.0.1", port, engine_id)

    def serve(self) -> str | None:
        return self._half.serve(60)

    def serve_and_change_a_bit(self) -> str | None:
        """After it has arrived, and before it is held: digests of what is held agree on both sides."""
        pull = self._half._pull

        def change(*args: Any) -> None:
            pull(*args)
            view = self._half._views["layer.2"]
            view.view(torch.uint8)[100, 1, 2, 3] ^= 1

        self._half._pull = change  # type: ignore[method-assign]
        return self._half.serve(60)

    def die_when_asked(self) -> None:
        """In the middle of the trip: when it has been asked to pull, and has not."""
        self._half._pull = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        self._half.serve(60)

    def close(self) -> None:
        self._half.close()


class PackedEngine(Engine):
    """Its kernels pack a page in an order of their own, as vLLM's on a CPU."""

    def __init__(self, config: EngineConfig) -> None:
        import kvx.plan

        plain = kvx.plan.group_geometry
        kvx.plan.group_geometry = lambda *args: replace(plain(*args), page_format="CPU_ATTN")
        super().__init__(config)


class EngineOfAnotherTime(Engine):
    """Its clock is as many seconds ahead as its name says, and its side channel as many seconds old."""

    def __init__(self, config: EngineConfig) -> None:
        import kvx.handoff

        ahead_s, age_s = map(float, config.engine_id.split())

        class Seal(kvx.handoff.ReplySeal):
            def __init__(self, secret: Any, window_s: float) -> None:
                super().__init__(secret, window_s, lambda: time.time() + ahead_s)
                self._started -= age_s

        kvx.handoff.ReplySeal = Seal
        super().__init__(config)


@pytest.fixture
def start(fork_server: None) -> Iterator[Callable[..., Remote]]:
    started: list[Remote] = []

    def start_one(make: Any, engine_id: str = "peer", **config: Any) -> Remote:
        started.append(Remote(EngineConfig(engine_id, **config), make))
        return started[-1].ready()

    yield start_one
    for remote in started:
        remote.stop()


def address(remote: Remote) -> str:
    return f"127.0.0.1:{remote.port}"


def unused_port() -> int:
    """Below those that the kernel gives to everybody who asks for any: it stays unused until it is wanted."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


# Halves


def test_a_round_trip_brings_back_what_went_and_notices_one_bit(start: Callable[..., Remote]) -> None:
    owner, reader = start(HalfInAProcess, connectors=("ipc",)), start(HalfInAProcess, connectors=("ipc",))
    owner_id = owner.engine_id()
    digests = set()
    for _ in range(2):
        served = owner.begin("serve")
        trip = reader.round_trip(owner.port, owner_id)
        assert "64 MiB there and back" in served()
        assert (trip.connector, trip.nbytes, trip.digests_compared) == ("ipc", 64 << 20, len(digests) * 65536 + 65536)
        digests.add(trip.digest)
    assert len(digests) == 2, "each trip has numbers of its own"
    served = owner.begin("serve_and_change_a_bit")
    with pytest.raises(RuntimeError, match=r"VerificationError: 1 of .* numbers of layer.2 came back changed"):
        reader.round_trip(owner.port, owner_id)
    served()


def test_a_half_is_not_to_be_asked_for_more_than_it_has(start: Callable[..., Remote]) -> None:
    owner = start(HalfInAProcess, connectors=("ipc",))
    served = owner.begin("serve")
    fetch = Fetch(sequence=1, engine_id="e", host="127.0.0.1", port=9, request_id="r", num_tokens=2**61)
    fetched = ask("127.0.0.1", owner.port, fetch, RequestSeal(None), None, 30)
    assert isinstance(fetched, Fetched)
    assert "are no trip" in fetched.failure
    assert "could not be read" in served()


# A sound machine


@contextlib.contextmanager
def serving(place: str) -> Iterator[subprocess.Popen[str]]:
    """`kvx doctor --serve`, as somebody on the other host would type it."""
    command = [sys.executable, "-m", "kvx.cli.main", "doctor", "--serve", place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert f"kvx doctor --peer {place}" in process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_all_green_on_a_sound_machine_and_with_sound_peers(
    doctor: Doctor, start_engines: StartEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVX_SECRET", SECRET)
    (engine,) = start_engines(EngineConfig("prefill", environ={"KVX_SECRET": SECRET}))
    place = f"127.0.0.1:{unused_port()}"
    with serving(place) as half:
        peers = ("--peer", place, "--peer", address(engine))
        found = doctor("--connector", "nixl", "--side-channel-port", unused_port(), *peers)
        assert found.troubles == set(), found.said
        assert found.status == 0
        for check in ("round trip by nixl", f"round trip with {place}"):
            assert found.findings[check]["level"] == "ok"
            assert "64 MiB by nixl" in found.findings[check]["found"]
        assert "cma" in found.findings["UCX transports"]["found"]
        assert found.findings[f"clock of {place}"]["level"] == "ok"
        assert SECRET not in found.said
        assert half.stdout is not None
        assert "64 MiB there and back" in half.stdout.readline()
        half.send_signal(signal.SIGINT)
        assert half.wait(60) == 0
    assert "in service" in found.findings[f"round trip with {address(engine)}"]["found"]
    assert engine.status()["transfer"]["count"] == 0, "nothing was moved through it"


def trips_of(found: Report) -> set[str]:
    return {name.removeprefix("round trip by ") for name in found.findings if name.startswith("round trip by ")}


@pytest.mark.slow
def test_round_trip_by_mooncake(doctor: Doctor) -> None:
    found = doctor("--connector", "mooncake")
    assert found.troubles == set(), found.said
    assert trips_of(found) == {"mooncake"}


@pytest.mark.slow
def test_the_example_of_the_help_works(doctor: Doctor) -> None:
    example = re.search(r"Example: kvx doctor (.*)", str(doctor_command.__doc__))
    assert example is not None
    found = doctor(*example[1].split())
    assert found.status == 0, found.said
    assert trips_of(found) == {"ipc", "nixl"}


def test_a_connector_that_reaches_no_other_process_moves_nothing(doctor: Doctor) -> None:
    found = doctor("--connector", "cpu_offload")
    assert found.troubles == set(), found.said
    assert found.findings["connector cpu_offload"]["level"] == "ok"
    assert trips_of(found) == set()


def test_two_engines_in_service_are_compared(doctor: Doctor, start_engines: StartEngines) -> None:
    first, second = start_engines(
        EngineConfig("prefill", num_kv_heads=4, layout="LBNHC"),
        EngineConfig("decode", num_kv_heads=2, total_heads=4, tp_size=2, block_size_tokens=32),
    )
    found = doctor("--quick", "--peer", address(first), "--peer", address(second))
    assert found.troubles == set(), found.said
    both = found.findings[f"compatibility of {address(first)} and {address(second)}"]
    assert re.search("layouts .* block sizes .* tensor parallel", both["found"])
    assert "engine prefill, model tiny" in found.findings[f"handshake with {address(first)}"]["found"]

    found = doctor("--quick", "--peer", address(first), "--side-channel-port", second.port)
    assert found.troubles == set(), found.said
    assert "engine decode runs there already" in found.findings["side channel port"]["found"]
    assert f"compatibility of {address(second)} and {address(first)}" in found.findings

    check = f"compatibility with {address(first)}"
    doctor("--quick", "--connector", "ipc", "--peer", address(first)).require(
        check, "error", "connectors: ipc at here, nixl at", "one connector that both have"
    )
    doctor("--quick", "--config", '{"verify": "all"}', "--peer", address(first)).require(
        check, "error", "verify: all at here, off at", "the same value"
    )


# Faults


@pytest.fixture
def no_nixl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the doctor starts cannot import it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['nixl'] = sys.modules['nixl._api'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_missing_library(doctor: Doctor, no_nixl: None) -> None:
    doctor("--connector", "nixl").require(
        "connector nixl", "error", "library does not load.*not installed", r"pip install 'kvx\[nixl\]'"
    )


@pytest.mark.slow
def test_auto_goes_on_without_a_missing_library(doctor: Doctor, no_nixl: None) -> None:
    found = doctor("--connector", "auto")
    assert found.troubles == set(), found.said
    assert "auto goes on without it" in found.findings["connector nixl"]["found"]
    assert trips_of(found) == {"ipc"}


def test_closed_port(doctor: Doctor) -> None:
    port = unused_port()
    doctor("--quick", "--peer", f"127.0.0.1:{port}").require(
        f"peer 127.0.0.1:{port}", "error", f"nothing listens on port {port}: connection refused", "side_channel_port"
    )


def test_our_own_port_is_taken(doctor: Doctor) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        doctor("--quick", "--side-channel-port", port).require(
            "side channel port", "error", f"{port} on 127.0.0.1 cannot be used", "choose a free side_channel_port"
        )


def test_the_port_of_another_program(doctor: Doctor) -> None:
    """As when the HTTP port was given."""
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(re.search(r"port (\d+)", server.stdout.readline())[1])  # type: ignore[index]
        doctor("--quick", "--peer", f"127.0.0.1:{port}").require(
            f"peer 127.0.0.1:{port}", "error", "no side channel of kvx", "not its HTTP port"
        )
    finally:
        server.kill()
        server.communicate()


def test_wrong_host(doctor: Doctor) -> None:
    doctor("--quick", "--side-channel-host", ELSEWHERE).require(
        "side channel host", "error", "no address of this machine", "side_channel_host: .* it has .*127"
    )
    doctor("--quick", "--side-channel-host", "0.0.0.0").require(
        "side channel host", "error", "every interface", "side_channel_host"
    )
    doctor("--quick", "--peer", "no-such-host.invalid:5600").require_among(
        "peer no-such-host.invalid:5600", "error", "has no address", "correct the name"
    )


def test_loopback_while_the_peer_is_elsewhere(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx.doctor.network.CONNECT_S", 0.2)
    found = doctor("--quick", "--peer", f"{ELSEWHERE}:5600")
    assert found.troubles == {"side channel host", f"peer {ELSEWHERE}:5600"}
    found.require_among("side channel host", "error", "127.0.0.1 is loopback, but the peer", "side_channel_host: the")
    found.require_among(f"peer {ELSEWHERE}:5600", "error", "no way there|refused", "5600|the host that it")


def test_low_memlock(tmp_path: Path) -> None:
    """The limit is real; the NIC, which few machines have, is two folders."""
    (tmp_path / "nics/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "nics/mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    (tmp_path / "verbs").mkdir()
    (tmp_path / "verbs/uverbs0").touch()
    with_nic = (
        f"from pathlib import Path\nfolder = Path({str(tmp_path)!r})\nimport kvx.doctor.machine as machine\n"
        "machine.NIC_FOLDER, machine.VERBS_FOLDER = folder / 'nics', folder / 'verbs'\n"
    )
    low = "import resource\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
    doctor_in_a_child(with_nic + low, "--quick").require(
        "memlock", "error", "at most 64 KiB.*RLIMIT_MEMLOCK.*mlx5_0", "ulimit -l unlimited.*--ulimit memlock=-1"
    )


def test_full_shared_memory() -> None:
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if subprocess.run([*prefix, mount], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces for this user")
    found = doctor_in_a_child("", "--quick", prefix=(*prefix, f'{mount}; exec "$@"', "sh"))
    found.require("shared memory", "error", "1 MiB of 1 MiB free in /dev/shm", "--shm-size=8g")


def test_wrong_secret(doctor: Doctor, start: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start(Engine, environ={"KVX_SECRET": SECRET})
    check = f"handshake with {address(peer)}"
    monkeypatch.setenv("KVX_SECRET", ANOTHER_SECRET)
    found = doctor("--quick", "--peer", address(peer))
    found.require(check, "error", "it has another secret", "the same KVX_SECRET_FILE on both sides")
    assert ANOTHER_SECRET not in found.said
    monkeypatch.delenv("KVX_SECRET")
    doctor("--quick", "--peer", address(peer)).require(
        check, "error", "it has a secret, and this side has none", "export KVX_SECRET_FILE"
    )
    trusting = start(Engine, "trusting")
    monkeypatch.setenv("KVX_SECRET", SECRET)
    doctor("--quick", "--peer", address(trusting)).require(
        f"handshake with {address(trusting)}", "error", "it has no secret, and this side has one", "the same KVX_SECRET"
    )
    monkeypatch.setenv("KVX_SECRET", "short")
    doctor("--quick").require("secret", "error", "5 bytes", "mode 0600")


def test_keys_of_curve(
    doctor: Doctor, start: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("ours", "others")]
    for folder in folders:
        folder.mkdir()
        zmq.auth.create_certificates(folder, "kvx")
        (folder / "kvx.key_secret").chmod(0o600)
    ours, others = map(str, folders)
    peer = start(Engine, environ={"KVX_SECRET": SECRET, "KVX_CURVE_DIR": ours})
    monkeypatch.setenv("KVX_SECRET", SECRET)
    doctor("--quick", "--peer", address(peer)).require(
        f"peer {address(peer)}", "error", "it encrypts with CURVE, and the other one does not", "one KVX_CURVE_DIR"
    )
    monkeypatch.setenv("KVX_CURVE_DIR", ours)
    found = doctor("--quick", "--peer", address(peer))
    assert found.troubles == set(), found.said
    monkeypatch.setenv("KVX_CURVE_DIR", others)
    doctor("--quick", "--peer", address(peer)).require(
        f"handshake with {address(peer)}", "error", "closed the connection|no answer", "keys of one KVX_CURVE_DIR"
    )


@pytest.mark.parametrize(
    ("ahead_and_age_s", "level", "found"),
    [
        ("-100 0", "error", r"(9\d|10\d) s behind ours; auth_window_s is 30"),
        (f"{3 * 3600 + 12} 0", "error", r"3.0 h ahead of ours"),
        ("700 3600", "error", r"12 min ahead of ours"),
        ("20 0", "error", r"(19|2\d) s ahead of ours"),
        ("20 3600", "warning", r"(19|2\d) s ahead of ours"),
    ],
)
def test_skewed_clock(
    doctor: Doctor,
    start: Callable[..., Remote],
    monkeypatch: pytest.MonkeyPatch,
    ahead_and_age_s: str,
    level: str,
    found: str,
) -> None:
    peer = start(EngineOfAnotherTime, ahead_and_age_s, environ={"KVX_SECRET": SECRET})
    monkeypatch.setenv("KVX_SECRET", SECRET)
    doctor("--quick", "--peer", address(peer)).require(f"clock of {address(peer)}", level, found, "NTP or chrony")


def test_mismatched_block_size(doctor: Doctor, start: Callable[..., Remote]) -> None:
    first, second = start(PackedEngine), start(PackedEngine, "other", block_size_tokens=32)
    doctor("--quick", "--peer", address(first), "--block-size", 32).require(
        f"compatibility with {address(first)}", "error", "block_size_tokens.*32 at here, .*16 at", "start both engines"
    )
    doctor("--quick", "--peer", address(first), "--peer", address(second)).require(
        f"compatibility of {address(first)} and {address(second)}", "error", "block_size_tokens", "start both engines"
    )
    assert doctor("--quick", "--peer", address(first), "--block-size", 16, "--tp", 1).status == 0
    doctor("--quick", "--peer", address(first), "--layout", "NHD").require(
        f"compatibility with {address(first)}", "error", "layout: LBNHC at here, LBHNC at", "VLLM_KV_CACHE_LAYOUT"
    )
    doctor("--quick", "--peer", address(first), "--model", "another").require(
        f"compatibility with {address(first)}", "error", "model: another at here, tiny at", "the same value"
    )


def test_unknown_vllm(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm-0.40.1.dist-info").mkdir()
    (tmp_path / "vllm-0.40.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.40.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    doctor("--quick", "--device", "cpu").require(
        "vLLM", "error", r"vllm 0\.40\.1; kvx knows 0\.32, 0\.33", r"pip install 'vllm==0\.32\.\*'"
    )


@pytest.mark.slow
def test_ucx_without_shared_memory(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    doctor("--connector", "nixl").require(
        "UCX transports", "warning", r"this host: tcp/lo \(UCX_TLS=tcp\)", "export UCX_TLS=tcp,self,cma"
    )


def test_dead_peer(doctor: Doctor, start: Callable[..., Remote]) -> None:
    peer = start(Engine)
    peer.signal(signal.SIGSTOP)
    doctor("--quick", "--peer", address(peer)).require(
        f"peer {address(peer)}", "error", "accepts connections, but said nothing", "stopped or hangs"
    )
    peer.signal(signal.SIGKILL)
    peer.process.join()
    doctor("--quick", "--peer", address(peer)).require(
        f"peer {address(peer)}", "error", "connection refused", "start the engine there, if it has ended"
    )


@pytest.mark.slow
def test_a_peer_that_dies_in_the_middle_of_the_trip(doctor: Doctor, start: Callable[..., Remote]) -> None:
    half = start(HalfInAProcess)
    half.begin("die_when_asked")
    doctor("--peer", address(half)).require(
        f"round trip with {address(half)}", "error", "did not arrive", "start it again"
    )


@pytest.mark.parametrize(
    ("settings", "level", "found", "fix"),
    [
        ({"lease_s": 0.2}, "error", "lease_s 0.2", "at least 5 s; the default is 30"),
        ({"lease_s": 2.0}, "warning", "lease_s 2,", "at least 5 s"),
        ({"lease_s": 1800}, "warning", "lease_s 1800", "at most 600"),
        ({"lease_s": 60, "max_hold_s": 30}, "warning", "max_hold_s 30", "max_hold_s of at least 60"),
    ],
)
def test_absurd_lease(doctor: Doctor, settings: dict[str, float], level: str, found: str, fix: str) -> None:
    doctor("--quick", "--config", json.dumps({"max_hold_s": 3000, **settings})).require("leases", level, found, fix)


def test_settings_that_an_engine_refuses(doctor: Doctor) -> None:
    doctor("--quick", "--config", '{"lease_s": -1}').require("settings", "error", "lease_s is -1", "correct kv_conn")
    found = doctor("--quick", "--config", '{"my_secret": "hush hush"}')
    found.require("settings", "error", "KVX_SECRET_FILE", "correct kv_connector_extra_config")
    assert "hush hush" not in found.said
