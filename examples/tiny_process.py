"""An object in a process of its own, driven over a pipe. Nothing in here knows of kvx."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

TIMEOUT_S = 180.0


class Remote:
    """`call("method", ...)` runs `make(*arguments).method(...)` in the other process; leaving the block closes it."""

    def __init__(self, make: Callable[..., Any], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, make, arguments), daemon=True)
        self.process.start()
        child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, method: str, *arguments: object) -> Any:
        """An exception there is a RuntimeError here, with its traceback as the text."""
        self._pipe.send((method, arguments))
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"{method} has not returned within {TIMEOUT_S} s")
        worked, result = self._pipe.recv()
        if not worked:
            raise RuntimeError(result)
        return result

    def stop(self) -> None:
        """Hanging up ends the process, as our own end would. One that does not listen is killed."""
        self._pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    served = make(*arguments)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, getattr(served, method)(*arguments)))
        except Exception:  # noqa: BLE001  the other side raises it
            pipe.send((False, traceback.format_exc()))
    served.close()
