"""Assembler of arrays that arrive in chunks, within budgets of memory.

A chunk's header is checked for consistency and against the chunks before it. Only then memory is
allocated, or a byte copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphLimitError, MessageTooLarge, ProtocolError
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address, empty_aligned
from graphflow.runtime.wire.array_codec import (
    CHUNK_BYTES,
    FAR_CHUNK_BYTES,
    BorrowedBuffer,
    Buffer,
    dtype_of,
    nbytes_of,
)
from graphflow.runtime.wire.frame_codec import BUDGET
from graphflow.runtime.wire.messages import Array, Chunk
from graphflow.runtime.wire.step_values import Key

_HEADERS = 1024  # of arrays, cached
MAX_ARRAYS = 1 << 17  # of one session, under way to one process


def check_header(chunk: Chunk) -> np.dtype[Any]:
    """Return the dtype of the array of `chunk`, whose header must be consistent.

    Raises:
        ProtocolError: It is not.
    """
    return _validate_header(chunk.dtype, tuple(chunk.shape), tuple(chunk.axes), chunk.nbytes)


@lru_cache(_HEADERS)
def _validate_header(
    name: str, shape: tuple[int, ...], axes: tuple[int, ...], told: int
) -> np.dtype[Any]:
    """Check the header of an array; cached, because most arrays come in every step."""
    dtype = dtype_of(name)
    nbytes = nbytes_of(shape, dtype)
    if sorted(axes) != list(range(len(shape))):
        raise ProtocolError(f"axes {list(axes)} are not a permutation of {len(shape)} axes")
    if nbytes != told:
        raise ProtocolError(
            f"an array of shape {list(shape)} and dtype {name} has {nbytes} bytes, "
            f"but its header says {told}"
        )
    return dtype


def _check_piece(chunk: Chunk, data: Buffer) -> None:
    """Check how many bytes come with a chunk.

    Raises:
        ProtocolError: They are not as many as belong at its offset.
    """
    if isinstance(data, BorrowedBuffer):
        if chunk.offset:
            raise ProtocolError(f"an array that is lent starts at byte {chunk.offset}")
        return
    left = chunk.nbytes - chunk.offset
    if not any(
        len(data) == min(size, left) and chunk.offset % size == 0
        for size in (CHUNK_BYTES, FAR_CHUNK_BYTES)
    ):
        raise ProtocolError(
            f"a chunk of {len(data)} bytes at byte {chunk.offset} of {chunk.nbytes} has the wrong "
            "size"
        )


@dataclass
class _Partial:
    """An array of which some bytes are missing."""

    header: Chunk
    array: Array
    memory: Array  # the same bytes, flat
    filled: int


def _adopt_buffer(chunk: Chunk, data: Buffer) -> Array | None:
    """Return the memory of a whole array that comes with its first chunk, or None.

    That is a lent array, or the chunk's own bytes if they begin where a buffer may and nobody else
    refers to them.
    """
    if isinstance(data, BorrowedBuffer):
        return data.borrow()
    if len(data) < chunk.nbytes or not isinstance(data, memoryview) or data.readonly:
        return None
    memory = np.frombuffer(data, np.uint8)
    return memory if address(memory) % ALIGNMENT == 0 else None


def _is_same_array(header: Chunk, chunk: Chunk) -> bool:
    """Return True if two chunks are of the same array."""
    return (
        chunk.nbytes == header.nbytes
        and chunk.dtype == header.dtype
        and chunk.shape == header.shape
        and chunk.axes == header.axes
    )


class ByteBudget:
    """A budget of bytes under way to one process, for all sessions and peers together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0


class ChunkAssembler:
    """Assembles the arrays of one session, within budgets of bytes.

    An array counts from its first chunk until it is taken.

    Args:
        budget: Bytes for each peer.
        entries: Arrays of all peers.
        shared_budget: The budget that all sessions of the process share.
    """

    def __init__(
        self,
        budget: int = BUDGET,
        entries: int = MAX_ARRAYS,
        shared_budget: ByteBudget | None = None,
    ) -> None:
        self._budget = budget
        self._entries = entries
        self._shared_budget = shared_budget or ByteBudget(1 << 62)
        self._held: dict[int, int] = {}  # by origin
        self._partial: dict[tuple[int, str, int, Key], _Partial] = {}
        self._whole: dict[tuple[int, str, int, Key], Array] = {}

    def add(self, origin: int, chunk: Chunk, data: Buffer) -> bool:
        """Add a chunk from `origin`; return True if its array is complete now.

        Raises:
            ProtocolError: The chunk contradicts itself or those before it.
            MessageTooLarge: The array exceeds a budget.
        """
        key = (origin, chunk.purpose, chunk.number, chunk.name)
        _check_piece(chunk, data)
        partial = self._partial.get(key)
        if partial is None:
            partial = self._start(key, chunk, data)
        elif not _is_same_array(partial.header, chunk) or chunk.offset != partial.filled:
            raise ProtocolError(
                f"a chunk of {chunk.purpose} {chunk.name} does not continue the one before it"
            )
        if partial.filled < chunk.nbytes:
            assert not isinstance(data, BorrowedBuffer)
            end = partial.filled + len(data)
            partial.memory[partial.filled : end] = np.frombuffer(data, np.uint8)
            partial.filled = end
        if partial.filled < chunk.nbytes:
            return False
        del self._partial[key]
        self._whole[key] = partial.array
        return True

    def _start(self, key: tuple[int, str, int, Key], chunk: Chunk, data: Buffer) -> _Partial:
        """Check the first chunk of an array and allocate the array; raises as `add`."""
        dtype = check_header(chunk)
        if chunk.offset:
            raise ProtocolError(f"{chunk.purpose} {chunk.name} starts at byte {chunk.offset}")
        if key in self._whole:
            raise ProtocolError(f"{chunk.purpose} {chunk.name} arrives a second time")
        held = self._held.get(key[0], 0)
        shared_budget = self._shared_budget
        if (
            held + chunk.nbytes > self._budget
            or shared_budget.held + chunk.nbytes > shared_budget.budget
        ):
            error = GraphLimitError if chunk.purpose == "part" else MessageTooLarge
            raise error(
                f"{chunk.purpose} {chunk.name} of {chunk.nbytes} bytes exceeds what is left of the "
                f"budget: {held} of {self._budget} bytes of its sender are under way, and "
                f"{shared_budget.held} of {shared_budget.budget} of all"
            )
        if len(self._partial) + len(self._whole) >= self._entries:
            raise MessageTooLarge(f"more than {self._entries} arrays are under way in a session")
        try:
            memory = _adopt_buffer(chunk, data)
            filled = 0 if memory is None else chunk.nbytes
            memory = empty_aligned(chunk.nbytes) if memory is None else memory
        except MemoryError:
            raise MessageTooLarge(f"no memory for an array of {chunk.nbytes} bytes") from None
        array = memory.view(dtype).reshape([chunk.shape[axis] for axis in chunk.axes])
        if chunk.axes != sorted(chunk.axes):
            array = array.transpose(np.argsort(chunk.axes))
        self._charge(key[0], chunk.nbytes)
        self._partial[key] = partial = _Partial(chunk, array, memory, filled)
        return partial

    def take(self, origin: int, purpose: str, number: int, name: Key) -> Array:
        """Return a complete array and stop counting it.

        Raises:
            ProtocolError: It has not arrived.
        """
        array = self._whole.pop((origin, purpose, number, name), None)
        if array is None:
            raise ProtocolError(f"{purpose} {name} of request {number} was announced but not sent")
        self._charge(origin, -array.nbytes)
        return array

    def _charge(self, origin: int, nbytes: int) -> None:
        """Count `nbytes` more for `origin`, or fewer."""
        self._held[origin] = self._held.get(origin, 0) + nbytes
        self._shared_budget.held += nbytes

    @property
    def is_empty(self) -> bool:
        """True if no array has arrived that was not taken."""
        return not (self._partial or self._whole)

    def forget(self, purpose: str, number: int) -> None:
        """Drop the arrays of a request or step."""
        for key in [key for key in self._partial if key[1:3] == (purpose, number)]:
            self._charge(key[0], -self._partial.pop(key).header.nbytes)
        for key in [key for key in self._whole if key[1:3] == (purpose, number)]:
            self._charge(key[0], -self._whole.pop(key).nbytes)

    def clear(self) -> None:
        """Drop all arrays; the session is over."""
        self._partial.clear()
        self._whole.clear()
        self._shared_budget.held -= sum(self._held.values())
        self._held.clear()
