"""The side channel's sockets, against what cannot be connected to."""

from __future__ import annotations

import gc
import logging
import socket

import pytest
import zmq
from test_handshake import INFO

from kvx.engine_side import EngineSide, HandoffSettings
from kvx.errors import HandshakeError
from kvx.handshake import Message, Refused, Status, encode
from kvx.holder import Holder
from kvx.seal import RefusedMessage
from kvx.sidechannel import MOST_AT_ONCE, Link, Server


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", -1), ("127.0.0.1", 0), ("::1", 65536)])
def test_a_link_to_nowhere_is_a_handshake_error_and_leaves_no_socket(host: str, port: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(HandshakeError):
        Link(context, host, port, host)
    gc.collect()
    context.term()  # would wait for ever for a socket that is still open


def test_a_link_says_why_it_is_lost_and_that_nobody_listens_is_one_reason() -> None:
    """What waits in it for an engine that ended must not reach the next one at its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "127.0.0.1", 0)
    try:
        link = Link(context, "127.0.0.1", server.port, "127.0.0.1")
        link.tell(Status(sequence=0))
        assert server.socket.poll(5000)
        assert link.why_lost() == ""
        server.close()
        assert link.monitor.poll(5000)
        assert link.why_lost() == f"engine 127.0.0.1:{server.port} closed its side channel; is it still running?"
        with socket.socket() as bound:  # and does not listen
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            late = Link(context, "127.0.0.1", port, "127.0.0.1")
            assert late.monitor.poll(5000)
            assert late.why_lost() == f"engine 127.0.0.1:{port} cannot be connected to; is it still running?"
        link.close()
        late.close()
    finally:
        context.destroy(linger=0)


def test_a_flood_of_requests_is_read_in_parts() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, dealer = Server(context, "127.0.0.1", 0), context.socket(zmq.DEALER)
    try:
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        count = MOST_AT_ONCE + 100
        for sequence in range(count):
            dealer.send(encode(Status(sequence=sequence)))
        read = 0
        while read < count:
            assert server.socket.poll(5000), "what is left is still announced"
            part = len(list(server.requests()))
            assert part <= MOST_AT_ONCE
            read += part
    finally:
        server.close()
        context.destroy(linger=0)


def test_refused_messages_are_counted_each_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []
    side = EngineSide(HandoffSettings(), INFO, [], post=lambda note: None)
    holder = Holder(side, lambda receiver, message: sent.append(message), dict)
    with caplog.at_level(logging.WARNING):
        for sequence in range(100):
            holder.answer(b"x", RefusedMessage("not one\nfake line", sequence, "unsigned"))
    assert side.metrics.as_status(0)["messages_refused"] == {"unsigned": 100}
    assert [message.sequence for message in sent if isinstance(message, Refused)] == list(range(100))
    assert len(caplog.records) == 7, "the 1st, 2nd, 4th ... 64th"
    assert all("\n" not in record.getMessage() for record in caplog.records)
