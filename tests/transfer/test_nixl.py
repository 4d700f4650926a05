"""What is NIXL's alone, between processes: its agents, its transports. The conformance kit asks for the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from engine_process import EngineConfig, Remote, StartEngines

pytestmark = pytest.mark.transfer

# UCX's TCP transport moves bytes with the peer's help, so a stopped peer stops a transfer half way.
TCP_ONLY = {"UCX_TLS": "tcp,self"}
BIG = {"num_layers": 4, "granularity_bytes": 1 << 21, "head_size": 64, "num_blocks": 512, "capacity_blocks": 512}


def read(reader: Remote, op: str, source: list[int], destination: list[int], length: int) -> tuple[str, str, str, int]:
    reader.submit(op, source, destination, length, 10.0)
    result: tuple[str, str, str, int] = reader.finish(10)
    return result


@pytest.mark.parametrize(("transports", "loads_rdma"), [("tcp,self,cma", False), ("all", True)])
def test_rdma_modules_are_loaded_only_where_a_transport_may_need_them(transports: str, loads_rdma: bool) -> None:
    """Theirs and a host's own libnl in one process end it with SIGSEGV at exit."""
    script = (
        "import ctypes, numpy, pathlib\n"
        "from kvx.region import Mapping, MemoryRegion\n"
        "from kvx_connectors.nixl import NixlConnector\n"
        "memory = numpy.zeros(4096, numpy.uint8)\n"
        "connector = NixlConnector()\n"
        "mapping = Mapping(memory.ctypes.data, 4096, 1, 'cpu')\n"
        "connector.open([MemoryRegion(memory.ctypes.data, 4096, 0, mapping)], 1)\n"
        "print('libuct_ib' in pathlib.Path('/proc/self/maps').read_text())\n"
        "connector.close()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "UCX_MODULES"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**environment, "UCX_TLS": transports}, capture_output=True, text=True
    )
    assert done.stdout.split()[-1:] == [str(loads_rdma)], done.stderr[-2000:]
    assert loads_rdma or done.returncode == 0


def test_a_stopped_peer_times_out_and_nothing_lands_afterwards(start_engines: StartEngines) -> None:
    """The drain is real: bytes of a READ that ended with a timeout never arrive, even when the peer goes on."""
    ours, theirs, third = start_engines(
        EngineConfig("ours", environ=TCP_ONLY, **BIG),
        EngineConfig("theirs", environ=TCP_ONLY, **BIG),
        EngineConfig("third", environ=TCP_ONLY, **BIG),
    )
    theirs.progress_in_background(), third.progress_in_background()
    ours.connect(third.metadata())
    third_peer = ours.connect(theirs.metadata())
    assert third_peer
    size = 1 << 20
    theirs.poke(0, 8 * size, 5)
    assert read(ours, "read", [0], [0], 64)[0] == "done"
    ours.poke(0, 8 * size, 1)
    theirs.signal(signal.SIGSTOP)
    began = time.monotonic()
    ours.submit("read", [index * size for index in range(8)], [index * size for index in range(8)], size, 0.5)
    state, kind, text, reported = ours.finish(10)
    assert (state, kind, reported) == ("failed", "TransferTimeout", 1), text
    assert 0.5 <= time.monotonic() - began < 5
    ours.poke(0, 8 * size, 2)
    theirs.signal(signal.SIGCONT)
    ours.progress(1.0)
    assert ours.peek(0, 8 * size) == b"\x02" * (8 * size)
    ours.connect(third.metadata())
    assert read(ours, "read", [0], [0], 64)[0] == "done", "the connector works on"


def test_a_drain_leaves_the_transfers_with_other_peers_alone(start_engines: StartEngines) -> None:
    ours, theirs, third = start_engines(
        *(EngineConfig(name, environ=TCP_ONLY, **BIG) for name in ("ours", "theirs", "third"))
    )
    theirs.progress_in_background(), third.progress_in_background()
    size, places = 1 << 20, [index << 20 for index in range(8)]
    third.poke(0, 8 * size, 6)
    ours.connect(third.metadata())
    assert read(ours, "read", [0], [0], 64)[0] == "done"
    third.signal(signal.SIGSTOP)
    assert ours.submit("read", places, places, size, 30.0) == "pending"
    ours.set_aside()
    ours.connect(theirs.metadata())
    theirs.signal(signal.SIGSTOP)
    ours.submit("read", [0], [places[-1] + size], size, 0.3)
    assert ours.finish(10)[:2] == ("failed", "TransferTimeout")
    assert ours.take_back() == "pending"
    third.signal(signal.SIGCONT)
    assert ours.finish(30)[0] == "done"
    assert ours.peek(0, 8 * size) == b"\x06" * (8 * size)


def test_cancel_and_close_with_a_transfer_in_flight(start_engines: StartEngines) -> None:
    ours, theirs = start_engines(
        EngineConfig("ours", environ=TCP_ONLY, **BIG), EngineConfig("theirs", environ=TCP_ONLY, **BIG)
    )
    theirs.progress_in_background()
    metadata = theirs.metadata()
    ours.connect(metadata)
    assert read(ours, "read", [0], [0], 64)[0] == "done"
    theirs.signal(signal.SIGSTOP)
    assert ours.submit("read", [0], [0], 1 << 20, 0.5) == "pending"
    ours.cancel_transfer()
    assert ours.finish(10)[:2] == ("cancelled", "TransferError")
    with pytest.raises(RuntimeError, match=r"ConnectorStateError: peer .* shake hands again"):
        ours.submit("read", [0], [0], 64, 1.0)
    ours.connect(metadata)
    assert ours.submit("read", [0], [0], 1 << 20, 30.0) == "pending"
    ours.close_connector()
    assert ours.finish(1)[:2] == ("failed", "TransferError")
    with pytest.raises(RuntimeError, match="ConnectorStateError: submit needs an open connector"):
        ours.submit("read", [0], [0], 64, 1.0)


@pytest.mark.parametrize("has_pieces", [True, False], ids=["reader_over_tcp", "owner_over_tcp"])
def test_an_engine_with_more_transports_and_one_with_tcp_read_each_other(
    start_engines: StartEngines, has_pieces: bool
) -> None:
    """One of them alone reads in pieces, and sends what is read in messages of their length."""
    ours, theirs = start_engines(
        EngineConfig("ours", environ=TCP_ONLY if has_pieces else {}, **BIG),
        EngineConfig("theirs", environ={} if has_pieces else TCP_ONLY, **BIG),
    )
    theirs.progress_in_background()
    ours.connect(theirs.metadata())
    size = 3 << 19
    starts, ends = [index * size for index in range(10)], [(10 + index) * size for index in range(10)]
    for index, start in enumerate(starts):
        theirs.poke(start, size, index + 1)
    assert read(ours, "read", starts, ends, size)[0] == "done"
    assert ours.peek(ends[0], 10 * size) == b"".join(bytes([index + 1]) * size for index in range(10))
    assert read(ours, "write", ends[3:4], starts[:1], size)[0] == "done"
    assert theirs.peek(0, size) == b"\x04" * size


def test_a_killed_peer_fails_and_one_of_its_name_takes_its_place(start_engines: StartEngines) -> None:
    ours, theirs = start_engines(EngineConfig("ours"), EngineConfig("theirs", agent_name="same"))
    theirs.progress_in_background()
    assert ours.connect(theirs.metadata()) == "same"
    assert read(ours, "read", [0], [0], 64)[0] == "done"
    theirs.stop()
    time.sleep(0.2)
    ours.submit("read", [0], [0], 64, 2.0)
    state, kind, _, _ = ours.finish(5)
    assert (state, kind) in {("failed", "TransferError"), ("failed", "TransferTimeout")}
    (again,) = start_engines(EngineConfig("theirs", agent_name="same"))
    again.progress_in_background()
    again.poke(0, 64, 7)
    assert ours.connect(again.metadata()) == "same"
    assert read(ours, "read", [0], [0], 64)[0] == "done"
    assert ours.peek(0, 64) == b"\x07" * 64


@pytest.mark.parametrize("op", ["read", "write"])
def test_thousands_of_equal_copies_and_some_others(start_engines: StartEngines, op: str) -> None:
    """Permuted over several regions on either side, some of them shorter, as the last block of a request is."""
    size = {"num_blocks": 1000, "capacity_blocks": 1024}
    ours, theirs = start_engines(EngineConfig("ours", **size), EngineConfig("theirs", **size))
    theirs.progress_in_background()
    regions = ours.registered()["regions"]
    assert len(regions) > 1, regions
    page, span = regions[0][1] // 1000, regions[-1][0] + regions[-1][1]
    starts = np.concatenate([offset + np.arange(1000) * page for offset, _ in regions])
    numbers = np.random.default_rng(1)
    sources, destinations = (numbers.permutation(starts)[:2500] for _ in range(2))
    lengths = np.where(np.arange(2500) % 50 == 7, page // 2 - 1, page)
    source, destination = (theirs, ours) if op == "read" else (ours, theirs)
    content, expected = numbers.integers(0, 256, span, np.uint8), np.zeros(span, np.uint8)
    for offset, nbytes in regions:
        source.put(offset, content[offset : offset + nbytes].tobytes())
        destination.poke(offset, nbytes, 0)
    for start, end, length in zip(sources, destinations, lengths, strict=True):
        expected[end : end + length] = content[start : start + length]
    ours.connect(theirs.metadata())
    ours.submit(op, sources.tolist(), destinations.tolist(), lengths.tolist(), 20.0)
    assert ours.finish(20)[0] == "done"
    for offset, nbytes in regions:
        found = np.frombuffer(destination.peek(offset, nbytes), np.uint8)
        assert (found == expected[offset : offset + nbytes]).all()
