"""The file that says where the engines of a pair run: read in full, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvx.errors import EngineError
from kvx.verify.places import Place, read_places

WHOLE = """
[options]
allow_unauthenticated_data_plane = true
transfer_deadline_s = 5.0

[prefill]
prefix = ["ip", "netns", "exec", "prefill"]
host = "10.0.0.1"
side_channel_host = "10.1.0.1"
environment = { UCX_TLS = "tcp,self" }

[decode]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "places.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    places, options = read_places(write(tmp_path, WHOLE))
    assert places["prefill"] == Place(
        prefix=("ip", "netns", "exec", "prefill"),
        host="10.0.0.1",
        side_channel_host="10.1.0.1",
        environment={"UCX_TLS": "tcp,self"},
    )
    assert places["decode"] == Place()
    assert options == {"allow_unauthenticated_data_plane": True, "transfer_deadline_s": 5.0}


def test_nothing_said_is_here(tmp_path: Path) -> None:
    assert read_places(write(tmp_path, "")) == ({}, {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[prefill", "--places needs a TOML file"),
        ("[router]", "has 'router', which kvx does not know; it knows prefill, decode, options"),
        ("prefill = 3", "has prefill = 3; it needs a table"),
        ("[decode]\nport = 1", "has 'port' in [decode], which kvx does not know; it knows prefix, host"),
        ('[decode]\nprefix = "ssh there"', "it needs a list of words"),
        ("[decode]\nprefix = [1]", "it needs a list of words"),
        ("[decode]\nhost = 1", "has host = 1 in [decode]; it needs an address"),
        ('[decode]\nside_channel_host = ""', "it needs an address"),
        ("[decode]\nenvironment = { A = 1 }", "it needs a table of texts"),
        ('[decode]\nenvironment = { KVX_SECRET = "sesame" }', "set it where kvx verify runs"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(EngineError) as raised:
        read_places(write(tmp_path, text))
    assert sentence in str(raised.value)
    assert "sesame" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"places\.toml cannot be read"):
        read_places(tmp_path / "places.toml")
