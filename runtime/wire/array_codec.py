"""Arrays in messages: split into chunks, inside a message, or lent in shared memory.

An array that arrives is taken as hostile. Its header is checked before memory is allocated for it,
and only the dtypes that are listed here may travel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import xxhash

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProtocolError
from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.runtime.wire.field_checks import construct_unchecked, make_check
from graphflow.runtime.wire.messages import Array, Chunk, Count, Small
from graphflow.runtime.wire.msgpack_codec import dumps, loads
from graphflow.runtime.wire.step_values import Key

CHUNK_BYTES = 1 << 20  # bytes of an array in one frame
FAR_CHUNK_BYTES = 256 << 10  # the same, to another host
SMALL_BYTES = 16 << 10  # arrays below this size go inside messages
SMALL_TOTAL_BYTES = 256 << 10  # of all arrays inside one message, about

_HEADER_CAP = 1 << 10  # bytes of the header of an array inside a message
_RANK_CAP = 32

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOATS = {"float16", "float32", "float64", "complex64", "complex128"}
_NUMPY_DTYPES = {name: np.dtype(name) for name in {"bool"} | _INTEGERS | _FLOATS}

_CACHED_HEADERS = 1024  # of arrays inside messages

_PREFIX = struct.Struct("<QH")  # of an array inside a message: checksum, length of its header
_CHECKSUM_BYTES = 8  # in front of the bytes that it is of
SMALL_CAP = SMALL_BYTES + _HEADER_CAP + _PREFIX.size  # bytes of an array inside a message
_check_header = make_check(tuple[Key, str, list[Count]])


@dataclass(frozen=True)
class BorrowedBuffer:
    """The bytes of an array in its sender's memory, not examined before the message is believed.

    Attributes:
        borrow: Returns the bytes, perhaps before the last of them are there, for which the reader
            waits. To be called once.
    """

    borrow: Callable[[], Array]

    def __len__(self) -> int:
        return 0  # bytes that came with the message


def return_borrowed(data: Buffer | None) -> None:
    """Return the lent array of a message that came too late."""
    if isinstance(data, BorrowedBuffer):
        data.borrow()


Buffer = bytes | memoryview | BorrowedBuffer


def checksum(data: bytes | memoryview) -> int:
    """Return XXH3 of 64 bits without the lowest, never 0.

    That takes a tenth of the time of a CRC.
    """
    return xxhash.xxh3_64_intdigest(data) >> 1 or 1


def split_array(
    purpose: str,
    number: int,
    name: Key,
    array: Array,
    *,
    checked: bool = True,
    far: bool = False,
) -> Iterator[tuple[Chunk, memoryview[Any]]]:
    """Return the chunks of an array in the order of its memory.

    An array that is contiguous in some order of its axes is not copied. Any other is first copied
    into C order.

    Args:
        checked: Each chunk has a checksum. Chunks in shared memory need none.
        far: Make small chunks, for a receiver on another host or one that decrypts. A link counts
            as dead if nothing comes for seconds, and nothing else comes before a chunk's end.

    Raises:
        ProtocolError: The array's dtype has no name on the wire.
    """
    array, dtype = _to_native_order(array)
    compact, axes = _flatten_order(array)
    raw: memoryview[Any] = compact.reshape(-1).view(np.uint8).data
    size = min(CHUNK_BYTES, FAR_CHUNK_BYTES) if far else CHUNK_BYTES
    for offset in range(0, max(raw.nbytes, 1), size):
        piece = raw[offset : offset + size]
        yield (
            Chunk(
                purpose, number, name, dtype, list(array.shape), axes, raw.nbytes, offset,
                checksum(piece) if checked else 0,
            ),
            piece,
        )  # fmt: skip


def encode_small(name: Key, array: Array) -> Small | None:
    """Return an array as one byte string inside a message; None if it is too large.

    Its header (name, dtype, shape) is nearly always one that the receiver has seen before.

    Raises:
        ProtocolError: The array's dtype has no name on the wire.
    """
    if array.nbytes >= SMALL_BYTES:
        return None
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    header = _small_header(name, array.dtype, array.shape)
    if len(header) > _HEADER_CAP:
        return None
    body = header + array.tobytes()
    return checksum(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def is_intact(sent: Small) -> bool:
    """Return True if an array inside a message has the right checksum."""
    if len(sent) < _PREFIX.size:
        return False
    sealed: int = _PREFIX.unpack_from(sent)[0]
    return checksum(memoryview(sent)[_CHECKSUM_BYTES:]) == sealed


def decode_small(sent: Small, *, aligned: bool = True) -> tuple[Key, Array]:
    """Return an array inside a message, and its name.

    Args:
        aligned: Place it where a buffer may start. Otherwise it lies where numpy puts it, which
            takes half of the time.

    Raises:
        ProtocolError: It contradicts itself, or its checksum is wrong.
    """
    if len(sent) < _PREFIX.size:
        raise ProtocolError(f"an array in a message has only {len(sent)} bytes")
    seal, length = _PREFIX.unpack_from(sent)
    end = _PREFIX.size + length
    name, shape, dtype, nbytes = _parse_small_header(sent[_PREFIX.size : end])
    if nbytes != len(sent) - end:
        raise ProtocolError(
            f"array {str(name)[:40]} of shape {str(shape)[:80]} and dtype {dtype} has "
            f"{len(sent) - end} bytes"
        )
    if checksum(sent[_CHECKSUM_BYTES:]) != seal:
        raise ProtocolError(f"array {str(name)[:40]} has the wrong checksum")
    found: Array = np.ndarray(shape, dtype, sent, end)
    if not aligned:
        return name, found.copy()
    array: Array = np.ndarray(shape, dtype, empty_aligned(nbytes))
    array[...] = found
    return name, array


@lru_cache(_CACHED_HEADERS)
def _small_header(name: Key, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of an array inside a message, with the length in front."""
    header = dumps((name, _wire_name(dtype), shape))
    return _PREFIX.pack(0, len(header))[_CHECKSUM_BYTES:] + header


@lru_cache(_CACHED_HEADERS)
def _parse_small_header(header: bytes) -> tuple[Key, tuple[int, ...], np.dtype[Any], int]:
    """Return name, shape, dtype and bytes of an array inside a message."""
    if len(header) > _HEADER_CAP:
        raise ProtocolError(f"the header of an array in a message has {len(header)} bytes")
    name, told, shape = _check_header(loads(header), "small")
    dtype = dtype_of(told)
    return name, tuple(shape), dtype, nbytes_of(shape, dtype)


def nbytes_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array that numpy can make, even if one of its sizes is zero.

    Raises:
        ProtocolError: It has too many axes, or its other sizes exceed any memory.
    """
    if len(shape) > _RANK_CAP:
        raise ProtocolError(f"an array has {len(shape)} axes, at most {_RANK_CAP} may travel")
    nbytes = math.prod(shape) * dtype.itemsize
    if 0 < nbytes < 1 << 48:
        return nbytes
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 48:
        raise ProtocolError(f"an array has the shape {str(list(shape))[:100]}")
    return nbytes


Announce = Callable[[int, int], None]
Lend = Callable[[memoryview, Announce | None], tuple[int, int] | None]
"""Copies bytes to where the receiver sees them.

Returns the slot and its turn, or None if no slot is free. The second argument is called with these
while the last bytes are copied.
"""


def lend_array(
    purpose: str,
    number: int,
    name: Key,
    array: Array,
    lend: Lend,
    announce: Callable[[Chunk], None] | None = None,
) -> Chunk | None:
    """Return the chunk of an array that the receiver borrows, in place of `split_array`.

    Return None if `lend` finds no free slot.

    Args:
        announce: Sends the chunk while the last bytes are copied.

    Raises:
        ProtocolError: The array's dtype has no name on the wire.
    """
    array, dtype = _to_native_order(array)
    compact, axes = _flatten_order(array)
    raw: memoryview[Any] = compact.reshape(-1).view(np.uint8).data
    header = {
        "purpose": purpose, "number": number, "name": name, "dtype": dtype,
        "shape": list(array.shape), "axes": axes, "nbytes": raw.nbytes, "offset": 0, "checksum": 0,
    }  # fmt: skip

    def chunk_at(slot: int, turn: int) -> Chunk:
        return construct_unchecked(Chunk, header | {"slot": slot, "turn": turn})

    found = lend(raw, None if announce is None else lambda *place: announce(chunk_at(*place)))
    return None if found is None else chunk_at(*found)


def message_parts(
    purpose: str, number: int, name: Key, array: Array | Chunk, *, far: bool = False
) -> list[tuple[Chunk, memoryview[Any] | None]]:
    """Return the chunks and bytes that are sent for an array, or for one that is lent already."""
    if isinstance(array, Chunk):
        return [(array, None)]
    return list(split_array(purpose, number, name, array, far=far))


def _to_native_order(array: Array) -> tuple[Array, str]:
    """Return an array in this machine's byte order, and the name of its dtype on the wire."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, _wire_name(array.dtype)


@cache
def _wire_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype on the wire; raise ProtocolError if it has none."""
    if dtype != dtype_of(dtype.name):
        raise ProtocolError(f"an array of dtype {dtype} cannot be sent")
    return dtype.name


def _flatten_order(array: Array) -> tuple[Array, list[int]]:
    """Return a C-contiguous view of an array, and its axes from slowest to fastest in memory.

    An array that is not contiguous in any order of its axes is copied.
    """
    axes = list(range(array.ndim))
    if array.flags.c_contiguous:
        return array, axes
    slowest_first = sorted(axes, key=lambda axis: -array.strides[axis])
    turned = array.transpose(slowest_first)
    if turned.flags.c_contiguous:
        return turned, slowest_first
    return np.ascontiguousarray(array), axes


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of that name, if it may travel.

    Raises:
        ProtocolError: It may not.
    """
    known = _NUMPY_DTYPES.get(name)
    if known is not None:
        return known
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    raise ProtocolError(f"dtype {name[:40]!r} may not travel between processes")
