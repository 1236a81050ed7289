"""Copies and sums that bypass the caches (non-temporal stores), for arrays between processes.

An ordinary copy first fetches the cache lines that it overwrites, and evicts other data. The lender
of an array does not read the copy again. If the copy would not stay in a cache until its reader
comes, its stores go straight to memory, which is a third less traffic. Whether it would stay
depends on the processor, its other users and what else is in the cache. A `CopyStrategyTuner`
measures that for sizes that a cache could hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import compiler, name_module
from graphflow.placement.clusters.machine.host_facts import cache_bytes

Array = np.ndarray[Any, np.dtype[Any]]

STREAMED_FROM = 2 << 20  # bytes; smaller copies stay in the second-level cache
_CACHED_COPIES = 6  # the array, its copy and the reader's result, in half of the last cache
_TRIALS = 4  # of each kind; the quickest of them counts: others were disturbed
_GAIN = 0.8  # of the time of an ordinary copy; if it takes more, the reader's cache counts more
_RETRY_AFTER = 256  # copies, then both kinds are timed again
_LINE_BYTES = 64  # of a cache line, and of a store
_LINES_A_BLOCK = 4  # in one iteration of the loop
BLOCK_BYTES = _LINE_BYTES * _LINES_A_BLOCK
_FLOATS = {"float32": "float", "float64": "double"}

Sum = Callable[[Array, Array, Array], None]
"""(target, first, second): arrays of whole blocks (`whole_blocks`), of one dtype."""


class CopyStrategyTuner:
    """Times both kinds of copies of about one size and chooses the kind of the next one.

    A trial includes reading the copy. A non-temporal copy is about as quick as an ordinary one, but
    its reader has to fetch everything from memory. For one thread at a time; two at once only
    measure worse.
    """

    def __init__(self, nbytes: int) -> None:
        self._large = nbytes >= STREAMED_FROM
        self._tries = (
            2 * _TRIALS if self._large and not exceeds_cache(nbytes * _CACHED_COPIES) else 0
        )
        self._count = 0
        self._whole = [inf, inf]  # seconds a byte of the best trial: ordinary, non-temporal

    @property
    def is_trial(self) -> bool:
        """True if the next copy is a trial, which is timed with its reading."""
        return self._count < self._tries

    @property
    def nontemporal(self) -> bool:
        """True if the next copy bypasses the caches."""
        if not self._tries:
            return self._large
        if self.is_trial:
            return self._count >= _TRIALS
        through, past = self._whole
        return past < _GAIN * through

    def record(self, past: bool, copied: float, read: float) -> None:
        """Note the seconds a byte of a copy and, for a trial, of reading it."""
        if self.is_trial:
            self._whole[past] = min(self._whole[past], copied + read)
        self._count += 1
        if self._count == _RETRY_AFTER:
            self._count, self._whole = 0, [inf, inf]


def read(array: Array) -> int:
    """Read all bytes of an array, to time that."""
    return int(array.max())


@cache
def _last_cache() -> int:
    """Return the bytes of the last cache, which cores share; 0 if unknown."""
    return cache_bytes(3) or 0


def exceeds_cache(nbytes: int) -> bool:
    """Return True if data of `nbytes` that is used in turns is more than a cache keeps."""
    return nbytes > _last_cache()


def bypasses_cache(nbytes: int) -> bool:
    """Return True if an array of `nbytes` for another process is always written past the caches."""
    return nbytes >= STREAMED_FROM and exceeds_cache(nbytes * _CACHED_COPIES)


def whole_blocks(array: Array) -> slice:
    """Return the elements of `array`, shape (n,), that fill whole blocks from an aligned address.

    Few elements are outside.
    """
    size = array.itemsize
    first, astray = divmod(-address(array) % _LINE_BYTES, size)
    if astray:
        return slice(0, 0)
    first = min(first, array.size)
    return slice(first, first + (array.size - first) * size // BLOCK_BYTES * BLOCK_BYTES // size)


def copy(target: Array, source: Array, past: bool, start: int = 0, stop: int | None = None) -> None:
    """Copy bytes for other processes to read.

    Args:
        target: uint8, (n,), aligned to 64 bytes.
        source: uint8, (n,).
        past: Bypass the caches.
        start, stop: The bytes to copy, if not all; `start` is a multiple of `BLOCK_BYTES`.
    """
    stop = source.nbytes if stop is None else stop
    if past and stop - start >= BLOCK_BYTES:
        whole = stop - stop % BLOCK_BYTES
        _copy_loop()(address(target), address(source), start, whole)
        start = whole
    target[start:stop] = source[start:stop]


def copy_array(target: Array, source: Array) -> None:
    """Copy an array, past the caches if they are too small for it.

    Args:
        target: C-contiguous, aligned to 64 bytes.
        source: of the same shape.
    """
    past = bypasses_cache(target.nbytes)
    if past and source.flags.c_contiguous and source.dtype == target.dtype:
        copy(target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8), past=True)
    else:
        target[...] = source


@cache
def make_adder(dtype: str, *, halved: bool) -> Sum | None:
    """Return a function that adds two arrays past the caches, with the bits of numpy.

    Return None where nothing is quicker than numpy.

    Args:
        halved: Return the mean: each sum is halved, which equals a division by two.
    """
    scalar = _FLOATS.get(dtype)
    if scalar is None:
        return None
    vector = f"<{_LINE_BYTES // np.dtype(dtype).itemsize} x {scalar}>"
    lines = [f"  %{'sum' if halved else 'line'}@ = fadd {vector} %first@, %second@"]
    if halved:
        lines.append(f"  %line@ = fmul {vector} %sum@, splat ({scalar} 5.0e-1)")
    native = _compile_loop(("first", "second"), vector, lines)

    def add(target: Array, first: Array, second: Array) -> None:
        if target.nbytes:  # the loop runs at least once
            native(address(target), address(first), address(second), 0, target.nbytes)

    return add


@cache
def _copy_loop() -> Any:
    """Return the native loop (target, source, start, stop) that copies whole blocks."""
    return _compile_loop(("line",), f"<{_LINE_BYTES // 8} x i64>", ())


def _compile_loop(sources: Sequence[str], vector: str, lines: Sequence[str]) -> Any:
    """Compile the loop of `_loop_text`."""
    name, text = name_module(_loop_text(sources, vector, lines), "")
    return compiler().function(name, f"{text}!0 = !{{i32 1}}\n").releasing_gil


def _loop_text(sources: Sequence[str], vector: str, lines: Sequence[str]) -> str:
    """Return a loop (target, *sources, start, stop) over whole blocks as LLVM IR.

    The lines of a block are read, then written together. The fence orders these stores before the
    one that announces them.

    Args:
        lines: Code that makes %line@ of %source@; @ is the number of a line.
    """
    begins = [f"  %at{i} = add i64 %here, {i * _LINE_BYTES}" for i in range(_LINES_A_BLOCK)]
    loads = [
        f"""  %{source}_from{i} = getelementptr i8, ptr %{source}, i64 %at{i}
  %{source}{i} = load {vector}, ptr %{source}_from{i}, align 1"""
        for source in sources
        for i in range(_LINES_A_BLOCK)
    ]
    made = [line.replace("@", str(i)) for line in lines for i in range(_LINES_A_BLOCK)]
    stores = [
        f"""  %to{i} = getelementptr i8, ptr %target, i64 %at{i}
  store {vector} %line{i}, ptr %to{i}, align {_LINE_BYTES}, !nontemporal !0"""
        for i in range(_LINES_A_BLOCK)
    ]
    body = "\n".join(begins + loads + made + stores)
    pointers = ", ".join(f"ptr %{source}" for source in sources)
    return f"""(ptr %target, {pointers}, i64 %start, i64 %stop) {{
entry:
  br label %turn
turn:
  %here = phi i64 [ %start, %entry ], [ %next, %turn ]
{body}
  %next = add i64 %here, {BLOCK_BYTES}
  %more = icmp slt i64 %next, %stop
  br i1 %more, label %turn, label %done
done:
  fence seq_cst
  ret void
}}"""
