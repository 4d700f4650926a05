"""Which engine steps may wait: with asynchronous scheduling the engine core reads what a step tells one step later.

The core hands out a step, then one more, and only then reads the first one's outcome. A worker that waited for a
transfer in the second would keep the first one's tokens, or the news that blocks have arrived, from the core. So the
core says with each step up to where it has read, and a worker that has told more than that does not wait.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CoreSteps:
    """The engine core's count: of the steps that it has handed out, and of those that told something and were read."""

    handed_out: int = 0
    read: int = 0

    def hand_out(self) -> tuple[int, int]:
        """The next step's number, and up to where the core has read."""
        self.handed_out += 1
        return self.handed_out, self.read

    def was_read(self, step: int) -> None:
        self.read = max(self.read, step)


@dataclass
class WorkerSteps:
    """A worker's count: of the step that it is in, and of the newest that told something."""

    step: int = 0
    read: int = 0
    told: int = 0

    def begin(self, step: int, read: int) -> None:
        self.step, self.read = step, read

    def tell(self) -> None:
        """The step that it is in computes, or something came to an end."""
        self.told = self.step

    @property
    def tells(self) -> bool:
        """Whether the step that it is in has something for the core to read."""
        return self.told == self.step > 0

    @property
    def all_read(self) -> bool:
        """Whether nothing of an earlier step is kept from the core by waiting now."""
        return self.read >= self.told
