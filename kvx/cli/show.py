"""Draws progress and results for people. Progress goes to standard error, results to standard output."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from kvx.servers import Server

_UNITS = {
    "first_token_s": "time to first token",
    "prefill_s": "of it, prefill's answer",
    "between_tokens_s": "time between tokens",
    "handoff_p50_s": "hand-off, p50",
    "handoff_p99_s": "hand-off, p99",
}


class ConsoleProgress:
    """One line that changes on a terminal; on anything else, one line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def stage(self, text: str) -> None:
        self._stage = text
        if self._status is not None:
            self._status.update(escape(text))
        else:
            self._console.print(escape(text))

    def waiting(self, server: Server, seconds: float) -> None:
        if self._status is not None:
            self._status.update(escape(f"{self._stage}: waiting for {server.name}, {seconds:.0f} s"))

    def answered(self, done: int, total: int) -> None:
        if self._status is not None:
            self._status.update(escape(f"{self._stage}: {done} of {total}"))
        elif done == total or done % 8 == 0:
            self._console.print(escape(f"{self._stage}: {done} of {total}"))


def show_verify(console: Console, report: Mapping[str, Any]) -> None:
    """The conditions as a table, the first differences, and one last line that says it all."""
    table = Table("condition", "found", "holds", title="kvx verify")
    for condition in report["conditions"]:
        mark = "[green]yes[/]" if condition["holds"] else "[bold red]NO[/]"
        table.add_row(escape(condition["name"]), escape(condition["detail"]), mark)
    console.print(table)
    accuracy = report["accuracy"]
    console.print(
        f"accuracy: baseline {accuracy['baseline']:.1%}, candidate {accuracy['candidate']:.1%}; "
        f"moved {report['transfer']['bytes'] / 2**20:.1f} MiB in {report['transfer']['blocks']} blocks; "
        f"peak memory {report['memory']['peak_bytes'] / 2**30:.1f} GiB; {report['duration_s']:.0f} s"
    )
    offload = report["offload"]
    if offload["stores"]:
        console.print(
            f"offload: {offload['stores']} blocks stored, {offload['evictions']} evicted, "
            f"{offload['reloads']} reloaded ({offload['loaded_bytes'] / 2**20:.1f} MiB)"
        )
    for mismatch in report["digests"]["mismatches"][:3]:
        # In one piece, however narrow the terminal: a request's name is there to be looked for in the logs.
        console.print(f"[red]{escape(_mismatch(mismatch))}[/]", soft_wrap=True)
    for difference in report["differences"][:3]:
        console.print(f"[red]{escape(_difference(difference))}[/]")
    colour = "green" if report["passed"] else "bold red"
    verdict = "" if report["passed"] else ", but not every condition holds"
    if report["identical"] != report["questions"]:
        verdict = ""
    console.print(f"[{colour}]{report['identical']} of {report['questions']} identical{verdict}[/]")


def show_bench(console: Console, report: Mapping[str, Any]) -> None:
    """Milliseconds per metric for both pairs: the median of the alternations, and in brackets their spread."""
    title = f"kvx bench pd: {report['pairs']} alternating pairs of {report['requests']} requests"
    table = Table("milliseconds", "kvx", "stock NixlConnector", "kvx / stock", title=title)
    for metric, found in report["metrics"].items():
        cells = [_spread(found[side], 1e3) for side in ("kvx", "stock")]
        table.add_row(_UNITS[metric], *cells, _spread(found["ratio"], 1))
    console.print(table)
    for name, found in report["handoffs"].items():
        p50, p99 = found["p50_s"] * 1e3, found["p99_s"] * 1e3
        console.print(f"{name}: {found['count']} hand-offs, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    if report["phases_s"]:
        phases = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in report["phases_s"].items())
        console.print(f"kvx, inside the connector, medians in ms: {phases}")


def _spread(summary: Mapping[str, float], factor: float) -> str:
    median, lowest, highest = (summary[key] * factor for key in ("median", "lowest", "highest"))
    return f"{median:.2f} ({lowest:.2f} to {highest:.2f})"


def _mismatch(row: Mapping[str, Any]) -> str:
    return f"bytes differ: request {row['request']}, layer group {row['layer_group']}, position {row['position']}"


def _difference(row: Mapping[str, Any]) -> str:
    where = f" at {row['position']}" if row["position"] >= 0 else ""
    return f"question {row['index']}: {row['what']}{where}: baseline {row['baseline']}, candidate {row['candidate']}"
