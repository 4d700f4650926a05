"""Which model a user names, and what a GGUF file says of its prompts; converting a real one is a matrix test."""

import struct
from pathlib import Path

import pytest

from kvx.errors import EngineError
from kvx.verify.model import _wants_bos, checkpoint_of


def gguf(folder: Path, *fields: bytes) -> Path:
    file = folder / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + b"".join(fields))
    return file


def flag(value: bool) -> bytes:
    key = b"tokenizer.ggml.add_bos_token"
    return struct.pack("<Q", len(key)) + key + struct.pack("<I?", 7, value)


def test_a_checkpoint_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert checkpoint_of(tmp_path) == tmp_path


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"not")
    with pytest.raises(EngineError, match="is no GGUF file; --model needs one, or a folder"):
        checkpoint_of(file)


def test_nothing_there_is_no_model_folder(tmp_path):
    with pytest.raises(EngineError, match="no model folder at"):
        checkpoint_of(tmp_path / "gone")


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVX_CACHE_DIR", str(tmp_path / "cache"))
    file = gguf(tmp_path)
    with pytest.raises(EngineError, match=r"model could not be converted from .*model\.gguf: "):
        checkpoint_of(file)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(("fields", "wanted"), [([flag(True)], True), ([flag(False)], False), ([], False)])
def test_whether_prompts_begin_with_the_first_token(tmp_path, fields, wanted):
    assert _wants_bos(gguf(tmp_path, b"before", *fields, b"after")) is wanted
