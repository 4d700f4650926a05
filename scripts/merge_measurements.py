"""Merge what the stages of scripts/gpu.sh wrote into docs/measurements.json; the raw results come along.

    python scripts/merge_measurements.py FOLDER [--name h200]

Each key holds its value, the date, the versions, the command, and its raw result's name and SHA-256 under
docs/measurements/ (its place in FOLDER after NAME). Keys that no file of the folder has stay as they are. Give each
session a NAME of its own: the raw results of an earlier one are not written over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="h200")
    options = parser.parse_args()
    sys.stdout.write(f"{merge(options.folder, options.name, DOCS)} keys\n")


def merge(folder: Path, name: str, docs: Path) -> int:
    """How many keys there are now. ValueError: a raw result of that name is there, and other keys stand on it."""
    target = docs / "measurements.json"
    merged: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for path, found in stages(folder):
        parts = path.relative_to(folder).with_suffix("").parts
        raw = docs / "measurements" / f"{'-'.join([name, *parts])}.json"
        if raw.exists() and raw.read_bytes() != path.read_bytes():
            raise ValueError(f"{raw.name} is there with another content; give this session another --name")
        raw.parent.mkdir(exist_ok=True)
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
    return len(merged)


def stages(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every stage's file; the older first, so that of one key the newest value stays."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text() or "null")
        if isinstance(content, dict) and content.get("measurements"):
            found.append((path, content))
    yield from sorted(found, key=lambda item: str(item[1]["date"]))


def versions(found: Mapping[str, Any]) -> dict[str, str]:
    """The stage's own, or those of its machine and what its runs gave."""
    if "versions" in found:
        return dict(found["versions"])
    names = ("vllm", "torch", "gpu", "kvx")
    return dict(found.get("machine", {})) | {
        name: str(run[name]) for run in found["runs"].values() for name in names if name in run
    }


if __name__ == "__main__":
    main()
