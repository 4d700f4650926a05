"""The side channel's sockets, against what cannot be connected to."""

from __future__ import annotations

import gc

import pytest
import zmq

from kvx.errors import HandshakeError
from kvx.sidechannel import Link


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", -1), ("127.0.0.1", 0), ("::1", 65536)])
def test_a_link_to_nowhere_is_a_handshake_error_and_leaves_no_socket(host: str, port: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(HandshakeError):
        Link(context, host, port, host)
    gc.collect()
    context.term()  # would wait for ever for a socket that is still open
