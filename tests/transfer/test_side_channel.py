"""The side channel of a real engine under messages that no kvx would send."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from engine_process import EngineConfig, Remote, StartEngines
from test_handoff import hand_off

from kvx.errors import HandshakeError, PeerDead
from kvx.handshake import MESSAGE_LIMIT_BYTES, Hello, Status, encode, request_status
from kvx.sidechannel import HARD_LIMIT_BYTES

pytestmark = pytest.mark.transfer


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context.socket(zmq.DEALER)
    context.destroy(linger=0)


def ask(dealer: zmq.Socket[bytes], data: bytes) -> dict[str, Any]:
    dealer.send(data)
    assert dealer.poll(20_000), "no answer"
    reply: dict[str, Any] = msgspec.msgpack.decode(dealer.recv())
    return reply


def message(**fields: Any) -> bytes:
    return msgspec.msgpack.encode({"version": 1, "sequence": 7, **fields})


BAD = {
    "no msgpack": b"\xc1\xff",
    "empty": b"",
    "a list": msgspec.msgpack.encode([1, 2]),
    "no version": msgspec.msgpack.encode({"kind": "status", "sequence": 1}),
    "another version": msgspec.msgpack.encode({"version": 2, "kind": "status", "sequence": 1, "new": True}),
    "unknown kind": message(kind="shutdown"),
    "a reply": message(kind="refused", reason="no"),
    "unknown field": message(kind="status", extra=1),
    "missing field": message(kind="claim", request_id="r"),
    "mistyped field": message(kind="claim", request_id=1, reader="x", wait_s=1.0),
    "negative number": message(kind="digests", request_id="r", group=-1, first_token=0, num_tokens=1, head_start=0,
                               head_count=1),
    "endless wait": message(kind="claim", request_id="r", reader="x", wait_s=float("inf")),
    "not a number": message(kind="claim", request_id="r", reader="x", wait_s=float("nan")),
    "huge name": message(kind="hello", engine_id="x" * 5000),
    "trailing bytes": encode(Status(sequence=1)) + b"\x00",
    "deep nesting": b"\x91" * 100_000 + b"\x90",
    "oversized": b"\0" * (MESSAGE_LIMIT_BYTES + 1),
    "a pickle": __import__("pickle").dumps({"version": 1, "kind": "status", "sequence": 1}),
}  # fmt: skip


def test_bad_messages_are_refused_and_counted(start_engines: StartEngines, dealer: zmq.Socket[bytes]) -> None:
    owner, reader = start_engines(EngineConfig("prefill"), EngineConfig("decode"))
    dealer.connect(f"tcp://127.0.0.1:{owner.port}")
    for name, data in BAD.items():
        reply = ask(dealer, data)
        assert reply["kind"] == "refused", name
        assert reply["reason"], name
    assert "protocol 2 found, 1 spoken here" in ask(dealer, BAD["another version"])["reason"]
    dealer.send_multipart([b"two", b"frames"])
    assert dealer.poll(20_000)
    dealer.recv()
    status = request_status("127.0.0.1", owner.port)
    refused = len(BAD) + 2
    assert status["side_channel"] == {"refused": refused, "internal_errors": 0}
    assert status["messages_refused"] == {"malformed": refused}
    # Larger still: ZeroMQ drops the connection before the message is in memory.
    dealer.send(b"\0" * (HARD_LIMIT_BYTES + 1))
    assert not dealer.poll(300)
    hand_off(owner, reader, 100, 1)
    assert owner.status()["side_channel"] == status["side_channel"]


def test_valid_but_wrong_requests_are_refused(start_engines: StartEngines, dealer: zmq.Socket[bytes]) -> None:
    (owner,) = start_engines(EngineConfig("prefill", settings={"verify": "all"}))
    dealer.connect(f"tcp://127.0.0.1:{owner.port}")
    owner.hold("r", [[1, 2]], 20)
    digests = {"kind": "digests", "request_id": "r", "group": 0, "first_token": 0, "num_tokens": 20, "head_start": 0}
    assert ask(dealer, message(**digests, head_count=2))["kind"] == "digestpage"
    for wrong in ({"group": 1}, {"num_tokens": 21}, {"head_start": 1}, {"request_id": "x"}, {"first_token": 2**61}):
        assert ask(dealer, message(**{**digests, **wrong}, head_count=2))["kind"] == "refused"
    assert ask(dealer, encode(Hello(sequence=3, engine_id="me")))["kind"] == "welcome"
    claim = {"kind": "claim", "request_id": "r", "wait_s": 1.0}
    assert ask(dealer, message(**claim, reader="one"))["blocks"] == [[1, 2]]
    assert ask(dealer, message(**claim, reader="one"))["blocks"] == [[1, 2]], "the same reader may ask again"
    assert ask(dealer, message(**claim, reader="two"))["blocks"] == [[1, 2]], "and another pull may read, too"
    for reader in ("two", "two", "three"):
        dealer.send(message(kind="release", request_id="r", reader=reader))
    assert not owner.events(0.3)["released"], "nobody can release what another one reads"
    dealer.send(message(kind="release", request_id="r", reader="one"))
    assert owner.events(20)["released"] == {"r"}


def test_an_engine_in_service_fetches_nothing(start_engines: StartEngines, dealer: zmq.Socket[bytes]) -> None:
    """Only the doctor's other half connects to where somebody tells it to."""
    owner, reader = start_engines(EngineConfig("prefill"), EngineConfig("decode"))
    owner.hold("r", [[1, 2]], 20)
    dealer.connect(f"tcp://127.0.0.1:{reader.port}")
    fetch = {"kind": "fetch", "engine_id": "prefill", "host": "127.0.0.1", "port": owner.port, "request_id": "r"}
    reply = ask(dealer, message(**fetch, num_tokens=20))
    assert (reply["kind"], "in service" in reply["reason"]) == ("refused", True)
    assert owner.status()["handoff"]["holds"] == 1
    assert reader.status()["transfer"]["count"] == 0


def test_a_question_to_an_engine_that_dies_ends_with_it(start_engines: StartEngines) -> None:
    (owner,) = start_engines(EngineConfig("prefill"))
    owner.signal(signal.SIGSTOP)  # it has the question and cannot answer

    def kill_when_asked() -> None:
        while not is_connected_to(owner.port):
            time.sleep(0.01)
        owner.signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_when_asked, daemon=True)
    killer.start()
    with pytest.raises(PeerDead, match="closed the connection"):
        request_status("127.0.0.1", owner.port, timeout_s=60)
    killer.join()


def is_connected_to(port: int) -> bool:
    with open("/proc/net/tcp") as lines:
        for line in list(lines)[1:]:
            _, _, remote, state, *_ = line.split()
            if state == "01" and remote == f"0100007F:{port:04X}":
                return True
    return False


def listening_addresses(pid: int) -> set[str]:
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.add(fields[1])
    return found


def test_it_listens_on_the_configured_host_only(start_engines: StartEngines) -> None:
    (owner,) = start_engines(EngineConfig("prefill", settings={"side_channel_host": "localhost"}))
    assert owner.process.pid is not None
    port = f"{owner.port:04X}"
    ours = [address for address in listening_addresses(owner.process.pid) if address.endswith(":" + port)]
    assert ours == [f"0100007F:{port}"]


def test_a_port_in_use_or_a_foreign_host_is_one_clear_sentence(start_engines: StartEngines) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"ConnectorError: side channel port {port} on 127.0.0.1 is in use"):
            start_engines(EngineConfig("prefill", settings={"side_channel_port": port}))
    foreign = {"side_channel_host": "203.0.113.1", "allowed_hosts": ("203.0.113.0/24",)}
    with pytest.raises(RuntimeError, match=r"ConnectorError: the side channel cannot listen on 203\.0\.113\.1:0"):
        start_engines(EngineConfig("prefill", connectors=("ipc",), settings=foreign))


def test_status_of_nobody_is_an_error() -> None:
    with pytest.raises(HandshakeError, match=r"no answer from the side channel of 127\.0\.0\.1:9 within 0\.2 s"):
        request_status("127.0.0.1", 9, timeout_s=0.2)


def test_close_ends_what_is_on_its_way(start_engines: StartEngines) -> None:
    owner: Remote
    owner, reader = start_engines(EngineConfig("prefill"), EngineConfig("decode"))
    reader.pull(
        request_id="r", remote_request_id="r", remote_engine_id="prefill", host="127.0.0.1", port=owner.port,
        blocks=[[1]], first_token=0, num_tokens=16,
    )  # fmt: skip
    assert reader.close_worker() == {"r": "the hand-off was closed"}
