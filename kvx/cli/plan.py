"""`kvx plan`: what an engine's memory will look like, and what a hand-off moves, before anything runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvx.cli import consoles
from kvx.cli.checkpoint import read_config, weights_bytes
from kvx.cli.files import require_writable, write_json
from kvx.errors import EngineError, KVXError, ModelError
from kvx.forecast import (
    IN_USE_BYTES,
    Device,
    Forecast,
    Overheads,
    Setting,
    forecast,
    handoff_plan,
    overheads,
    variations,
)
from kvx.layout import KVCacheLayout
from kvx.model import ModelShape, read_shape
from kvx.sizing import GIB, MIB, MarginPolicy
from kvx.spec import dtype_bytes

_out = consoles.output()
_SIZE = re.compile(r"([0-9.]+)\s*(B|KIB|MIB|GIB|TIB|KB|MB|GB|TB)?", re.IGNORECASE)
_MOST_BYTES = 1 << 50
_MOST_PROMPT_TOKENS = 1 << 22
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def plan_command(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder, or a model's config.json by itself.")],
    device_memory: Annotated[
        str, typer.Option(help="Memory of one device, as 80GiB or 141GB; by default that of the first GPU here.")
    ] = "",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in one block.")] = 16,
    layout: Annotated[str, typer.Option(help="KV cache layout.")] = "LBHNC",
    dtype: Annotated[str, typer.Option(help="Of weights and cache; by default the config's.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="Of the cache alone, as fp8 or bfloat16.")] = "",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share the heads, a device each.")] = 1,
    max_model_len: Annotated[int, typer.Option(min=0, help="Tokens of the longest request; 0: the config's.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in one step at most.")] = 8192,
    utilization: Annotated[
        float, typer.Option(min=0, max=1, help="An explicit share of the device; 0: all that is free.")
    ] = 0,
    margin: Annotated[MarginPolicy, typer.Option(help="What stays free on purpose.")] = MarginPolicy.DEFAULT,
    in_use_mib: Annotated[int, typer.Option(min=0, help="MiB in use before the engine loads.")] = IN_USE_BYTES // MIB,
    graphs_mib: Annotated[int | None, typer.Option(min=0, help="MiB of captured graphs, instead of the guess.")] = None,
    context_mib: Annotated[
        int | None, typer.Option(min=0, help="MiB of context and workspaces, instead of the guess.")
    ] = None,
    weights_mib: Annotated[int | None, typer.Option(min=0, help="MiB of all weights, instead of counting.")] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=_MOST_PROMPT_TOKENS, help="Tokens of the request whose hand-off is planned.")
    ] = 2048,
    peer_block_size: Annotated[int | None, typer.Option(min=1, help="The other side's, where it differs.")] = None,
    peer_layout: Annotated[str, typer.Option(help="The other side's, where it differs.")] = "",
    peer_tensor_parallel: Annotated[int | None, typer.Option(min=1, help="The other side's.")] = None,
    server: Annotated[str, typer.Option(help="HOST:PORT of an engine's side channel: its measured ledger.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole result there, as JSON.")] = None,
) -> None:
    """Blocks, tokens and the ledger of an engine, and a hand-off's copies: no GPU and no weights needed.

    Example: kvx plan Qwen2.5-7B-Instruct/config.json --device-memory 80GiB --prompt-tokens 4096
    """
    require_writable(json_file)
    shape = read_shape(read_config(model))
    if dtype:
        shape = replace(shape, dtype=_cache_dtype(dtype))
    setting = Setting(
        block_size_tokens=block_size,
        layout=KVCacheLayout.parse(layout),
        cache_dtype=_cache_dtype(kv_cache_dtype) if kv_cache_dtype else None,
        tp_size=tensor_parallel,
        max_model_len_tokens=max_model_len or shape.max_model_len_tokens or 8192,
        max_batch_tokens=batch_tokens,
        utilization=utilization or None,
        margin=margin,
    )
    whole = weights_mib * MIB if weights_mib is not None else weights_bytes(model, dtype_bytes(shape.dtype))
    device = Device(_bytes(device_memory) if device_memory else _first_gpu_bytes(), in_use_mib * MIB)
    given = {"graph_bytes": graphs_mib, "context_bytes": context_mib}

    def taken(one: Setting) -> Overheads:
        return replace(
            overheads(shape, one, whole), **{name: mib * MIB for name, mib in given.items() if mib is not None}
        )

    found = forecast(shape, device, setting, taken(setting))
    rows = [_variation(name, shape, device, one, taken(one)) for name, one in variations(setting, shape)]
    theirs = replace(
        setting,
        block_size_tokens=peer_block_size or block_size,
        layout=KVCacheLayout.parse(peer_layout) if peer_layout else setting.layout,
        tp_size=peer_tensor_parallel or tensor_parallel,
    )
    moved = handoff_plan(shape, setting, theirs, prompt_tokens)
    measured = _measured_ledger(server) if server else None
    report = {
        "model": {"layers": len(shape.kinds), "parameters": shape.parameters, "dtype": shape.dtype},
        "device_bytes": device.total_bytes,
        **_row("as given", found),
        "page_bytes": [group.spec.page_size_bytes for group in found.groups],
        "ledger": found.sizing.ledger.as_dicts(),
        "measured_ledger": measured,
        "settings": rows,
        "handoff": {
            "prompt_tokens": prompt_tokens, "runs": moved.runs, "descriptors": moved.descriptors,
            "bytes": moved.nbytes, "descriptor_bytes": moved.descriptor_bytes,
        },
    }  # fmt: skip
    write_json(json_file, report)
    _show(model, found, rows, report, measured)


def _cache_dtype(name: str) -> str:
    """vLLM says fp8 where torch says float8_e4m3fn. LayoutError: a dtype that no cache has."""
    known = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "half": "float16"}
    found = known.get(name, name)
    dtype_bytes(found)
    return found


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size; write it as 80GiB or 141GB", param_hint="--device-memory")
    try:
        size = float(found[1]) * _UNITS[(found[2] or "GIB").upper()]
    except ValueError:
        size = -1.0
    if not 0 < size <= _MOST_BYTES:
        raise typer.BadParameter(f"{text!r} is no memory of a device; write it as 80GiB", param_hint="--device-memory")
    return int(size)


def _first_gpu_bytes() -> int:
    hint = "give --device-memory, for example --device-memory 80GiB"
    try:
        import pynvml
    except ImportError:
        raise ModelError(f"nvidia-ml-py is not installed, so no GPU can be asked for its memory; {hint}") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ModelError(f"no GPU can be asked for its memory ({error}); {hint}") from None
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    finally:
        pynvml.nvmlShutdown()


def _measured_ledger(server: str) -> list[dict[str, Any]]:
    from kvx.handshake import request_status

    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise typer.BadParameter(
            f"{server!r} is no HOST:PORT of a side channel; for example 127.0.0.1:5600", param_hint="--server"
        )
    found = request_status(host.strip("[]"), int(port))
    ledger: list[dict[str, Any]] = found.get("cache", {}).get("ledger", [])
    if not ledger:
        raise EngineError(f"the engine at {server} reports no ledger; ask a vLLM engine whose size kvx has measured")
    return ledger


def _row(name: str, found: Forecast) -> dict[str, Any]:
    return {
        "name": name, "blocks": found.sizing.num_blocks, "tokens": found.num_tokens,
        "block_bytes": found.block_bytes, "groups": len(found.groups), "idle_bytes": found.idle_bytes,
        "longest_requests_at_once": round(found.concurrency, 2),
        "stock_blocks": found.stock.num_blocks, "stock_idle_bytes": found.stock.idle_bytes,
    }  # fmt: skip


def _variation(name: str, shape: ModelShape, device: Device, setting: Setting, taken: Overheads) -> dict[str, Any]:
    try:
        return _row(name, forecast(shape, device, setting, taken))
    except KVXError as error:
        return {"name": name, "error": str(error)}


def _show(
    model: Path, found: Forecast, rows: list[dict[str, Any]], report: dict[str, Any], measured: list[Any] | None
) -> None:
    beside = {row["consumer"]: row["bytes"] for row in measured or ()}
    columns = ["MiB", "measured"] if measured else ["MiB"]
    ledger = Table("where the memory goes", *columns, title=f"kvx plan: {escape(str(model))}, one rank, estimated")
    names = [row.consumer for row in found.sizing.ledger.rows]
    for consumer in [*names, *(name for name in beside if name not in names)]:
        planned = next((row.nbytes for row in found.sizing.ledger.rows if row.consumer == consumer), None)
        cells = ["" if value is None else f"{value / MIB:,.0f}" for value in (planned, beside.get(consumer))]
        ledger.add_row(escape(consumer), *cells[: len(columns)])
    _out.print(ledger)
    settings = Table("setting", "blocks", "tokens", "bytes a block", "idle GiB", "stock at 0.92", "its idle GiB")
    for column in settings.columns:
        column.overflow = "fold"  # a narrow terminal breaks a number, and takes no digit of it
    for row in rows:
        if "error" in row:
            settings.add_row(escape(row["name"]), escape(row["error"]))
            continue
        settings.add_row(
            escape(row["name"]),
            *(f"{row[name]:,}" for name in ("blocks", "tokens", "block_bytes")),
            f"{row['idle_bytes'] / GIB:.2f}",
            f"{row['stock_blocks']:,}",
            f"{row['stock_idle_bytes'] / GIB:.2f}",
        )
    _out.print(settings)
    moved = report["handoff"]
    _out.print(
        f"a hand-off of {moved['prompt_tokens']:,} tokens moves {moved['bytes'] / MIB:,.1f} MiB in "
        f"{moved['descriptors']:,} descriptors of {moved['descriptor_bytes'] / 1024:,.1f} KiB ({moved['runs']:,} runs)"
    )
    if len(found.groups) > 1:
        _out.print(f"{len(found.groups)} layer groups share the blocks: a request takes blocks of each")
    for warning in found.sizing.warnings:
        _out.print(f"[yellow]{escape(warning)}[/]")
