"""The secret that engines of one deployment share. It comes from a file or the environment, and shows itself nowhere.

Not from `kv_connector_extra_config`: vLLM logs that, and hashes it into cache keys.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from typing import NoReturn

from kvx.errors import ConnectorError

FILE, VALUE = "KVX_SECRET_FILE", "KVX_SECRET"
# Shorter ones can be guessed from one signed message.
LEAST_BYTES = 16
MOST_BYTES = 4096


class Secret:
    """Signs, and is not to be had from it: no text, copy or pickle of it holds the key."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, purpose: bytes, data: bytes) -> bytes:
        """32 bytes. What is signed for one purpose is never valid for another one."""
        return hmac.digest(self._key, len(purpose).to_bytes(1) + purpose + data, hashlib.sha256)

    def is_signed(self, purpose: bytes, data: bytes, signature: bytes) -> bool:
        """Takes the same time wherever the signature differs."""
        return hmac.compare_digest(self.sign(purpose, data), signature)

    def __repr__(self) -> str:
        return "Secret(not shown)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not to be copied or sent; each process reads its own")


def read_secret(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The configured secret, or None where there is none.

    ConnectorError: both variables are set, the secret is shorter than 16 bytes or longer than 4096, or the file is not
    a regular file of this user that nobody else may read.
    """
    path, value = environ.get(FILE), environ.get(VALUE)
    if path is None and value is None:
        return None
    if path is not None and value is not None:
        raise ConnectorError(f"{FILE} and {VALUE} are both set; set one of them")
    where = VALUE if path is None else f"{FILE} {path}"
    key = read_private(FILE, path) if path is not None else os.fsencode(value or "")
    key = key.rstrip(b"\r\n")
    if not LEAST_BYTES <= len(key) <= MOST_BYTES:
        raise ConnectorError(f"{where} has a secret of {len(key)} bytes; it needs {LEAST_BYTES} to {MOST_BYTES}")
    return Secret(key)


def read_private(setting: str, path: str) -> bytes:
    """A file of this user that nobody else may read. What is checked is what is read: by its descriptor, not its name.

    ConnectorError otherwise; it names the setting.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe waits for somebody to write to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConnectorError(
            f"{setting} {path!r} cannot be read: {error}; give a file of this user, mode 0600"
        ) from error
    try:
        found = os.fstat(fd)
        if why := _why_not(found):
            raise ConnectorError(f"{setting} {path} {why}; give a regular file of this user with mode 0600 or stricter")
        return os.read(fd, MOST_BYTES + 3)  # more than a line's end too many, so that it is seen
    finally:
        os.close(fd)


def _why_not(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, this process is user {os.geteuid()}"
    mode = stat.S_IMODE(found.st_mode)
    return f"has mode {mode:04o}" if mode & 0o177 else ""
