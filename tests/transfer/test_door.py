"""The side channel between strangers: an engine with a secret answers those alone that have it, too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth
from engine_process import EngineConfig, Remote, StartEngines
from test_handoff import hand_off, pull
from test_side_channel import BAD, listening_addresses, message

from kvx.errors import HandshakeError
from kvx.handshake import (
    Claim,
    Claimed,
    Digests,
    Hello,
    Message,
    Refused,
    Release,
    Renew,
    Status,
    decode_reply,
    encode,
    request_status,
)  # fmt: skip
from kvx.seal import REQUEST_LIMIT_BYTES, RequestSeal
from kvx.secret import Secret
from kvx.sidechannel import HARD_LIMIT_BYTES, STRANGERS_REPLY
from kvx.ticket import Ticket, write_ticket

pytestmark = pytest.mark.transfer

KEY = "a secret for tests, and for nothing else"
WITH_SECRET = {"KVX_SECRET": KEY}
SECRET = Secret(KEY.encode())


class Stranger:
    """Somebody who speaks ZeroMQ, and is not an engine."""

    def __init__(self, owner: Remote) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, 5000)
        self._socket.connect(f"tcp://127.0.0.1:{owner.port}")

    def say(self, data: bytes) -> None:
        """As far as there is anybody who listens: a server with keys of its own may have hung up already."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(data)

    def ask(self, data: bytes) -> dict[str, Any]:
        self.say(data)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._socket.poll(20_000), "no answer"
        reply: dict[str, Any] = msgspec.msgpack.decode(self._socket.recv())
        return reply

    def hears_something(self, timeout_s: float) -> bool:
        return bool(self._socket.poll(round(timeout_s * 1000)))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def stranger_at() -> Iterator[Callable[[Remote], Stranger]]:
    made: list[Stranger] = []

    def make(owner: Remote) -> Stranger:
        made.append(Stranger(owner))
        return made[-1]

    yield make
    for stranger in made:
        stranger.close()


def requests() -> list[Message]:
    return [
        Hello(sequence=1, engine_id="decode"),
        Claim(sequence=2, request_id="r", reader="me", wait_s=1.0),
        Digests(sequence=3, request_id="r", group=0, first_token=0, num_tokens=1, head_start=0, head_count=1),
        Status(sequence=4),
        Release(sequence=5, request_id="r", reader="me"),
        Renew(sequence=6, request_id="r"),
    ]


def only_refused(reply: dict[str, Any]) -> bool:
    if reply.pop("cause", "missing") != "":
        return False
    return reply.keys() == {"kind", "version", "sequence", "reason"} and reply["reason"] == STRANGERS_REPLY


def refused(engine: Remote) -> dict[str, int]:
    found: dict[str, int] = engine.status()["messages_refused"]
    return found


def test_a_pair_with_a_secret_hands_off_and_verifies(
    start_engines: StartEngines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    owner, reader = start_engines(
        EngineConfig("prefill", settings={"verify": "all"}, environ={"KVX_SECRET_FILE": str(path)}),
        EngineConfig("decode", settings={"verify": "all"}, environ=WITH_SECRET),
    )
    for seed in range(3):
        hand_off(owner, reader, 100, seed)
    assert refused(owner) == refused(reader) == {}
    monkeypatch.setenv("KVX_SECRET", KEY)
    status = request_status("127.0.0.1", owner.port)
    assert status["handoff"]["released"] == 3
    assert KEY not in str(status)
    for wrong in ("another secret altogether", None):
        monkeypatch.delenv("KVX_SECRET") if wrong is None else monkeypatch.setenv("KVX_SECRET", wrong)
        with pytest.raises(HandshakeError):
            request_status("127.0.0.1", owner.port)


def test_a_stranger_gets_nothing_and_frees_nothing(
    start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger]
) -> None:
    owner, reader = start_engines(
        EngineConfig("prefill", settings={"verify": "all"}, environ=WITH_SECRET),
        EngineConfig("decode", settings={"verify": "all"}, environ=WITH_SECRET),
    )
    owner.hold("r", [[1, 2]], 20)
    stranger, other = stranger_at(owner), RequestSeal(Secret(b"not the secret of it"))
    for request in requests():
        assert only_refused(stranger.ask(encode(request)))
        assert only_refused(stranger.ask(other.seal(request.sequence, encode(request))[0]))
    for name, data in BAD.items():
        assert only_refused(stranger.ask(data)), name
    counted = refused(owner)
    assert counted["unsigned"] >= 5
    assert counted["forged"] == len(requests())
    assert sum(counted.values()) == 2 * len(requests()) + len(BAD)
    stranger.say(b"\0" * (HARD_LIMIT_BYTES + 1))  # ends its own connection
    assert not any(owner.events(0.2).values())
    assert owner.status()["handoff"] == {"holds": 1, "released": 0, "expired": 0, "renewed": 0}
    assert owner.status()["side_channel"]["internal_errors"] == 0
    hand_off(owner, reader, 100, 1)


STRANGERS = {
    "read KV": [
        Claim(sequence=1, request_id="r", reader="stranger", wait_s=1.0),
        Digests(sequence=2, request_id="r", group=0, first_token=0, num_tokens=16, head_start=0, head_count=2),
    ],
    "register a peer": [Hello(sequence=1, engine_id="decode"), Hello(sequence=2, engine_id="another")],
    "free a block": [
        Release(sequence=1, request_id="r", reader="me"),
        Claim(sequence=2, request_id="r", reader="me", wait_s=0.0),
        Release(sequence=3, request_id="r", reader="me"),
    ],
    "keep a block": [Renew(sequence=1, request_id="r")],
}


@pytest.mark.parametrize("what", [*STRANGERS, "stop the engine"])
def test_a_stranger_cannot(what: str, start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger]) -> None:
    """Neither unsigned nor signed with another secret; an engine has claimed the blocks meanwhile, as "me"."""
    owner, reader = start_engines(
        EngineConfig("prefill", settings={"verify": "all"}, environ=WITH_SECRET),
        EngineConfig("decode", settings={"verify": "all"}, environ=WITH_SECRET),
    )
    owner.hold("r", [[1]], 16)
    engine, seal = stranger_at(owner), RequestSeal(SECRET)
    claim = Claim(sequence=1, request_id="r", reader="me", wait_s=1.0, ticket=owner.ticket("r", 16))
    body, _ = seal.open(msgspec.msgpack.encode(engine.ask(seal.seal(1, encode(claim))[0])))
    assert isinstance(decode_reply(body), Claimed)
    stranger, other = stranger_at(owner), RequestSeal(Secret(b"not the secret of it"))
    said = [encode(message) for message in STRANGERS.get(what, [])]
    if what == "stop the engine":
        said = [message(kind=kind) for kind in ("stop", "shutdown", "close", "exit")] + [b"\x91" * 60_000, b""] * 500
    for sequence, data in enumerate(said, start=1):
        assert only_refused(stranger.ask(data)), what
        assert only_refused(stranger.ask(other.seal(sequence, data)[0])), what
    assert owner.status()["handoff"] == {"holds": 1, "released": 0, "expired": 0, "renewed": 0}
    assert sum(refused(owner).values()) == 2 * len(said)
    assert owner.status()["side_channel"]["internal_errors"] == 0
    hand_off(owner, reader, 100, 1)
    engine.say(seal.seal(2, encode(Release(sequence=2, request_id="r", reader="me")))[0])
    assert owner.events(20)["released"] == {"r"}, "and it was the engine's own word that freed it"


def test_a_stranger_in_an_owners_place_is_no_peer(start_engines: StartEngines) -> None:
    """It listens where a ticket leads to, and says what an engine would say, but cannot sign it."""
    owner, plain, reader = start_engines(
        EngineConfig("prefill", environ=WITH_SECRET),
        EngineConfig("prefill"),
        EngineConfig("decode", environ=WITH_SECRET),
    )
    plain.hold("r", [[1]], 16)
    ask(reader, plain, "r", "r", a_ticket(plain, "r"))
    assert "does not know our secret" in reader.events(20)["failed"]["r"]
    assert plain.status()["handoff"]["holds"] == 1, "nothing was claimed"
    hand_off(owner, reader, 100, 1)


def test_replayed_unsigned_expired_truncated_and_oversized_messages_are_dropped_and_counted(
    start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger]
) -> None:
    """Each would free the blocks, were it taken."""
    (owner,) = start_engines(EngineConfig("prefill", settings={"auth_window_s": 30.0}, environ=WITH_SECRET))
    owner.hold("r", [[1]], 16)
    engine, seal, thief = stranger_at(owner), RequestSeal(SECRET), stranger_at(owner)
    release = encode(Release(sequence=2, request_id="r", reader="me"))
    early, _ = seal.seal(1, release)  # nobody had claimed: it freed nothing, and a thief keeps it
    engine.say(early)
    claim = Claim(sequence=2, request_id="r", reader="me", wait_s=1.0, ticket=owner.ticket("r", 16))
    engine.ask(seal.seal(2, encode(claim))[0])
    signed, _ = seal.seal(3, release)
    old, _ = RequestSeal(SECRET, clock=lambda: time.time() - 31.0).seal(1, release)
    padded = Release(sequence=4, request_id="r" * 1024, reader="m" * 1024)
    dropped = {
        "replayed": (early, "replayed"), "unsigned": (release, "unsigned"), "expired": (old, "stale"),
        "truncated": (signed[:-1], "malformed"),
        "oversized": (seal.seal(4, encode(padded) + b"\0" * REQUEST_LIMIT_BYTES)[0], "malformed"),
    }  # fmt: skip
    for number, (name, (data, cause)) in enumerate(dropped.items(), start=1):
        before = refused(owner).get(cause, 0)
        assert only_refused(thief.ask(data)), name
        assert refused(owner)[cause] == before + 1, name
        assert sum(refused(owner).values()) == number
    assert owner.status()["handoff"]["holds"] == 1
    engine.say(signed)
    assert owner.events(20)["released"] == {"r"}, "the same word, signed, whole, in time and once"


def test_replayed_and_stale_messages_are_refused(
    start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger]
) -> None:
    (owner,) = start_engines(EngineConfig("prefill", settings={"auth_window_s": 30.0}, environ=WITH_SECRET))
    engine, thief = RequestSeal(SECRET), stranger_at(owner)
    caught, nonce = engine.seal(1, encode(Hello(sequence=1, engine_id="decode")))
    known = stranger_at(owner)
    body, echoed = engine.open(msgspec.msgpack.encode(known.ask(caught)))
    assert decode_reply(body).sequence == 1
    assert echoed == nonce
    assert only_refused(thief.ask(caught))
    old = RequestSeal(SECRET, clock=lambda: time.time() - 31.0)
    early = RequestSeal(SECRET, clock=lambda: time.time() + 31.0)
    for seal in (old, early):
        assert only_refused(thief.ask(seal.seal(1, encode(Status(sequence=1)))[0]))
    assert refused(owner) == {"replayed": 1, "stale": 2}


@pytest.mark.parametrize(
    ("owners", "readers", "cause"),
    [
        (WITH_SECRET, {}, "not authenticated"),
        (WITH_SECRET, {"KVX_SECRET": "another secret altogether"}, "give both engines the same KVX_SECRET_FILE"),
        ({}, WITH_SECRET, "give both engines the same KVX_SECRET_FILE"),
    ],
)
def test_a_pull_between_engines_that_share_no_secret_says_so(
    start_engines: StartEngines, owners: dict[str, str], readers: dict[str, str], cause: str
) -> None:
    owner, reader = start_engines(EngineConfig("prefill", environ=owners), EngineConfig("decode", environ=readers))
    owner.hold("r", [[1]], 16)
    ticket = a_ticket(owner, "r", secret=Secret(readers.get("KVX_SECRET", "none").encode()))
    pull(reader, owner, "r", [[1]], 0, 16, ticket)
    failure = reader.events(20)["failed"]["r"]
    assert cause in failure
    assert KEY not in failure
    assert owner.status()["handoff"]["holds"] == 1


def a_ticket(owner: Remote, request_id: str, **changed: Any) -> str:
    """One that an engine with the secret could have signed."""
    fields = {"request_id": request_id, "engine_id": "prefill", "instances": ("x",), "host": "127.0.0.1",
              "port": owner.port, "num_tokens": 16, "expires_s": time.time() + 30}  # fmt: skip
    return write_ticket(changed.pop("secret", SECRET), Ticket(**{**fields, **changed}))


def require_refused(reader: Remote, name: str, text: str, cause: str) -> None:
    events = reader.events(20)
    assert text in events["failed"][name]
    assert events["causes"][name] == cause


def test_only_the_owners_own_ticket_leads_to_a_hold(start_engines: StartEngines) -> None:
    owner, reader = start_engines(
        EngineConfig("prefill", environ=WITH_SECRET), EngineConfig("decode", environ=WITH_SECRET)
    )
    owner.fill([[1]], 16, 1)
    for request in ("r", "s"):
        owner.hold(request, [[1]], 16)
    right = owner.ticket("r", 16)
    by_cause = {"expired": "lease_expired", "of an engine that has restarted": "stale_generation"}
    before_anything_is_connected = {
        "has no ticket": "",
        "is not one that an engine with our secret signed": a_ticket(owner, "r", secret=Secret(b"some other secret")),
        "is for request s of engine prefill, not for r": owner.ticket("s", 16),
        "is for request r of engine other": a_ticket(owner, "r", engine_id="other"),
        "expired": owner.ticket("r", 16, lease_s=-1.0),
        "leads to 127.0.0.1 port": a_ticket(owner, "r", port=owner.port - 1),
        "is for 15 tokens, 16 were asked for": owner.ticket("r", 15),
    }
    fds = reader.num_fds()
    for number, (cause, ticket) in enumerate(before_anything_is_connected.items()):
        ask(reader, owner, f"a{number}", "r", ticket)
        require_refused(reader, f"a{number}", cause, by_cause.get(cause, "ticket_refused"))
    assert reader.num_fds() == fds, "something was connected to"
    by_the_owner = {
        "of an engine that has restarted": a_ticket(owner, "r"),
        "has 17 tokens, its hold 16": owner.ticket("r", 17),
    }
    for number, (cause, ticket) in enumerate(by_the_owner.items()):
        ask(reader, owner, f"b{number}", "r", ticket)
        require_refused(reader, f"b{number}", cause, by_cause.get(cause, "ticket_refused"))
    assert reader.status()["transfer"]["failures"] == {"ticket_refused": 7, "lease_expired": 1, "stale_generation": 1}
    assert refused(owner) == {"ticket_refused": 1}
    assert owner.status()["handoff"] == {"holds": 2, "released": 0, "expired": 0, "renewed": 0}
    ask(reader, owner, "c", "r", right)
    assert reader.events(20)["received"] == {"c"}
    assert reader.read([[3]], 0, 16) == owner.read([[1]], 0, 16)
    assert owner.events(20)["released"] == {"r"}


def test_the_owner_checks_the_ticket_of_a_claim_itself(
    start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger]
) -> None:
    """An engine that knows the secret, and checks nothing."""
    (owner,) = start_engines(EngineConfig("prefill", environ=WITH_SECRET))
    owner.hold("r", [[1]], 16)
    owner.hold("s", [[2]], 16)
    engine, seal = stranger_at(owner), RequestSeal(SECRET)
    tickets = ["", "x", owner.ticket("s", 16), owner.ticket("r", 16, lease_s=-1), a_ticket(owner, "r")]
    for sequence, ticket in enumerate([*tickets, owner.ticket("r", 16)], start=1):
        claim = Claim(sequence=sequence, request_id="r", reader="me", wait_s=1.0, ticket=ticket)
        body, _ = seal.open(msgspec.msgpack.encode(engine.ask(seal.seal(sequence, encode(claim))[0])))
        reply = decode_reply(body)
        assert isinstance(reply, Claimed if sequence > len(tickets) else Refused), ticket
    assert isinstance(reply, Claimed)
    assert reply.blocks == [[1]]


def test_a_hand_off_to_a_host_that_is_not_allowed_connects_to_nothing(start_engines: StartEngines) -> None:
    owner, reader = start_engines(
        EngineConfig("prefill"), EngineConfig("decode", settings={"allowed_hosts": ("127.0.0.2", "10.0.0.0/8")})
    )
    owner.hold("r", [[1]], 16)
    fds = reader.num_fds()
    for name, host in (("a", "127.0.0.1"), ("b", "::ffff:127.0.0.1"), ("c", "localhost"), ("d", "0.0.0.0")):
        reader.pull(
            request_id=name, remote_request_id="r", remote_engine_id="prefill", host=host, port=owner.port,
            blocks=[[3]], first_token=0, num_tokens=16,
        )  # fmt: skip
        failure = reader.events(20)["failed"][name]
        assert f"host {host!r} (" in failure
        assert "is not among allowed_hosts; nothing was connected to" in failure
    assert reader.num_fds() == fds
    assert owner.status()["handoff"]["holds"] == 1
    assert owner.status()["side_channel"]["refused"] == 0


def test_off_loopback_an_engine_starts_only_when_told_who_may_come(start_engines: StartEngines) -> None:
    everywhere = {"side_channel_host": "0.0.0.0"}
    with pytest.raises(RuntimeError, match="ConnectorError: connector nixl opens ports of UCX's choice"):
        start_engines(EngineConfig("prefill", settings={**everywhere, "allowed_hosts": ("127.0.0.1",)}))
    with pytest.raises(RuntimeError, match="is not loopback, and kv_transfer_params"):
        start_engines(EngineConfig("prefill", connectors=("ipc",), settings=everywhere))
    told = {**everywhere, "allowed_hosts": ("127.0.0.1",), "allow_unauthenticated_data_plane": True}
    owner, reader = start_engines(EngineConfig("prefill", settings=told), EngineConfig("decode"))
    hand_off(owner, reader, 100, 1)


def test_on_loopback_nixl_listens_nowhere_else(start_engines: StartEngines) -> None:
    (owner,) = start_engines(EngineConfig("prefill", environ={"UCX_TLS": "tcp,self"}))
    assert owner.process.pid is not None
    addresses = listening_addresses(owner.process.pid)
    assert len(addresses) > 1, "UCX listens, too"
    assert {address.split(":")[0] for address in addresses} == {"0100007F"}


def test_mooncake_listens_everywhere_whatever_it_is_told(start_engines: StartEngines) -> None:
    """Where this turns red, the library has learned it: say so in docs/security.md, and let the door trust it."""
    told = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "KVX_MOONCAKE_HOST": "127.0.0.1"}
    (owner,) = start_engines(EngineConfig("prefill", connectors=("mooncake",), environ=told))
    assert owner.process.pid is not None
    hosts = {address.split(":")[0] for address in listening_addresses(owner.process.pid)}
    assert hosts & {"00000000", "0" * 32}


def curve_folder(parent: Path, name: str) -> dict[str, str]:
    """A deployment's key pair, and the environment of an engine that has it."""
    folder = parent / name
    folder.mkdir()
    zmq.auth.create_certificates(folder, "kvx")
    (folder / "kvx.key_secret").chmod(0o600)
    return {**WITH_SECRET, "KVX_CURVE_DIR": str(folder)}


def test_with_curve_keys_the_side_channel_is_encrypted(
    start_engines: StartEngines,
    stranger_at: Callable[[Remote], Stranger],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, others = curve_folder(tmp_path, "ours"), curve_folder(tmp_path, "others")
    owner, reader, other, plain = start_engines(
        EngineConfig("prefill", environ=ours), EngineConfig("decode", environ=ours),
        EngineConfig("other", environ=others), EngineConfig("plain", environ=WITH_SECRET),
    )  # fmt: skip
    hand_off(owner, reader, 100, 1)
    owner.hold("r", [[1]], 16)
    for engine in (other, plain):
        ask(engine, owner, "r", "r", owner.ticket("r", 16))
        failure = engine.events(20)["failed"]["r"]
        assert "has other CURVE keys, or none" in failure or "closed its side channel" in failure
    stranger = stranger_at(owner)
    stranger.say(RequestSeal(SECRET).seal(1, encode(Status(sequence=1)))[0])
    assert not stranger.hears_something(0.3)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    assert request_status("127.0.0.1", owner.port)["handoff"]["holds"] == 1


def ask(reader: Remote, owner: Remote, name: str, request_id: str, ticket: str) -> None:
    reader.pull(
        request_id=name, remote_request_id=request_id, remote_engine_id="prefill", host="127.0.0.1", port=owner.port,
        blocks=[[3]], first_token=0, num_tokens=16, ticket=ticket,
    )  # fmt: skip


def test_a_secret_that_others_may_read_is_one_clear_sentence(start_engines: StartEngines, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(KEY)
    path.chmod(0o644)
    with pytest.raises(RuntimeError, match=r"KVX_SECRET_FILE .* has mode 0644; give a regular file") as raised:
        start_engines(EngineConfig("prefill", environ={"KVX_SECRET_FILE": str(path)}))
    assert KEY not in str(raised.value)
