"""What goes over the wire, pinned to its version: another schema under the same number turns this red (ADR 17).

`wire_versions.json` holds the schema of each version. After a change on purpose, raise the version, and write the file
anew with `python tests/unit/test_wire_versions.py`; what it has of released versions never changes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from kvx_connectors.ipc import IpcMetadata
from kvx_connectors.mooncake import MooncakeMetadata
from kvx_connectors.nixl import NixlMetadata

from kvx import connector, seal, ticket
from kvx.geometry import GroupGeometry
from kvx.handshake import Reply, Request

PINNED = Path(__file__).with_name("wire_versions.json")


def wires() -> dict[str, tuple[Any, ...]]:
    """Everything that one version number stands for."""
    return {
        f"side channel {seal.PROTOCOL_VERSION}": (*get_args(Request), *get_args(Reply), seal.Envelope, GroupGeometry),
        f"ticket {ticket.VERSION}": (ticket.Ticket,),
        f"connector metadata {connector.METADATA_VERSION}": (
            connector.ConnectorMetadata, IpcMetadata, MooncakeMetadata, NixlMetadata,
        ),
    }  # fmt: skip


def schema_of(types: tuple[Any, ...]) -> Any:
    """Fields, types and limits, and nothing that is only for readers."""
    return _without_text(msgspec.json.schema_components(types)[1])


def _without_text(found: Any) -> Any:
    if isinstance(found, list):
        return [_without_text(item) for item in found]
    if isinstance(found, dict):
        return {name: _without_text(value) for name, value in sorted(found.items()) if name != "description"}
    return found


def test_each_version_has_the_schema_that_it_had() -> None:
    pinned = json.loads(PINNED.read_text())
    for name, types in wires().items():
        assert name in pinned, f"{name} is new: write its schema down (see above)"
        assert schema_of(types) == pinned[name], f"{name} has changed: raise its version (see above)"


def test_a_field_more_and_another_limit_are_another_schema() -> None:
    short, longer = (Annotated[str, msgspec.Meta(max_length=length)] for length in (10, 20))
    fields: list[list[tuple[str, type]]] = [[("a", short)], [("a", longer)], [("a", short), ("b", str)]]
    schemas = [json.dumps(schema_of((msgspec.defstruct("Message", given),))) for given in fields]
    assert len(set(schemas)) == 3


if __name__ == "__main__":
    kept = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    now = {name: schema_of(types) for name, types in wires().items()}
    PINNED.write_text(json.dumps({**kept, **now}, indent=1, sort_keys=True) + "\n")
