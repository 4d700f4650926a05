"""`kvx doctor`: the diagnosis as a table, as JSON, or as a report to paste; or the half that waits for one."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvx.cli import consoles
from kvx.cli.files import require_writable, write_json
from kvx.cli.show import ConsoleProgress

if TYPE_CHECKING:
    from kvx.doctor.network import Peer
    from kvx.doctor.run import Diagnosis

STANDARD_OUTPUT = Path("-")
DEVICES = ("cpu", "cuda")
CLOSE_S = 15.0
_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "error": "bold red"}
_PANEL = "The engine of this side, as it will be started"


def doctor_command(
    peer: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a side channel to shake hands with; several times.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(help="HOST:PORT to be the other half at, for a doctor with --peer elsewhere.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Start no processes and move no bytes.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the findings there, as JSON; -: standard output.")
    ] = None,
    paste: Annotated[
        bool, typer.Option("--paste", help="A report to paste into an issue, as Markdown, without secrets.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default what the installed vLLM computes on.")
    ] = None,
    config: Annotated[
        str, typer.Option(help="kv_connector_extra_config as vLLM gets it: JSON, or @FILE.", rich_help_panel=_PANEL)
    ] = "{}",
    connector: Annotated[
        str | None, typer.Option(help="Connectors, separated by commas.", rich_help_panel=_PANEL)
    ] = None,
    side_channel_host: Annotated[
        str | None, typer.Option(help="Where it listens, and peers connect to.", rich_help_panel=_PANEL)
    ] = None,
    side_channel_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Its first rank's port; 0: any.", rich_help_panel=_PANEL)
    ] = None,
    model: Annotated[str | None, typer.Option(help="As vLLM's --model.", rich_help_panel=_PANEL)] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float32 ...", rich_help_panel=_PANEL)] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="As vLLM's --kv-cache-dtype.", rich_help_panel=_PANEL)
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in one block.", rich_help_panel=_PANEL)] = None,
    layout: Annotated[str | None, typer.Option(help="KV cache layout.", rich_help_panel=_PANEL)] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel size.", rich_help_panel=_PANEL)] = None,
) -> None:
    """Find what breaks a prefill/decode deployment, before the first request: what, why it matters, and the fix.

    Ends with 0 where all is well, with 1 after warnings, with 2 after errors.

    Example: kvx doctor --connector ipc,nixl
    """
    from kvx.doctor.fit import Wanted  # with torch, which takes seconds to import
    from kvx.doctor.run import Options, diagnose
    from kvx.layout import KVCacheLayout

    extra = _extra_config(config, connector, side_channel_host, side_channel_port)
    if device not in (None, *DEVICES):
        raise typer.BadParameter(f"{device!r} is none of {', '.join(DEVICES)}", param_hint="--device")
    if serve is not None:
        _serve(_address(serve, "--serve"), extra, device or "cpu")
        return
    if json_file != STANDARD_OUTPUT:
        require_writable(json_file)
    options = Options(
        extra_config=extra,
        peers=tuple(_address(text, "--peer") for text in peer or ()),
        wanted=Wanted(
            model=model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size_tokens=block_size,
            layout=KVCacheLayout.parse(layout).name if layout else None,
            tp_size=tp,
        ),
        ranks=tp or 1,
        device=device,
        moves=not quick,
    )
    with ConsoleProgress(consoles.alarms()) as progress:
        found = diagnose(options, progress.stage)
    _tell(found, json_file, paste)
    raise typer.Exit(found.status)


def _extra_config(config: str, connector: str | None, host: str | None, port: int | None) -> dict[str, Any]:
    """What the engine will get, with the options of the command line over it."""
    try:
        text = Path(config[1:]).read_text(encoding="utf-8") if config.startswith("@") else config
        given = json.loads(text)
    except OSError as error:
        raise typer.BadParameter(f"{config[1:]}: {error.strerror}; give @FILE", param_hint="--config") from None
    except ValueError as error:
        raise typer.BadParameter(f"no JSON: {error}; give an object, or @FILE", param_hint="--config") from None
    if not isinstance(given, dict):
        raise typer.BadParameter("it needs a JSON object, as kv_connector_extra_config is one", param_hint="--config")
    if connector is not None:
        given["connectors"] = [name.strip() for name in connector.split(",") if name.strip()]
    if host is not None:
        given["side_channel_host"] = host
    if port is not None:
        given["side_channel_port"] = port
    return given


def _address(text: str, option: str) -> Peer:
    from kvx.doctor.network import Peer

    try:
        return Peer.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


# The other half


def _serve(where: Peer, extra: Mapping[str, Any], device: str) -> None:
    """Be the other half until Ctrl-C. Errors as of an engine that is started with these settings."""
    from kvx.curve import read_curve
    from kvx.doctor.half import Half
    from kvx.secret import read_secret
    from kvx.vllm.settings import from_options

    settings = from_options({**extra, "side_channel_host": where.host, "side_channel_port": where.port})
    secret = read_secret()
    half = Half(settings, secret, read_curve(secret), device)
    half.open()
    is_over = _interrupted()
    try:
        typer.echo(f"waiting at {where} for `kvx doctor --peer {where}` on the other host; Ctrl-C ends it")
        while not is_over.is_set():
            if said := half.serve(timeout_s=0.5):
                typer.echo(said)
    except KeyboardInterrupt:
        pass
    finally:
        _close_in_time(half.close)


def _interrupted() -> threading.Event:
    """Set by the first Ctrl-C: as an exception it may be raised in a library's callback, and be lost there. The second
    one is an exception."""
    event = threading.Event()

    def note(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    return event


def _close_in_time(close: Callable[[], None]) -> None:
    """A transfer library may wait for a peer that has gone; nothing here is worth waiting for."""
    closing = threading.Thread(target=close, name="kvx-doctor-close", daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    if closing.is_alive():
        typer.echo(f"the transfer library has not ended within {CLOSE_S:g} s; leaving it", err=True)
        sys.stdout.flush()
        os._exit(0 if sys.exc_info()[0] is None else 1)


# What is told


def _tell(found: Diagnosis, json_file: Path | None, paste: bool) -> None:
    report = as_report(found)
    if json_file == STANDARD_OUTPUT:
        sys.stdout.write(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        return
    write_json(json_file, report)
    if paste:
        sys.stdout.write(as_markdown(report))
    else:
        _show(consoles.output(), report)


def as_report(found: Diagnosis) -> dict[str, Any]:
    """Plain values for JSON. `status` is what the command exits with."""
    return {
        "status": found.status,
        "findings": [{**asdict(finding), "level": finding.level.value} for finding in found.findings],
        "software": dict(found.software),
        "environment": dict(found.environment),
        "duration_s": round(found.duration_s, 2),
    }


def as_markdown(report: Mapping[str, Any]) -> str:
    """A report to paste: verdict, trouble, everything that was looked at, versions, environment."""
    lines = [f"### kvx doctor: {_verdict(report)}", ""]
    for trouble in _troubles(report):
        lines.append(f"- **{trouble['level']}: {trouble['check']}**")
        lines += [f"  - {name}: {trouble[name]}" for name in ("found", "why", "fix")]
    lines += ["", "```"]
    lines += [f"{item['level']:8}{item['check']}: {item['found']}" for item in report["findings"]]
    lines += ["", *(f"{name} {version}" for name, version in report["software"].items())]
    lines += [f"{name}={value}" for name, value in report["environment"].items()]
    return "\n".join([*lines, "```", ""])


def _show(console: Console, report: Mapping[str, Any]) -> None:
    table = Table("check", "", "found", title="kvx doctor")
    table.columns[-1].overflow = "fold"
    for item in report["findings"]:
        style = _STYLES[item["level"]]
        table.add_row(escape(item["check"]), f"[{style}]{item['level']}[/]", escape(item["found"]))
    console.print(table)
    for trouble in _troubles(report):
        console.print(f"\n[{_STYLES[trouble['level']]}]{trouble['level']}: {escape(trouble['check'])}[/]")
        for name in ("found", "why", "fix"):
            console.print(f"  {name:<6}{escape(trouble[name])}", highlight=False, soft_wrap=True)
    colour = ("green", "yellow", "bold red")[report["status"]]
    console.print(f"[{colour}]{_verdict(report)}[/]")


def _troubles(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Errors first."""
    return [item for level in ("error", "warning") for item in report["findings"] if item["level"] == level]


def _verdict(report: Mapping[str, Any]) -> str:
    levels = [item["level"] for item in report["findings"]]
    counts = [f"{levels.count(level)} {level}{'s'[: levels.count(level) != 1]}" for level in ("error", "warning")]
    return (
        f"{', '.join(counts)}, {levels.count('ok')} checks in order, {levels.count('skipped')} that do not apply here"
    )
