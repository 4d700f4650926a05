"""`kvx doctor` beside twelve faults, each brought about for real: it names the cause and the fix, and nothing else."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq.auth
from doctor_helpers import (
    SECRET,
    Doctor,
    EngineOfAnotherTime,
    HalfInAProcess,
    PackedEngine,
    Start,
    address,
    doctor_in_a_child,
    trips_of,
    unused_port,
)
from engine_process import Engine

pytestmark = pytest.mark.transfer

ANOTHER_SECRET = "another secret for those tests"
ELSEWHERE = "192.0.2.1"  # documentation's own network: nobody is there


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


def test_wrong_secret(doctor: Doctor, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_keys_of_curve(doctor: Doctor, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        ("20 0", "error", r"(1[5-9]|2\d) s ahead of ours"),
        ("20 3600", "warning", r"(1[5-9]|2\d) s ahead of ours"),
    ],
)
def test_skewed_clock(
    doctor: Doctor,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    ahead_and_age_s: str,
    level: str,
    found: str,
) -> None:
    peer = start(EngineOfAnotherTime, ahead_and_age_s, environ={"KVX_SECRET": SECRET})
    monkeypatch.setenv("KVX_SECRET", SECRET)
    doctor("--quick", "--peer", address(peer)).require(f"clock of {address(peer)}", level, found, "NTP or chrony")


def test_mismatched_block_size(doctor: Doctor, start: Start) -> None:
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


def test_dead_peer(doctor: Doctor, start: Start) -> None:
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
def test_a_peer_that_dies_in_the_middle_of_the_trip(doctor: Doctor, start: Start) -> None:
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
