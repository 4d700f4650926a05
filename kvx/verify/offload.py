"""A run in which blocks must leave the cache and come back: how small the cache and its host memory have to be.

The questions are asked twice, the second time backwards. The cache holds one request and hardly more, so most blocks
of the first round have left it when they are asked for again. Host memory holds more than the cache and less than
everything, so the blocks of the last questions come back from there, and those of the first ones have been evicted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvx.errors import EngineError
from kvx.verify import questions
from kvx.verify.client import Answer
from kvx.verify.engines import RunSettings
from kvx.verify.questions import Problem

#: vLLM keeps one block back; one more lets a request begin while another one's last block is stored.
SPARE_BLOCKS = 2
#: Each prompt fills so many blocks, roughly.
PROMPT_BLOCKS = 5
_CHARACTERS_PER_TOKEN = 4
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def prompt(problem: Problem, shots: Sequence[Problem], *, number: int, block_size_tokens: int) -> str:
    """A prompt that begins as no other one does, and is long: the examples come as often as that takes."""
    once = len(questions.prompt(problem, shots))
    wanted = PROMPT_BLOCKS * block_size_tokens * _CHARACTERS_PER_TOKEN
    times = max(1, -(-wanted // once))
    return f"Sheet {number}.\n\n" + questions.prompt(problem, [*shots] * times)


def fitted(run: RunSettings, answers: Sequence[Answer], max_tokens: int) -> RunSettings:
    """The run with a cache and host memory of sizes that fit what the baseline was asked and has answered.

    EngineError: too few questions for any block to have to leave.
    """
    size = run.block_size_tokens
    longest = max((len(answer.prompt_tokens) for answer in answers), default=0) + max_tokens
    needed = -(-longest // size)
    blocks = run.explicit_blocks or needed + SPARE_BLOCKS
    distinct = distinct_blocks(answers, size)
    host_blocks = (blocks + distinct) // 2
    if run.offload_bytes is None and not blocks < host_blocks < distinct:
        raise EngineError(
            f"the questions fill {distinct} blocks of {size} tokens, and a cache for one of them has {blocks}: nothing "
            "has to leave; ask more questions (--limit), or longer ones"
        )
    return replace(
        run,
        max_model_len_tokens=needed * size,
        small_blocks=blocks,
        offload_bytes=run.offload_bytes or host_blocks * block_bytes(run),
    )


def distinct_blocks(answers: Sequence[Answer], block_size_tokens: int) -> int:
    """Full blocks that the answers leave in a cache that loses none; a common beginning counts once."""
    found = set()
    for answer in answers:
        tokens = (*answer.prompt_tokens, *answer.tokens)[:-1]  # the last token is never computed
        found |= {tokens[:end] for end in range(block_size_tokens, len(tokens) + 1, block_size_tokens)}
    return len(found)


def block_bytes(run: RunSettings) -> int:
    """Bytes of one block in all layers, from the model's own configuration. EngineError: it does not say."""
    config = _config(run.model)
    try:
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        layers = int(config["num_hidden_layers"])
    except KeyError as error:
        raise EngineError(f"{run.model}/config.json has no {error}; give --offload-mib") from error
    return 2 * layers * heads * size * _ELEMENT_BYTES[run.dtype] * run.block_size_tokens


def _config(model: Path) -> dict[str, Any]:
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model}/config.json cannot be read ({error}); give --offload-mib") from error
    return found if isinstance(found, dict) else {}
