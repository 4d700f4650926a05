"""Where the shared secret comes from, and that it shows itself nowhere."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import zmq.auth

from kvx.curve import read_curve
from kvx.errors import ConnectorError
from kvx.secret import Secret, read_secret

KEY = "0123456789abcdef-a-key"


def key_file(folder: Path, mode: int = 0o600, text: str = KEY + "\n") -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_file_and_environment_give_the_same_secret(tmp_path: Path) -> None:
    found = read_secret({"KVX_SECRET_FILE": str(key_file(tmp_path, 0o400))})
    other = read_secret({"KVX_SECRET": KEY})
    assert found is not None
    assert other is not None
    assert found.is_signed(b"x", b"data", other.sign(b"x", b"data"))
    assert read_secret({}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o700, 0o666])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode)
    with pytest.raises(ConnectorError, match=f"{path} has mode {mode:04o}; give a regular file"):
        read_secret({"KVX_SECRET_FILE": str(path)})


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConnectorError, match="is not a regular file"):
            read_secret({"KVX_SECRET_FILE": str(path)})
    with pytest.raises(ConnectorError, match="cannot be read"):
        read_secret({"KVX_SECRET_FILE": str(tmp_path / "missing")})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConnectorError, match="belongs to user 12345, this process is user 0"):
        read_secret({"KVX_SECRET_FILE": str(path)})


def test_too_short_too_long_or_twice_is_refused(tmp_path: Path) -> None:
    for text in ("", "7h0rt", "x" * 15 + "\n", "x" * 4097):
        with pytest.raises(ConnectorError, match="it needs 16 to 4096") as raised:
            read_secret({"KVX_SECRET_FILE": str(key_file(tmp_path, text=text))})
        assert not text.strip() or text.strip() not in str(raised.value)
    with pytest.raises(ConnectorError, match="both set"):
        read_secret({"KVX_SECRET_FILE": "x", "KVX_SECRET": KEY})


def test_it_shows_itself_nowhere_and_does_not_travel() -> None:
    secret = Secret(KEY.encode())
    assert KEY not in f"{secret} {secret!r} {[secret]} {vars(type(secret))}"
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not to be copied or sent") as raised:
            carry(secret)
        assert KEY not in str(raised.value)


def test_a_signature_is_good_for_its_key_purpose_and_data_alone() -> None:
    secret = Secret(KEY.encode())
    signature = secret.sign(b"ticket", b"data")
    assert secret.is_signed(b"ticket", b"data", signature)
    assert not secret.is_signed(b"reply", b"data", signature)
    assert not secret.is_signed(b"ticke", b"tdata", signature)
    assert not secret.is_signed(b"ticket", b"datA", signature)
    assert not secret.is_signed(b"ticket", b"data", signature[:-1])
    assert not Secret(b"another key of 16").is_signed(b"ticket", b"data", signature)


def test_curve_keys_need_a_secret_a_private_file_and_a_certificate(tmp_path: Path) -> None:
    secret, environ = Secret(KEY.encode()), {"KVX_CURVE_DIR": str(tmp_path)}
    assert read_curve(secret, {}) is None
    with pytest.raises(ConnectorError, match="CURVE proves only the owner's side; set KVX_SECRET_FILE"):
        read_curve(None, environ)
    with pytest.raises(ConnectorError, match=r"kvx\.key_secret' cannot be read"):
        read_curve(secret, environ)
    zmq.auth.create_certificates(tmp_path, "kvx")
    path = tmp_path / "kvx.key_secret"
    path.chmod(0o644)
    with pytest.raises(ConnectorError, match="has mode 0644"):
        read_curve(secret, environ)
    path.chmod(0o600)
    _, key = zmq.auth.load_certificate(path)
    assert key is not None
    assert key.decode() not in repr(read_curve(secret, environ))
    path.write_text((tmp_path / "kvx.key").read_text())
    with pytest.raises(ConnectorError, match="has no secret key"):
        read_curve(secret, environ)
    path.write_text("nothing of it")
    with pytest.raises(ConnectorError, match="is no ZeroMQ certificate"):
        read_curve(secret, environ)
