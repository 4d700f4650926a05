"""The entry point that vLLM calls in every process (`vllm.general_plugins`).

It only installs hooks that wait for vLLM's own modules, so it cannot fail and costs nothing where kvx is not asked for.
A vLLM start without kvx in its configuration behaves as if the plug-in were not there: each hook looks at the
configuration first and calls the original.
"""

from __future__ import annotations

import os

from . import hooks


def register() -> None:
    """Install the hooks. Called by vLLM, possibly several times in one process."""
    from . import handoff_log, seam

    for target in seam.TARGETS:
        hooks.wrap(target.module, target.name, target.wrapper)
    hooks.when_imported(seam.WORKER_MODULE, seam.add_worker_methods)
    if os.environ.get(handoff_log.ENVIRONMENT):
        hooks.wrap(handoff_log.MODULE, handoff_log.NAME, handoff_log.wrapper)
