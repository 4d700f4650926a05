"""What some of the words mean that go to vLLM's command line as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvx.errors import EngineError

_WORLD = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)

# What kvx serve must know, so that it decides about it: the option of its own that does.
_DECIDED = {
    "--model": "--model",
    "--served-model-name": "--served-model-name",
    "--host": "--host, or --prefill-hosts and --decode-hosts",
    "--port": "--first-port",
    "--kv-transfer-config": "--connector and --handoff",
}


def require_undecided(arguments: Sequence[str]) -> None:
    """Trigger of EngineError: one of the words is an option that kvx serve gives to vLLM itself."""
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name in _DECIDED:
            raise EngineError(f"vLLM's {name} is given by kvx serve; before --, use its own {_DECIDED[name]}")


def world_size(arguments: Sequence[str]) -> int:
    """Ranks of an engine that is started with these words: each has a side channel, and on a GPU a device."""
    size = 1
    for names in _WORLD:
        value = last_value(arguments, names) or "1"
        if not value.isdigit() or int(value) < 1:
            raise EngineError(f"{names[0]} is {value!r}; it needs a number of at least 1")
        size *= int(value)
    return size


def last_value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """The value that counts, the last one, of an option that has these names; None where it is not given."""
    found = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
    return found


def api_key(arguments: Sequence[str]) -> str | None:
    """What the engines ask their clients for, if anything."""
    return last_value(arguments, ("--api-key",)) or os.environ.get("VLLM_API_KEY")
