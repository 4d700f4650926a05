"""Where the engines of a pair run: other network namespaces of this machine, or anywhere that a command leads to."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvx.errors import EngineError

HOST = "127.0.0.1"
PREFILL, DECODE = "prefill", "decode"
OPTIONS = "options"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one engine runs, and how it is reached from here and by its peer.

    `prefix`: words before its command (see EngineSettings). `host`: where its HTTP server listens.
    `side_channel_host`: where the other engine finds it, and where its connectors listen. `environment`: its own.
    """

    prefix: tuple[str, ...] = ()
    host: str = HOST
    side_channel_host: str = HOST
    environment: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """For a report."""
        return {
            "prefix": list(self.prefix),
            "host": self.host,
            "side_channel_host": self.side_channel_host,
            "environment": dict(self.environment),
        }


def read_places(path: Path) -> tuple[dict[str, Place], dict[str, Any]]:
    """The places by role, and more options of `kv_connector_extra_config`, from a TOML file.

    Triggers of EngineError: it cannot be read, or has something that kvx does not know; or a secret, since reports
    repeat the file.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}; --places needs a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EngineError(f"{path} is no TOML ({error}); --places needs a TOML file") from error
    _require_known(path, "", found, (PREFILL, DECODE, OPTIONS))
    for name, table in found.items():
        if not isinstance(table, dict):
            raise EngineError(f"{path} has {name} = {table!r}; it needs a table [{name}]")
    places = {role: _place(path, role, found[role]) for role in (PREFILL, DECODE) if role in found}
    return places, dict(found.get(OPTIONS, {}))


def _place(path: Path, role: str, table: Mapping[str, Any]) -> Place:
    _require_known(path, f" in [{role}]", table, tuple(Place.__dataclass_fields__))
    given = dict(table)
    prefix, environment = given.pop("prefix", []), given.pop("environment", {})
    if not isinstance(prefix, list) or not all(isinstance(word, str) for word in prefix):
        raise EngineError(f"{path} has prefix = {prefix!r} in [{role}]; it needs a list of words")
    if not isinstance(environment, dict) or not all(isinstance(value, str) for value in environment.values()):
        raise EngineError(f"{path} has environment = {environment!r} in [{role}]; it needs a table of texts")
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise EngineError(f"{path} has {name} = {value!r} in [{role}]; it needs an address")
    if "KVX_SECRET" in environment:
        raise EngineError(f"{path} has KVX_SECRET in [{role}], and reports repeat it; set it where kvx verify runs")
    return Place(prefix=tuple(prefix), environment=environment, **given)


def _require_known(path: Path, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise EngineError(f"{path} has {name!r}{where}, which kvx does not know; it knows {', '.join(known)}")
