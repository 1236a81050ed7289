"""Frames: between the protocol's messages and the bytes that a transport carries.

A message is one frame, in msgpack or as of `step_frame_codec`. A `Chunk` has the bytes of a piece
of an array in a second frame. Everything that arrives is taken as hostile. A frame is measured
before it is decoded. A value is checked against the declared type of its field. Only the message
classes that `messages` lists exist. `array_codec` does the same for arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.base.argument_checks import format_value
from graphflow.errors import MessageTooLarge, ProtocolError
from graphflow.runtime.wire.array_codec import SMALL_CAP, Buffer
from graphflow.runtime.wire.field_checks import (
    INT64_END,
    MessageSchema,
)
from graphflow.runtime.wire.messages import (
    KINDS,
    Chunk,
    Envelope,
    Message,
)
from graphflow.runtime.wire.msgpack_codec import dumps, loads
from graphflow.runtime.wire.step_frame_codec import MARK, pack, unpack

WIRE_VERSION = 12
CONTROL_CAP = 1 << 20  # bytes of a control frame
ZERO_COPY_BYTES = 64 << 10  # from here on, sending without a copy is quicker
BUDGET = 4 << 30  # bytes that one peer may have under way to one process in a session
SPANS_A_MESSAGE = 2048

_UNCHANGED = ("Hello", "Welcome")  # maps in all versions; the bodies of others are lists

_ENVELOPE = MessageSchema(Envelope)


class _SchemaTable(dict[str, MessageSchema[Message]]):
    """The schema of each kind of message, made when the first message of the kind travels."""

    def __missing__(self, kind: str) -> MessageSchema[Message]:
        self[kind] = MessageSchema(KINDS[kind])
        return self[kind]


_SCHEMAS = _SchemaTable()


# Messages --------------------------------------------------------------------------------------


def encode(envelope: Envelope, message: Message) -> bytes:
    """Return the control frame of a message.

    Raises:
        MessageTooLarge: The frame exceeds CONTROL_CAP bytes.
        ProtocolError: A field holds a value that cannot be sent.
    """
    packed = pack(envelope, message)
    frame = _encode_msgpack(envelope, message) if packed is None else packed
    if len(frame) > CONTROL_CAP:
        raise MessageTooLarge(
            f"a {type(message).__name__} message has {len(frame)} bytes, a control frame at most "
            f"{CONTROL_CAP}"
        )
    return frame


def _encode_msgpack(envelope: Envelope, message: Message) -> bytes:
    """Return the msgpack frame of a message."""
    kind = type(message).__name__
    known = _SCHEMAS[kind]
    body: Any = known.values_of(message)
    if kind in _UNCHANGED:
        body = dict(zip(known.names, body, strict=True))
    return dumps((kind, envelope, body), f"a {kind} message")


def decode(frame: bytes | memoryview) -> tuple[Envelope, Message]:
    """Return the message in a control frame.

    Raises:
        MessageTooLarge: The frame exceeds CONTROL_CAP bytes; it is not decoded.
        ProtocolError: The frame is not a message of this protocol.
    """
    if len(frame) > CONTROL_CAP:
        raise MessageTooLarge(f"a control frame has {len(frame)} bytes, the cap is {CONTROL_CAP}")
    if len(frame) and frame[0] == MARK:
        return unpack(frame)
    parts = loads(frame, SMALL_CAP)
    if type(parts) is not tuple or len(parts) != 3:
        raise ProtocolError("a control frame holds a kind, an envelope and a body")
    kind, head, body = parts
    if type(kind) is not str or kind not in KINDS:
        raise ProtocolError(f"unknown kind of message {format_value(kind, 40)}")
    known = _SCHEMAS[kind]
    if type(head) is not tuple:
        raise ProtocolError(f"the envelope of a {kind} message is malformed")
    if kind in _UNCHANGED:
        if type(body) is not dict:
            raise ProtocolError(f"the body of a {kind} message is not a map")
        return _ENVELOPE.build(_fit_envelope(head)), known.from_map(body)
    if type(body) is not tuple:
        raise ProtocolError(f"the body of a {kind} message is not a list")
    return _read_envelope(head), known.build(body)


def _read_envelope(head: tuple[Any, ...]) -> Envelope:
    """As `_ENVELOPE.build`, written out because every message has an envelope."""
    if len(head) == 7:
        session, epoch, origin, step, sequence, acknowledged, token = head
        if (
            type(epoch) is type(origin) is type(step) is type(sequence) is type(acknowledged) is int
            and type(session) is type(token) is str
            and 0 <= epoch < INT64_END and -INT64_END <= origin < INT64_END
            and 0 <= step < INT64_END and 0 <= sequence < INT64_END
            and 0 <= acknowledged < INT64_END
        ):  # fmt: skip
            return tuple.__new__(Envelope, head)
    return _ENVELOPE.build(head)


def _fit_envelope(head: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return another version's envelope with the fields of this one.

    So versions that differ can tell each other. Fields are only added, at the end, with a default.
    """
    names = _ENVELOPE.names
    defaults = Envelope._field_defaults
    added = [defaults[name] for name in names[len(head) :] if name in defaults]
    return (*head[: len(names)], *added)


def decode_frames(
    frames: Sequence[bytes | memoryview],
) -> tuple[Envelope, Message, Buffer | None]:
    """Return the message in one or two frames, and the bytes of the second one, if any."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message has 1 or 2 frames, not {len(frames)}")
    envelope, message = decode(frames[0])
    data = frames[1] if len(frames) == 2 else None
    if (type(message) is Chunk and not message.slot) != (data is not None):
        raise ProtocolError("a chunk that is not lent, and nothing else, has a second frame")
    return envelope, message, data
