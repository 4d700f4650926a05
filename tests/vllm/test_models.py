"""The small models: always the same, and what they say depends on all of their prompt, so that a wrong byte shows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from kvx.servers import Servers
from kvx.verify import engines
from kvx.verify.client import Ask, Client

from ..models import ARGUMENTS, CONFIGS, make

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NEW_TOKENS = 16
STORY = "The quick brown fox jumps over the lazy dog near the river bank, and sleeps under a tree until evening. " * 4
PROMPTS = [f"Yes. {STORY}", f"No. {STORY}", "What is 3 times 7?"]


@pytest.fixture(scope="session")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are made; `model`: vLLM is installed, and the default model is there."""
    return tmp_path_factory.mktemp("models")


def said_by_transformers(folder: Path) -> list[list[int]]:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            whole = reference.generate(
                **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        answers.append(whole[0, given.input_ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_says_depends_on_the_first_word(name: str, models: Path) -> None:
    first, second, third = said_by_transformers(make(name, models))
    assert len({tuple(answer) for answer in (first, second, third)}) == 3
    assert all(len(set(answer)) > NEW_TOKENS // 2 for answer in (first, second, third)), "it does not repeat itself"
    assert sum(path.stat().st_size for path in (models / name).iterdir()) < 24 << 20


def test_it_is_the_same_model_each_time(models: Path, tmp_path: Path) -> None:
    folders = [make("dense", folder) for folder in (models, tmp_path)]
    weights = [hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() for folder in folders]
    assert weights[0] == weights[1]
    before = (folders[0] / "config.json").stat().st_mtime_ns
    assert make("dense", models).joinpath("config.json").stat().st_mtime_ns == before, "it is made once"


@pytest.mark.matrix
@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_says_what_transformers_says(name: str, models: Path, tmp_path: Path) -> None:
    folder = make(name, models)
    more = ARGUMENTS.get(name, ())
    run = engines.RunSettings(model=folder, max_model_len_tokens=512, explicit_blocks=64, arguments=more)
    with Servers(tmp_path) as servers:
        server = servers.start(engines.baseline(run))
        servers.wait_healthy()
        client = Client()
        try:
            asks = [Ask(f"r{number}", prompt, NEW_TOKENS, ignore_eos=True) for number, prompt in enumerate(PROMPTS)]
            answers = [client.ask_single(server.url, ask) for ask in asks]
        finally:
            client.close()
    assert [list(answer.tokens) for answer in answers] == said_by_transformers(folder), answers
