"""Reading untrusted ONNX files: bytes to a `ModelProto`, and its tensors to arrays.

The size of a file is checked before it is parsed, and the size of a tensor's data against its shape
before it is used. External data must be inside the model's folder, and no part of its path may be a
symbolic link. (model_checks.py checks names and order before any node is built.)
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    SparseTensorProto,
    TensorProto,
    numpy_helper,
)

from graphflow.errors import OnnxError
from graphflow.onnx.loading.reading.model_checks import sparse_name
from graphflow.onnx.loading.reading.payloads import (
    RAW_DTYPES,
    InitializerMemory,
    ModelBytes,
    split_off_large,
)
from graphflow.onnx.loading.reading.value_kinds import Array, onnx_dtype
from graphflow.onnx.loading.reading.value_kinds import dtype_name as name_of

LIMIT = (1 << 31) - 1
"""Bytes of the largest file that is parsed, which is the limit of protobuf."""


class ParsedModel(NamedTuple):
    """A parsed model, its name for messages, and its folder.

    Attributes:
        large: the data of large initializers by index, which the model lacks.
    """

    model: ModelProto
    large: Mapping[int, Array]
    file: str
    folder: Path | None


def read(source: Any, limit: int = LIMIT) -> ParsedModel:
    """Read a model from a path, from bytes, or from a `ModelProto`.

    Raises:
        OnnxError: the file is missing, too large, or not a model.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise OnnxError(f"the limit is a number of bytes above 0, not {limit!r}")
    if isinstance(source, ModelProto):
        _check_text(source, "the model")
        return ParsedModel(source, {}, "the model", None)
    if isinstance(source, bytes | bytearray | memoryview):
        stored = ModelBytes(memoryview(source).cast("B"))
        return ParsedModel(*_parse(stored, "the given bytes", limit), "the given bytes", None)
    if not isinstance(source, str | os.PathLike):
        raise OnnxError(f"a model is a path, bytes or a ModelProto, not {source!r}")
    path = Path(source)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            raise OnnxError(f"{path} is not a file")
        with path.open("rb") as file:
            return ParsedModel(
                *_parse(ModelBytes(file.fileno()), str(path), limit), path.name, path.parent
            )
    except OSError as error:
        raise OnnxError(f"{path} cannot be read: {error.strerror}") from None


def _parse(stored: ModelBytes, what: str, limit: int) -> tuple[ModelProto, Mapping[int, Array]]:
    """Parse a model without its large initializers, and return both."""
    if stored.size > limit:
        raise OnnxError(
            f"{what} has {stored.size} bytes, the limit is {limit}; raise limit= to read"
        )
    content, large = split_off_large(stored)
    try:
        model: ModelProto = ModelProto.FromString(content)
    except Exception as error:  # protobuf's DecodeError, which onnx does not export
        raise OnnxError(
            f"{what}: not an ONNX model, or cut short ({stored.size} bytes): {error}"
        ) from None
    if not model.HasField("graph"):
        raise OnnxError(f"{what}: holds no graph; is it an ONNX model?")
    _check_text(model, what)
    return model, large


def _check_text(model: ModelProto, what: str) -> None:
    """Refuse text that is not UTF-8, which protobuf returns as bytes rather than str."""
    pending: list[Any] = [model]
    while pending:
        message = pending.pop()
        for field, value in message.ListFields():
            values = [value] if isinstance(value, str | bytes) else value
            if field.type == field.TYPE_STRING and any(isinstance(v, bytes) for v in values):
                raise OnnxError(f"{what}: {field.full_name} holds text that is not UTF-8")
            if field.type == field.TYPE_MESSAGE:
                pending += [value] if hasattr(value, "ListFields") else list(value)


# Tensors --------------------------------------------------------------------------------------


def tensor_to_array(
    tensor: TensorProto,
    file: str,
    folder: Path | None = None,
    large: Array | None = None,
    room: InitializerMemory | None = None,
) -> Array:
    """Convert a TensorProto to an array (of objects for strings).

    Args:
        large: the data of the tensor, if it was split off.
        room: memory for external data.

    Raises:
        OnnxError: the dtype is unknown, a size is negative, the data does not match the shape, or
            external data may not be read.
    """
    what = f"{file}: tensor {tensor.name!r}"
    if tensor.HasField("segment"):
        raise OnnxError(f"{what} is stored in segments, which nobody writes; export it whole")
    dtype = onnx_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    if dtype is None and tensor.data_type != TensorProto.STRING:
        raise OnnxError(f"{what} has the unknown {name_of(tensor.data_type)}")
    if any(size < 0 for size in shape):
        raise OnnxError(f"{what} has a negative size: {shape}")
    count = math.prod(shape)
    if tensor.data_location == TensorProto.EXTERNAL:
        if dtype is None:
            raise OnnxError(f"{what} keeps strings outside of the file, which ONNX does not allow")
        wanted = _stored_bytes(tensor.data_type, dtype, count)
        raw = _read_external(tensor, what, folder, wanted, room or InitializerMemory())
        return _decode_raw(tensor.data_type, shape, raw)
    if dtype is not None and (large is not None or tensor.HasField("raw_data")):
        wanted = _stored_bytes(tensor.data_type, dtype, count)
        have = len(tensor.raw_data) if large is None else large.size
        if have != wanted:
            raise OnnxError(
                f"{what} has {have} bytes, but {name_of(tensor.data_type)}{shape} takes {wanted}"
            )
    if large is not None:
        return _decode_raw(tensor.data_type, shape, large)
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:  # onnx raises errors of many types for invalid tensors
        raise OnnxError(f"{what} of shape {shape} cannot be read: {error}") from None
    if array.shape != shape:
        raise OnnxError(f"{what} has {array.size} elements, its shape {shape} takes {count}")
    return array


_PACKED = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}


def _stored_bytes(code: int, dtype: np.dtype[Any], count: int) -> int:
    """Return the bytes of `count` elements in a file, where 2- and 4-bit elements are packed."""
    per_byte = _PACKED.get(TensorProto.DataType.Name(code), 0)
    return -(-count // per_byte) if per_byte else count * dtype.itemsize


def _decode_raw(code: int, shape: tuple[int, ...], raw: Array) -> Array:
    """View bytes that nothing else refers to as a read-only array."""
    dtype = onnx_dtype(code)
    if dtype is not None and code in RAW_DTYPES and sys.byteorder == "little":
        array = raw.view(dtype).reshape(shape)
    else:
        proto = TensorProto(data_type=code, dims=shape, raw_data=raw.tobytes())
        array = np.asarray(numpy_helper.to_array(proto))
    array.flags.writeable = False
    return array


def _read_external(
    tensor: TensorProto, what: str, folder: Path | None, wanted: int, room: InitializerMemory
) -> Array:
    """Read the data of a tensor from another file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise OnnxError(f"{what} is in the file {location!r}; give the model by its path")
    path = _resolve_inside(folder, location, what)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", wanted))
        size = path.stat().st_size
        if offset < 0 or length != wanted or offset + length > size:
            raise OnnxError(
                f"{what} takes {wanted} bytes; {location!r} has {size}, of which {length} from "
                f"{offset} on are named"
            )
        with path.open("rb") as file:
            return room.array(ModelBytes(file.fileno()), offset, wanted)
    except (OSError, ValueError) as error:
        raise OnnxError(f"{what}: {location!r} cannot be read: {error}") from None
    except OnnxError as error:
        raise OnnxError(f"{what}: {location!r}: {error}") from None


def _resolve_inside(folder: Path, location: str, what: str) -> Path:
    """Resolve a relative path to a file below a folder; refuse links, `..` and absolute paths."""
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts or "\0" in location:
        raise OnnxError(f"{what} lies at {location!r}, outside of the model's folder; refused")
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise OnnxError(f"{what} lies at {location!r}, which is a symbolic link; refused")
    if not path.is_file():
        raise OnnxError(f"{what} lies at {location!r}, which is not a file in the model's folder")
    return path


def sparse_array(tensor: SparseTensorProto, file: str, folder: Path | None) -> Array:
    """Convert a sparse initializer to a dense array.

    Raises:
        OnnxError: its indices and values are inconsistent, or the array is too large.
    """
    values = tensor_to_array(tensor.values, file, folder)
    indices = tensor_to_array(tensor.indices, file, folder)
    shape = tuple(tensor.dims)
    what = f"{file}: sparse tensor {tensor.values.name!r}"
    size = math.prod(shape)
    if any(s < 0 for s in shape) or size * values.itemsize > LIMIT:
        raise OnnxError(f"{what} has shape {shape}, which is negative or beyond {LIMIT} bytes")
    if indices.ndim == 2 and indices.shape == (values.size, len(shape)):
        inside = bool((indices >= 0).all() and (indices < np.array(shape)).all())
        flat = np.ravel_multi_index(tuple(indices.T), shape) if inside and values.size else indices
    else:
        flat = indices
        inside = bool(indices.size == 0 or (indices.min() >= 0 and indices.max() < size))
    if not inside or flat.size != values.size:
        raise OnnxError(f"{what}: {indices.shape} indices do not fit {values.size} values")
    result = np.zeros(size, values.dtype)
    result[flat.reshape(-1)] = values
    return result.reshape(shape)


def read_initializers(
    graph: GraphProto, file: str, folder: Path | None, large: Mapping[int, Array]
) -> dict[str, Array]:
    """Read the initializers of a graph into arrays, by name."""
    room = InitializerMemory()
    arrays = {
        t.name: tensor_to_array(t, file, folder, large.get(i), room)
        for i, t in enumerate(graph.initializer)
    }
    arrays.update((sparse_name(t), sparse_array(t, file, folder)) for t in graph.sparse_initializer)
    return arrays
