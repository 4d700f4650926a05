"""Sharing memory between processes of one host: the bytes, who may have them, and when they are let go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from engine_process import EngineConfig, Remote, StartEngines
from kvx_connectors.ipc import IpcConnector, IpcMetadata
from kvx_connectors.ipc_listener import ANSWER_S, LET_GO_S, Listener, ask
from test_handoff import block_ids, hand_off, pull

from kvx.connector import ConnectorMetadata, Op
from kvx.drivers.host import HostDriver
from kvx.drivers.shared_host import SharedHostDriver
from kvx.errors import ConnectorError, HandshakeError, LayoutError
from kvx.plan import RUN_DTYPE, Runs
from kvx.region import MemoryRegion
from kvx.vmm import Reservation

pytestmark = pytest.mark.transfer

MIB = 1 << 20
SHARED = {"connectors": ("ipc",)}
VERIFY = {"verify": "all", "transfer_deadline_s": 5.0}


@pytest.fixture
def pair(start_engines: StartEngines) -> tuple[Remote, Remote]:
    ours, theirs = start_engines(EngineConfig("ours", **SHARED), EngineConfig("theirs", **SHARED))
    ours.connect(theirs.metadata())
    return ours, theirs


def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """A process drops a mapping on a thread of its own; nothing tells us when."""
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds()


@pytest.mark.parametrize("op", list(Op))
def test_permuted_runs_arrive_and_nothing_beside_them(pair: tuple[Remote, Remote], op: Op) -> None:
    ours, theirs = pair
    source, destination = (theirs, ours) if op is Op.READ else (ours, theirs)
    numbers = random.Random(3)
    starts = numbers.sample(range(0, 64 * 512, 512), 40)
    targets = numbers.sample(range(0, 64 * 512, 512), 40)
    expected = bytearray(64 * 512)
    for index, (at, to) in enumerate(zip(starts, targets, strict=True)):
        source.poke(at, 512, index + 1)
        expected[to : to + 300] = bytes([index + 1]) * 300

    ours.submit(op.value, starts, targets, 300, 10.0)

    assert ours.finish(10) == ("done", "NoneType", "None", 1)
    assert destination.peek(0, len(expected)) == bytes(expected)


@pytest.mark.parametrize("connectors", [("ipc",), ("auto",)])
def test_hand_offs_go_through_shared_memory(start_engines: StartEngines, connectors: tuple[str, ...]) -> None:
    shared = {**SHARED, "connectors": connectors}
    owner, reader = start_engines(
        EngineConfig("owner", settings=VERIFY, **shared),
        EngineConfig("reader", settings=VERIFY, layout="LBNHC", block_size_tokens=32, **shared),
    )
    for seed, num_tokens in enumerate((1, 33, 700)):
        hand_off(owner, reader, num_tokens, 100 * seed)
    assert reader.status()["transfer"]["by_connector"] == {"ipc": 3}


def test_auto_takes_nixl_for_a_peer_on_another_host(start_engines: StartEngines) -> None:
    shared = {**SHARED, "connectors": ("auto",)}
    owner, reader = start_engines(
        EngineConfig("owner", settings=VERIFY, **shared), EngineConfig("reader", settings=VERIFY, **shared)
    )
    owner.pretend_another_host()
    hand_off(owner, reader, 100, 1)
    assert reader.status()["transfer"]["by_connector"] == {"nixl": 1}


def test_auto_takes_nixl_where_sharing_fails_after_all(start_engines: StartEngines) -> None:
    shared = {**SHARED, "connectors": ("auto",)}
    owner, reader = start_engines(
        EngineConfig("owner", settings=VERIFY, **shared), EngineConfig("reader", settings=VERIFY, **shared)
    )
    owner.stop_listening()
    hand_off(owner, reader, 100, 1)
    assert reader.status()["transfer"]["by_connector"] == {"nixl": 1}


def test_ipc_alone_refuses_a_peer_on_another_host_and_goes_on(start_engines: StartEngines) -> None:
    owner, other, reader = start_engines(*(EngineConfig(name, settings=VERIFY, **SHARED) for name in "abc"))
    owner.pretend_another_host()
    blocks = block_ids(owner.config, 50, 1)
    owner.hold("refused", [blocks], 50)
    pull(reader, owner, "refused", [blocks], 0, 50)
    assert "its boot id is another" in reader.events(20)["failed"]["refused"]
    hand_off(other, reader, 50, 7)


def test_a_killed_peer_is_let_go_and_refused(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    assert not not_shared(ours)
    assert theirs.process.pid is not None
    os.kill(theirs.process.pid, signal.SIGKILL)
    theirs.process.join()

    assert until(lambda: not_shared(ours))
    with pytest.raises(Exception, match="has ended or changed its memory; shake hands again"):
        ours.submit("read", [0], [0], 64, 1.0)


def not_shared(remote: Remote) -> bool:
    """Only its own segments are mapped, one mapping each."""
    return bool(remote.maps("memfd:kvx") == len(remote.registered()["regions"]))


def test_a_stopped_peer_can_be_read(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    theirs.poke(0, 64, 7)
    assert theirs.process.pid is not None
    os.kill(theirs.process.pid, signal.SIGSTOP)
    try:
        ours.submit("read", [0], [64], 64, 1.0)
        assert ours.finish(5)[0] == "done"
    finally:
        os.kill(theirs.process.pid, signal.SIGCONT)
    assert ours.peek(64, 64) == b"\x07" * 64


def test_memory_that_its_owner_gives_back_is_unmapped_by_an_idle_reader(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    theirs.sleep()  # waits until readers have let go
    assert not_shared(ours)
    with pytest.raises(Exception, match="has ended or changed its memory"):
        ours.submit("read", [0], [0], 64, 1.0)
    theirs.wake()
    ours.connect(theirs.metadata())
    ours.submit("read", [0], [0], 64, 1.0)
    assert ours.finish(5)[0] == "done"


def test_stale_metadata_finds_nobody(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    old = theirs.metadata()
    theirs.sleep(), theirs.wake()
    with pytest.raises(Exception, match="it has ended, or its memory has changed; shake hands again"):
        ours.connect(old)


def test_connections_leave_no_descriptors_and_no_mappings(pair: tuple[Remote, Remote]) -> None:
    ours, theirs = pair
    ours.disconnect()
    assert until(lambda: not_shared(ours))
    before = ours.num_fds(), theirs.num_fds()
    for _ in range(10):
        ours.connect(theirs.metadata())
        ours.disconnect()
    assert until(lambda: (ours.num_fds(), theirs.num_fds()) == before)
    assert not_shared(ours)


def test_a_process_of_another_user_gets_nothing() -> None:
    if os.geteuid() != 0:
        pytest.fail("this test needs root, to become somebody else; run the suite as root, as .ci/run does")
    asked: list[str] = []
    listener = Listener("not-yours", lambda: asked.append("export") or [])
    listener.start()
    try:
        script = (
            "import os, socket\n"
            "os.setuid(65534)\n"
            "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "peer.settimeout(5)\n"
            "peer.connect('\\0kvx-ipc-not-yours')\n"
            "print(peer.recv(2))\n"
        )
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert found.stdout.strip() == "b''", found.stderr
        assert not asked
    finally:
        listener.stop()


def test_a_listener_of_another_user_is_not_believed() -> None:
    if os.geteuid() != 0:
        pytest.fail("this test needs root, to become somebody else; run the suite as root, as .ci/run does")
    script = (
        "import os, socket\n"
        "os.setuid(65534)\n"
        "server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "server.bind('\\0kvx-ipc-impostor')\n"
        "server.listen()\n"
        "print('listening', flush=True)\n"
        "server.accept()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listening\n"
        with pytest.raises(ConnectorError, match="of user 65534 is at the other end"):
            ask("impostor", 1)
        impostor.wait(10)


def opened(driver: HostDriver, nbytes: int = 4 * MIB) -> tuple[IpcConnector, Reservation]:
    reservation = Reservation(driver, nbytes)
    reservation.reserve()
    reservation.commit_range(0, nbytes)
    connector = IpcConnector()
    try:
        connector.open([MemoryRegion(reservation.address, nbytes, 0, reservation.mappings[0])], 1)
    except BaseException:
        reservation.release()
        raise
    return connector, reservation


def test_memory_that_cannot_be_shared_is_refused_at_open() -> None:
    with pytest.raises(ConnectorError, match="needs memory that other processes can map"):
        opened(HostDriver())


def test_registered_memory_that_was_not_shared_is_refused() -> None:
    """A copy there would end our process."""
    ours, our_memory = opened(SharedHostDriver())
    theirs, their_memory = opened(SharedHostDriver())
    try:
        wire = msgspec.msgpack.decode(theirs.metadata(), type=ConnectorMetadata)
        more = msgspec.structs.replace(wire, regions=[(0, 6 * MIB)])
        peer = ours.connect(msgspec.msgpack.encode(more))
        rows = np.zeros(1, RUN_DTYPE)
        rows["source"], rows["length"], rows["count"] = 5 * MIB, 64, 1
        with pytest.raises(HandshakeError, match="registered memory that it did not share"):
            ours.submit(Op.READ, peer, Runs(rows), deadline_s=1.0)
    finally:
        ours.close(), theirs.close()
        our_memory.release(), their_memory.release()


@pytest.mark.parametrize(
    ("seals", "pages", "why"),
    [
        (0, True, "cannot be cut off"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, True, "can be written"),
        (fcntl.F_SEAL_SHRINK | 0x10, True, "can be written"),  # F_SEAL_FUTURE_WRITE
        (fcntl.F_SEAL_SHRINK, False, "has memory for 0 only"),
    ],
)
def test_a_memory_file_that_could_harm_us_is_refused(seals: int, pages: bool, why: str) -> None:
    file = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 2 * MIB)
        if pages:
            os.posix_fallocate(file, 0, 2 * MIB)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(LayoutError, match=why):
            SharedHostDriver().import_fd(file, 2 * MIB)
    finally:
        os.close(file)


def test_nobody_can_seal_our_memory_further() -> None:
    driver = SharedHostDriver()
    allocation = driver.create(2 * MIB)
    fd = driver.export_fd(allocation)
    try:
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10)
    finally:
        os.close(fd)
        driver.release(allocation)


def test_a_peer_of_another_user_is_not_tried() -> None:
    ours, our_memory = opened(SharedHostDriver())
    try:
        wire = msgspec.msgpack.decode(ours.metadata(), type=ConnectorMetadata)
        library = msgspec.structs.replace(msgspec.msgpack.decode(wire.library, type=IpcMetadata), user=65534)
        other = msgspec.structs.replace(wire, library=msgspec.msgpack.encode(library))
        assert ours.why_unreachable(ours.metadata()) is None
        assert ours.why_unreachable(msgspec.msgpack.encode(other)) == f"its user is 65534, ours {os.geteuid()}"
    finally:
        ours.close()
        our_memory.release()


def test_an_owner_does_not_wait_for_a_reader_whose_child_has_the_socket_too() -> None:
    listener = Listener("family", lambda: [os.open("/dev/null", os.O_RDONLY)])
    reader = Listener("family-reader", list)
    listener.start(), reader.start()
    connection, fds = ask("family", 1)
    child = os.dup(connection.fileno())
    reader.watch(connection, lambda: reader.let_go(connection))
    started_s = time.monotonic()
    listener.stop()
    assert time.monotonic() - started_s < LET_GO_S / 2
    reader.stop()
    for fd in (child, *fds):
        os.close(fd)


def test_a_listener_that_drips_is_given_up() -> None:
    """However long it goes on: our side's lock is held meanwhile."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind("\0kvx-ipc-drip")
    server.listen()

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError), open("/dev/null") as nothing:
            for _ in range(100):
                socket.send_fds(connection, [(1).to_bytes(2, "little")], [nothing.fileno()])
                time.sleep(0.1)

    thread = threading.Thread(target=drip)
    thread.start()
    started_s = time.monotonic()
    with pytest.raises(ConnectorError, match="shake hands again"):
        ask("drip", 1000)
    assert time.monotonic() - started_s < 2 * ANSWER_S
    thread.join()
    server.close()


@pytest.mark.parametrize("said", [(1, 1), (0, 0), (2, 1)])
def test_a_listener_that_sends_too_little_is_refused(said: tuple[int, int]) -> None:
    """`said`: how many descriptors it says that it sends, and how many it sends."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind("\0kvx-ipc-mean")
    server.listen()
    script = (
        "from kvx_connectors.ipc_listener import ask\ntry:\n    ask('mean', 2)\nexcept Exception as e:\n    print(e)"
    )
    with server, subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as client:
        connection, _ = server.accept()
        with open("/dev/null") as nothing:
            socket.send_fds(connection, [said[0].to_bytes(2, "little")], [nothing.fileno()] * said[1])
        connection.close()
        output, _ = client.communicate(timeout=60)
    assert f"sent {said[1]} descriptors of memory, 2 are needed" in output
