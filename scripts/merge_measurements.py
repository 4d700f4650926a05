"""Merge what the stages of scripts/gpu.sh wrote into docs/measurements.json; the raw results come along.

    python scripts/merge_measurements.py FOLDER [--name h200]

Each key holds its value, the date, the versions, the command, and its raw result's name and SHA-256 under
docs/measurements/. Keys that no file of the folder has stay as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="h200")
    options = parser.parse_args()
    target = DOCS / "measurements.json"
    merged: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for path, found in stages(options.folder):
        raw = DOCS / "measurements" / f"{options.name}-{path.stem}.json"
        raw.write_bytes(path.read_bytes())
        about = {
            "date": found["date"],
            "versions": versions(found),
            "command": found["command"],
            "raw": f"measurements/{raw.name}",
            "sha256": hashlib.sha256(raw.read_bytes()).hexdigest(),
        }
        merged |= {key: {"value": value, **about} for key, value in found["measurements"].items()}
    target.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")
    sys.stdout.write(f"{target}: {len(merged)} keys\n")


def stages(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.json")):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and "measurements" in found:
            yield path, found


def versions(found: dict[str, Any]) -> dict[str, str]:
    """The stage's own, or those that its engines gave."""
    if "versions" in found:
        return dict(found["versions"])
    names = ("vllm", "torch", "gpu", "kvx")
    return {name: str(run[name]) for run in found["runs"].values() for name in names if name in run}


if __name__ == "__main__":
    main()
