"""`kvx serve`: its options, and how a running deployment is shown."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvx.cli import consoles
from kvx.serve.deployment import plan
from kvx.serve.manifests import manifests
from kvx.serve.options import DEFAULT_FILE, merged
from kvx.serve.run import ENDED, READY, UNHEALTHY, Instance, serve
from kvx.serve.shell import script
from kvx.verify.model import MODEL_NAME, default_model_folder

_COLOURS = {READY: "green", UNHEALTHY: "yellow", ENDED: "bold red"}

EPILOG = (
    "Example: kvx serve --prefill 1 --decode 1 -- --max-num-seqs 8. Every option may stand in kvx.toml, with _ for -; "
    "what follows -- is its vllm_args, a list."
)


def serve_command(
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_OPTIONS", help="More options for every vLLM server.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill engines; by default 1.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode engines; by default 1.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or Hugging Face name; by default SmolLM2-135M-Instruct.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    connector: Annotated[str | None, typer.Option(help="Connectors, separated by commas; by default auto.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM's --dtype; by default auto.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what vLLM here computes on.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to deal out, for example 0,1,2,3; by default all.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in one block; by default 128 on a CPU, else 16.")
    ] = None,
    eager: Annotated[
        bool | None, typer.Option("--eager/--no-eager", help="Without torch.compile and graphs; default on a CPU.")
    ] = None,
    kv_space: Annotated[
        int | None, typer.Option(help="GiB of cache of each engine on a CPU, by default 1; 0: measured.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="KV cache layout; by default vLLM decides.")] = None,
    host: Annotated[str | None, typer.Option(help="Where the router listens; by default 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(help="The router's port; by default 8000, or where that is taken a free one.")
    ] = None,
    first_port: Annotated[int | None, typer.Option(help="First port of the engines; by default free ones.")] = None,
    prefill_hosts: Annotated[
        str | None, typer.Option(help="Machines of the prefill engines, separated by commas; with --dry-run.")
    ] = None,
    decode_hosts: Annotated[str | None, typer.Option(help="The same for the decode engines.")] = None,
    router: Annotated[
        bool | None, typer.Option("--router/--no-router", help="By default with vllm-router where it is installed.")
    ] = None,
    router_args: Annotated[str | None, typer.Option(help="More options for vllm-router.")] = None,
    prefill_args: Annotated[str | None, typer.Option(help="More options for prefill engines alone.")] = None,
    decode_args: Annotated[str | None, typer.Option(help="More options for decode engines alone.")] = None,
    handoff: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of kv_connector_extra_config, for example verify=all.")
    ] = None,
    logs: Annotated[str | None, typer.Option(help="Folder for the logs; by default a new one.")] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds that a start may take; by default 600.")] = None,
    keep_going: Annotated[
        bool | None, typer.Option("--keep-going", help="When a server ends, leave the others running.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image with vLLM and kvx; with --k8s.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of options; by default kvx.toml, if it is there.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print commands and environment; start nothing.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="Print Kubernetes manifests; start nothing.")] = False,
) -> None:
    """Serve a model with prefill and decode engines of this machine, behind one URL."""
    given: dict[str, Any] = {
        "prefill": prefill,
        "decode": decode,
        "model": model,
        "served_model_name": served_model_name,
        "connector": connector,
        "dtype": dtype,
        "device": device,
        "gpus": _numbers(gpus),
        "block_size": block_size,
        "eager": eager,
        "kv_space": kv_space,
        "layout": layout,
        "host": host,
        "port": port,
        "first_port": first_port,
        "prefill_hosts": _names(prefill_hosts),
        "decode_hosts": _names(decode_hosts),
        "router": router,
        "router_args": _words(router_args, "--router-args"),
        "prefill_args": _words(prefill_args, "--prefill-args"),
        "decode_args": _words(decode_args, "--decode-args"),
        "vllm_args": _vllm_words(vllm_args),
        "handoff": _pairs(handoff),
        "logs": logs,
        "start_timeout": start_timeout,
        "keep_going": keep_going,
        "image": image,
    }
    options = merged(config, given)
    if k8s:
        sys.stdout.write(manifests(options))
    elif dry_run:
        sys.stdout.write(script(plan(options, only_printed=True)))
    else:
        with ConsoleView(consoles.output(), consoles.alarms()) as view:
            if config is None and DEFAULT_FILE.is_file():
                view.say(f"options are read from {DEFAULT_FILE}")
            if options.model is None and not default_model_folder().is_dir():
                view.say(f"converting {MODEL_NAME}, once")
            code = serve(options, plan(options), view)
        raise typer.Exit(code)


class ConsoleView:
    """A table that changes on a terminal; on anything else, a line for each change."""

    def __init__(self, console: Console, alarms: Console) -> None:
        self._console, self._alarms = console, alarms
        self._live: Live | None = None
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def wants_counts(self) -> bool:
        return self._live is not None

    def show(self, instances: Sequence[Instance]) -> None:
        if self._live is not None:
            self._live.update(table_of(instances), refresh=True)
            return
        for instance in instances:
            if self._states.get(instance.name) != instance.state:
                self._states[instance.name] = instance.state
                self._console.print(escape(f"{instance.name}: {_line_of(instance)}"), soft_wrap=True, highlight=False)

    def say(self, text: str, *, alarm: bool = False) -> None:
        console = self._alarms if alarm and self._live is None else self._console
        console.print(text, style="red" if alarm else "bold", markup=False, highlight=False, soft_wrap=True)


def table_of(instances: Sequence[Instance]) -> Table:
    """One row for each server, and where their logs are."""
    columns = ("server", "URL", "state", "since", "running", "served", "external hits")
    table = Table(*columns, caption=escape(f"logs: {instances[0].log.parent}/NAME.log"), caption_justify="left")
    for one in instances:
        state = Text(one.state, _COLOURS.get(one.state, ""))  # not as markup: `say` prints above the table without it
        counts = ["" if count is None else str(count) for count in (one.running, one.served, one.external_tokens)]
        table.add_row(one.name, one.url, state, _duration(time.monotonic() - one.since_s), *counts)
    return table


def _line_of(instance: Instance) -> str:
    side = "" if instance.side_port is None else f", side channel {instance.side_port}"
    where = f" at {instance.url}{side}, log {instance.log}"
    return f"{instance.state}{where if instance.state == 'starting' else ''}"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str | None) -> list[int] | None:
    names = _names(text)
    if names is not None and not all(name.isdigit() for name in names):
        raise typer.BadParameter(f"{text!r} is no list of numbers, for example 0,1", param_hint="--gpus")
    return None if names is None else [int(name) for name in names]


def _words(text: str | None, option: str) -> list[str] | None:
    try:
        return None if text is None else shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=option) from None


def _vllm_words(words: list[str] | None) -> list[str] | None:
    if words and not words[0].startswith("-"):
        raise typer.BadParameter(f"{words[0]!r} is no option; options for vLLM come after --", param_hint="--")
    return words or None


def _pairs(pairs: list[str] | None) -> dict[str, Any] | None:
    """NAME=VALUE, the value as JSON where it is some, else as text."""
    if not pairs:
        return None
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is no NAME=VALUE, for example verify=all", param_hint="--handoff")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
