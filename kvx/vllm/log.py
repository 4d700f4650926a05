"""Where the lines of kvx's core and connectors appear inside vLLM."""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Show what kvx's core and connectors tell, where vLLM shows its own: it gives handlers to its own logger only.

    Loggers that somebody has given handlers are left alone.
    """
    vllms = logging.getLogger("vllm")
    for name in ("kvx", "kvx_connectors"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers, ours.propagate = list(vllms.handlers), vllms.propagate
            ours.setLevel(vllms.level)
