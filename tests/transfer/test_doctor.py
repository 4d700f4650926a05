"""`kvx doctor` on sound machines and with sound peers, and the round trips of its halves."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from doctor_helpers import (
    SECRET,
    Doctor,
    HalfInAProcess,
    Start,
    address,
    trips_of,
    unused_port,
)
from engine_process import EngineConfig, StartEngines

from kvx.cli.doctor import doctor_command
from kvx.handshake import Fetch, Fetched, ask
from kvx.seal import RequestSeal

pytestmark = pytest.mark.transfer

# Halves


def test_a_round_trip_brings_back_what_went_and_notices_one_bit(start: Start) -> None:
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


def test_a_half_is_not_to_be_asked_for_more_than_it_has(start: Start) -> None:
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
