"""The data of large initializers, read directly into arrays.

Protobuf would keep a second copy as long as a node of the model is in use. So the fields of the
file are scanned first, and protobuf parses the model without its large tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from graphflow.base.process.memory_pages import SMALL, Pages, is_supported, round_to_pages
from graphflow.errors import OnnxError
from graphflow.onnx.loading.reading.value_kinds import Array

LARGE = 1024
"""Bytes from which on a tensor counts as large."""

RAW_DTYPES = {
    int(code)
    for code in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16,
        TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
        TensorProto.BOOL, TensorProto.COMPLEX64, TensorProto.COMPLEX128,
    )
}  # fmt: skip
"""Dtypes whose elements have the same bytes in a file and in little-endian memory."""

_BLOCK = 1 << 13
_FIXED = {1: 8, 5: 4}  # bytes of the wire types of fixed size
_GRAPH, _INITIALIZER = 7, 5  # fields of ModelProto and GraphProto
_DATA_TYPE, _FLOATS, _RAW = 2, 4, 9  # fields of TensorProto
_UNUSUAL_FIELDS = {3, 13, 14}  # segment, external_data, data_location


class ModelBytes:
    """Random access to the bytes of a model, in memory or in an open file."""

    def __init__(self, source: bytes | memoryview | int) -> None:
        self._descriptor = source if isinstance(source, int) else -1
        self._view = memoryview(b"") if isinstance(source, int) else memoryview(source)
        self.size = os.fstat(source).st_size if isinstance(source, int) else len(self._view)
        self._block, self._start = b"", 0

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return the bytes from `start` to `end`."""
        if self._descriptor < 0:
            return self._view[start:end]
        return self.array(start, end - start).data

    def array(self, start: int, count: int) -> Array:
        """Read `count` bytes into a new array.

        Raises:
            OnnxError: the file is too short.
        """
        result = np.empty(count, np.uint8)
        if self._descriptor < 0:
            result[:] = np.frombuffer(self._view[start : start + count], np.uint8)
            return result
        done = 0
        while done < count:
            got = os.preadv(self._descriptor, [result[done:].data], start + done)
            if not got:
                raise OnnxError(f"the file ended {count - done} bytes early while it was read")
            done += got
        return result

    def copy(self, start: int, count: int, target: int, at: int) -> None:
        """Copy `count` bytes from `start` to offset `at` of the open file `target`.

        Raises:
            OnnxError: the file is too short.
        """
        if self._descriptor < 0:
            while count:
                done = os.pwrite(target, self._view[start : start + count], at)
                start, count, at = start + done, count - done, at + done
            return
        os.lseek(target, at, os.SEEK_SET)
        while count:
            done = os.sendfile(target, self._descriptor, start, count)
            if not done:
                raise OnnxError(f"the file ended {count} bytes early while it was read")
            start, count = start + done, count - done

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Decode the varint at an offset, and return it with the offset after it.

        Raises:
            OnnxError: the varint is too long, or goes beyond `end`.
        """
        value = 0
        for i in range(10):
            if at + i >= end:
                break
            byte = self._byte(at + i)
            value |= (byte & 127) << (7 * i)
            if byte < 128:
                return value, at + i + 1
        raise OnnxError("a varint is malformed")

    def _byte(self, at: int) -> int:
        if self._descriptor < 0:
            return self._view[at]
        if not self._start <= at < self._start + len(self._block):
            self._block, self._start = os.pread(self._descriptor, _BLOCK, at), at
        return self._block[at - self._start]


class _Field(NamedTuple):
    number: int
    wire: int
    start: int  # of the field, with its number
    content: int
    end: int


def _fields(stored: ModelBytes, start: int, end: int) -> Iterator[_Field]:
    """Iterate over the fields of a message.

    Raises:
        OnnxError: a field is malformed.
    """
    while start < end:
        tag, content = stored.varint(start, end)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, stop = stored.varint(content, end)
        elif wire == 2:
            length, content = stored.varint(content, end)
            stop = content + length
        else:
            stop = content + _FIXED[wire] if wire in _FIXED else end + 1
        if stop > end or not number:
            raise OnnxError("a field is malformed")
        yield _Field(number, wire, start, content, stop)
        start = stop


def split_off_large(stored: ModelBytes) -> tuple[bytes, dict[int, Array]]:
    """Split a model into its bytes without large initializers, and these by initializer index.

    A model of any unusual form comes back whole, so that protobuf reports its errors.
    """
    if sys.byteorder == "little":
        try:
            return _split_off_large(stored)
        except (OnnxError, IndexError):
            pass
    return bytes(stored.read(0, stored.size)), {}


def _split_off_large(stored: ModelBytes) -> tuple[bytes, dict[int, Array]]:
    graphs = [f for f in _fields(stored, 0, stored.size) if f.number == _GRAPH]
    if len(graphs) != 1 or graphs[0].wire != 2:
        raise OnnxError("not one graph")
    (graph,) = graphs
    inner, large = _without_large(stored, graph)
    parts = [
        stored.read(0, graph.start),
        _encode_field(_GRAPH, inner),
        stored.read(graph.end, stored.size),
    ]
    room = InitializerMemory(sum(round_to_pages(count) for _, count in large.values()))
    return b"".join(parts), {at: room.array(stored, *where) for at, where in large.items()}


class InitializerMemory:
    """Memory for the data of initializers.

    Large ones lie in memory pages that a session's processes can share without copies.
    """

    def __init__(self, nbytes: int = 1 << 26) -> None:
        self._next = nbytes  # untouched pages take no memory
        self._pages: Pages | None = None
        self._used = 0

    def array(self, stored: ModelBytes, start: int, count: int) -> Array:
        """Read `count` bytes into a new read-only array.

        Raises:
            OnnxError: the file is too short.
        """
        if count < SMALL or not is_supported():
            return stored.array(start, count)
        if self._pages is None or self._used + count > len(self._pages):
            self._pages, self._used = Pages(max(round_to_pages(count), self._next)), 0
            self._next *= 2
        at, self._used = self._used, self._used + round_to_pages(count)
        stored.copy(start, count, self._pages.descriptor, at)
        return self._pages.view(at, count)


def _without_large(stored: ModelBytes, graph: _Field) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """Return a graph without its large initializers, and the offset and size of each."""
    parts: list[bytes | memoryview] = []
    large: dict[int, tuple[int, int]] = {}
    kept, count = graph.content, 0
    for field in _fields(stored, graph.content, graph.end):
        if field.number != _INITIALIZER:
            continue
        data = _raw_data_field(stored, field) if field.end - field.content > LARGE else None
        if data is not None:
            large[count] = (data.content, data.end - data.content)
            shell = [stored.read(field.content, data.start), stored.read(data.end, field.end)]
            parts += [stored.read(kept, field.start), _encode_field(_INITIALIZER, b"".join(shell))]
            kept = field.end
        count += 1
    return b"".join([*parts, stored.read(kept, graph.end)]), large


def _raw_data_field(stored: ModelBytes, tensor: _Field) -> _Field | None:
    """Return the field with all elements of a tensor as they are in memory; None if not large."""
    fields = list(_fields(stored, tensor.content, tensor.end))
    codes = [stored.varint(f.content, f.end)[0] for f in fields if f.number == _DATA_TYPE]
    data = [f for f in fields if f.number in (_FLOATS, _RAW)]
    if len(codes) != 1 or len(data) != 1 or any(f.number in _UNUSUAL_FIELDS for f in fields):
        return None
    (found,) = data
    plain = codes[0] in RAW_DTYPES if found.number == _RAW else codes[0] == TensorProto.FLOAT
    return found if plain and found.wire == 2 and found.end - found.content >= LARGE else None


def _encode_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    head, size = bytearray([number << 3 | 2]), len(content)
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head) + content


__all__ = ["LARGE", "RAW_DTYPES", "InitializerMemory", "ModelBytes", "split_off_large"]
