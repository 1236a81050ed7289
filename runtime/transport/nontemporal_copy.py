"""Copies and sums past the caches: how large arrays are moved between processes.

An ordinary copy first fetches the lines that it is going to write over, and pushes out of the cache
what was there. Who lends an array does not look at the copy again, so where it would not stay in a
cache its stores go straight to memory: a third less traffic. Whether it would stay depends on the
processor, on its other users and on what else lies there: of what a cache could hold it is
measured, by a `CopyStrategyTuner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import compiler, name_module
from graphflow.placement.clusters.host_facts import cache_bytes

Array = np.ndarray[Any, np.dtype[Any]]

STREAMED_FROM = 2 << 20  # bytes; smaller copies stay in the second cache, and are quicker there
_CACHED_COPIES = 6  # the array, its copy and what a reader makes of that, in half of the last cache
_TRIALS = 4  # copies one way, then the other; of each the quickest counts: others were disturbed
_GAIN = 0.8  # of the time through the caches; else these are taken, for the reader's sake
_RETRY_AFTER = 256  # copies after which both ways are tried again
_LINE_BYTES = 64  # bytes: of a cache, and of a store
_LINES_A_BLOCK = 4  # a turn of the loop
BLOCK_BYTES = _LINE_BYTES * _LINES_A_BLOCK  # bytes
_FLOATS = {"float32": "float", "float64": "double"}

Sum = Callable[[Array, Array, Array], None]
"""(target, first, second): whole turns (`turns`) of one dtype."""


class CopyStrategyTuner:
    """How long copies of about one size take, and so which way the next one goes.

    Tries of both ways count with the reading of the copy: who writes past the caches is about as
    quick as who does not, and leaves its reader to fetch everything from memory. For one thread at
    a time; two at once only measure worse.
    """

    def __init__(self, nbytes: int) -> None:
        self._large = nbytes >= STREAMED_FROM
        self._tries = (
            2 * _TRIALS if self._large and not exceeds_cache(nbytes * _CACHED_COPIES) else 0
        )
        self._count = 0
        self._whole = [inf, inf]  # seconds of a try a byte: through, past

    @property
    def is_trial(self) -> bool:
        """Whether the next copy is a try, which counts with its reading."""
        return self._count < self._tries

    @property
    def nontemporal(self) -> bool:
        """Whether the next copy goes past the caches."""
        if not self._tries:
            return self._large
        if self.is_trial:
            return self._count >= _TRIALS
        through, past = self._whole
        return past < _GAIN * through

    def record(self, past: bool, copied: float, read: float) -> None:
        """Notes seconds a byte of a copy, and of reading it if it was a try."""
        if self.is_trial:
            self._whole[past] = min(self._whole[past], copied + read)
        self._count += 1
        if self._count == _RETRY_AFTER:
            self._count, self._whole = 0, [inf, inf]


def read(array: Array) -> int:
    """Reads all bytes of an array, to see how long that takes."""
    return int(array.max())


@cache
def _last_cache() -> int:
    """Bytes of the last cache, which cores share; 0 if there is none, or the system does not
    say."""
    return cache_bytes(3) or 0


def exceeds_cache(nbytes: int) -> bool:
    """Whether so many bytes, which are used in turns, are more than a cache keeps."""
    return nbytes > _last_cache()


def whole_blocks(array: Array) -> slice:
    """The elements of an array, (n,), of which whole turns are written past the caches; few are
    beside them."""
    size = array.itemsize
    first, astray = divmod(-address(array) % _LINE_BYTES, size)
    if astray:
        return slice(0, 0)
    first = min(first, array.size)
    return slice(first, first + (array.size - first) * size // BLOCK_BYTES * BLOCK_BYTES // size)


def copy(target: Array, source: Array, past: bool, start: int = 0, stop: int | None = None) -> None:
    """Copies bytes, for others to read.

    Args:
        target: uint8, (n,), aligned to 64 bytes.
        source: uint8, (n,).
        past: whether past the caches.
        start, stop: which of them, where not all; `start` is a multiple of `TURN`.
    """
    stop = source.nbytes if stop is None else stop
    if past and stop - start >= BLOCK_BYTES:
        whole = stop - stop % BLOCK_BYTES
        _copy_loop()(address(target), address(source), start, whole)
        start = whole
    target[start:stop] = source[start:stop]


@cache
def make_adder(dtype: str, *, halved: bool) -> Sum | None:
    """What adds two arrays past the caches and, for their mean, halves each sum, which is to divide
    it by two; with the bits of numpy. None where there is nothing quicker than numpy."""
    scalar = _FLOATS.get(dtype)
    if scalar is None:
        return None
    vector = f"<{_LINE_BYTES // np.dtype(dtype).itemsize} x {scalar}>"
    lines = [f"  %{'sum' if halved else 'line'}@ = fadd {vector} %first@, %second@"]
    if halved:
        lines.append(f"  %line@ = fmul {vector} %sum@, splat ({scalar} 5.0e-1)")
    native = _compile_loop(("first", "second"), vector, lines)

    def add(target: Array, first: Array, second: Array) -> None:
        if target.nbytes:  # of turns, the loop makes at least one
            native(address(target), address(first), address(second), 0, target.nbytes)

    return add


@cache
def _copy_loop() -> Any:
    return _compile_loop(("line",), f"<{_LINE_BYTES // 8} x i64>", ())


def _compile_loop(sources: Sequence[str], vector: str, lines: Sequence[str]) -> Any:
    name, text = name_module(_loop_text(sources, vector, lines), "")
    return compiler().function(name, f"{text}!0 = !{{i32 1}}\n").releasing_gil


def _loop_text(sources: Sequence[str], vector: str, lines: Sequence[str]) -> str:
    """(target, *sources, start, stop) in LLVM: lines are read, then written together. The fence
    orders these stores before whatever tells that they are there.

    Args:
        lines: make %line@ of %source@; @ is the number of a line.
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
