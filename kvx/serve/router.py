"""The router in front of a deployment: `vllm-router` from PyPI. All that kvx knows about it is here.

In its NIXL mode it asks a prefill engine with `do_remote_decode`, and hands the `kv_transfer_params` of the answer,
kvx's ticket included, to a decode engine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvx.servers import reachable

MODULE = "vllm_router"
HINT = "pip install 'kvx[router]'"


def is_installed() -> bool:
    """Whether this Python can start the router."""
    return importlib.util.find_spec(MODULE) is not None


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How the router is started. `arguments` come last, so that they win over what is decided here."""

    port: int
    metrics_port: int
    prefill_urls: Sequence[str]
    decode_urls: Sequence[str]
    host: str = "127.0.0.1"
    api_key: str | None = None
    arguments: Sequence[str] = ()
    name: str = "router"
    prefix: Sequence[str] = ()
    stop_order: int = 0

    @property
    def title(self) -> str:
        return self.name

    @property
    def url(self) -> str:
        """Where clients of this machine reach it."""
        return f"http://{reachable(self.host)}:{self.port}"

    def command(self) -> list[str]:
        """The argument vector.

        Round robin, not the router's own default: the cache-aware policy has every prompt tokenised twice more.
        """
        command = [sys.executable, "-m", f"{MODULE}.launch_router", "--host", self.host, "--port", str(self.port)]
        command += ["--prometheus-port", str(self.metrics_port), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for url in self.prefill_urls:
            command += ["--prefill", url]
        for url in self.decode_urls:
            command += ["--decode", url]
        is_named = any(word.partition("=")[0] == "--policy" for word in self.arguments)
        return [*command, *(() if is_named else ("--policy", "round_robin")), *self.arguments]

    def added_environment(self) -> dict[str, str]:
        """No proxy on the way to the engines; and `OPENAI_API_KEY` is the engines' key, not OpenAI's.

        The router shows the engines that key, whatever the client showed, and asks the client for none.
        """
        hosts = {urlsplit(url).hostname or "" for url in (*self.prefill_urls, *self.decode_urls)}
        passed = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "", *sorted(hosts)]
        return {"NO_PROXY": ",".join(filter(None, passed)), "OPENAI_API_KEY": self.api_key or ""}

    def full_environment(self, scratch: Path) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(scratch), **self.added_environment()}
