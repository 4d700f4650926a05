"""`kvx bench extend` and `kvx bench bandwidth`: the memory itself, without any engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvx.cli.files import require_writable, write_json

_out = Console()
_STEPS = {"map_s": "extend: map", "zero_s": "extend: zero", "sleep_s": "sleep", "wake_s": "wake: map"}

Device = Annotated[str, typer.Option(help="cpu, cuda:0, cuda:1 ...; by default the first GPU, if there is one.")]
JsonFile = Annotated[Path | None, typer.Option("--json", "--report", help="Write the whole result there, as JSON.")]


def extend_command(
    device: Device = "",
    gib: Annotated[float, typer.Option(min=0, help="GiB to grow to; 0: most of what is free.")] = 0,
    segments: Annotated[int, typer.Option(min=1, help="Segments of the cache, as many as layers.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """How long a cache takes to grow from its first blocks to all of them, to sleep and to wake."""
    from kvx import bench  # with torch, which takes seconds to import

    require_writable(json_file)
    found = bench.bench_extend(
        bench.ExtendSettings(
            device=device or _first_device(), total_bytes=int(gib * bench.GIB) or None, segments=segments, rounds=rounds
        )
    )
    write_json(json_file, found)
    title = f"kvx bench extend: {found['total_bytes'] / bench.GIB:.2f} GiB over {segments} segments, {_where(found)}"
    table = Table("step", "milliseconds, median (lowest to highest)", title=title)
    for name, words in _STEPS.items():
        if name in found:
            table.add_row(words, _spread(found[name], 1e3))
    _out.print(table)
    if "zero_bandwidth_ratio" in found:
        zero, memset = (found[name]["median"] / 1e9 for name in ("zero_bytes_per_s", "memset_bytes_per_s"))
        _out.print(
            f"zeroing {zero:.0f} GB/s, {found['zero_bandwidth_ratio']:.2f} of the device's memset ({memset:.0f})"
        )


def bandwidth_command(
    device: Device = "",
    mib: Annotated[int, typer.Option(min=1, help="MiB of each of the two buffers.")] = 1024,
    pairs: Annotated[int, typer.Option(min=1, help="Alternations that count.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Copy, elementwise kernel and gather on kvx memory, beside the same on torch memory."""
    from kvx import bench  # with torch, which takes seconds to import

    require_writable(json_file)
    found = bench.bench_bandwidth(
        bench.BandwidthSettings(device=device or _first_device(), buffer_bytes=mib << 20, pairs=pairs)
    )
    write_json(json_file, found)
    table = Table("GB/s", "kvx", "torch", "kvx / torch", title=f"kvx bench bandwidth: {mib} MiB, {_where(found)}")
    for name, sides in found["operations"].items():
        cells = [_spread(sides[side], 1e-9) for side in (bench.KVX, bench.TORCH)]
        table.add_row(name, *cells, _spread(sides["ratio"], 1, digits=3))
    _out.print(table)


def _first_device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _where(found: Mapping[str, Any]) -> str:
    return f"{found['device']} ({found['device_name']})"


def _spread(summary: Mapping[str, float], factor: float, digits: int = 2) -> str:
    median, lowest, highest = (f"{summary[key] * factor:.{digits}f}" for key in ("median", "lowest", "highest"))
    return f"{median} ({lowest} to {highest})"
