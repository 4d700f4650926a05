"""An engine that takes a turn's work of many requests at once, and tells what its process holds."""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_engine import FaultConfig, FaultEngine, Place

KEPT = 50
"""What kvx keeps of its past is full before memory is first looked at: after that, whatever grows is a leak."""


@dataclass(frozen=True)
class Prompt:
    name: str
    num_tokens: int
    seed: int


@dataclass(frozen=True)
class Resume:
    """A request to be fetched; `abort_after_s`: and to be aborted so long after the begin of the turn."""

    prompt: Prompt
    place: Place
    cached_blocks: int = 0
    abort_after_s: float | None = None


class SoakEngine(FaultEngine):
    """Runs in the child, as `Engine` does."""

    def __init__(self, config: FaultConfig) -> None:
        import kvx.holds
        import kvx.metrics

        kvx.metrics.KEPT_DURATIONS = kvx.holds.KEPT_ENDINGS = KEPT
        super().__init__(config)

    def prefill_all(self, prompts: list[Prompt], drops: list[str]) -> dict[str, Place]:
        """A prefill engine's turn: compute prompts, abort holds that are still there; where each is held."""
        self.step()
        places = {prompt.name: self.prefill(prompt.name, prompt.num_tokens, prompt.seed) for prompt in prompts}
        for name in drops:
            if name in self.held:
                self.drop(name)
        return places

    def resume_all(self, resumes: list[Resume], wait_s: float) -> dict[str, dict[str, Any]]:
        """A decode engine's turn: what has ended, waiting for it at most so long; see `FaultEngine.outcome`."""
        began = time.monotonic()
        for resume in resumes:
            prompt = resume.prompt
            self.resume(prompt.name, resume.place, prompt.num_tokens, prompt.seed, cached_blocks=resume.cached_blocks)
        for after_s, name in sorted((r.abort_after_s, r.prompt.name) for r in resumes if r.abort_after_s is not None):
            time.sleep(max(0.0, began + after_s - time.monotonic()))
            self.abort(name)
        if self.running:
            self.worker.wait(wait_s)
        self.step()
        ended, self.ended = self.ended, {}
        return ended

    def look(self) -> dict[str, int]:
        """What this process holds when its garbage has gone; memory in bytes."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "resident": pages * os.sysconf("SC_PAGE_SIZE"),
            "objects": sys.getallocatedblocks(),
            **self.footprint(),
        }
