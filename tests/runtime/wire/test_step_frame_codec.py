"""Frames of a step: what goes in comes out, and what is none is refused."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import ProtocolError
from graphflow.runtime.wire import array_codec
from graphflow.runtime.wire import frame_codec as wire
from graphflow.runtime.wire import step_frame_codec as packed
from graphflow.runtime.wire.messages import (
    KINDS,
    Chunk,
    Compute,
    Done,
    Envelope,
    Message,
    Ping,
    Tensor,
    replace_fields,
)

ENVELOPE = Envelope("a" * 32, 1, -1, 5, 7, 3, "b" * 32)
ARRAY = array_codec.encode_small("x", np.arange(4, dtype="float32"))
assert ARRAY is not None
COMPUTE = Compute(4, "p", {"n": 128, "@draws": 3}, ["y"], False, 2.5, 4, [ARRAY, b"", ARRAY])
CHUNK = Chunk("edge", 5, 3, "float32", [2, 3], [1, 0], 24, 0, 7)
STEP = [COMPUTE, Done(4, [], {}, [ARRAY]), Done(5, [], {}), CHUNK, Tensor(ARRAY)]

counts = st.integers(0, 2**63 - 1)
numbers = st.integers(-(2**63), 2**63 - 1)
words = st.text(max_size=40)
arrays = st.lists(st.binary(max_size=50), max_size=5)
envelopes = st.builds(Envelope, words, counts, numbers, counts, counts, counts, words)
messages = st.one_of(
    st.builds(
        Compute, counts, words, st.dictionaries(words, numbers, max_size=5),
        st.lists(words, max_size=4), st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False), numbers, arrays, numbers, st.booleans(),
    ),
    st.builds(Done, counts, st.just([]), st.just({}), arrays),
    st.builds(Tensor, st.binary(max_size=100)),
    st.builds(
        Chunk, words, counts, counts | words, words, st.lists(counts, max_size=4),
        st.lists(counts, max_size=4), counts, counts, counts, counts, counts,
    ),
)  # fmt: skip


@given(envelopes, messages)
def test_a_message_of_a_step_comes_out_as_it_went_in(envelope: Envelope, message: Message) -> None:
    frame = packed.pack(envelope, message)
    assert frame is not None and frame[0] == packed.MARK
    for form in (frame, memoryview(frame), bytearray(frame)):
        assert packed.unpack(form) == (envelope, message)
    assert wire.decode(wire.encode(envelope, message)) == (envelope, message)


@pytest.mark.parametrize("message", STEP)
def test_a_step_is_told_in_packed_frames(message: Message) -> None:
    assert wire.encode(ENVELOPE, message)[0] == packed.MARK


@pytest.mark.parametrize(
    "message",
    [
        Ping(),
        Done(4, ["0"], {}),
        Done(4, [], {"/worker:0/cpu:0": 12}),
        replace_fields(COMPUTE, feeds=["x" * 2000]),
        replace_fields(COMPUTE, bindings={str(i): i for i in range(1000)}),
        replace_fields(CHUNK, name="e" * 2000),
    ],
)
def test_what_is_unusual_goes_as_all_messages_do(message: Message) -> None:
    assert packed.pack(ENVELOPE, message) is None
    assert wire.decode(wire.encode(ENVELOPE, message)) == (ENVELOPE, message)


def test_a_long_name_of_a_session_goes_as_all_messages_do() -> None:
    envelope = ENVELOPE._replace(session="s" * 2000)
    assert packed.pack(envelope, COMPUTE) is None
    assert wire.decode(wire.encode(envelope, COMPUTE)) == (envelope, COMPUTE)


@pytest.mark.parametrize(
    "message",
    [
        replace_fields(COMPUTE, request=1 << 64),
        replace_fields(COMPUTE, deadline="soon"),
        replace_fields(COMPUTE, bindings={"n": "many"}),
        replace_fields(COMPUTE, bindings={"n": 1 << 70}),
        replace_fields(STEP[1], request=None),
        replace_fields(CHUNK, offset=1 << 64),
        replace_fields(CHUNK, nbytes=-1),
        replace_fields(CHUNK, shape=[2, 1 << 64]),
        replace_fields(CHUNK, axes=0),
    ],
)
def test_what_is_no_number_is_refused_by_one_of_both(message: Message) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(ENVELOPE, message))


@pytest.mark.parametrize("message", STEP)
def test_a_frame_that_ends_early_is_refused(message: Message) -> None:
    frame = wire.encode(ENVELOPE, message)
    rest = ARRAY if isinstance(message, Tensor) else b""  # of which nothing says how long it is
    for end in range(1, len(frame) - len(rest)):
        with pytest.raises(ProtocolError):
            wire.decode(frame[:end])


@pytest.mark.parametrize("message", STEP[:-1])
def test_bytes_after_the_end_are_refused(message: Message) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(ENVELOPE, message) + b"\0")


@settings(max_examples=500)
@given(st.sampled_from(STEP), st.data())
def test_a_frame_with_other_bytes_is_a_message_or_refused(message: Message, data: Any) -> None:
    frame = bytearray(wire.encode(ENVELOPE, message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        envelope, found = wire.decode(bytes(frame))
    except ProtocolError:
        return
    assert type(found) in KINDS.values()
    assert min(envelope.epoch, envelope.step, envelope.sequence, envelope.acknowledged) >= 0


def encode_frame(kind: int, body: bytes, sender: Any = ("s", 1, -1, "t"), step: int = 5) -> bytes:
    told = sender if isinstance(sender, bytes) else msgpack.packb(sender)
    return struct.pack("<BBHqqq", packed.MARK, kind, len(told), step, 7, 3) + told + body


def order(template: Any, *, count: int = 1, flags: int = 0, deadline: float = 1.0) -> bytes:
    told = msgpack.packb(template)
    numbers = struct.pack("<qqqdBHH", 4, -1, -1, deadline, flags, count, len(told))
    return numbers + told + struct.pack(f"<{count}q", *range(count)) + b"\0\0"


def piece(whole: Any, *, offset: int = 0) -> bytes:
    return struct.pack("<qqqqq", 5, offset, 7, 0, 0) + msgpack.packb(whole)


def test_frames_made_by_hand_are_those_of_the_protocol() -> None:
    envelope, message = wire.decode(encode_frame(0, order(("p", ("n",), ("x",)))))
    assert envelope == Envelope("s", 1, -1, 5, 7, 3, "t")
    assert message == Compute(4, "p", {"n": 0}, ["x"], False, 1.0)
    _, message = wire.decode(encode_frame(3, piece(("edge", 3, "float32", (2, 3), (1, 0), 24))))
    assert message == CHUNK


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame(4, b""),
        encode_frame(3, piece(("edge", 3, "float32", (2, 3), (0, 1), 24), offset=-1)),
        encode_frame(3, piece(("edge", 3, "float32", (2, 3), (0, 1), -24))),
        encode_frame(3, piece(("edge", 3, "float32", (2, -3), (0, 1), 24))),
        encode_frame(3, piece(("edge", 3.5, "float32", (2, 3), (0, 1), 24))),
        encode_frame(3, piece(("edge", 3, "float32", (2, 3), 24))),
        encode_frame(3, piece(("edge", 3, "float32", (2, 3), (0, 1), 24)) + b"\0"),
        encode_frame(0, order(("p", ("n",), ("x",)), flags=4)),
        encode_frame(0, order(("p", ("n",), ("x",)), deadline=float("nan"))),
        encode_frame(0, order(("p", ("n",), ("x",)), deadline=float("inf"))),
        encode_frame(0, order(("p", ("n", "n"), ("x",)), count=2)),
        encode_frame(0, order(("p", ("n",), ("x",)), count=2)),
        encode_frame(0, order(("p", ("n",)))),
        encode_frame(0, order(("p", ("n",), (1,)))),
        encode_frame(0, order((1, ("n",), ("x",)))),
        encode_frame(0, order({"p": 1})),
        encode_frame(2, b"array", step=-1),
        encode_frame(2, b"array", sender=("s", -1, -1, "t")),
        encode_frame(2, b"array", sender=("s", 1, "0", "t")),
        encode_frame(2, b"array", sender=("s", 1, -1)),
        encode_frame(2, b"array", sender=("s" * 1100, 1, -1, "t")),
        encode_frame(2, b"array", sender=b"\xc1"),
        encode_frame(2, b"array", sender=b""),
        encode_frame(2, b"array", sender=msgpack.packb(("s", 1, -1, "t")) + b"\0"),
        encode_frame(2, b"array", sender=msgpack.packb(msgpack.ExtType(1, b"x"))),
        encode_frame(2, b"array", sender=b"\x91" * 1000 + b"\xc0"),
        encode_frame(1, struct.pack("<q", -4) + b"\0\0"),
        encode_frame(1, struct.pack("<qH", 4, 65535)),
        encode_frame(1, struct.pack("<qHI", 4, 1, 1 << 31) + b"a"),
        bytes([packed.MARK]),
    ],
)  # fmt: skip
def test_what_is_no_frame_of_a_step_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(frame)


def test_what_two_messages_have_in_common_is_not_shared_between_them() -> None:
    frame = wire.encode(ENVELOPE, COMPUTE)
    first, second = (wire.decode(frame)[1] for _ in range(2))
    assert isinstance(first, Compute) and isinstance(second, Compute)
    first.bindings.pop("n")
    assert second == COMPUTE


# Between two who know each other -----------------------------------------------------------------

KNOWN = packed.StepCodec.for_worker("s" * 32, 2, 3, "t" * 32)
assert KNOWN is not None
FROM_COORDINATOR = Envelope("s" * 32, 2, -1, 0, 0, 0, "t" * 32)
plain_orders = st.builds(
    Compute, counts, words, st.dictionaries(words, numbers, max_size=5), st.just([]),
    st.just(False), st.floats(allow_nan=False, allow_infinity=False), numbers, arrays,
)  # fmt: skip


@given(counts, counts, counts, plain_orders)
def test_those_who_know_each_other_write_and_read_the_same_orders(
    step: int, sequence: int, acknowledged: int, order: Compute
) -> None:
    same = packed.SharedOrder.from_compute(order)
    assert same is not None
    envelope = FROM_COORDINATOR._replace(step=step, sequence=sequence, acknowledged=acknowledged)
    frame = packed.pack(envelope, order)
    said = order.request, order.commits, order.small
    assert frame == KNOWN.write_order(step, sequence, acknowledged, *said, same)
    assert KNOWN.read_order(frame) == (step, sequence, acknowledged, order)


@given(counts, counts, counts, counts, arrays)
def test_those_who_know_each_other_write_and_read_the_same_answers(
    step: int, sequence: int, acknowledged: int, request: int, small: list[bytes]
) -> None:
    envelope = Envelope("s" * 32, 2, 3, step, sequence, acknowledged, "t" * 32)
    frame = packed.pack(envelope, Done(request, [], {}, small))
    assert frame == KNOWN.write_answer(step, sequence, acknowledged, request, small)
    assert KNOWN.read_answer(frame) == (step, sequence, acknowledged, request, small)


@given(envelopes, messages)
def test_what_others_say_is_none_of_their_dialogue(envelope: Envelope, message: Message) -> None:
    frame = wire.encode(envelope, message)
    assert KNOWN.read_order(frame) is None and KNOWN.read_answer(frame) is None


@pytest.mark.parametrize(
    "order", [
        replace_fields(COMPUTE, feeds=[], trace=True),
        replace_fields(COMPUTE, feeds=["x"]),
        replace_fields(COMPUTE, feeds=[], follows=4),
        replace_fields(COMPUTE, feeds=[], free=True),
    ],
)  # fmt: skip
def test_an_order_that_is_not_as_most_is_read_by_others(order: Compute) -> None:
    frame = packed.pack(FROM_COORDINATOR, order)
    assert frame is not None and wire.decode(frame) == (FROM_COORDINATOR, order)
    assert KNOWN.read_order(frame) is None


@settings(max_examples=500)
@given(st.data())
def test_a_dialogue_reads_no_more_than_everybody_does(data: Any) -> None:
    order, answer = replace_fields(COMPUTE, feeds=[]), Done(4, [], {}, [ARRAY])
    said = FROM_COORDINATOR._replace(step=5, sequence=7)
    asked = data.draw(st.booleans())
    sound = wire.encode(said if asked else said._replace(origin=3), order if asked else answer)
    frame = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))] if data.draw(st.booleans()) else frame
    found = KNOWN.read_order(bytes(frame)), KNOWN.read_answer(bytes(frame))
    try:
        envelope, message = wire.decode(bytes(frame))
    except ProtocolError:
        assert found == (None, None)
        return
    numbers = envelope.step, envelope.sequence, envelope.acknowledged
    assert found[0] in (None, (*numbers, message))
    if found[1] is not None:
        assert isinstance(message, Done)
        assert found[1] == (*numbers, message.request, message.small)
