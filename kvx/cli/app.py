"""The commands and their options."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import typer

import kvx
from kvx.cli import consoles, memory
from kvx.cli.doctor import doctor_command
from kvx.cli.files import require_writable, write_json
from kvx.cli.map import map_command
from kvx.cli.new_connector import new_connector_command
from kvx.cli.plan import plan_command
from kvx.cli.serve import EPILOG, serve_command
from kvx.cli.show import ConsoleProgress, show_bench, show_verify
from kvx.errors import KVXError
from kvx.layout import KVCacheLayout, require_block_compact
from kvx.offload import Eviction
from kvx.registry import connector_classes
from kvx.servers import require_known_vllm
from kvx.verify.bench import BenchSettings, bench_pd
from kvx.verify.engines import RunSettings, Shape, require_ports
from kvx.verify.model import checkpoint_of, default_model
from kvx.verify.places import DECODE, PREFILL, read_places
from kvx.verify.questions import load_problems, own_problems, own_shots
from kvx.verify.runner import VerifySettings, verify

FAILED = 1
FULL = (errno.ENOSPC, errno.EDQUOT)
DEFAULT_BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
DTYPES = ("float32", "bfloat16", "float16")
INJECTIONS = tuple(fault + used for used in ("", "-used") for fault in ("flip-byte", "swap-blocks", "stale"))

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure kvx beside what vLLM has on board.")
app.add_typer(bench_app, name="bench")
bench_app.command("extend")(memory.extend_command)
bench_app.command("bandwidth")(memory.bandwidth_command)
bench_app.command("transfer")(memory.transfer_command)
bench_app.command("offload")(memory.offload_command)
bench_app.command("verify")(memory.verify_command)
bench_app.command("plan")(memory.plan_command)

app.command("doctor")(doctor_command)
app.command("new-connector")(new_connector_command)
app.command("plan")(plan_command)
app.command("map")(map_command)
app.command("serve", epilog=EPILOG)(serve_command)

_out = consoles.output()
_progress = consoles.alarms()

Model = Annotated[
    Path | None,
    typer.Option(help="Checkpoint folder, or GGUF file, converted once; by default SmolLM2-135M-Instruct."),
]
Connector = Annotated[str, typer.Option(help="Connectors of the kvx engines, separated by commas.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16. Answers are comparable in float32 only.")]
BlockSize = Annotated[
    int | None, typer.Option(min=1, help="Tokens in one block; by default 128 on a CPU, and 16 on a GPU.")
]
SideBlockSize = Annotated[int | None, typer.Option(min=1, help="Of this engine alone; by default --block-size.")]
TPSize = Annotated[int, typer.Option(min=1, help="Tensor parallel ranks of this engine; the baseline has one.")]
MaxModelLen = Annotated[int, typer.Option(min=2, help="Tokens of the longest request.")]
KVSpace = Annotated[
    int, typer.Option(min=0, help="GiB that each engine on a CPU may plan with; 0: what is free is measured.")
]
ExplicitSize = Annotated[int | None, typer.Option(min=1, help="Blocks per engine, instead of measuring.")]
Layout = Annotated[str | None, typer.Option(help="KV cache layout; by default vLLM decides.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default what the installed vLLM computes on.")]
Eager = Annotated[
    bool | None, typer.Option(help="Without torch.compile and graphs; by default on a CPU, and not on a GPU.")
]
EngineArgs = Annotated[str, typer.Option(help="More options for every vLLM server, as on its command line.")]
Gpus = Annotated[
    str, typer.Option(help="The GPU of prefill and that of decode, as 0,1; by default both are on the first.")
]
FirstPort = Annotated[int, typer.Option(min=0, max=65535, help="First of four ports; 0: free ones are chosen.")]
Logs = Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """An extensible KV cache and a connector framework for disaggregated LLM serving."""
    if version:
        typer.echo(f"kvx {kvx.__version__}")
        raise typer.Exit


@app.command("verify")
def verify_command(
    connector: Connector = "nixl",
    dataset: Annotated[Path | None, typer.Option(help="gsm8k JSONL; by default kvx's own word problems.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only the first so many questions.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the whole result there, as JSON.")] = None,
    few_shot: Annotated[Path | None, typer.Option(help="gsm8k JSONL of worked examples; by default kvx's own.")] = None,
    shots: Annotated[int, typer.Option(min=0, help="Worked examples before each question.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer at most.")] = 96,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions in flight.")] = 4,
    judge_answers: Annotated[
        bool, typer.Option(help="Fail when answers differ; without, judge the moved bytes only.")
    ] = True,
    inject: Annotated[
        str | None,
        typer.Option(
            help="A fault on purpose: flip-byte, swap-blocks or stale. With -used behind it, what differs is used."
        ),
    ] = None,
    expect_fallbacks: Annotated[
        int, typer.Option(min=0, help="Exactly so many hand-offs must fail and be computed again.")
    ] = 0,
    offload_mib: Annotated[
        int | None, typer.Option(min=1, help="MiB of host memory to offload to; by default what the questions need.")
    ] = None,
    offload_eviction: Annotated[str, typer.Option(help="What leaves host memory first: lru or arc.")] = "lru",
    places: Annotated[
        Path | None,
        typer.Option(help="TOML file: where prefill and decode run, and more options for both; by default here."),
    ] = None,
    prefill_tp: TPSize = 1,
    decode_tp: TPSize = 1,
    prefill_block_size: SideBlockSize = None,
    decode_block_size: SideBlockSize = None,
    model: Model = None,
    dtype: Dtype = "float32",
    block_size: BlockSize = None,
    max_model_len: MaxModelLen = 2048,
    kv_space: KVSpace = 1,
    explicit_size: ExplicitSize = None,
    layout: Layout = None,
    device: Device = None,
    eager: Eager = None,
    engine_args: EngineArgs = "",
    gpus: Gpus = "",
    first_port: FirstPort = 0,
    logs: Logs = None,
) -> None:
    """Prove that engines with kvx answer byte for byte as one stock server does.

    A prefill/decode pair; or, where the connectors only offload, one engine that is asked everything twice.

    Example: kvx verify --limit 8 --report r.json
    """
    problems = load_problems(dataset, limit) if dataset is not None else own_problems()[:limit]
    examples = load_problems(few_shot, shots) if few_shot is not None and shots else own_shots()[:shots]
    if inject is not None and inject not in INJECTIONS:
        raise typer.BadParameter(f"{inject!r} is none of {', '.join(INJECTIONS)}", param_hint="--inject")
    if offload_eviction not in get_args(Eviction):
        raise typer.BadParameter(
            f"{offload_eviction!r} is none of {', '.join(get_args(Eviction))}", param_hint="--offload-eviction"
        )
    require_writable(report)
    where, options = read_places(places) if places is not None else ({}, {})
    if options:
        from kvx.vllm.settings import from_options  # with torch, which takes seconds to import

        from_options(options)
    run = _run_settings(
        model,
        connector,
        dtype,
        block_size,
        max_model_len,
        kv_space,
        explicit_size,
        layout,
        device,
        eager,
        engine_args,
        gpus,
        first_port,
    )
    shapes = {
        PREFILL: Shape(tp_size=prefill_tp, block_size_tokens=prefill_block_size),
        DECODE: Shape(tp_size=decode_tp, block_size_tokens=decode_block_size),
    }
    run = replace(run, shapes={role: shape for role, shape in shapes.items() if shape != Shape()})
    if run.shapes and run.offloading:
        raise typer.BadParameter(
            "connectors that offload need both engines alike", param_hint="--prefill-tp, --decode-tp, ..-block-size"
        )
    require_ports(run)
    if where and not run.hands_off:
        raise typer.BadParameter("these connectors need one engine, here", param_hint="--places")
    settings = VerifySettings(
        run=replace(
            run,
            inject=inject,
            offload_bytes=offload_mib and offload_mib << 20,
            offload_eviction=offload_eviction,
            places=where,
            options=options,
        ),
        problems=problems,
        shots=examples,
        max_tokens=max_tokens,
        concurrency=concurrency,
        judge_answers=judge_answers,
        expect_fallbacks=expect_fallbacks,
        logs=logs,
    )
    with ConsoleProgress(_progress) as progress:
        found = verify(settings, progress)
    write_json(report, found)
    show_verify(_out, found)
    raise typer.Exit(0 if found["passed"] else FAILED)


@bench_app.command("pd")
def bench_pd_command(
    connector: Connector = "nixl",
    pairs: Annotated[int, typer.Option(min=1, help="Alternations of the two pairs that count.")] = 7,
    requests: Annotated[int, typer.Option(min=1, help="Requests to each pair in one alternation.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 384,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 16,
    json_file: Annotated[
        Path | None, typer.Option("--json", "--report", help="Write the whole result there, as JSON.")
    ] = None,
    model: Model = None,
    dtype: Dtype = "float32",
    block_size: BlockSize = None,
    max_model_len: MaxModelLen = 2048,
    kv_space: KVSpace = 1,
    explicit_size: ExplicitSize = None,
    device: Device = None,
    eager: Eager = None,
    engine_args: EngineArgs = "",
    gpus: Gpus = "",
    first_port: FirstPort = 0,
    logs: Logs = None,
) -> None:
    """Time to first token, between tokens and of the hand-off: a kvx pair beside a stock NixlConnector pair.

    Example: kvx bench pd --pairs 3 --requests 4
    """
    if prompt_tokens + new_tokens > max_model_len:
        raise typer.BadParameter("prompt and answer do not fit into --max-model-len", param_hint="--prompt-tokens")
    require_writable(json_file)
    run = _run_settings(
        model,
        connector,
        dtype,
        block_size,
        max_model_len,
        kv_space,
        explicit_size,
        None,
        device,
        eager,
        engine_args,
        gpus,
        first_port,
    )
    settings = BenchSettings(
        run=run, pairs=pairs, requests=requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens, logs=logs
    )
    with ConsoleProgress(_progress) as progress:
        found = bench_pd(settings, progress)
    write_json(json_file, found)
    show_bench(_out, found)


def run() -> None:
    """Entry point: kvx's own errors, and a full disk, end with one sentence and status 1, Ctrl-C with 130."""
    consoles.make_help_plain()
    try:
        app()
    except KVXError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in FULL:
            raise
        _fail(f"{error.strerror} while writing {error.filename or 'the results'}; make room there, and run it again")


def _fail(sentence: str) -> NoReturn:
    _progress.print(f"kvx: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(FAILED)


def _words(engine_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(engine_args))
    except ValueError as error:
        raise typer.BadParameter(f"{engine_args!r}: {error}", param_hint="--engine-args") from None


def _gpu_names(gpus: str, device: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in gpus.split(",")) if gpus else ()
    if names and (device == "cpu" or len(names) != 2 or not all(names)):
        found = "engines on a CPU" if device == "cpu" else repr(gpus)
        raise typer.BadParameter(f"{found}; give two GPUs, as 0,1, or leave it out", param_hint="--gpus")
    return names


def _run_settings(
    model: Path | None,
    connector: str,
    dtype: str,
    block_size: int | None,
    max_model_len: int,
    kv_space: int,
    explicit_size: int | None,
    layout: str | None,
    device: str | None,
    eager: bool | None,
    engine_args: str,
    gpus: str,
    first_port: int,
) -> RunSettings:
    """Check everything that can be checked before the first engine starts."""
    installed = require_known_vllm()
    chosen = device or installed
    if chosen not in DEFAULT_BLOCK_TOKENS:
        raise typer.BadParameter(f"{chosen!r} is none of {', '.join(DEFAULT_BLOCK_TOKENS)}", param_hint="--device")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    names = tuple(name.strip() for name in connector.split(",") if name.strip())
    if not names:
        raise typer.BadParameter("at least one name is needed, for example nixl", param_hint="--connector")
    offloading = tuple(found.name for found in connector_classes(names) if not found.capabilities.reaches_processes)
    wanted = layout or os.environ.get("VLLM_KV_CACHE_LAYOUT")
    if wanted:
        require_block_compact(KVCacheLayout.parse(wanted))
    run = RunSettings(
        model=checkpoint_of(model.resolve()) if model is not None else default_model(),
        connectors=names,
        offloading=offloading,
        dtype=dtype,
        block_size_tokens=block_size or DEFAULT_BLOCK_TOKENS[chosen],
        max_model_len_tokens=max_model_len,
        kv_space_gib=kv_space or None,
        explicit_blocks=explicit_size,
        layout=layout,
        device=chosen,
        eager=chosen == "cpu" if eager is None else eager,
        arguments=_words(engine_args),
        gpus=_gpu_names(gpus, chosen),
        first_port=first_port,
    )
    if chosen != installed:
        raise typer.BadParameter(
            f"{chosen!r}, but the vLLM installed here computes on {installed}; leave it out, or install the other one",
            param_hint="--device",
        )
    require_ports(run)
    return run
