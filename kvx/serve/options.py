"""What `kvx serve` may be told: from `kvx.toml`, from the command line, which wins, or by default."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvx.engine_side import HandoffSettings
from kvx.errors import EngineError

DEFAULT_FILE = Path("kvx.toml")
# Serve decides about these itself: who is reached where, and through which connectors.
_DECIDED_HERE = {"connectors": "connector", "side_channel_host": "prefill_hosts", "side_channel_port": "first_port"}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """One deployment. Names and meanings are those of the command line; `kvx.toml` has the same names.

    None: kvx chooses. `port`: of the router, the one that clients use. `first_port`: of the engines' ports, 0: free
    ones. `prefill_hosts` and `decode_hosts`: the machines of engines that are only printed, not started.
    `handoff`: options of `kv_connector_extra_config`. `*_args`: words for the command lines of vLLM and vllm-router.
    """

    prefill: int = 1
    decode: int = 1
    model: str | None = None
    served_model_name: str | None = None
    connector: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    gpus: list[int] | None = None
    block_size: int | None = None
    eager: bool | None = None
    kv_space: int = 1
    layout: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    first_port: int = 0
    prefill_hosts: list[str] = field(default_factory=list)
    decode_hosts: list[str] = field(default_factory=list)
    router: bool | None = None
    router_args: list[str] = field(default_factory=list)
    prefill_args: list[str] = field(default_factory=list)
    decode_args: list[str] = field(default_factory=list)
    vllm_args: list[str] = field(default_factory=list)
    handoff: dict[str, Any] = field(default_factory=dict)
    logs: str | None = None
    start_timeout: float = 600.0
    keep_going: bool = False
    image: str | None = None

    @property
    def connectors(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.connector.split(",") if name.strip())


def merged(file: Path | None, given: Mapping[str, Any]) -> ServeOptions:
    """The options of a TOML file and of the command line; `given` has the latter's, None where it was not used.

    Without a file, `kvx.toml` of the present folder is read where there is one. Triggers of EngineError: the file is
    not there or is no TOML, a name that is no option, a value of the wrong kind or out of its range.
    """
    path = file if file is not None else DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    found = _read(path) if path is not None else {}
    command_line = {name: value for name, value in given.items() if value is not None}
    if "handoff" in command_line and isinstance(found.get("handoff"), dict):
        command_line["handoff"] = {**found["handoff"], **command_line["handoff"]}
    try:
        options = msgspec.convert({**found, **command_line}, ServeOptions)
    except msgspec.ValidationError as error:
        raise EngineError(f"{path or 'the command line'}: {error}") from None
    _require_sound(options)
    return options


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` where a known name is like this one, else the list of all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}; --config needs a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} is no TOML ({error}); --config needs a TOML file") from None
    named = {name.replace("-", "_"): value for name, value in found.items()}
    known = [one.name for one in dataclasses.fields(ServeOptions)]
    for name in named:
        if name not in known:
            raise EngineError(f"{path} has {name!r}, which is no option of kvx serve{nearest(name, known)}")
    return named


def _require_sound(options: ServeOptions) -> None:
    """Everything that can be said about the options alone."""
    for name in ("prefill", "decode"):
        hosts, count = getattr(options, f"{name}_hosts"), getattr(options, name)
        if count < 1:
            raise EngineError(f"{name} is {count}; a deployment needs at least one engine of each role")
        if hosts and len(hosts) != count:
            raise EngineError(f"{name}_hosts names {len(hosts)} hosts for {count} engines; name one for each")
    if bool(options.prefill_hosts) != bool(options.decode_hosts):
        raise EngineError("prefill_hosts and decode_hosts belong together; give both or neither")
    for name in ("port", "first_port"):
        port = getattr(options, name)
        if port is not None and not 0 <= port <= 65535:
            raise EngineError(f"{name} is {port}; a port is at most 65535, and 0 stands for a free one")
    for name in ("block_size", "start_timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise EngineError(f"{name} is {value}; it needs more than 0")
    if options.device not in (None, "cpu", "cuda"):
        raise EngineError(f"device is {options.device!r}; it is cpu or cuda")
    if options.kv_space < 0:
        raise EngineError(f"kv_space is {options.kv_space}; give GiB, or 0 to have what is free measured")
    if not options.connectors:
        raise EngineError("connector is empty; give at least one name, for example nixl")
    _require_handoff(options.handoff)


def _require_handoff(given: Mapping[str, Any]) -> None:
    known = {one.name for one in dataclasses.fields(HandoffSettings)} - set(_DECIDED_HERE)
    for name in given:
        if name in _DECIDED_HERE:
            raise EngineError(f"handoff.{name} is decided by kvx serve; use {_DECIDED_HERE[name]} instead")
        if name not in known:
            raise EngineError(f"handoff has no option {name!r}{nearest(name, known)}")
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
    HandoffSettings(**values)
