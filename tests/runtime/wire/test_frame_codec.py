"""Frames: what was sent arrives, and nothing else is accepted."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import fields, replace
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from graphflow.base.addresses import is_loopback
from graphflow.errors import MessageTooLarge, ProtocolError
from graphflow.runtime.wire import array_codec
from graphflow.runtime.wire import frame_codec as wire
from graphflow.runtime.wire.array_codec import SMALL_BYTES, decode_small, encode_small, split_array
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.frame_codec import decode, decode_frames, encode
from graphflow.runtime.wire.messages import (
    KINDS,
    Chunk,
    Compute,
    Done,
    Envelope,
    Hello,
    Measured,
    Open,
    Ping,
    Spans,
    Welcome,
)

ENVELOPE = Envelope("a" * 32, 1, 0, 5, 7, 3)
COMPUTE = Compute(4, "p", {"n": 128}, ["x", "y"], True, 2.5)
CHUNK = Chunk("edge", 5, "e", "float32", [2, 3], [0, 1], 24, 0)


def repack(change: Any, message: Any = COMPUTE) -> bytes:
    """The frame of a message after `change` has had its way with the plain data in it."""
    body = {field.name: getattr(message, field.name) for field in fields(type(message))}
    kind = type(message).__name__
    plain = [kind, list(ENVELOPE), body]
    changed = change(plain) or plain
    if kind not in ("Hello", "Welcome") and isinstance(changed[-1], dict):
        changed = [*changed[:-1], list(changed[-1].values())]
    return msgpack.packb(changed)


# Messages --------------------------------------------------------------------------------------


DEEP = b"\x91" * 1000 + b"\xc0"
HEAD = msgpack.packb(ENVELOPE)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x93\xa4Read" + HEAD + b"\x92\x01" + DEEP,
        b"\x93\xa4Read" + DEEP + b"\x90",
        b"\x93" + DEEP + b"\x90\x90",
    ],
)
# From 3.12 on, Python shows a thousand levels: then their first characters are told.
def test_what_is_nested_too_deep_to_be_shown_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"RecursionError from its repr|has 1 fields|\({20}"):
        decode(frame)


@pytest.mark.parametrize(
    "message",
    [
        COMPUTE,
        CHUNK,
        replace(CHUNK, name=17),
        Ping(),
        Open(1, 0, ["tcp://127.0.0.1:7001"], 30.0),
        Done(2, ["loss"], {"/worker:0/cpu:0": 4096}),
        Spans(2, [("/worker:0/cpu:0", "matmul", 1, 2)]),
        Measured(3, {"flops": 1e9, "sizes": [1, 2], "gpu": None, "fast": True}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert decode(encode(ENVELOPE, message)) == (ENVELOPE, message)


def test_every_kind_has_a_check_for_every_field() -> None:
    for kind in KINDS.values():
        known = wire._SCHEMAS[kind.__name__]
        assert known.names == tuple(field.name for field in fields(kind))
        assert len(known._checks) == len(known.names)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_as_no_message(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=150)  # make fuzz has a million
@given(st.sampled_from(sorted(KINDS)), plain, plain, st.data())
def test_a_frame_of_any_plain_data_decodes_to_valid_fields_or_is_refused(
    kind: str, head: Any, value: Any, data: st.DataObject
) -> None:
    names = [field.name for field in fields(KINDS[kind])]
    body: Any = [data.draw(plain) for _ in names]
    if kind in ("Hello", "Welcome"):
        body = dict(zip(names, body, strict=True))
    good = msgpack.unpackb(encode(ENVELOPE, Ping()))[1]
    for frame in ([kind, head, body], [kind, good, body], [kind, good, value], value):
        try:
            envelope, message = decode(msgpack.packb(frame))
        except ProtocolError:
            continue
        assert envelope == ENVELOPE and type(message) is KINDS[kind]
        assert decode(encode(envelope, message)) == (envelope, message) or kind == "Measured"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: [["Steal", *f[1:]]][0], "unknown kind"),
        (lambda f: f[:2], "envelope and a body"),
        (lambda f: [f[0], f[1][:-1], f[2]], "Envelope"),
        (lambda f: [f[0], f[1], 1], "not a list"),
        (lambda f: [f[0], f[1], [1]], "1 fields"),
        (lambda f: f[2].pop("trace") and None, "fields"),
        (lambda f: f[2].update(extra=1), "fields"),
        (lambda f: f[2].update(trace=1), "trace"),
        (lambda f: f[2].update(request=True), "request"),
        (lambda f: f[2].update(request=-1), "request"),
        (lambda f: f[2].update(request=2**64 - 1), "request"),
        (lambda f: f[2].update(program=b"p"), "not a str"),
        (lambda f: f[2].update(deadline=math.nan), "deadline"),
        (lambda f: f[2].update(deadline=math.inf), "deadline"),
        (lambda f: f[2].update(bindings={"n": "m"}), "bindings"),
        (lambda f: f[2].update(bindings={1: 2}), "msgpack|not a string"),
        (lambda f: f[2].update(feeds="xy"), "feeds"),
        (lambda f: f[1].__setitem__(4, -1), "sequence"),
        (lambda f: f[2].update(feeds=["x"] * 70_000), "msgpack"),
        (lambda f: f[2].update(program="p" * 300_000), "msgpack"),
        (lambda f: f[2].update(program=msgpack.ExtType(5, b"")), "ext|msgpack"),
        (lambda f: f[2].update(program=msgpack.Timestamp(1)), "msgpack|ext"),
    ],
)
def test_a_field_that_is_not_what_it_declares_is_refused(change: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(repack(change))


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", id="a key twice"),
        pytest.param(b"\x93\xa2\xff\xfe\x90\x80", id="bad UTF-8"),
        pytest.param(b"\x91" * 100_000 + b"\x80", id="deep nesting"),
        pytest.param(b"\xdd\x00\x0f\xff\xf0" + b"\x80" * 0xFFFF0, id="a bomb of empty maps"),
        pytest.param((b"\xdc\xff\xff" + b"\x80" * 0xFFFF) * 12, id="a bomb of lists of maps"),
        pytest.param(b"\xc6\x7f\xff\xff\xff", id="a claim of 2 GiB"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(b"\x80\x04\x95\x10\x00\x00\x00", id="a pickle"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_hostile_frames_are_refused_in_little_memory(frame: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_plain_data_may_not_be_nested_for_ever() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    with pytest.raises(ProtocolError, match="nested"):
        decode(repack(lambda f: f[2].update(report=deep), Measured(1, {})))


def test_a_control_frame_over_the_cap_is_not_decoded_and_not_sent() -> None:
    with pytest.raises(MessageTooLarge):
        decode(bytes(wire.CONTROL_CAP + 1))
    with pytest.raises(MessageTooLarge):
        encode(ENVELOPE, replace(COMPUTE, program="p" * (wire.CONTROL_CAP + 1)))
    with pytest.raises(ProtocolError, match="plain data"):
        encode(ENVELOPE, Measured(1, {"f": object()}))


def test_only_a_chunk_has_a_second_frame() -> None:
    assert decode_frames([encode(ENVELOPE, CHUNK), b"x"])[2] == b"x"
    for frames in (
        [],
        [encode(ENVELOPE, CHUNK)],
        [encode(ENVELOPE, COMPUTE), b"x"],
        [encode(ENVELOPE, CHUNK), b"x", b"y"],
    ):
        with pytest.raises(ProtocolError):
            decode_frames(frames)


# Arrays ----------------------------------------------------------------------------------------


def travel(array: Any) -> Any:
    inbox = ChunkAssembler()
    for chunk, data in split_array("edge", 1, "e", array):
        _, message, frame = decode_frames([encode(ENVELOPE, chunk), bytes(data)])
        assert isinstance(message, Chunk) and frame is not None
        inbox.add(0, message, frame)
    return inbox.take(0, "edge", 1, "e")


dtypes = st.sampled_from(sorted(array_codec._NUMPY_DTYPES)).map(np.dtype)
shapes = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(arrays_of.arrays(dtypes, shapes), st.randoms())
def test_an_array_arrives_bit_for_bit_aligned_and_in_its_layout(array: Any, random: Any) -> None:
    axes = random.sample(range(array.ndim), array.ndim)
    sent = array.transpose(axes)
    got = travel(sent)
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert got.tobytes() == sent.tobytes() and got.flags.writeable
    assert got.ctypes.data % 64 == 0 or got.size == 0
    if sent.size > 1:
        wide = [axis for axis in range(sent.ndim) if sent.shape[axis] > 1]
        assert [got.strides[axis] for axis in wide] == [sent.strides[axis] for axis in wide]


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype=ml_dtypes.bfloat16), id="bfloat16"),
        pytest.param(np.arange(24.0).reshape(4, 6)[::2, ::3], id="strided"),
        pytest.param(np.broadcast_to(np.float32(3), (3, 2)), id="broadcast"),
        pytest.param(np.arange(5, dtype=">f4"), id="foreign byte order"),
        pytest.param(np.arange(9.0)[::-1], id="reversed"),
    ],
)
def test_special_arrays_arrive_with_their_values(array: Any) -> None:
    got = travel(array)
    assert got.dtype == array.dtype.newbyteorder("=") and (got == array).all()


def test_a_large_array_travels_in_several_chunks_without_a_copy() -> None:
    array = np.arange(3 * array_codec.CHUNK_BYTES // 8 + 5, dtype=np.int64)
    pieces = list(split_array("part", 1, 0, array))
    assert [len(data) for _, data in pieces] == [array_codec.CHUNK_BYTES] * 3 + [40]
    assert np.shares_memory(np.frombuffer(pieces[1][1], np.uint8), array)
    assert (travel(array) == array).all()


@pytest.mark.parametrize("array", [np.array([None]), np.array(["x"]), np.zeros(2, "M8[s]")])
def test_arrays_of_other_dtypes_are_not_sent(array: Any) -> None:
    with pytest.raises(ProtocolError):
        list(split_array("edge", 1, "e", array))


@pytest.mark.parametrize("message", [Hello(1, "9.9.9", 77, "3.14"), Welcome(1, "9", 7, "3", [])])
def test_versions_whose_envelopes_differ_can_tell_each_other(message: Any) -> None:
    assert decode(repack(lambda f: f[1].append("of a later version"), message))[1] == message
    assert decode(repack(lambda f: f[1].pop() and None, message))[1] == message
    for shorten in (lambda f: f[1].clear(), lambda f: f[1].__delitem__(slice(3, None))):
        with pytest.raises(ProtocolError):
            decode(repack(shorten, message))
    with pytest.raises(ProtocolError, match="Envelope"):
        decode(repack(lambda f: f[1].append("of a later version"), Ping()))


# Small arrays inside messages ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_a_small_array_inside_a_message_arrives_bit_for_bit(dtype: str, shape: Any) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    sent = encode_small("x", array)
    assert sent is not None
    message = Compute(1, "p", {}, [], False, 1.0, -1, [sent])
    _, came = decode(encode(ENVELOPE, message))
    assert isinstance(came, Compute)
    name, back = decode_small(came.small[0])
    assert name == "x" and array_codec.is_intact(came.small[0])
    assert back.dtype == array.dtype and back.shape == shape and (back == array).all()
    assert back.flags.c_contiguous and back.flags.writeable
    assert not back.size or back.ctypes.data % 64 == 0
    name, back = decode_small(sent, aligned=False)
    assert name == "x" and back.dtype == array.dtype and back.shape == shape
    assert (back == array).all() and back.flags.c_contiguous and back.flags.writeable


def test_an_array_of_another_order_travels_in_c_order() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    sent = encode_small("x", array)
    assert sent is not None and (decode_small(sent)[1] == array).all()


def test_a_large_array_does_not_go_inside_a_message() -> None:
    assert encode_small("x", np.zeros(SMALL_BYTES, np.uint8)) is None
    assert encode_small("x", np.zeros(SMALL_BYTES - 1, np.uint8)) is not None


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (["x", "object", [1]], b"12345678"),
        (["x", "O", [1]], b"12345678"),
        (["x", "float32", [2]], b"1234"),
        (["x", "float32", [3]], bytes(8)),
        (["x", "float32", [1 << 40, 1 << 40]], b""),
        (["x", "float32", [2**62, 0]], b""),
        (["x", "float32", [2**40, 2**40, 0]], b""),
        (["x", "float32", [1] * 33], b"1234"),
        (["x", "V8", [1]], b"12345678"),
        (["x", "float32", [-1]], b""),
        (["x", "float32"], b"1234"),
        (["x", 32, [1]], b"1234"),
        ([1.5, "float32", [1]], b"1234"),
        ([True, "float32", [1]], b"1234"),
        ({"x": 1}, b"1234"),
        (["x" * 2000, "float32", [1]], b"1234"),
        ("x", b""),
    ],
)
def test_a_small_array_that_contradicts_itself_is_refused(header: Any, data: bytes) -> None:
    packed = msgpack.packb(header)
    body = len(packed).to_bytes(2, "little") + packed + data
    with pytest.raises(ProtocolError) as caught:
        decode_small(array_codec.checksum(body).to_bytes(8, "little") + body)
    assert "wrong checksum" not in str(caught.value)


@pytest.mark.parametrize("sent", [b"", bytes(9), bytes(8) + b"\xff\xff", bytes(30)])
def test_a_small_array_without_a_header_is_refused(sent: bytes) -> None:
    assert not array_codec.is_intact(sent)
    with pytest.raises(ProtocolError):
        decode_small(sent)


def test_a_small_array_of_which_any_bit_is_flipped_is_not_intact() -> None:
    sent = encode_small("x", np.arange(3.0))
    assert sent is not None and array_codec.is_intact(sent)
    for bit in range(8 * len(sent)):
        damaged = bytearray(sent)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not array_codec.is_intact(bytes(damaged))
        for aligned in (True, False):
            with pytest.raises(ProtocolError):
                decode_small(bytes(damaged), aligned=aligned)


@pytest.mark.parametrize("sent", [["text"], [1], [b"1234", "text"], [bytes(2 * SMALL_BYTES)], b""])
def test_a_message_with_what_is_no_small_array_is_refused(sent: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(repack(lambda f: f[2].update(small=sent)))


def test_an_array_with_a_very_long_name_does_not_go_inside_a_message() -> None:
    assert encode_small("x" * 2000, np.zeros(3)) is None


# Pieces for another host -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "far"),
    [
        ("tcp://127.0.0.1:7001", False),
        ("tcp://localhost:7001", False),
        ("tcp://[::1]:7001", False),
        ("tcp://10.0.0.1:7001", True),
        ("tcp://host-127.example:7001", True),
    ],
)
def test_an_address_beyond_loopback_counts_as_far(address: str, far: bool) -> None:
    assert is_loopback(address) is not far


def test_an_array_for_another_host_goes_in_small_pieces_and_arrives_whole() -> None:
    array = np.arange(5 * array_codec.FAR_CHUNK_BYTES // 8 + 3, dtype=np.int64)
    inbox = ChunkAssembler()
    pieces = list(split_array("edge", 1, 2, array, far=True))
    assert max(len(data) for _, data in pieces) == array_codec.FAR_CHUNK_BYTES and len(pieces) == 6
    assert [inbox.add(0, chunk, data) for chunk, data in pieces] == [False] * 5 + [True]
    assert (inbox.take(0, "edge", 1, 2) == array).all()
