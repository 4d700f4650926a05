"""A deployment as text: the commands to type, with all that their environment needs."""

from __future__ import annotations

import os
import shlex

from kvx.engine_settings import EngineSettings
from kvx.serve.deployment import Deployment, Member
from kvx.serve.router import RouterSettings

# Comes from the environment: it is named, not shown.
_KEY = "VLLM_API_KEY"


def script(deployment: Deployment) -> str:
    """Shell text: each engine's command in its order of start, and the router's."""
    parts = []
    if deployment.elsewhere:
        parts.append("# python3: one with vLLM and kvx. Each command is for the machine that its heading names.")
    for number, wave in enumerate(deployment.waves()):
        if number > 0:
            parts.append("# These share a device with engines above: start them when GET /health there answers 200.")
        parts += [f"# {_heading(member)}\n{_lines(deployment, member.engine)}" for member in wave]
    router = deployment.router
    if router is not None:
        heading = f"# router, when all engines answer: {router.url}/v1, model {deployment.served_model_name}"
        parts.append(f"{heading}\n{_lines(deployment, router)}")
    return "\n\n".join(parts) + "\n"


def _heading(member: Member) -> str:
    engine = member.engine
    return f"{member.name} on {engine.host}: http://{engine.host}:{engine.port}, side channel {member.side_port}"


def _lines(deployment: Deployment, settings: EngineSettings | RouterSettings) -> str:
    """One command over several lines: its variables, then an option with its value on each."""
    python, *rest = settings.command()
    words = ["python3" if deployment.elsewhere else python, *rest[:2]]
    lines = [f"{name}={_value(value)}" for name, value in sorted(settings.added_environment().items())]
    for word in rest[2:]:
        if word.startswith("-"):
            lines.append(shlex.join(words))
            words = []
        words.append(word)
    return " \\\n  ".join([*lines, shlex.join(words)])


def _value(value: str) -> str:
    if value and value == os.environ.get(_KEY):
        return f'"${_KEY}"'
    return shlex.quote(value)
