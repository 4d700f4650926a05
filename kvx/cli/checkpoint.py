"""A checkpoint folder's `config.json` and the size of its weights, without loading any."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kvx.cli.files import read_object
from kvx.errors import ModelError

_HEADER_LIMIT_BYTES = 100 << 20
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
_FLOATS = {"F64", "F32", "F16", "BF16"}


def read_config(model: Path) -> dict[str, Any]:
    """The config of a checkpoint folder, or of a `config.json` by itself.

    Raises:
        ModelError: no such file, or no JSON object in it.
    """
    path = model / "config.json" if model.is_dir() else model
    return read_object(
        path,
        ModelError,
        wanted="a checkpoint folder, or a model's config.json by itself",
        holds="a config.json holds an object",
    )


def weights_bytes(model: Path, bytes_an_element: int) -> int | None:
    """Bytes of all weights as served, from the headers of `*.safetensors`; None where the folder has none.

    Floating-point weights count `bytes_an_element`, quantized ones what they take in the file.

    Raises:
        ModelError: a file that is no safetensors file.
    """
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    return sum(_file_bytes(path, bytes_an_element) for path in files) if files else None


def _file_bytes(path: Path, bytes_an_element: int) -> int:
    total = 0
    for name, tensor in _header(path).items():
        if name == "__metadata__":
            continue
        elements = math.prod(tensor["shape"])
        kind = tensor["dtype"]
        total += elements * (bytes_an_element if kind in _FLOATS else _DTYPE_BYTES.get(kind, 1))
    return total


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file begins with the header's length (8 bytes, little-endian) and the header in JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _HEADER_LIMIT_BYTES:
                raise ModelError(f"{path} claims a header of {length} bytes; it is no safetensors file")
            found = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} has no readable header: {error}") from None
    if not isinstance(found, dict) or not all(_is_tensor(one) for name, one in found.items() if name != "__metadata__"):
        raise ModelError(f"{path} has no readable header; it is no safetensors file")
    return found


def _is_tensor(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("dtype"), str):
        return False
    shape = found.get("shape")
    return isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
