"""Page sizes, layer groups and bytes a block of `kvx plan`, beside vLLM's own arithmetic."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvx.layout import KVCacheLayout
from kvx.model import read_shape

pytestmark = pytest.mark.slow  # vLLM takes long to import

CONFIGS = Path(__file__).parents[1] / "unit" / "configs"
NAMES = ("Qwen2.5-7B", "DeepSeek-V2-Lite", "Gemma-3-1B")


def test_plan_counts_as_vllm_does(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in NAMES]
    for name in NAMES:
        (tmp_path / name).mkdir()
        shutil.copy(CONFIGS / f"{name}.json", tmp_path / name / "config.json")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("plan_arithmetic.py")), *folders],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for name, theirs in zip(NAMES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        shape = read_shape(json.loads((CONFIGS / f"{name}.json").read_text()))
        groups = shape.groups(theirs["block_size"], "bfloat16", 1)
        ours = {
            "block_size": theirs["block_size"],
            "pages": sorted({group.spec.page_size_bytes for group in groups}),
            "groups": sorted(sorted(group.layers) for group in groups),
            "block_bytes": shape.geometry(KVCacheLayout.LBHNC, groups, 1, 1).block_bytes,
        }
        assert ours == theirs, name
