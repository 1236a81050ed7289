"""Frames of the messages that steps send, which are looked up rather than parsed.

A process that has just woken up finds nothing of its code and data in the processor's caches. Then
a general decoder, which reads field by field, takes ten times as long as in a loop. In these frames
numbers have fixed places. All that is the same in every step is one byte string that the receiver
nearly always has seen before: the sender, the program, the names of sizes and feeds, the array of a
chunk. A message with any other content goes as all others do, see `frame_codec`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from math import isfinite
from sys import intern
from typing import Any, NamedTuple

from graphflow.errors import ProtocolError
from graphflow.runtime.wire.field_checks import construct_unchecked, make_check
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Chunk,
    Compute,
    Count,
    Done,
    Envelope,
    Message,
    Small,
    Tensor,
)
from graphflow.runtime.wire.msgpack_codec import dumps, loads
from graphflow.runtime.wire.step_values import Key

MARK = 0xC1
"""The first byte of these frames. No msgpack begins with it."""

_FIRST = struct.Struct("<BBH")  # mark, kind, length of the sender
_HEAD = struct.Struct(f"{_FIRST.format}qqq")  # these, step, sequence, acknowledged
_COMPUTE = struct.Struct("<qqqdBHH")  # request, commits, follows, deadline, flags, sizes, template
_CHUNK = struct.Struct("<qqqqq")  # number, offset, checksum, slot, turn; then what it is a piece of
_REQUEST = struct.Struct("<q")
_COUNT = struct.Struct("<H")  # of small arrays
_NONE = _COUNT.pack(0)
_SIZE = struct.Struct("<I")  # of each, before its bytes
_ONE = struct.Struct("<HI")
_TRACE, _FREE = 1, 2  # flags of a step
_SHARED_CAP = 1 << 10  # bytes that are the same in all steps
_CACHED = 1024  # of these byte strings

_check_sender = make_check(tuple[str, Count, int, str])
_check_template = make_check(tuple[str, list[str], list[str]])
_check_array_header = make_check(tuple[str, Key, str, list[Count], list[Count], Count])


def pack(envelope: Envelope, message: Message) -> bytes | None:
    """Return the frame of a message; None if it must go as other messages do."""
    writer = _WRITERS.get(type(message))
    body = writer(message) if writer is not None else None
    if body is None:
        return None
    session, epoch, origin, step, sequence, acknowledged, token = envelope
    try:
        sender = _sender_bytes(session, epoch, origin, token)
        if len(sender) > _SHARED_CAP:
            return None
        kind = _KINDS[type(message)]
        head = _HEAD.pack(MARK, kind, len(sender), step, sequence, acknowledged)
    except (struct.error, OverflowError, TypeError, ValueError):
        return None
    return b"".join((head, sender, body))


def unpack(frame: bytes | memoryview) -> tuple[Envelope, Message]:
    """Return the message in such a frame.

    Raises:
        ProtocolError: The frame is malformed.
    """
    if type(frame) is not bytes:
        frame = bytes(frame)
    try:
        _, kind, size, step, sequence, acknowledged = _HEAD.unpack_from(frame)
        start = _HEAD.size + size
        session, epoch, origin, token = _read_sender(frame[_HEAD.size : start])
        if kind >= len(_READERS) or step < 0 or sequence < 0 or acknowledged < 0:
            raise ProtocolError(f"a packed frame has the unknown kind {kind}")
        said = (session, epoch, origin, step, sequence, acknowledged, token)
        return tuple.__new__(Envelope, said), _READERS[kind](frame, start)
    except struct.error as error:
        raise ProtocolError(f"a packed frame ends too early: {error}") from None


# Senders -----------------------------------------------------------------------------------------


@lru_cache(_CACHED)
def _sender_bytes(session: str, epoch: int, origin: int, token: str) -> bytes:
    return dumps((session, epoch, origin, token))


@lru_cache(_CACHED)
def _read_sender(packed: bytes) -> tuple[str, int, int, str]:
    """Return the sender in its bytes; its token is interned, for comparison by identity."""
    session, epoch, origin, token = _check_sender(_read_shared(packed), "sender")
    return session, epoch, origin, intern(token)


def _read_shared(packed: bytes) -> Any:
    """Return the plain data in bytes that steps have in common."""
    if len(packed) > _SHARED_CAP:
        raise ProtocolError(
            f"the shared part of a packed frame has {len(packed)} bytes, the cap is {_SHARED_CAP}"
        )
    return loads(packed)


# Compute -----------------------------------------------------------------------------------------


@lru_cache(_CACHED)
def _template_bytes(program: str, sizes: tuple[str, ...], feeds: tuple[str, ...]) -> bytes:
    return dumps((program, sizes, feeds))


@lru_cache(_CACHED)
def _read_template(packed: bytes) -> tuple[str, list[str], list[str]]:
    """Return the program, the names of sizes, and the names of feeds of an order."""
    template: tuple[str, list[str], list[str]] = _check_template(_read_shared(packed), "template")
    if len({*template[1]}) != len(template[1]):
        raise ProtocolError("a packed order names a size twice")
    return template


@lru_cache(_CACHED)
def _int64_struct(count: int) -> struct.Struct:
    """Return the format of so many integers."""
    return struct.Struct(f"<{count}q")


def _write_compute(message: Compute) -> bytes | None:
    sizes = message.bindings
    try:
        template = _template_bytes(message.program, tuple(sizes), tuple(message.feeds))
        if len(template) > _SHARED_CAP:
            return None
        flags = (_TRACE if message.trace else 0) | (_FREE if message.free else 0)
        numbers = _COMPUTE.pack(
            message.request, message.commits, message.follows, message.deadline, flags, len(sizes),
            len(template),
        )  # fmt: skip
        values = _int64_struct(len(sizes)).pack(*sizes.values())
        return b"".join((numbers, template, values, _join_small(message.small)))
    except (struct.error, OverflowError, TypeError, ValueError):
        return None


def _read_compute(frame: bytes, start: int) -> Compute:
    request, commits, follows, deadline, flags, count, size = _COMPUTE.unpack_from(frame, start)
    start += _COMPUTE.size
    end = start + size
    program, names, feeds = _read_template(frame[start:end])
    values = _int64_struct(count).unpack_from(frame, end)
    if request < 0 or len(names) != count or flags > _TRACE | _FREE or not isfinite(deadline):
        raise ProtocolError("a packed order is inconsistent")
    return construct_unchecked(Compute, {
        "request": request, "program": program, "feeds": feeds, "deadline": deadline,
        "bindings": dict(zip(names, values, strict=True)), "trace": bool(flags & _TRACE),
        "commits": commits, "small": _split_small(frame, end + 8 * count),
        "follows": follows, "free": bool(flags & _FREE),
    })  # fmt: skip


# Done, Tensor ------------------------------------------------------------------------------------


def _write_done(message: Done) -> bytes | None:
    if message.fetches or message.peak:
        return None
    try:
        return _REQUEST.pack(message.request) + _join_small(message.small)
    except (struct.error, TypeError):
        return None


def _read_done(frame: bytes, start: int) -> Done:
    (request,) = _REQUEST.unpack_from(frame, start)
    if request < 0:
        raise ProtocolError(f"a packed answer has the negative request {request}")
    small = _split_small(frame, start + _REQUEST.size)
    return construct_unchecked(
        Done, {"request": request, "fetches": [], "peak": {}, "small": small}
    )


def _write_tensor(message: Tensor) -> bytes:
    return message.array


def _read_tensor(frame: bytes, start: int) -> Tensor:
    return construct_unchecked(Tensor, {"array": frame[start:]})


# Chunk -------------------------------------------------------------------------------------------


@lru_cache(_CACHED)
def _array_header_bytes(
    purpose: str, name: Key, dtype: str, shape: tuple[int, ...], axes: tuple[int, ...], nbytes: int
) -> bytes:
    return dumps((purpose, name, dtype, shape, axes, nbytes))


@lru_cache(_CACHED)
def _read_array_header(packed: bytes) -> tuple[str, Key, str, list[int], list[int], int]:
    """Return the array that a chunk is a piece of."""
    whole: tuple[str, Key, str, list[int], list[int], int]
    whole = _check_array_header(_read_shared(packed), "chunk")
    return whole


def _write_chunk(message: Chunk) -> bytes | None:
    try:
        whole = _array_header_bytes(
            message.purpose, message.name, message.dtype, tuple(message.shape),
            tuple(message.axes), message.nbytes,
        )  # fmt: skip
        if len(whole) > _SHARED_CAP:
            return None
        numbers = _CHUNK.pack(
            message.number, message.offset, message.checksum, message.slot, message.turn
        )
        return numbers + whole
    except (struct.error, OverflowError, TypeError, ValueError):
        return None


def _read_chunk(frame: bytes, start: int) -> Chunk:
    number, offset, checksum, slot, turn = _CHUNK.unpack_from(frame, start)
    if number < 0 or offset < 0 or checksum < 0 or slot < 0 or turn < 0:
        raise ProtocolError("a packed chunk has a negative number")
    purpose, name, dtype, shape, axes, nbytes = _read_array_header(frame[start + _CHUNK.size :])
    return construct_unchecked(Chunk, {
        "purpose": purpose, "number": number, "name": name, "dtype": dtype, "shape": shape,
        "axes": axes, "nbytes": nbytes, "offset": offset, "checksum": checksum, "slot": slot,
        "turn": turn,
    })  # fmt: skip


# Small arrays ------------------------------------------------------------------------------------


def _join_small(small: list[Small]) -> bytes:
    """Return small arrays as bytes: their count, and each behind its length."""
    if len(small) == 1:  # nearly always
        return _ONE.pack(1, len(small[0])) + small[0]
    parts = [_COUNT.pack(len(small))]
    for each in small:
        parts += (_SIZE.pack(len(each)), each)
    return b"".join(parts)


def _split_small(frame: bytes, start: int) -> list[Small]:
    """Return the small arrays in the rest of a frame."""
    (count,) = _COUNT.unpack_from(frame, start)
    start += _COUNT.size
    small = []
    for _ in range(count):
        (size,) = _SIZE.unpack_from(frame, start)
        start += _SIZE.size
        small.append(frame[start : start + size])
        start += size
    if start != len(frame):
        raise ProtocolError(f"a packed frame has {len(frame)} bytes, but claims {start}")
    return small


# Between a coordinator and a worker --------------------------------------------------------------


class StepCodec:
    """The orders and answers of steps, between a session's coordinator and one worker in one epoch.

    The frames are those of `pack`, written and read in half of the time, because both ends are
    known. Only common messages go this way: orders of steps that are not traced, follow no other
    and have all feeds inside, and answers with all results inside.

    Args:
        asks, answers: The bytes of the sender in orders, and in answers.
    """

    def __init__(self, asks: bytes, answers: bytes) -> None:
        self._asks, self._answers = asks, answers
        self._asked = _FIRST.pack(MARK, _KINDS[Compute], len(self._asks))
        self._answered = _FIRST.pack(MARK, _KINDS[Done], len(self._answers))
        self._order = struct.Struct(f"<4sqqq{len(self._asks)}s{_COMPUTE.format[1:]}")
        self._answer = struct.Struct(f"<4sqqq{len(self._answers)}s{_REQUEST.format[1:]}")

    @staticmethod
    def for_worker(session: str, epoch: int, worker: int, token: str) -> StepCodec | None:
        """Return the codec of a session's coordinator and a worker.

        Return None if the identity of one is too long for these frames.
        """
        asks = _sender_bytes(session, epoch, COORDINATOR, token)
        answers = _sender_bytes(session, epoch, worker, token)
        return StepCodec(asks, answers) if max(len(asks), len(answers)) <= _SHARED_CAP else None

    def write_order(
        self,
        step: int,
        sequence: int,
        acknowledged: int,
        request: int,
        commits: int,
        small: list[Small],
        same: SharedOrder,
    ) -> bytes:
        """Return the frame of an order. `same` is shared with the orders to other workers."""
        deadline, sizes, template, body = same
        head = self._order.pack(
            self._asked, step, sequence, acknowledged, self._asks,
            request, commits, -1, deadline, 0, sizes, template,
        )  # fmt: skip
        return b"".join((head, body, _join_small(small) if small else _NONE))

    def read_order(self, frame: bytes) -> tuple[int, int, int, Compute] | None:
        """Return step, number, acknowledged number and order of a frame.

        Return None for any frame that `write_order` does not write.
        """
        order = self._order
        try:
            (
                first, step, sequence, acknowledged, sender,
                request, commits, follows, deadline, flags, count, size,
            ) = order.unpack_from(frame)  # fmt: skip
            if first != self._asked or sender != self._asks or flags or follows != -1:
                return None
            start = order.size
            end = start + size
            program, names, feeds = _read_template(frame[start:end])
            values = _int64_struct(count).unpack_from(frame, end)
            small = _split_small(frame, end + 8 * count)
        except (struct.error, ProtocolError):
            return None
        if feeds or len(names) != count or not isfinite(deadline):
            return None
        if step < 0 or sequence < 0 or acknowledged < 0 or request < 0:
            return None
        return step, sequence, acknowledged, construct_unchecked(Compute, {
            "request": request, "program": program, "feeds": [], "deadline": deadline,
            "bindings": dict(zip(names, values, strict=True)), "trace": False, "commits": commits,
            "small": small, "follows": -1, "free": False,
        })  # fmt: skip

    def write_answer(
        self, step: int, sequence: int, acknowledged: int, request: int, small: list[Small]
    ) -> bytes:
        """Return the frame of an answer."""
        head = self._answer.pack(
            self._answered, step, sequence, acknowledged, self._answers, request
        )
        return head + (_join_small(small) if small else _NONE)

    def read_answer(self, frame: bytes) -> tuple[int, int, int, int, list[Small]] | None:
        """Return step, number, acknowledged number, request and arrays of a frame.

        Return None for any frame that `write_answer` does not write.
        """
        answer = self._answer
        try:
            first, step, sequence, acknowledged, sender, request = answer.unpack_from(frame)
            if first != self._answered or sender != self._answers:
                return None
            small = _split_small(frame, answer.size)
        except (struct.error, ProtocolError):
            return None
        if step < 0 or sequence < 0 or acknowledged < 0 or request < 0:
            return None
        return step, sequence, acknowledged, request, small


class SharedOrder(NamedTuple):
    """The part of a step's orders that is the same for all workers."""

    deadline: float
    sizes: int
    template: int  # bytes
    body: bytes

    @staticmethod
    def from_compute(message: Compute) -> SharedOrder | None:
        """Return the shared part of orders like `message`; None if they go as others do."""
        sizes = message.bindings
        try:
            template = _template_bytes(message.program, tuple(sizes), ())
            values = _int64_struct(len(sizes)).pack(*sizes.values())
        except (struct.error, OverflowError, TypeError, ValueError):
            return None
        if len(template) > _SHARED_CAP or message.feeds or not isfinite(message.deadline):
            return None
        said = (message.deadline, len(sizes), len(template), template + values)
        return tuple.__new__(SharedOrder, said)


_Writer = Callable[[Any], bytes | None]
_WRITERS: dict[type[Message], _Writer] = {
    Compute: _write_compute, Done: _write_done, Tensor: _write_tensor, Chunk: _write_chunk,
}  # fmt: skip
_KINDS = {kind: number for number, kind in enumerate(_WRITERS)}
_READERS: list[Callable[[bytes, int], Message]] = [
    _read_compute, _read_done, _read_tensor, _read_chunk,
]  # fmt: skip
