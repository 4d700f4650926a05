"""A benchmark's process of its own, which answers what it is asked: a library's settings are a whole process's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from kvx.connector import Connector, Op
from kvx.errors import ConnectorError, KVXError, TransferError
from kvx.registry import connector_class

DEADLINE_S = 60.0
START_S = 120.0


def reading_class(name: str) -> type[Connector]:
    """The class of a connector that reads from another process. ConnectorError: it is not known, or it does not."""
    found = connector_class(name)
    if Op.READ not in found.capabilities.operations or not found.capabilities.reaches_processes:
        raise ConnectorError(
            f"connector {name} cannot read from another process, so nothing can be timed; take one that does, as ipc"
        )
    return found


class Process:
    """A process that answers `ask` with what the method of that name of its `role` returned."""

    def __init__(self, role: type[Any], *arguments: Any, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, role, arguments, dict(environment)), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.first_answer = self._answer(START_S)
        except BaseException:
            self.stop()
            raise

    def ask(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
        except BrokenPipeError as error:
            raise TransferError("a benchmark's process ended; its last words are above") from error
        return self._answer(2 * DEADLINE_S)

    def stop(self) -> None:
        self._pipe.close()  # its next receive ends it
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise TransferError(f"a benchmark's process gave no answer for {timeout_s:g} s")
            worked, answer = self._pipe.recv()
        except EOFError as error:
            raise TransferError("a benchmark's process ended; its last words are above") from error
        if not worked:
            raise TransferError(answer)
        return answer


def _serve(pipe: Connection, role: type[Any], arguments: Sequence[Any], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    with ExitStack() as undo:
        try:
            worker = role(*arguments)
            undo.callback(worker.close)
            pipe.send((True, worker.first_answer))
            while True:
                while not pipe.poll(worker.idle_s):
                    worker.idle()
                name, given = pipe.recv()
                pipe.send((True, getattr(worker, name)(*given)))
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001  the parent raises it
            pipe.send((False, str(error) if isinstance(error, KVXError) else f"{type(error).__name__}: {error}"))
