"""What only the Mooncake connector shows, between two processes: its drain, its queue, its peers' ends, its library."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_process import EngineConfig, Remote, StartEngines

pytestmark = pytest.mark.transfer

# 32 MiB in four registrations of 8 MiB that touch one another.
BIG = {"num_layers": 4, "granularity_bytes": 1 << 21, "head_size": 64, "num_blocks": 512, "capacity_blocks": 512}
SEGMENT, MIB = 8 << 20, 1 << 20
MIBS = [index * MIB for index in range(8)]


def config(name: str, **fields: Any) -> EngineConfig:
    return EngineConfig(name, connectors=("mooncake",), **{**BIG, **fields})


@pytest.fixture
def pair(start_engines: StartEngines) -> tuple[Remote, Remote]:
    ours, theirs = start_engines(config("ours"), config("theirs"))
    ours.connect(theirs.metadata())
    return ours, theirs


def moved(engine: Remote, op: str, source: list[int], destination: list[int], length: int) -> tuple[str, str, str, int]:
    engine.submit(op, source, destination, length, 20.0)
    result: tuple[str, str, str, int] = engine.finish(20)
    return result


def library_of(metadata: bytes) -> dict[str, Any]:
    library: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.decode(metadata)["library"])
    return library


def forged(metadata: bytes, **library: object) -> bytes:
    """Metadata of a peer that says more than is true: larger registrations, or another identity."""
    wire = msgspec.msgpack.decode(metadata)
    if library:
        wire["library"] = msgspec.msgpack.encode({**library_of(metadata), **library})
    else:
        wire["regions"][-1][1] += SEGMENT
    return msgspec.msgpack.encode(wire)


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def require_untouched(engine: Remote, nbytes: int, value: int) -> None:
    engine.progress(1.0)
    assert engine.peek(0, nbytes) == bytes([value]) * nbytes


@pytest.mark.parametrize(("length", "count"), [(4 << 10, 3000), (64 << 10, 200), (1 << 20, 14)])
@pytest.mark.parametrize("op", ["read", "write"])
def test_permuted_copies_arrive_and_nothing_beside_them(
    pair: tuple[Remote, Remote], op: str, length: int, count: int
) -> None:
    """Some cross registrations on either side; 3,000 are more than the library lets wait for one peer."""
    ours, theirs = pair
    rng, guard = np.random.default_rng(length), 64
    owner, taker = (theirs, ours) if op == "read" else (ours, theirs)
    content = rng.integers(0, 256, 4 * SEGMENT, dtype=np.uint8)
    owner.put(0, content.tobytes())
    taker.poke(0, 4 * SEGMENT, 9)
    places = np.arange(count) * (length + guard) + guard
    source, destination = rng.permutation(places), rng.permutation(places)
    crossing = (source // SEGMENT != (source + length - 1) // SEGMENT).any()
    assert crossing or length < MIB
    assert moved(ours, op, source.tolist(), destination.tolist(), length) == ("done", "NoneType", "None", 1)
    expected = np.full(4 * SEGMENT, 9, np.uint8)
    for origin, place in zip(source, destination, strict=True):
        expected[place : place + length] = content[origin : origin + length]
    assert taker.peek(0, 4 * SEGMENT) == expected.tobytes()
    assert owner.peek(0, 4 * SEGMENT) == content.tobytes()


def test_transfers_beside_each_other_share_the_queue(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    theirs.poke(0, SEGMENT, 5)
    places = list(range(0, SEGMENT // 2, 2048))
    assert ours.submit("read", places, places, 1024, 20.0) == "pending"
    ours.set_aside()
    ours.submit("read", places, [place + SEGMENT // 2 for place in places], 1024, 20.0)
    assert ours.finish(20)[0] == "done"
    assert "done" in (ours.take_back(), ours.finish(20)[0]), "in no order"
    assert ours.peek(0, SEGMENT) == (b"\5" * 1024 + b"\0" * 1024) * (SEGMENT // 2048)


@pytest.mark.parametrize("op", ["read", "write"])
def test_after_a_failed_copy_no_other_one_lands(start_engines: StartEngines, op: str) -> None:
    """The library goes on with the rest of a transfer whose first copy was refused: the drain must end that."""
    ours, theirs = start_engines(config("ours"), config("theirs"))
    unconnected = theirs.num_fds()
    ours.connect(forged(theirs.metadata()))
    rest, beyond = MIBS * 32, [4 * SEGMENT + 64]
    source, destination = (beyond + rest, [0, *rest]) if op == "read" else ([0, *rest], beyond + rest)
    ours.submit(op, source, destination, MIB, 20.0)
    state, kind, text, reported = ours.finish(20)
    assert (state, kind, reported) == ("failed", "TransferError", 1)
    assert "refused it" in text
    taker = ours if op == "read" else theirs
    if op == "write":  # what had left us before the drain arrives until the owner sees the connections end
        await_that(lambda: theirs.num_fds() <= unconnected)
    taker.poke(0, SEGMENT, 2)
    require_untouched(taker, SEGMENT, 2)
    ours.connect(theirs.metadata())
    assert moved(ours, "read", [0], [0], 64)[0] == "done", "the connector works on"


def test_a_stopped_peer_times_out_and_nothing_lands_afterwards(start_engines: StartEngines) -> None:
    ours, theirs, third = start_engines(config("ours"), config("theirs"), config("third"))
    third.poke(0, SEGMENT, 6)
    ours.connect(third.metadata())
    third.signal(signal.SIGSTOP)
    assert ours.submit("read", MIBS, [place + 2 * SEGMENT for place in MIBS], MIB, 30.0) == "pending"
    ours.set_aside()
    ours.connect(theirs.metadata())
    theirs.poke(0, SEGMENT, 5), ours.poke(0, SEGMENT, 1)
    assert moved(ours, "read", [0], [0], 64)[0] == "done"
    theirs.signal(signal.SIGSTOP)
    began = time.monotonic()
    ours.submit("read", MIBS, MIBS, MIB, 0.5)
    state, kind, text, reported = ours.finish(10)
    assert (state, kind, reported) == ("failed", "TransferTimeout", 1), text
    assert 0.5 <= time.monotonic() - began < 8
    ours.poke(0, SEGMENT, 2)
    theirs.signal(signal.SIGCONT)
    require_untouched(ours, SEGMENT, 2)
    assert ours.take_back() == "pending", "a drain leaves other peers' transfers alone"
    third.signal(signal.SIGCONT)
    assert ours.finish(20)[0] == "done"
    assert ours.peek(2 * SEGMENT, SEGMENT) == b"\6" * SEGMENT


def test_a_peer_that_is_stopped_from_the_start_holds_nobody_up(pair: tuple[Remote, Remote]) -> None:
    """The library's own call would take a minute, in the thread that moves everybody's bytes."""
    ours, theirs = pair
    metadata = theirs.metadata()
    theirs.signal(signal.SIGSTOP)
    began = time.monotonic()
    ours.connect(metadata)
    ours.submit("read", [0], [0], 64, 0.3)
    assert ours.finish(10)[:2] == ("failed", "TransferTimeout")
    ours.submit("read", [0], [0], 64, 20.0)
    ours.cancel_transfer()
    assert ours.finish(10)[:2] == ("cancelled", "TransferError")
    ours.close_connector()
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_killed_peer_fails_the_transfer_and_spares_us(pair: tuple[Remote, Remote], op: str) -> None:
    ours, theirs = pair
    assert moved(ours, "read", [0], [0], 64)[0] == "done"
    theirs.signal(signal.SIGSTOP)
    assert ours.submit(op, MIBS, MIBS, MIB, 20.0) == "pending"
    theirs.signal(signal.SIGKILL)
    assert ours.finish(10)[:2] == ("failed", "TransferError")
    with pytest.raises(RuntimeError, match=r"ConnectorStateError: peer .* shake hands again"):
        ours.submit("read", [0], [0], 64, 1.0)


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_owner_survives_the_kill_of_its_peer_and_serves_the_next(start_engines: StartEngines, op: str) -> None:
    ours, theirs, third = start_engines(config("ours"), config("theirs"), config("third"))
    ours.connect(theirs.metadata())
    theirs.signal(signal.SIGSTOP)
    ours.submit(op, MIBS, MIBS, MIB, 20.0)
    ours.signal(signal.SIGKILL)
    theirs.signal(signal.SIGCONT)
    theirs.poke(0, 64, 4)
    third.connect(theirs.metadata())
    assert moved(third, "read", [0], [0], 64)[0] == "done"
    assert third.peek(0, 64) == b"\4" * 64


def test_nothing_is_written_into_an_owner_that_has_closed(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    ours.poke(0, SEGMENT, 3)
    assert moved(ours, "write", [0], [0], 64)[0] == "done"
    theirs.signal(signal.SIGSTOP)  # so that most of it has not left us when we are stopped
    assert ours.submit("write", MIBS * 8, MIBS * 8, MIB, 20.0) == "pending"
    ours.signal(signal.SIGSTOP)
    theirs.signal(signal.SIGCONT)
    theirs.close_connector()
    theirs.poke(0, SEGMENT, 2)
    ours.signal(signal.SIGCONT)
    assert ours.finish(10)[0] == "failed"
    assert theirs.peek(0, SEGMENT) == b"\2" * SEGMENT


def test_a_peer_that_connects_again_takes_the_place_of_the_former(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    metadata = theirs.metadata()
    first = ours.connect(metadata)
    assert moved(ours, "read", [0], [0], 64)[0] == "done"
    theirs.signal(signal.SIGSTOP)
    assert ours.submit("read", MIBS, MIBS, MIB, 20.0) == "pending"
    ours.poke(0, SEGMENT, 2)
    assert ours.connect(metadata) == first
    assert ours.finish(5)[:2] == ("cancelled", "TransferError")
    ours.poke(0, SEGMENT, 2)
    theirs.signal(signal.SIGCONT)
    require_untouched(ours, SEGMENT, 2)
    assert moved(ours, "read", [0], [0], 64)[0] == "done"


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_stranger_at_a_known_address_is_noticed(pair: tuple[Remote, Remote], op: str) -> None:
    """A process started again gets the old one's ports: the library connects anew without a word."""
    ours, theirs = pair
    assert moved(ours, op, [0], [0], 64)[0] == "done"
    ours.poke(0, 64, 1), theirs.poke(0, 64, 5)
    theirs.poke_address(library_of(theirs.metadata())["identity_address"], b"\1" * 16)
    state, kind, text, _ = moved(ours, op, [0], [0], 64)
    assert (state, kind) == ("failed", "TransferError")
    assert "another engine answers at its address; shake hands again" in text
    assert theirs.peek(0, 64) == b"\5" * 64
    ours.connect(theirs.metadata())
    assert moved(ours, op, [0], [0], 64)[0] == "done"


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_peer_that_is_not_who_it_said_gets_and_gives_nothing(pair: tuple[Remote, Remote], op: str) -> None:
    ours, theirs = pair
    ours.poke(0, 64, 1), theirs.poke(0, 64, 5)
    ours.connect(forged(theirs.metadata(), identity=b"\1" * 16))
    state, kind, text, _ = moved(ours, op, [0], [0], 64)
    assert (state, kind) == ("failed", "TransferError")
    assert "no answer, or another engine's" in text
    assert (ours.peek(0, 64), theirs.peek(0, 64)) == (b"\1" * 64, b"\5" * 64)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ({"address": "nowhere"}, "Mooncake address 'nowhere' of a peer is not a numeric address and a port"),
        ({"protocol": "rdma"}, "speaks 'rdma', we speak 'tcp'; set KVX_MOONCAKE_PROTOCOL alike"),
        ({"identity": b""}, "does not say how to identify it"),
        ({"more": 1}, "unreadable Mooncake metadata of a peer"),
    ],
)
def test_bad_metadata_is_refused(pair: tuple[Remote, Remote], library: dict[str, object], message: str) -> None:
    ours, theirs = pair
    with pytest.raises(RuntimeError, match=f"HandshakeError: .*{message}"):
        ours.connect(forged(theirs.metadata(), **library))
    assert moved(ours, "read", [0], [0], 64)[0] == "done"


def test_opening_and_closing_leaves_no_thread_and_no_descriptor() -> None:
    script = (
        "import os, numpy\n"
        "from kvx.region import Mapping, MemoryRegion\n"
        "from kvx_connectors.mooncake import MooncakeConnector\n"
        "memory = numpy.zeros(4096, numpy.uint8)\n"
        "region = MemoryRegion(memory.ctypes.data, 4096, 0, Mapping(memory.ctypes.data, 4096, 1, 'cpu'))\n"
        "connector, balances = MooncakeConnector(), []\n"
        "for generation in range(1, 6):\n"
        "    connector.open([region], generation)\n"
        "    connector.connect(connector.metadata())\n"
        "    connector.close()\n"
        "    balances.append([len(os.listdir(f'/proc/self/{what}')) for what in ('task', 'fd')])\n"
        "print(balances[1:] == balances[1:2] * 4, balances)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["True"]), done.stdout + done.stderr[-2000:]


def test_a_missing_system_library_is_one_sentence(tmp_path: Path) -> None:
    """A copy of the wheel that asks for a libibverbs which no machine has."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    (tmp_path / "mooncake").mkdir()
    for file in itertools.chain(package.glob("*.py"), package.glob("lib*.so")):
        (tmp_path / "mooncake" / file.name).symlink_to(file)
    for folder in package.parent.glob("mooncake_transfer_engine*.libs"):
        (tmp_path / folder.name).symlink_to(folder)
    library = (package / "engine.so").read_bytes()
    (tmp_path / "mooncake" / "engine.so").write_bytes(library.replace(b"libibverbs.so.1\0", b"libibverbs.so.9\0"))
    script = (
        "from kvx import registry\n"
        "from kvx.errors import ConnectorUnavailable\n"
        "try:\n"
        "    registry.connector_class('mooncake')\n"
        "except ConnectorUnavailable as error:\n"
        "    print(error, error.hint, sep='|')\n"
        "print(registry.connector_class('nixl').name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    hint = "apt-get install libibverbs1"
    sentence = "connector 'mooncake' needs the system library libibverbs.so.1, which is missing"
    assert done.stdout.splitlines() == [f"{sentence}; to use it: {hint}|{hint}", "nixl"], done.stderr[-2000:]
