"""`kvx map --html`: one page that opens from disk, with nothing fetched from anywhere. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from string import Template

from kvx.picture import Comparison, EngineMap, SegmentBand, Step, Tokens
from kvx.sizing import GIB, MIB

_WIDTH = 860
_ROW = 26
_PALETTE = (
    "#4878a8",
    "#7aa974",
    "#c98f4e",
    "#a86a8c",
    "#6d7f8f",
    "#b8b04a",
    "#58a5a0",
    "#c0655a",
    "#8d7bb8",
    "#9aa3aa",
)

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvx map: $title</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; --ink: #1d2733; --quiet: #66717d; --line: #d5dbe1; --paper: #fff; --free: #eceff2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --quiet: #9aa5b1; --line: #3a444f; --paper: #14181d; --free: #262d35; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
h3 { font-size: 1rem; margin-bottom: .3rem }
table { border-collapse: collapse; width: 100% } td, th { padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top } td.number { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.quiet { color: var(--quiet) } .bad { color: #b3261e; font-weight: 600 } .good { color: #2e7d32; font-weight: 600 }
@media (prefers-color-scheme: dark) { .bad { color: #ff8a80 } .good { color: #81c784 } }
mark { background: #ffd54f; color: #1d2733; padding: 0 .2em; border-radius: 3px }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
</style></head><body>
<h1>kvx map: $title</h1>
$verdict
$engines
$questions
</body></html>
""")


def page(title: str, engines: Sequence[EngineMap], questions: Sequence[Comparison] = ()) -> str:
    """The whole page. Everything that came from an engine or a model is escaped."""
    differing = sum(not one.is_identical for one in questions)
    verdict = ""
    if questions:
        word = "bad" if differing else "good"
        verdict = f'<p class="{word}" id="verdict">{len(questions) - differing} of {len(questions)} identical</p>'
    return _PAGE.substitute(
        title=escape(title),
        verdict=verdict,
        engines="\n".join(_engine(engine) for engine in engines),
        questions="\n".join(_questions(questions)) if questions else "",
    )


def _engine(engine: EngineMap) -> str:
    return f"""<section class="engine"><h2>{escape(engine.name)}</h2>
<p><b>{engine.blocks_final:,}</b> blocks, of which <b>{engine.blocks_at_warmup:,}</b> at warm-up; addresses for
{engine.capacity_blocks:,}. Reserved {size_text(engine.reserved_bytes)}, committed {size_text(engine.committed_bytes)},
registered with transfer libraries {size_text(engine.registered_bytes)};
held for hand-offs {engine.held_blocks:,} blocks.</p>
<h3>Address range</h3>{_segments(engine.segments)}
<h3>Start-up</h3>{_timeline(engine.timeline)}
<h3>Memory</h3>{_ledger(engine)}</section>"""


def _segments(bands: Sequence[SegmentBand]) -> str:
    legend = "".join(
        f'<span class="swatch" style="background:{colour}"></span>{name}&ensp;'
        for name, colour in (("held", _PALETTE[2]), ("registered", _PALETTE[0]), ("committed", _PALETTE[1]))
    )
    rows = []
    for index, band in enumerate(bands):
        y = index * _ROW * 2
        segments = f"{band.count} segment{'s' * (band.count > 1)}"
        words = f"{segments} of {size_text(band.capacity_bytes)} from offset {band.offset_bytes:#x}"
        rows.append(f'<text x="0" y="{y + 13}">{words}</text>')
        rows.append(_bar(0, y + 20, _WIDTH, "var(--free)", f"reserved: {size_text(band.capacity_bytes)}"))
        for name, nbytes, colour in (
            ("committed", band.committed_bytes, _PALETTE[1]),
            ("registered", band.registered_bytes, _PALETTE[0]),
            ("held", band.held_bytes, _PALETTE[2]),
        ):
            if nbytes:
                width = max(1.0, _WIDTH * nbytes / band.capacity_bytes)
                rows.append(_bar(0, y + 20, width, colour, f"{name}: {size_text(nbytes)}"))
    return f'<p class="quiet">{legend}the rest: addresses without memory</p>' + _svg(len(bands) * _ROW * 2, rows)


def _timeline(steps: Sequence[Step]) -> str:
    """The longest steps decide the scale; each row is one step, named with when it began and how long it took."""
    end_s = max((step.start_s + step.duration_s for step in steps), default=0.0) or 1.0
    rows = []
    for index, step in enumerate(steps):
        x, width = _WIDTH * step.start_s / end_s, max(2.0, _WIDTH * step.duration_s / end_s)
        words = f"{step.name}, {step.start_s:.2f} s after the first, {_duration(step.duration_s)}"
        rows.append(
            _bar(min(x, _WIDTH - 2), index * _ROW + 16, width, _PALETTE[index % len(_PALETTE)], words, height=6)
        )
        anchor = "start" if x < _WIDTH * 0.6 else "end"
        rows.append(
            f'<text x="{min(x, _WIDTH):.1f}" y="{index * _ROW + 12}" text-anchor="{anchor}">{escape(words)}</text>'
        )
    return _svg(len(steps) * _ROW, rows) if steps else '<p class="quiet">none was reported</p>'


def _ledger(engine: EngineMap) -> str:
    total = sum(row.nbytes for row in engine.ledger)
    if not total:
        return '<p class="quiet">The size was given, not measured: no ledger.</p>'
    bars, rows, x = [], [], 0.0
    for index, row in enumerate(engine.ledger):
        colour, width = _PALETTE[index % len(_PALETTE)], _WIDTH * max(0, row.nbytes) / total
        bars.append(_bar(x, 0, width, colour, f"{row.consumer}: {size_text(row.nbytes)}"))
        x += width
        rows.append(
            f'<tr><td><span class="swatch" style="background:{colour}"></span>{escape(row.consumer)}</td>'
            f'<td class="number">{row.nbytes / MIB:,.1f} MiB</td><td class="number">{row.nbytes / total:.1%}</td></tr>'
        )
    rows.append(f'<tr><td><b>total</b></td><td class="number"><b>{total / MIB:,.1f} MiB</b></td><td></td></tr>')
    return _svg(20, bars) + f"<table>{''.join(rows)}</table>"


def _questions(questions: Sequence[Comparison]) -> Iterator[str]:
    yield "<h2>Answers, token by token</h2><table id='answers'><tr><th>#</th><th>result</th><th>around the first token"
    yield "that differs</th></tr>"
    for one in questions:
        if one.is_identical:
            word = "identical, after it was computed again" if one.blame else "identical"
            blame = f"<p>{escape(one.blame)}</p>" if one.blame else ""
            yield (
                f'<tr><td>{one.index}</td><td class="good">{word}</td>'
                f'<td class="quiet">{escape(_short(one.question))}{blame}</td></tr>'
            )
            continue
        where = one.error or f"differs at token {one.differs_at}"
        blame = f"<p>{escape(one.blame)}</p>" if one.blame else '<p class="quiet">No digest of its blocks differs.</p>'
        yield (
            f'<tr class="differs"><td>{one.index}</td><td class="bad">{escape(where)}</td><td>'
            f'<p class="quiet">{escape(_short(one.question))}</p>{_tokens("baseline", one.baseline, one.differs_at)}'
            f"{_tokens('candidate', one.candidate, one.differs_at)}{blame}</td></tr>"
        )
    yield "</table>"


def _tokens(side: str, tokens: Tokens, at: int | None) -> str:
    shown = " ".join(
        f"<mark>{token}</mark>" if tokens.first + index == at else str(token) for index, token in enumerate(tokens.ids)
    )
    if at is not None and at >= tokens.first + len(tokens.ids):
        shown += " <mark>the end</mark>"
    before = "… " if tokens.first else ""
    return f"<p>{side}: <code>{before}{shown} …</code><br><span class='quiet'>{escape(_short(tokens.text))}</span></p>"


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _bar(x: float, y: float, width: float, colour: str, title: str, height: int = 20) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height}" fill="{colour}" rx="2">'
        f"<title>{escape(title)}</title></rect>"
    )


def size_text(nbytes: int) -> str:
    """In GiB, or where that is less than one, in MiB."""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
