"""ZeroMQ's CURVE around the side channel: encrypted, and the owner proves that it has the deployment's key.

One key pair for all engines of a deployment: `zmq.auth.create_certificates(FOLDER, "kvx")` makes it, and each engine
needs `kvx.key_secret` of it. Readers use a key of the moment, so it is the shared secret that proves *them*.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.certs import load_certificate

from kvx.errors import ConnectorError
from kvx.secret import Secret, read_private

FOLDER = "KVX_CURVE_DIR"
KEY_FILE = "kvx.key_secret"


class Curve:
    """The deployment's key pair, which no text shows."""

    __slots__ = ("_key", "_public")

    def __init__(self, public: bytes, key: bytes) -> None:
        self._public, self._key = public, key

    def listen(self, socket: zmq.Socket[Any]) -> None:
        """Before the socket is bound."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._key
        socket.curve_server = True

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Before the socket is connected."""
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = self._public

    def __repr__(self) -> str:
        return "Curve(not shown)"


def read_curve(secret: Secret | None, environ: Mapping[str, str] = os.environ) -> Curve | None:
    """The configured key pair, or None.

    ConnectorError: there is no secret beside it, its file is not this user's alone, or is no certificate.
    """
    folder = environ.get(FOLDER)
    if folder is None:
        return None
    path = Path(folder) / KEY_FILE
    if secret is None:
        raise ConnectorError(f"{FOLDER} is set, but CURVE proves only the owner's side; set KVX_SECRET_FILE beside it")
    if not zmq.has("curve"):
        raise ConnectorError(f"{FOLDER} is set, but this ZeroMQ was built without CURVE; unset it")
    read_private(FOLDER, str(path))
    try:
        public, key = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConnectorError(f"{path} is no ZeroMQ certificate: {error}") from error
    if key is None:
        raise ConnectorError(f"{path} has no secret key; zmq.auth.create_certificates writes one that has")
    return Curve(public, key)
