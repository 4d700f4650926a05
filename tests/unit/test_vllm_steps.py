"""Which idle steps wait: never one that keeps an earlier step's outcome from the engine core."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from kvx.vllm.steps import CoreSteps, WorkerSteps


@dataclass
class Engine:
    """The engine core's loop as vLLM has it, with a queue of `depth` steps, and a worker that runs a step at once.

    `steps` says what each one does: `compute`, `idle`, or `arrive` (idle, and a transfer ends in it). `waited` has the
    numbers of the steps that waited, `late` those of steps whose outcome was unread while a later one waited.
    """

    depth: int
    core: CoreSteps = field(default_factory=CoreSteps)
    worker: WorkerSteps = field(default_factory=WorkerSteps)
    waited: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def run(self, steps: str) -> None:
        queue: deque[tuple[int, bool]] = deque()
        for act in steps.split():
            queue.append(self._step(act, [number for number, tells in queue if tells]))
            if len(queue) == self.depth:
                self._read(*queue.popleft())
        while queue:
            self._read(*queue.popleft())

    def _step(self, act: str, unread: list[int]) -> tuple[int, bool]:
        self.worker.begin(*self.core.hand_out())
        if act != "compute" and self.worker.all_read:
            self.waited.append(self.worker.step)
            self.late += unread
        if act != "idle":
            self.worker.tell()
        return self.worker.step, self.worker.tells

    def _read(self, number: int, tells: bool) -> None:
        if tells:
            self.core.was_read(number)


def test_an_idle_step_waits_when_the_core_reads_each_step_before_the_next() -> None:
    engine = Engine(depth=1)
    engine.run("compute idle idle arrive idle compute idle")
    assert engine.waited == [2, 3, 4, 5, 7]


def test_a_step_handed_out_before_a_computing_one_is_read_does_not_wait() -> None:
    engine = Engine(depth=2)
    engine.run("compute idle idle idle")
    assert engine.waited == [3, 4]
    assert engine.late == []


def test_nor_does_one_that_follows_an_arrival() -> None:
    engine = Engine(depth=2)
    engine.run("idle idle arrive idle idle idle")
    assert engine.waited == [1, 2, 3, 5, 6]
    assert engine.late == []


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_whatever_comes_nothing_is_kept_from_the_core(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.run("compute compute idle arrive idle idle idle compute idle arrive arrive idle idle idle idle idle idle")
    assert engine.late == []
    assert engine.waited, "nor does every step spin"
