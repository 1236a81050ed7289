"""Shards: arrays by name as a safetensors file, which any reader of that format opens.

The file is produced in pieces, so that writing it needs no second copy of the arrays: 8 bytes with
the length of the header, the header in JSON (dtype, shape and offsets of each array), the arrays.
Complex numbers are stored as pairs of floats, (real, imaginary), along a last axis of size 2. Their
names are in the file's metadata under "complex". The manifest has every array's own dtype and
shape.

Source: the description of the format at github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.errors import CheckpointError
from graphflow.frontend.builders import RESERVED
from graphflow.ir.spec import as_dtype, complex_dtype, real_dtype
from graphflow.runtime.checkpoint import files
from graphflow.runtime.checkpoint.pieced_arrays import PiecedArray

Array = np.ndarray[Any, Any]

_NAMES = {
    "bool": "BOOL", "bfloat16": "BF16",
    "float16": "F16", "float32": "F32", "float64": "F64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip


def encode_shard(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Yield the bytes of a shard, in order.

    Raises:
        CheckpointError: a variable has a name that the format reserves.
    """
    header, order = _encode_header(arrays, metadata)
    yield memoryview(header)
    for name in order:
        little = arrays[name].dtype.newbyteorder("<")
        flat = np.ascontiguousarray(arrays[name], little).reshape(-1)
        yield flat.view(np.uint8).data


def replace_by_parts(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a shard in place of a file; no more than a piece of an array is in memory.

    Raises:
        CheckpointError: as `encode_shard`.
        OSError: it cannot be written; the old file is intact.
    """
    header, order = _encode_header(arrays, metadata)

    def fill(content: mmap.mmap) -> None:
        content[: len(header)] = header
        offset = len(header)
        for name in order:
            array = arrays[name]
            little = array.dtype.newbyteorder("<")
            out: Array = np.ndarray(array.shape, little, content, offset)
            if isinstance(array, PiecedArray):
                array.copy_to(out)
            else:
                out[...] = array
            offset += array.nbytes

    size = len(header) + sum(array.nbytes for array in arrays.values())
    files.replace_mapped(path, size, fill)


def _encode_header(
    arrays: Mapping[str, Any], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """Return the bytes before the arrays, and the order of these."""
    if RESERVED in arrays:
        raise CheckpointError(
            f"the checkpoint format reserves the name {RESERVED!r}; rename that variable"
        )
    pairs = sorted(name for name, array in arrays.items() if array.dtype.kind == "c")
    if pairs:
        metadata = {**metadata, "complex": json.dumps(pairs)}
    # Arrays with the largest items come first, so that every array is aligned for its dtype.
    order = sorted(arrays, key=lambda name: (-real_dtype(arrays[name].dtype).itemsize, name))
    header: dict[str, Any] = {RESERVED: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        array = arrays[name]
        real = real_dtype(array.dtype)
        header[name] = {
            "dtype": _NAMES[real.name],
            "shape": [*array.shape, 2] if name in pairs else list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def read_arrays(data: bytes, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, Array]:
    """Return the arrays of a shard that the manifest lists, with the dtypes that it states.

    Raises:
        CheckpointError: it is no shard, or one with other arrays.
    """
    import safetensors  # loads with its own extension module

    read: Any = safetensors.deserialize  # typed in some versions, untyped in others
    arrays = {}
    try:
        for name, entry in read(data):
            if name not in dtypes:  # a leftover of a failed step on the worker
                continue
            dtype, shape = dtypes[name], entry["shape"]
            array = np.frombuffer(entry["data"], dtype.newbyteorder("<")).astype(dtype, copy=False)
            arrays[name] = array.reshape(shape[:-1] if dtype.kind == "c" else shape)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"it is not a shard of this checkpoint: {error!r}") from error
    return arrays


def map_arrays(data: mmap.mmap, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, Array]:
    """Return views of the arrays of a mapped shard; otherwise as `read_arrays`."""
    arrays = {}
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        for name in header.keys() & dtypes.keys():
            dtype, entry = dtypes[name], header[name]
            if _NAMES[real_dtype(dtype).name] != entry["dtype"]:
                raise CheckpointError(f"it holds {name!r} as {entry['dtype']}, not as {dtype}")
            shape = entry["shape"][:-1] if dtype.kind == "c" else entry["shape"]
            start, little = begin + entry["data_offsets"][0], dtype.newbyteorder("<")
            array = np.frombuffer(data, little, math.prod(shape), start)
            arrays[name] = array.astype(dtype, copy=False).reshape(shape)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not a shard of this checkpoint: {error!r}") from error
    return arrays


def read_all_arrays(data: bytes) -> dict[str, Array]:
    """Return the arrays of a safetensors file without a manifest.

    Raises:
        CheckpointError: it is no such file, or has an array of a dtype that variables cannot have.
    """
    import safetensors

    read: Any = safetensors.deserialize
    try:
        entries = read(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{error}") from error
    return read_arrays(data, _dtypes_of({name: e["dtype"] for name, e in entries}, data))


def map_all_arrays(data: mmap.mmap) -> dict[str, Array]:
    """Return views of all arrays of a mapped safetensors file without a manifest.

    Raises:
        CheckpointError: as `read_all_arrays`.
    """
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        codes = {name: str(e["dtype"]) for name, e in header.items() if name != RESERVED}
        ends = [e["data_offsets"][1] for name, e in header.items() if name != RESERVED]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise CheckpointError("its header is not that of a safetensors file") from None
    if begin + max(ends, default=0) != len(data):
        raise CheckpointError(
            f"it has {len(data):,} bytes, and its header says {begin + max(ends, default=0):,}"
        )
    return map_arrays(data, _dtypes_of(codes, data))


def _dtypes_of(codes: Mapping[str, str], data: bytes | mmap.mmap) -> dict[str, np.dtype[Any]]:
    """Return the dtypes of the arrays of a file from their codes in its header.

    Raises:
        CheckpointError: an array has a dtype that variables cannot have.
    """
    known = {code: as_dtype(name) for name, code in _NAMES.items()}
    strange = [f"{name} ({code})" for name, code in codes.items() if code not in known]
    if strange:
        raise CheckpointError(f"it has {strange[0]}, of a dtype that variables cannot have")
    try:
        pairs = set(json.loads(read_metadata(data).get("complex", "[]")))
    except (ValueError, TypeError):
        pairs = set()
    return {
        name: complex_dtype(known[code]) if name in pairs else known[code]
        for name, code in codes.items()
    }


def read_metadata(data: bytes | mmap.mmap) -> dict[str, str]:
    """Return a shard's metadata; empty if it cannot be read."""
    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get(RESERVED, {})
        return {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}
