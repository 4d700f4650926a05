"""Messages of the side channel: what is understood, what is refused, and that nothing else comes through."""

from __future__ import annotations

import dataclasses
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import LayoutError, PeerMismatch
from kvx.geometry import GroupGeometry, HeadRange
from kvx.handshake import (
    MOST_BLOCKS,
    Claim,
    Fetch,
    Fetched,
    Hello,
    RefusedMessage,
    Release,
    Status,
    StatusReply,
    Welcome,
    decode_reply,
    decode_request,
    descriptor,
    encode,
    welcome,
)
from kvx.peer import EngineInfo, PeerDescriptor, require_compatible
from kvx.seal import REQUEST_LIMIT_BYTES, RequestSeal
from kvx.secret import Secret
from kvx.ticket import LONGEST_TICKET

GROUP = GroupGeometry(
    name="full", kind="full_attention", layers=("a", "b"), layer_offsets_bytes=(0, 1 << 20), block_stride_bytes=1024,
    kernel_block_stride_bytes=1024, head_stride_bytes=512, token_stride_bytes=32, block_size_tokens=16,
    kernel_block_size_tokens=16, heads=HeadRange(0, 2, 4), content_bytes=32, dtype="float32",
)  # fmt: skip
INFO = EngineInfo(engine_id="e", model="m", dtype="float32", kv_cache_dtype="auto")
OURS = PeerDescriptor(
    info=INFO, instance="i", generation=2, layout="LBHNC", groups=(GROUP,), num_blocks=10, verify="off",
    digest="d", connectors={"nixl": b"\x00\xff"},
)  # fmt: skip


def changed(**fields: object) -> PeerDescriptor:
    return dataclasses.replace(OURS, info=msgspec.structs.replace(INFO, **fields))


@pytest.mark.parametrize(
    "request_",
    [
        Hello(sequence=1, engine_id="e"),
        Claim(sequence=2, request_id="r", reader="x", wait_s=1.5),
        Release(sequence=3, request_id="r", reader="x"),
        Status(sequence=4),
        Fetch(sequence=5, engine_id="e", host="h", port=5600, request_id="r", num_tokens=16, ticket="t"),
    ],
)
def test_requests_come_back_as_they_were(request_: Hello | Claim | Release | Status | Fetch) -> None:
    assert decode_request(encode(request_)) == request_


def test_what_was_fetched_comes_back_as_it_was() -> None:
    fetched = Fetched(sequence=5, request_id="r", failure="because", host="h", port=5600, ticket="t")
    assert decode_reply(encode(fetched)) == fetched


def test_a_descriptor_comes_back_as_it_was() -> None:
    reply = decode_reply(encode(welcome(5, OURS)))
    assert isinstance(reply, Welcome)
    assert descriptor(reply) == OURS


def test_a_malformed_group_of_a_peer_is_refused() -> None:
    reply = welcome(5, OURS)
    reply.groups[0]["block_size_tokens"] = -1
    with pytest.raises(LayoutError):
        descriptor(reply)


def test_a_reply_is_no_request_and_an_unknown_field_of_the_engine_is_refused() -> None:
    with pytest.raises(RefusedMessage, match="not a side channel request"):
        decode_request(encode(StatusReply(sequence=1, status={})))
    raw = msgspec.msgpack.decode(encode(welcome(5, OURS)))
    raw["info"]["extra"] = 1
    with pytest.raises(RefusedMessage, match="unknown field `extra`") as raised:
        decode_reply(msgspec.msgpack.encode(raw))
    assert raised.value.sequence == 5


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(RefusedMessage):
            decode(data)


@given(st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
                    max_leaves=10))  # fmt: skip
def test_any_msgpack_value_in_a_field_is_refused_or_fits(value: object) -> None:
    data = {"version": 1, "sequence": 1, "kind": "claim", "request_id": "r", "reader": value, "wait_s": 1.0}
    try:
        decoded = decode_request(msgspec.msgpack.encode(data))
    except RefusedMessage:
        assert not isinstance(value, str)
    else:
        assert isinstance(decoded, Claim)
        assert decoded.reader == value


EMPTY_LISTS = b"\xdd" + (1 << 20).to_bytes(4) + b"\x90" * (1 << 20)


def with_field(data: bytes, name: str, value: bytes) -> bytes:
    """A message's bytes with one field more."""
    return bytes([data[0] + 1]) + data[1:] + msgspec.msgpack.encode(name) + value


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        ({"kind": "claimed", "request_id": "r"}, "blocks", EMPTY_LISTS),
        (
            {"kind": "claimed", "request_id": "r"},
            "blocks",
            b"\x91\xdd" + (MOST_BLOCKS + 1).to_bytes(4) + b"\x01" * (MOST_BLOCKS + 1),
        ),
        ({"kind": "claimed", "request_id": "r"}, "blocks", b"\x91\x91\xcf\x80" + bytes(7)),
        ({"kind": "welcome", "instance": "i"}, "groups", EMPTY_LISTS.replace(b"\x90", b"\x80")),
        ({"kind": "welcome", "instance": "i"}, "groups", b"\x91\x81\xa1a" + EMPTY_LISTS),
        ({"kind": "welcome", "instance": "i"}, "connectors", EMPTY_LISTS.replace(b"\x90", b"\x80")),
        ({"kind": "statusreply"}, "status", b"\x81\xa1a" + EMPTY_LISTS),
    ],
)
def test_what_a_reply_may_become_in_memory_is_limited(message: dict[str, str], field: str, value: bytes) -> None:
    data = msgspec.msgpack.encode({**message, "version": 1, "sequence": 7})
    tracemalloc.start()
    with pytest.raises(RefusedMessage):
        decode_reply(with_field(data, field, value))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 4 << 20


def test_a_request_is_small_and_the_longest_one_fits() -> None:
    longest = Claim(
        sequence=2**62 - 1, request_id="\U0001f600" * 1024, reader="\U0001f600" * 1024, wait_s=1.0,
        ticket="x" * LONGEST_TICKET,
    )  # fmt: skip
    sealed, _ = RequestSeal(Secret(b"a secret of tests")).seal(1, encode(longest))
    assert len(sealed) < REQUEST_LIMIT_BYTES / 2
    assert decode_request(encode(longest)) == longest
    with pytest.raises(
        RefusedMessage, match=f"has {REQUEST_LIMIT_BYTES + 1} bytes, the limit is {REQUEST_LIMIT_BYTES}"
    ):
        decode_request(b"\x00" * (REQUEST_LIMIT_BYTES + 1))


def test_another_version_is_named() -> None:
    data = msgspec.msgpack.encode({"version": 9, "sequence": 3, "kind": "new", "field": 1})
    with pytest.raises(RefusedMessage, match="protocol 9 found, 1 spoken here") as raised:
        decode_request(data)
    assert raised.value.sequence == 3


def test_engines_alike_are_compatible_whatever_their_ranks() -> None:
    require_compatible(OURS, OURS)
    require_compatible(OURS, changed(engine_id="other", tp_rank=1, tp_size=2))


@pytest.mark.parametrize("field", ["model", "dtype", "kv_cache_dtype", "pp_size", "pp_rank"])
def test_one_difference_is_named_with_both_values(field: str) -> None:
    other = 3 if field.startswith("pp") else "other"
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(OURS, changed(**{field: other}))
    assert (raised.value.field, raised.value.ours, raised.value.theirs) == (field, getattr(INFO, field), other)


def test_every_difference_is_named() -> None:
    theirs = dataclasses.replace(changed(model="other", dtype="bfloat16"), groups=())
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(OURS, theirs)
    assert raised.value.field == "model, dtype, layer groups"
    assert str(raised.value).splitlines() == [
        "the two engines cannot exchange KV:",
        "  refused: model differs: here 'm', at the peer 'other'; start both engines alike",
        "  refused: dtype differs: here 'float32', at the peer 'bfloat16'; start both engines alike",
        "  refused: layer groups differs: here ['full'], at the peer []; start both engines alike",
    ]
    with pytest.raises(PeerMismatch, match="verify differs"):
        require_compatible(dataclasses.replace(OURS, verify="all"), OURS)
    require_compatible(OURS, dataclasses.replace(OURS, verify="all"))


def test_another_digest_function_is_refused_by_name_where_digests_are_compared() -> None:
    ours, theirs = (dataclasses.replace(OURS, verify="all", digest=name) for name in ("new.2", "old.1"))
    with pytest.raises(PeerMismatch, match="use one version of kvx, or set verify to off") as raised:
        require_compatible(ours, theirs)
    assert (raised.value.field, raised.value.ours, raised.value.theirs) == ("digest", "new.2", "old.1")
    require_compatible(dataclasses.replace(ours, verify="off"), theirs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "sliding_window", "sliding_window_tokens": 64}, "kind of layer group full, sliding_window_tokens of"),
        ({"layers": ("a", "c")}, "layers of layer group full"),
        ({"dtype": "bfloat16"}, "dtype of layer group full"),
        ({"content_bytes": 16}, "content_bytes of layer group full"),
        ({"heads": HeadRange(0, 2, 8)}, "heads.total of layer group full"),
        ({"page_format": "halves"}, "page_format of layer group full"),
    ],
)
def test_a_difference_of_a_layer_group_is_named_at_the_handshake(change: dict[str, object], field: str) -> None:
    theirs = dataclasses.replace(OURS, groups=(dataclasses.replace(GROUP, **change),))
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(OURS, theirs)
    assert raised.value.field.startswith(field)


def test_what_is_bridged_is_told_apart_from_what_is_refused() -> None:
    longer = dataclasses.replace(GROUP, block_size_tokens=32, block_stride_bytes=2048)
    theirs = dataclasses.replace(
        changed(tp_size=2), groups=(longer,), layout="BLNHC", connectors={"nixl": b"", "ipc": b""}, verify="all",
        digest="new", num_blocks=99, generation=7,
    )  # fmt: skip
    bridged = [
        "block_size_tokens of layer group full", "tp_size", "layout", "verify", "digest", "connectors"
    ]  # fmt: skip
    assert [item.field for item in require_compatible(OURS, theirs)] == bridged
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(OURS, dataclasses.replace(theirs, info=msgspec.structs.replace(theirs.info, model="other")))
    assert (raised.value.field, raised.value.ours, raised.value.theirs) == ("model", "m", "other")
    first, refused, *others = str(raised.value).splitlines()
    assert first == "the two engines cannot exchange KV:"
    assert refused == "  refused: model differs: here 'm', at the peer 'other'; start both engines alike"
    assert [line.split(" differs")[0] for line in others] == [f"  bridged: {field}" for field in bridged]


def test_groups_that_differ_alike_share_a_line_and_all_fits_on_a_screen() -> None:
    def engine(**fields: object) -> PeerDescriptor:
        return dataclasses.replace(
            OURS, groups=tuple(dataclasses.replace(GROUP, name=f"group{index}", **fields) for index in range(3))
        )

    with pytest.raises(PeerMismatch, match=r"^dtype of layer groups group0, group1, group2 differs"):
        require_compatible(engine(), engine(dtype="bfloat16"))
    many = tuple(f"model.layers.{index}.self_attn.attn" for index in range(60))
    theirs = engine(layers=many, layer_offsets_bytes=tuple(range(0, 60 << 20, 1 << 20)))
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(engine(), theirs)
    assert len(str(raised.value)) < 300
    assert "'60 layers, model.layers.0.self_attn.attn and 59 more only here'" in str(raised.value)
    apart = [
        dataclasses.replace(OURS, groups=tuple(
            dataclasses.replace(GROUP, name=f"g{index}", content_bytes=size + 4 * index, token_stride_bytes=1000,
                                head_stride_bytes=1 << 20, block_stride_bytes=1 << 18)
            for index in range(30)
        )) for size in (32, 36)
    ]  # fmt: skip
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(*apart)
    lines = str(raised.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "  and 11 more"


def test_differences_of_engines_and_groups_are_named_together() -> None:
    packed = dataclasses.replace(GROUP, page_format="halves")
    ours = dataclasses.replace(OURS, groups=(packed,), verify="all")
    other = dataclasses.replace(
        packed, layers=("a", "c"), block_size_tokens=32, kernel_block_size_tokens=32, block_stride_bytes=2048,
        head_stride_bytes=1024,
    )  # fmt: skip
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(ours, dataclasses.replace(changed(model="other"), groups=(other,)))
    assert raised.value.field == (
        "model, layers of layer group full, block_size_tokens of layer group full, "
        "kernel_block_size_tokens of layer group full, verify"
    )
    assert (raised.value.ours["model"], raised.value.theirs["model"]) == ("m", "other")  # type: ignore[index]


def test_an_owner_must_hold_all_heads_of_its_reader() -> None:
    def held(start: int, count: int, tp_size: int) -> PeerDescriptor:
        group = dataclasses.replace(GROUP, heads=HeadRange(start, count, 4), block_stride_bytes=2048)
        return dataclasses.replace(changed(tp_size=tp_size), groups=(group,))

    half, other_half, whole = held(0, 2, 2), held(2, 2, 2), held(0, 4, 1)
    require_compatible(half, whole)
    require_compatible(other_half, whole)
    with pytest.raises(PeerMismatch, match="at the peer") as raised:
        require_compatible(whole, half)
    assert raised.value.field == "heads, tp_size"
    assert raised.value.ours == {"heads": "heads 0 to 3 of 4", "tp_size": 1}
    assert raised.value.theirs == {"heads": "heads 0 to 1 of 4", "tp_size": 2}
    with pytest.raises(PeerMismatch) as raised:
        require_compatible(half, other_half)
    assert raised.value.field == "heads", "the port of another rank"
