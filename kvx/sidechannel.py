"""The side channel's sockets: one server a rank, one link to each engine that it reads from.

All of it belongs to the hand-off thread; ZeroMQ sockets are not for several threads. The server is bound to the
configured host and to no other.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvx.addresses import endpoint, endpoint_of
from kvx.errors import ConnectorError, HandshakeError, KVXError
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

# ZeroMQ drops a connection that sends more than this; between the limits we answer with a refusal.
HARD_LIMIT_BYTES = 4 * MESSAGE_LIMIT_BYTES
OnReply = Callable[[Reply], None]


class Server:
    """Answers HELLO, CLAIM, RENEW, DIGESTS, RELEASE and STATUS. The constructor binds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        """ConnectorError, in one sentence, when the port is in use or the host is not ours. Port 0 chooses one."""
        self.socket = context.socket(zmq.ROUTER)
        try:
            address = endpoint_of(host, port)
            self.socket.setsockopt(zmq.IPV6, "[" in address)
            self.socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
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
        """What has arrived: (sender, request), or what was wrong with it."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                yield frames[0], RefusedMessage(f"a side channel message has one frame, found {len(frames) - 1}")
                continue
            try:
                yield frames[0], decode_request(frames[1])
            except RefusedMessage as error:
                yield frames[0], error

    def send(self, receiver: bytes, message: Message) -> None:
        """Without waiting: a receiver that is gone or does not read loses the message, its deadline tells it."""
        try:
            self.socket.send_multipart([receiver, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            pass

    def close(self) -> None:
        self.socket.close(linger=0)


class Link:
    """Our end of the side channel of one engine. `host` is what the engine is known by, `address` where it is."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, address: str) -> None:
        """HandshakeError when nothing can be connected to there; no socket is left then."""
        self.host, self.port = host, port
        where = endpoint(address, port)
        if port == 0:  # ZeroMQ takes it and never connects
            raise HandshakeError(f"side channel port 0 of host {host} is no port; use one of 1 to 65535")
        self.socket = context.socket(zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.socket.setsockopt(zmq.IPV6, "[" in where)
            self.socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
            self.socket.connect(where)
        except zmq.ZMQError as error:
            self.close()
            raise HandshakeError(f"the side channel cannot connect to {host}:{port}: {error}") from error
        self._sequence = 0
        self._waiting: dict[int, OnReply] = {}

    def ask(self, message: Message, on_reply: OnReply) -> None:
        """Send a request (its `sequence` is set here); the reply, if one comes, goes to `on_reply`."""
        self._waiting[self._send(message)] = on_reply

    def tell(self, message: Message) -> None:
        """Send a message that has no reply."""
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
            reply = decode_reply(data)
            on_reply = self._waiting.pop(reply.sequence, None)
            if on_reply is not None:
                yield on_reply, reply

    def is_lost(self) -> bool:
        """Whether the engine closed the connection: it ended, whatever has taken its port since."""
        lost = False
        while not self.socket.closed and self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            lost = lost or event["event"] == zmq.EVENT_DISCONNECTED
        return lost

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        # What was said last (a release) still goes out if it can within this time.
        self.socket.close(linger=200)

    def _send(self, message: Message) -> int:
        self._sequence += 1
        message.sequence = self._sequence
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise HandshakeError(f"the side channel of {self.host}:{self.port} takes no more messages") from None
        return self._sequence


def reason_of(error: KVXError) -> str:
    """An error's text, short enough for a reply."""
    return str(error)[:1000]
