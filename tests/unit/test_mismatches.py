"""Two engines that differ in one field: refused by name on both sides, both alive, and the next right peer is welcome.

Real `HandoffWorker`s over the network and the library of `handoff_world`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import msgspec
import pytest
from handoff_world import Engine, World
from simulated_network import InFlight
from test_pulls import LAYER

from kvx.geometry import HeadRange

PACKED = dataclasses.replace(LAYER, page_format="halves")
LONGER = {
    "block_size_tokens": 32,
    "kernel_block_size_tokens": 32,
    "block_stride_bytes": 1024,
    "head_stride_bytes": 1024,
}


def layer(**fields: Any) -> dict[str, Any]:
    return {"layer": dataclasses.replace(LAYER, **fields)}


MISMATCHES: dict[str, tuple[dict[str, Any], str, tuple[str, str]]] = {
    "model": ({"info": {"model": "other"}}, "model", ("m", "other")),
    "dtype": ({"info": {"dtype": "bfloat16"}}, "dtype", ("float32", "bfloat16")),
    "KV dtype": ({"info": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype", ("auto", "fp8")),
    "KV element": (layer(dtype="bfloat16"), "dtype of layer group full", ("float32", "bfloat16")),
    "head count": (layer(heads=HeadRange(0, 1, 2)), "heads.total of layer group full", ("1", "2")),
    "head size": (layer(content_bytes=16), "content_bytes of layer group full", ("32", "16")),
    "layer count": (
        layer(layers=("a", "b"), layer_offsets_bytes=(0, 512)),
        "layers of layer group full",
        ("1 layers", "2 layers, b only here"),
    ),
    "kind": (layer(kind="mla"), "kind of layer group full", ("full_attention", "mla")),
    "layer groups": (layer(name="other"), "layer groups", ("['full']", "['other']")),
    "layout": ({"layout": "LHBNC"}, "layout", ("LBHNC", "LHBNC")),
    "unknown layout": ({"layout": "XBHNC"}, "layout", ("LBHNC", "XBHNC")),
    "page format": ({"layer": PACKED}, "page_format of layer group full", ("None", "halves")),
    "speculation": ({"info": {"speculation": "eagle with d"}}, "speculation", ("", "eagle with d")),
    "pipeline stages": ({"info": {"pp_size": 2}}, "pp_size", ("1", "2")),
    "connectors": ({"connector": "something"}, "connectors", ("simulated", "something")),
}


def hand_off(owner: Engine, reader: Engine) -> str:
    """Its outcome, and the reason where it failed."""
    world = owner.world
    owner.prefill(2)
    held = list(world.held.values())[-1]
    reader.pull(owner, held, 0, gives_up=False)
    pulled = list(reader.pulls)[-1]
    for _ in range(8):
        world.settle()
        world.deliver_all()
        for read in reader.library.reads:
            world.move(read, len(read.pieces))
            read.is_over = True
        world.pass_time(0.3)
    outcome = dict(reader.outcomes).get(pulled, "nothing")
    owner.worker.drop(held.name)
    world.settle()
    return outcome if outcome == "received" else f"{outcome}: {reader.reasons.get(pulled)}"


def require_refused(owner: Engine, reader: Engine, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """By the reader to its engine, and in the owner's log."""
    caplog.clear()
    reason = hand_off(owner, reader)
    assert reason.startswith("refused: ")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "kvx.holder"]
    for word in words:
        assert word in reason
        assert word in said


def require_all_well(world: World) -> None:
    """The one pair that fits hands off, there and back; nobody has seen an error of its own."""
    assert hand_off(world.prefill, world.decode) == "received"
    assert hand_off(world.decode, world.prefill) == "received"
    for engine in world.engines.values():
        assert engine.is_alive
        assert engine.worker.status()["side_channel"]["internal_errors"] == 0


@pytest.mark.parametrize("has_secret", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_one_field_that_differs_is_refused_by_name_on_both_sides(
    name: str, has_secret: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields, field, (right, wrong) = MISMATCHES[name]
    world = World(verify=False, has_secret=has_secret)
    other = world.add("other", "127.0.0.3", 70.0, **fields)
    for owner, reader in ((other, world.decode), (world.prefill, other)):
        require_refused(owner, reader, caplog, f"{field} differs", right, wrong)
        assert f"engine {reader.name!r} cannot read from this one" in caplog.text
    assert other.worker.status()["messages_refused"] == {"mismatch": 1}
    require_all_well(world)
    world.close()


def test_blocks_of_packed_pages_are_refused_where_their_sizes_differ(caplog: pytest.LogCaptureFixture) -> None:
    world = World(verify=False, has_secret=False, layer=PACKED)
    other = world.add("other", "127.0.0.3", 70.0, layer=dataclasses.replace(PACKED, **LONGER))
    words = (
        "refused: block_size_tokens of layer group full differs",
        "refused: kernel_block_size_tokens of layer group full differs",
        "pages packed as halves cannot be split",
    )
    require_refused(other, world.decode, caplog, *words)
    require_refused(world.prefill, other, caplog, *words)
    require_all_well(world)
    world.close()


def test_digests_are_refused_that_nobody_takes(caplog: pytest.LogCaptureFixture) -> None:
    """The other way round there is nothing to refuse: who compares none needs none."""
    world = World(verify=False, has_secret=False)
    other = world.add("other", "127.0.0.3", 70.0, settings={"verify": "all"})
    require_refused(world.prefill, other, caplog, "verify differs", "'all'", "'off'")
    assert hand_off(other, world.decode) == "received"
    require_all_well(world)
    world.close()


def test_another_protocol_version_is_refused_by_name_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    world = World(verify=False, has_secret=False)
    other = world.add("other", "127.0.0.3", 70.0)

    def translate(message: InFlight) -> bytes:
        """What one side says to the other is of a version that the other does not speak."""
        connection = message.connection
        is_between = other.host in connection.endpoint or connection.dealer in [
            link.socket for link in other.worker._puller.links
        ]
        if not is_between:
            return message.data
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(message.data), "version": 9})

    world.network.translate = translate
    for owner, reader in ((other, world.decode), (world.prefill, other)):
        require_refused(owner, reader, caplog, "side channel protocol 9 found, 1 spoken here; use one version of kvx")
    require_all_well(world)
    world.close()


def test_what_is_bridged_is_said_once_and_refuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvx.owners")
    world = World(verify=False, has_secret=False)
    other = world.add("other", "127.0.0.3", 70.0, layout="BLNHC", info={"tp_size": 2})
    assert [hand_off(other, world.decode) for _ in range(2)] == ["received"] * 2
    said = [record.getMessage() for record in caplog.records if "engine other differs" in record.getMessage()]
    assert said == [
        "engine other differs: bridged: tp_size differs: here 1, at the peer 2; "
        "bridged: layout differs: here 'LBHNC', at the peer 'BLNHC'"
    ]
    world.close()
