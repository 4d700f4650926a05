"""`kvx map`: a picture of the address range, in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvx.cli import consoles
from kvx.cli.files import kept_writable, read_object, write_text
from kvx.errors import DatasetError, EngineError, KVXError
from kvx.page import page, size_text
from kvx.picture import Comparison, EngineMap, comparisons, engine_map, engines_of
from kvx.sizing import MIB

_out = consoles.output()
_CELLS = 60


def map_command(
    report: Annotated[Path | None, typer.Argument(help="What `kvx verify --report FILE` has written.")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a running engine's side channel; several times.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page there that opens from disk.")] = None,
) -> None:
    """Draw where an engine's cache lies: segments, committed, registered, held; its ledger and its start-up.

    Example: kvx map r.json --html r.html
    """
    if (report is None) == (not server):
        found = "both are given" if server else "neither is given"
        raise typer.BadParameter(f"{found}; give a report of kvx verify, or --server HOST:PORT of a running engine")
    questions: tuple[Comparison, ...] = ()
    with kept_writable(html):
        if report is not None:
            engines, questions = _read(report)
        else:
            engines = tuple(engine_map(one, _status(one)) for one in server or ())
    for engine in engines:
        _draw(engine)
    _tell(questions)
    if html is not None:
        title = report.name if report is not None else ", ".join(engine.name for engine in engines)
        write_text(html, page(title, engines, questions))
        _out.print(f"written to {escape(str(html))}")


def _read(report: Path) -> tuple[tuple[EngineMap, ...], tuple[Comparison, ...]]:
    wanted = "a file that kvx verify --report has written"
    found = read_object(report, DatasetError, wanted=wanted, holds="a report of kvx verify is an object")
    try:
        return engines_of(found), comparisons(found)
    except KVXError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DatasetError(f"{report} is no report of kvx verify ({error!r}); give {wanted}") from None


def _status(server: str) -> dict[str, Any]:
    from kvx.handshake import request_status

    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(f"{server!r} is no HOST:PORT; give the address of an engine's side channel")
    return request_status(host.strip("[]"), int(port))


def _draw(engine: EngineMap) -> None:
    _out.print(
        f"[bold]{escape(engine.name)}[/]: {engine.blocks_at_warmup:,} blocks at warm-up -> {engine.blocks_final:,}, "
        f"addresses for {engine.capacity_blocks:,}; {engine.held_blocks:,} held for hand-offs"
    )
    for band in engine.segments:
        size = size_text(band.capacity_bytes)
        _out.print(f"  {band.count} x {size} from offset {band.offset_bytes:#x}", highlight=False)
        parts = (band.held_bytes, band.registered_bytes, band.committed_bytes, band.capacity_bytes)
        held, registered, committed, _ = (round(_CELLS * nbytes / band.capacity_bytes) for nbytes in parts)
        cells = "█" * held + "▓" * (registered - held) + "▒" * (committed - max(registered, held))
        _out.print(f"  {cells}{'·' * (_CELLS - len(cells))}", highlight=False)
    _out.print("  █ held  ▓ registered  ▒ committed  · addresses without memory", style="dim", highlight=False)
    table = Table("step of the start", "began, s", "took, ms", box=None, padding=(0, 2))
    for step in engine.timeline:
        table.add_row(escape(step.name), f"{step.start_s:.2f}", f"{step.duration_s * 1e3:,.1f}")
    _out.print(table)
    if engine.ledger:
        ledger = Table("where the memory goes", "MiB", box=None, padding=(0, 2))
        for row in engine.ledger:
            ledger.add_row(escape(row.consumer), f"{row.nbytes / MIB:,.1f}")
        _out.print(ledger)


def _tell(questions: tuple[Comparison, ...]) -> None:
    if not questions:
        return
    differing = [one for one in questions if not one.is_identical]
    _out.print(f"{len(questions) - len(differing)} of {len(questions)} answers identical")
    for one in questions:
        if one.is_identical and one.blame:
            _out.print(f"[yellow]question {one.index}: computed again[/]: {escape(one.blame)}")
    for one in differing[:10]:
        where = one.error or f"differs at token {one.differs_at}"
        _out.print(f"[red]question {one.index}: {escape(where)}[/]" + (f": {escape(one.blame)}" if one.blame else ""))
    if len(differing) > 10:
        _out.print(f"{len(differing) - 10} more")
