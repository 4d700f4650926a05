"""`kvx bench extend`, `bandwidth`, `transfer`, `offload`, `verify` and `plan`: all that needs no engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvx.cli import consoles
from kvx.cli.files import require_writable, write_json

_out = consoles.output()
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
    """How long a cache takes to grow from its first blocks to all of them, to sleep and to wake.

    Example: kvx bench extend --device cpu --gib 0.25 --segments 8 --rounds 3
    """
    from kvx import bench  # with torch, which takes seconds to import

    require_writable(json_file)
    _require_devices(device or "cpu")
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
    """Copy, elementwise kernel and gather on kvx memory, beside the same on torch memory.

    Example: kvx bench bandwidth --device cpu --mib 64 --pairs 3
    """
    from kvx import bench  # with torch, which takes seconds to import

    require_writable(json_file)
    _require_devices(device or "cpu")
    found = bench.bench_bandwidth(
        bench.BandwidthSettings(device=device or _first_device(), buffer_bytes=mib << 20, pairs=pairs)
    )
    write_json(json_file, found)
    table = Table("GB/s", "kvx", "torch", "kvx / torch", title=f"kvx bench bandwidth: {mib} MiB, {_where(found)}")
    for name, sides in found["operations"].items():
        cells = [_spread(sides[side], 1e-9) for side in (bench.KVX, bench.TORCH)]
        table.add_row(name, *cells, _spread(sides["ratio"], 1, digits=3))
    _out.print(table)


def transfer_command(
    connector: Annotated[str, typer.Option(help="The connector to time.")] = "ipc",
    device: Device = "cpu",
    peer_device: Annotated[str, typer.Option(help="The device of the memory that is read; by default the same.")] = "",
    mib: Annotated[int, typer.Option(min=1, help="MiB of one transfer.")] = 128,
    block: Annotated[
        list[int] | None, typer.Option(min=1, help="KiB of a block, several times; by default 4, 64 and 1024.")
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="Transfers at a time.")] = 1,
    pairs: Annotated[int, typer.Option(min=1, help="Alternations that count.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """A connector between two processes, beside its library driven by a bare loop, and beside memcpy.

    Example: kvx bench transfer --connector ipc --mib 16 --block 64 --pairs 3
    """
    from kvx import bench_transfer as bench  # with torch, which takes seconds to import

    require_writable(json_file)
    _require_devices(device, peer_device or device)
    sizes = [size << 10 for size in block or (4, 64, 1024)]
    if uneven := [size for size in sizes if (mib << 20) % size]:
        raise typer.BadParameter(f"{mib} MiB are no whole number of blocks of {uneven[0] >> 10} KiB")
    settings = bench.TransferSettings(
        connector=connector, device=device, peer_device=peer_device or None, total_bytes=mib << 20,
        block_sizes_bytes=sizes, in_flight=in_flight, pairs=pairs,
    )  # fmt: skip
    found = bench.bench_transfer(settings, partial(write_json, json_file))
    others = [side for side in (bench.RAW, bench.MEMCPY) if side in found["rows"][0]["ratio"]]
    table = Table("GB/s", connector, *others, *(f"{connector} / {side}" for side in others), "one alone, ms")
    table.title = f"kvx bench transfer: {mib} MiB, {in_flight} in flight, {found['peer_device']} to {found['device']}"
    for row in found["rows"]:
        rates = [_spread(row["bytes_per_s"][side], 1e-9) for side in (bench.CONNECTOR, *others)]
        ratios = [_spread(row["ratio"][side], 1) for side in others]
        table.add_row(row["case"], *rates, *ratios, _spread(row["single_transfer_s"], 1e3))
    _out.print(table)


def offload_command(
    device: Device = "",
    mib: Annotated[int, typer.Option(min=2, help="MiB of one copy.")] = 256,
    block: Annotated[
        list[int] | None, typer.Option(min=1, help="KiB of a block, several times; by default 32, 64, 256 and 2048.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternations that count.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Shuffled blocks to host memory and back, beside memcpy on a CPU, and vLLM's swap_blocks_batch on a GPU.

    Example: kvx bench offload --device cpu --mib 16 --block 64 --pairs 3
    """
    from kvx import bench_offload as bench  # with torch, which takes seconds to import

    require_writable(json_file)
    _require_devices(device or "cpu")
    sizes = [size << 10 for size in block or (32, 64, 256, 2048)]
    if uneven := [size for size in sizes if (mib << 20) % size]:
        raise typer.BadParameter(f"{mib} MiB are no whole number of blocks of {uneven[0] >> 10} KiB")
    found = bench.bench_offload(
        bench.OffloadSettings(
            device=device or _first_device(), total_bytes=mib << 20, block_sizes_bytes=sizes, pairs=pairs
        ),
        partial(write_json, json_file),
    )
    others = [found["beside"]] if found["beside"] else []
    table = Table("GB/s", bench.KVX, *others, *(f"{bench.KVX} / {side}" for side in others))
    table.title = f"kvx bench offload: {mib} MiB, {found['device']}"
    for row in found["rows"]:
        rates = [_spread(row["bytes_per_s"][side], 1e-9) for side in (bench.KVX, *others)]
        ratios = [_spread(row["ratio"][side], 1) for side in others]
        table.add_row(f"{row['block_bytes'] >> 10} KiB {row['direction']}", *rates, *ratios)
    _out.print(table)
    if not others:
        _out.print(f"no {bench.SWAP} beside it: the vLLM that is installed here has none for this device")


def verify_command(
    connector: Annotated[str, typer.Option(help="The connector that moves the blocks.")] = "ipc",
    device: Device = "",
    peer_device: Annotated[str, typer.Option(help="The device of the memory that is read; by default the same.")] = "",
    mib: Annotated[int, typer.Option(min=2, help="MiB of one request.")] = 256,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 2,
    pairs: Annotated[int, typer.Option(min=1, help="Alternations that count.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Hand-offs between two processes with digests of everything, beside the same without any.

    Example: kvx bench verify --device cpu --mib 16 --pairs 3
    """
    from kvx import bench_verify as bench  # with torch, which takes seconds to import

    require_writable(json_file)
    _require_devices(device or "cpu", peer_device or "cpu")
    if (mib << 20) % bench.BLOCK_BYTES:
        raise typer.BadParameter(f"{mib} MiB are no whole number of blocks of {bench.BLOCK_BYTES >> 20} MiB")
    found = bench.bench_verify(
        bench.VerifySettings(
            connector=connector, device=device or _first_device(), peer_device=peer_device or None,
            request_bytes=mib << 20, in_flight=in_flight, pairs=pairs,
        )
    )  # fmt: skip
    write_json(json_file, found)
    table = Table("GB/s", *(f"verify: {mode}" for mode in bench.MODES), "all / off", "digests alone")
    table.title = f"kvx bench verify: {mib} MiB, {in_flight} in flight, {found['peer_device']} to {_where(found)}"
    for row in found["rows"]:
        rates = [_spread(row["bytes_per_s"][mode], 1e-9) for mode in bench.MODES]
        table.add_row(row["case"], *rates, _spread(row["ratio"], 1), _spread(row["digest_bytes_per_s"], 1e-9))
    _out.print(table)


def _require_devices(*names: str) -> None:
    """Triggers of BadParameter: a name that is no device of kvx, a GPU that is not here."""
    import torch

    for name in names:
        kind, _, index = name.partition(":")
        if name != "cpu" and (kind != "cuda" or not (index or "0").isdecimal()):
            raise typer.BadParameter(f"{name!r} is no device; name cpu, or cuda:0, cuda:1 ...", param_hint="--device")
        if kind == "cuda" and int(index or 0) >= (here := torch.cuda.device_count()):
            raise typer.BadParameter(
                f"torch sees {here} GPUs here, and no {name}; name cpu, or one of them", param_hint="--device"
            )


def plan_command(
    copies: Annotated[int, typer.Option(min=1, help="Contiguous copies of one plan, about.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that does not.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """What it takes of one core to work out a hand-off's copies, for caches that are alike and for unequal ones.

    Example: kvx bench plan --copies 10000 --rounds 5
    """
    from kvx import bench_plan as bench  # with numpy, which takes a while to import

    require_writable(json_file)
    found = bench.bench_plan(bench.PlanSettings(copies=copies, rounds=rounds))
    write_json(json_file, found)
    table = Table("from, to", "runs", "copies", "ms of one core, median (lowest to highest)")
    table.title = f"kvx bench plan: bfloat16, 8 heads, numpy {found['numpy']}"
    for row in found["rows"]:
        table.add_row(row["case"], f"{row['runs']:,}", f"{row['copies']:,}", _spread(row["plan_s"], 1e3))
    _out.print(table)


def _first_device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _where(found: Mapping[str, Any]) -> str:
    return f"{found['device']} ({found['device_name']})"


def _spread(summary: Mapping[str, float], factor: float, digits: int = 2) -> str:
    median, lowest, highest = (f"{summary[key] * factor:.{digits}f}" for key in ("median", "lowest", "highest"))
    return f"{median} ({lowest} to {highest})"
