"""An engine core whose API server was killed ends as well: nobody can ask it any more.

vLLM's workers notice the end of their engine core, the engine core not that of its API server. It would keep its memory
and its side channel's port for ever, so that the next engine of its name could not start.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

logger = logging.getLogger("vllm.kvx")

#: What vLLM calls the processes of its engine cores, with a number behind it.
CORE = "EngineCore"
#: An engine that was asked to end waits for what it holds; one that has not ended by then is killed.
DEADLINE_S = 120.0


def end_with_parent() -> None:
    """In an engine core of its own process, start to watch the process that started it; elsewhere do nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(CORE):
        return
    threading.Thread(target=_watch, args=(parent,), name="kvx-parent", daemon=True).start()


def _watch(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    logger.warning("kvx: the API server has ended without a word, so this engine core ends")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(DEADLINE_S)
    os.kill(os.getpid(), signal.SIGKILL)
