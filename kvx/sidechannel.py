"""The side channel's sockets: one server a rank, one link to each engine that it reads from.

All of it belongs to the hand-off thread; ZeroMQ sockets are not for several threads. The server is bound to the
configured host and to no other. With a secret, both ends sign what they send, and take nothing that is not signed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvx.addresses import endpoint, endpoint_of
from kvx.curve import Curve
from kvx.errors import ConnectorError, Crowded, HandshakeError, KVXError
from kvx.handshake import (
    MESSAGE_LIMIT_BYTES,
    Message,
    RefusedMessage,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
)
from kvx.seal import ReplySeal, RequestSeal

# ZeroMQ drops a connection that sends more than this; between the limits we answer with a refusal.
HARD_LIMIT_BYTES = MESSAGE_LIMIT_BYTES + (64 << 10)
# Messages of one connection that wait for the hand-off thread; what is more waits at the sender, whom TCP tells.
MOST_WAITING = 16
# Messages that wait for the other side to read: a reply more is lost and counted, a request more is refused.
MOST_UNSENT = 1024
# Requests of one link whose reply is awaited; of more, the oldest reply will be ignored.
MOST_ASKED = 16384
# Requests that are read before the hand-off thread looks at its transfers again.
MOST_AT_ONCE = 256
# All that somebody without the secret, or with an old message, gets to know.
STRANGERS_REPLY = "not authenticated: this engine talks only to those that share its secret"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
OnReply = Callable[[Reply], None]


class Server:
    """Takes the requests of `kvx.handshake` and sends replies. The constructor binds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        seal: ReplySeal | None = None,
        curve: Curve | None = None,
    ) -> None:
        """ConnectorError, in one sentence, when the port is in use or the host is not ours. Port 0 chooses one."""
        self._seal = seal or ReplySeal(None)
        self.socket = context.socket(zmq.ROUTER)
        try:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is lost is lost without a word
            self.socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
            self.socket.setsockopt(zmq.SNDHWM, MOST_UNSENT)
            address = endpoint_of(host, port)
            self.socket.setsockopt(zmq.IPV6, "[" in address)
            self.socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
            if curve is not None:
                curve.listen(self.socket)
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            if error.errno == errno.EADDRINUSE:
                raise ConnectorError(
                    f"side channel port {port} on {host} is in use; choose a free one with side_channel_port"
                ) from error
            raise ConnectorError(
                f"the side channel cannot listen on {host}:{port}: {error}; set side_channel_host to an address of "
                "this machine"
            ) from error
        except HandshakeError:
            self.socket.close(linger=0)
            raise
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def requests(self) -> Iterator[tuple[bytes, Request | RefusedMessage]]:
        """What has arrived: (where a reply goes, request), or what was wrong with it; of very much, a part."""
        for _ in range(MOST_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                error = RefusedMessage(f"a side channel message has one frame, found {len(frames) - 1}")
                yield self._refuse(frames[0], error)
                continue
            try:
                body, nonce = self._seal.open(frames[1])
            except RefusedMessage as error:
                yield self._refuse(frames[0], error)
                continue
            try:
                yield _receiver(frames[0], nonce), decode_request(body)
            except RefusedMessage as error:
                yield _receiver(frames[0], nonce), error

    def send(self, receiver: bytes, message: Message) -> bool:
        """Without waiting: a receiver that is gone or does not read loses the message, its deadline tells it.

        False when it does not read.
        """
        name, nonce = receiver[1 + receiver[0] :], receiver[1 : 1 + receiver[0]]
        try:
            self.socket.send_multipart([name, self._seal.seal(message.sequence, nonce, encode(message))], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def _refuse(self, name: bytes, error: RefusedMessage) -> tuple[bytes, RefusedMessage]:
        if self._seal.is_strict:
            error.reply = STRANGERS_REPLY
        return _receiver(name, b""), error

    def close(self) -> None:
        self.socket.close(linger=0)


class Link:
    """Our end of the side channel of one engine. `host` is what the engine is known by, `address` where it is."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        address: str,
        seal: RequestSeal | None = None,
        curve: Curve | None = None,
    ) -> None:
        """HandshakeError when nothing can be connected to there; no socket is left then."""
        self.host, self.port = host, port
        where = endpoint(address, port)
        if port == 0:  # ZeroMQ takes it and never connects
            raise HandshakeError(f"side channel port 0 of host {host} is no port; use one of 1 to 65535")
        self.socket = context.socket(zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED
        )
        try:
            self.socket.setsockopt(zmq.IPV6, "[" in where)
            self.socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
            self.socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
            self.socket.setsockopt(zmq.SNDHWM, MOST_UNSENT)
            if curve is not None:
                curve.connect(self.socket)
            self.socket.connect(where)
        except zmq.ZMQError as error:
            self.close()
            raise HandshakeError(f"the side channel cannot connect to {host}:{port}: {error}") from error
        self._sequence = self._seen = 0
        self._seal = seal or RequestSeal(None)
        self._waiting: dict[int, tuple[OnReply, bytes]] = {}

    def ask(self, message: Message, on_reply: OnReply) -> None:
        """Send a request (its `sequence` is set here); the reply, if one comes, goes to `on_reply`.

        Crowded: MOST_UNSENT messages wait for the engine to read them. Of a lost link, `why_lost` tells.
        """
        nonce = self._send(message)
        self._waiting[self._sequence] = on_reply, nonce
        if len(self._waiting) > MOST_ASKED:
            del self._waiting[next(iter(self._waiting))]

    def tell(self, message: Message) -> None:
        """Send a message that has no reply. Crowded: as `ask`."""
        self._send(message)

    def replies(self) -> Iterator[tuple[OnReply, Reply]]:
        """Replies that have arrived, each with whom it is for. Unreadable or unasked ones raise RefusedMessage.

        It ends when what is done with a reply closes the link.
        """
        while not self.socket.closed:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            body, nonce = self._seal.open(data)
            reply = decode_reply(body)
            on_reply, asked = self._waiting.get(reply.sequence, (None, b""))
            if on_reply is None:
                continue
            if nonce != asked:
                raise RefusedMessage("a reply was signed for another request", reply.sequence, "replayed")
            del self._waiting[reply.sequence]
            yield on_reply, reply

    def why_lost(self) -> str:
        """Why nothing will come of this link any more, whatever takes the engine's port later; empty while it may.

        A port that nobody listens on counts: left to try again, ZeroMQ would say to the next engine there what was
        meant for this one.
        """
        while not self.socket.closed and self.monitor.poll(0):
            self._seen |= parse_monitor_message(self.monitor.recv_multipart())["event"]
        place = f"engine {self.host}:{self.port}"
        if self._seen & HANDSHAKE_FAILED:
            return f"{place} has other CURVE keys, or none; give all engines one KVX_CURVE_DIR"
        if self._seen & zmq.EVENT_DISCONNECTED:
            return f"{place} closed its side channel; is it still running?"
        return f"{place} cannot be connected to; is it still running?" if self._seen else ""

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        # What was said last (a release) still goes out if it can within this time.
        self.socket.close(linger=200)

    def _send(self, message: Message) -> bytes:
        """The nonce that its reply must have."""
        self._sequence += 1
        message.sequence = self._sequence
        data, nonce = self._seal.seal(self._sequence, encode(message))
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            # A refused connection takes nothing either. That is no crowd: it ends as what was said a moment earlier.
            if not (self._seen or self.monitor.poll(0)):
                raise Crowded(f"the side channel of {self.host}:{self.port} takes no more messages") from None
        return nonce


def _receiver(name: bytes, nonce: bytes) -> bytes:
    """Where a reply goes: ZeroMQ's name of the asker, and the nonce of what it asked."""
    return bytes([len(nonce)]) + nonce + name


def reason_of(error: KVXError) -> str:
    """An error's text, short enough for a reply."""
    return str(error)[:1000]
