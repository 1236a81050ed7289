"""Copies past the caches: how a large array goes into memory that another process reads.

An ordinary copy first fetches the lines that it is going to write over, and pushes out of the cache
what was there. Who lends an array does not look at the copy again, so from some megabytes on its
stores go straight to memory: a third less traffic.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.address import address
from graphflow.ops.kernels.native import compiler, named

Array = np.ndarray[Any, np.dtype[Any]]

STREAMED_FROM = 2 << 20  # bytes; smaller copies stay in the second cache, and are quicker there
_LINE = 64  # bytes: of a cache, and of a store
_LINES = 4  # a turn of the loop
TURN = _LINE * _LINES  # bytes


def copy(target: Array, source: Array, start: int = 0, stop: int | None = None) -> None:
    """Copies bytes, for others to read.

    Args:
        target: uint8, (n,), aligned to 64 bytes.
        source: uint8, (n,).
        start, stop: which of them, where not all; `start` is a multiple of `TURN`.
    """
    stop = source.nbytes if stop is None else stop
    if source.nbytes >= STREAMED_FROM and stop - start >= TURN:
        whole = stop - stop % TURN
        _native()(address(target), address(source), start, whole)
        start = whole
    target[start:stop] = source[start:stop]


@cache
def _native() -> Any:
    name, text = named(_text(), "")
    return compiler().function(name, f"{text}!0 = !{{i32 1}}\n").freed


def _text() -> str:
    """(target, source, start, stop) in LLVM: lines are read, then written together. The fence
    orders these stores before whatever tells that they are there."""
    vector = f"<{_LINE // 8} x i64>"
    loads = [
        f"""  %at{i} = add i64 %here, {i * _LINE}
  %from{i} = getelementptr i8, ptr %source, i64 %at{i}
  %line{i} = load {vector}, ptr %from{i}, align 1"""
        for i in range(_LINES)
    ]
    stores = [
        f"""  %to{i} = getelementptr i8, ptr %target, i64 %at{i}
  store {vector} %line{i}, ptr %to{i}, align {_LINE}, !nontemporal !0"""
        for i in range(_LINES)
    ]
    body = "\n".join(loads + stores)
    return f"""(ptr %target, ptr %source, i64 %start, i64 %stop) {{
entry:
  br label %turn
turn:
  %here = phi i64 [ %start, %entry ], [ %next, %turn ]
{body}
  %next = add i64 %here, {TURN}
  %more = icmp slt i64 %next, %stop
  br i1 %more, label %turn, label %done
done:
  fence seq_cst
  ret void
}}"""
