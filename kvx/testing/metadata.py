"""Metadata: what a peer sends is read strictly, whatever it is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvx.connector import METADATA_VERSION, ConnectorMetadata
from kvx.errors import ConnectorError, HandshakeError
from kvx.testing.kit import Kit
from kvx.testing.memory import REGISTERED
from kvx.testing.pair import Pair


class MetadataTests(Kit):
    """Each refusal leaves the connector as it was: it moves bytes afterwards."""

    def test_metadata_says_what_is_registered(self, pair: Pair) -> None:
        wire = msgspec.msgpack.decode(pair.ours.metadata(), type=ConnectorMetadata)
        assert (wire.version, wire.connector) == (METADATA_VERSION, pair.ours.name)
        assert wire.generation == pair.ours.generation
        if self.capabilities.reaches_processes:  # else it tells of memory of its own
            assert wire.base_address == pair.memory.base_address
            assert wire.regions == list(REGISTERED)

    def test_garbage_is_refused(self, pair: Pair) -> None:
        valid = pair.peer_metadata
        rng = np.random.default_rng(3)
        cut = [valid[:length] for length in sorted(rng.integers(0, len(valid), 16).tolist())]
        others = [b"\xc1", b"\x80", b"\x90", b"\xff" * 64, valid + b"\0", valid + valid, b"\x91" * 5000 + b"\x90"]
        for garbage in [b"", *cut, *others, *(rng.bytes(length) for length in (1, 7, 300))]:
            with pytest.raises(HandshakeError, match="unreadable metadata"):
                pair.ours.connect(garbage)
        _require_works(self, pair)

    def test_metadata_of_another_connector_or_version_is_refused(self, pair: Pair) -> None:
        for change in ({"connector": "another"}, {"connector": ""}, {"version": METADATA_VERSION + 1}):
            with pytest.raises(HandshakeError, match="needed"):
                pair.ours.connect(_changed(pair.peer_metadata, **change))
        _require_works(self, pair)

    def test_fields_that_cannot_be_are_refused(self, pair: Pair) -> None:
        changes: tuple[dict[str, object], ...] = (
            {"regions": [[0, 64], [32, 64]]},
            {"regions": [[-64, 128]]},
            {"regions": [[0, 0]]},
            {"regions": [[0, -1]]},
            {"regions": [[0, 1 << 63]]},
            {"regions": "all"},
            {"base_address": -1},
            {"base_address": None},
            {"generation": "new"},
            {"library": "text"},
            {"more": 1},
        )
        for change in changes:
            with pytest.raises(HandshakeError, match="unreadable metadata"):
                pair.ours.connect(_changed(pair.peer_metadata, **change))
        _require_works(self, pair)

    def test_garbage_in_the_librarys_own_part_is_refused(self, pair: Pair) -> None:
        library: bytes = msgspec.msgpack.decode(pair.peer_metadata)["library"]
        garbage = [library + b"\0", b"\xc1", b"\xff" * 100, b"\x91" * 5000 + b"\x90"]
        if library:
            garbage += [library[:-1], library[: len(library) // 2], b""]
        for part in garbage:
            with pytest.raises(ConnectorError):
                pair.ours.connect(_changed(pair.peer_metadata, library=part))
        _require_works(self, pair)


def _require_works(kit: Kit, pair: Pair) -> None:
    assert pair.remote.connected, "a refused handshake must not end another peer"
    for op in kit.operations():
        pair.move(op, [(0, 0, 4096)])
    pair.check()


def _changed(metadata: bytes, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(metadata), **fields})
