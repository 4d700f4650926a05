"""`make test-fuzz`: a million mutated messages through the doors of `fuzz_doors`; atheris follows their coverage.

Two doors at a time, each in a process of its own, with a fixed seed and the kept corpus. A message fails the run when
it makes a door raise, takes longer than HANG_S, makes Python allocate more than `most_bytes` of its length at its peak,
or leaves a connection behind over which an engine is not served. What failed lies in build/fuzz.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import atheris
import msgspec

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]
CORPUS, OUT = HERE / "corpus", Path("build/fuzz")
MESSAGES = {"reader": 50_000, "reader-sealed": 50_000, "owner-sealed": 350_000, "owner": 350_000, "ticket": 200_000}
SEED, HANG_S, LONGEST = 5, 20, 4096
CHECK_EVERY, SAY_EVERY = 1000, 10_000
INTERESTING: list[Any] = [
    None, True, 0, -1, 1, 2, 2**31, 2**62, 2**64 - 1, -(2**63), 0.0, float("nan"), float("inf"), "", "r", "mine",
    "x" * 1100, b"", b"\xff" * 40, [], {}, [[1, 2]], [-1], [[2**63]], {"a": 1}, [[[[]]]],
]  # fmt: skip
CLAIMS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x80\x00\x00\x00",
    b"\xdc\xff\xff",
]


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """A field of the message changed, dropped or swapped; a size that lies; or bytes, as libFuzzer does."""
    rng = random.Random(seed)
    kind = rng.randrange(8)
    if kind < 4 or len(data) < 3:
        changed: bytes = atheris.Mutate(data, most)
        return changed
    if kind == 4:
        place = rng.randrange(1, len(data))
        return (data[:place] + rng.choice(CLAIMS) + data[place:])[:most]
    if kind == 5:
        return bytes([rng.randrange(256)]) + data[1:]
    try:
        message = msgspec.msgpack.decode(data[1:])
    except (msgspec.MsgspecError, RecursionError):
        return data[: rng.randrange(1, len(data))]
    if isinstance(message, dict) and message:
        _change_field(message, rng)
    return (data[:1] + msgspec.msgpack.encode(message))[:most]


def _change_field(message: dict[Any, Any], rng: random.Random) -> None:
    name = rng.choice(list(message))
    inner = message[name]
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and rng.random() < 0.7:
        inner = inner[0]
    if isinstance(inner, dict) and inner and rng.random() < 0.7:
        _change_field(inner, rng)
    elif rng.random() < 0.15:
        del message[name]
    elif isinstance(inner, int) and rng.random() < 0.4:
        message[name] = (inner + rng.choice([-1, 1, 16])) % 2**63
    else:
        message[name] = rng.choice(INTERESTING)


class Run:
    """One door's messages, in a process of its own."""

    def __init__(self, name: str, messages: int) -> None:
        with atheris.instrument_imports(include=["kvx"], enable_loader_override=False):
            import fuzz_doors
        logging.disable(logging.CRITICAL)
        fuzz_doors.engine_side.ThreadPoolExecutor = fuzz_doors.SimulatedExecutor
        self.doors, self.name, self.messages = fuzz_doors, name, messages
        self.door = fuzz_doors.DOORS[name]()
        self.outcomes: Counter[str] = Counter()
        self.count = self.most_used = self.largest = 0
        self.most_over = self.slowest_s = 0.0
        self.began = time.monotonic()
        self.corpus = OUT / "corpus" / name
        self.kept = len(list(self.corpus.iterdir()))
        tracemalloc.start()

    def one(self, data: bytes) -> None:
        self._feed(data)
        if self.count % CHECK_EVERY == 0:
            self.door.require_usable()
        if self.count % SAY_EVERY == 0:
            for large in self.door.large():
                self._feed(large)
            self.door.require_usable()
            rate = self.count / (time.monotonic() - self.began)
            print(f"{self.name}: {self.count:,} of {self.messages:,} messages, {rate:,.0f} a second", flush=True)
        if self.count >= self.messages:
            self._end()

    def _feed(self, data: bytes) -> None:
        self.count += 1
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        began = time.perf_counter()
        self.outcomes[self.door.feed(data)] += 1
        self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
        used = tracemalloc.get_traced_memory()[1] - before
        allowed = self.doors.most_bytes(len(data))
        self.most_used, self.largest = max(self.most_used, used), max(self.largest, len(data))
        self.most_over = max(self.most_over, used / allowed)
        assert used <= allowed, f"{used} bytes for a message of {len(data)}; {allowed} are allowed"

    def _end(self) -> None:
        found = {
            "door": self.name, "messages": self.count, "outcomes": dict(self.outcomes.most_common()),
            "corpus": self.kept, "found": len(list(self.corpus.iterdir())),
            "seconds": round(time.monotonic() - self.began, 1), "slowest_s": round(self.slowest_s, 3),
            "longest_bytes": self.largest, "peak_bytes": self.most_used, "peak_of_allowed": round(self.most_over, 3),
            "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }  # fmt: skip
        (OUT / f"{self.name}.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # libFuzzer would go on


def run_door(name: str, messages: int) -> None:
    """In the child: does not return."""
    run = Run(name, messages)
    arguments = [
        sys.argv[0], f"-seed={SEED}", f"-max_len={LONGEST}", f"-timeout={HANG_S}", "-len_control=0", "-verbosity=0",
        "-rss_limit_mb=4096", f"-artifact_prefix={OUT}/{name}-", str(run.corpus),
    ]  # fmt: skip
    atheris.Setup(arguments, run.one, custom_mutator=mutate)
    atheris.Fuzz()


def start_door(name: str, messages: int) -> dict[str, Any]:
    """In the parent: what the child found, or how it failed."""
    shutil.copytree(CORPUS / name, OUT / "corpus" / name)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "run_fuzz.py"), "--door", name, "--messages", str(messages)]
    )
    result = OUT / f"{name}.json"
    if child.returncode or not result.exists():
        return {"door": name, "failed": f"exit {child.returncode}; see above, and {OUT}/{name}-*"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def table(results: list[dict[str, Any]]) -> None:
    names = ("messages", "seconds", "peak KiB", "of allowed", "corpus", "found")
    print(f"\n{'door':<14}{''.join(f'{name:>11}' for name in names)}  ended as")
    for row in results:
        if "failed" in row:
            print(f"{row['door']:<14}FAILED: {row['failed']}")
            continue
        ends = ", ".join(f"{name} {count:,}" for name, count in row["outcomes"].items())
        numbers = f"{row['messages']:>11,}{row['seconds']:>11.0f}{row['peak_bytes'] >> 10:>11,}"
        print(f"{row['door']:<14}{numbers}{row['peak_of_allowed']:>11.0%}{row['corpus']:>11}{row['found']:>11}  {ends}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--door", choices=MESSAGES)
    parser.add_argument("--messages", type=int, help="of one door; or in all, shared among them")
    given = parser.parse_args()
    if given.door:
        run_door(given.door, given.messages or MESSAGES[given.door])
    share = (given.messages or sum(MESSAGES.values())) / sum(MESSAGES.values())
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda item: start_door(item[0], round(item[1] * share)), MESSAGES.items()))
    table(results)
    total = sum(row.get("messages", 0) for row in results)
    seconds = round(time.monotonic() - began, 1)
    summary = {"messages": total, "seconds": seconds, "seed": SEED, "doors": results}
    Path("build/fuzz.json").write_text(json.dumps(summary, indent=1) + "\n")
    failed = [row["door"] for row in results if "failed" in row]
    end = f"FAILED: {', '.join(failed)}" if failed else "nothing came of any"
    print(f"\n{total:,} messages in {seconds:.0f} s; {end}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
