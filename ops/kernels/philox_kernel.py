"""Philox random words by a generated loop, with the bits of `ops/randomness/philox.py`.

    void kernel(ptr* result, i64* parameters, i64 start, i64 stop)

It draws blocks `start` to `stop` of 16 counters: 64 words each. It stores the words, or whether
each is below a bound. It takes a twentieth of the time of array calls, and uses integers only, so
all processors give the same bits.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.vector_writer import Module, VectorWriter
from graphflow.ops.kernels.fusion.region_kernels import (
    GIL_RELEASE_NANOSECONDS,
    THREADING_NANOSECONDS,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, name_module
from graphflow.ops.kernels.jit.thread_pool import current_pool

_COUNTERS = 16
_WORDS = 4 * _COUNTERS
_NANOSECONDS = 0.5
"""A rough estimate for a word."""
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def random_words(count: int, stream: tuple[int, int], step: int, first: int = 0) -> Any:
    """Draw the words of a stream in a step from `first` on, uint32, shape (count,)."""
    return _draw("words", count, stream, step, 0, np.dtype("uint32"), first)


def random_below(count: int, bound: int, stream: tuple[int, int], step: int, first: int = 0) -> Any:
    """Draw whether these words are below a bound, bool, shape (count,)."""
    return _draw("below", count, stream, step, bound, np.dtype(bool), first)


def _draw(
    what: str, count: int, stream: tuple[int, int], step: int, bound: int, dtype: np.dtype[Any],
    first: int,
) -> Any:  # fmt: skip
    seed, number = stream
    parameters = np.array(
        [
            seed & _LOW,
            (seed >> 32) & _LOW,
            ((step >> 32) & 0xFFFF) << 16,
            step & _LOW,
            number & _LOW,
            bound,
        ],
        np.int64,
    )
    before = first // _WORDS
    blocks = -(-(first + count) // _WORDS) - before
    result = np.empty(blocks * _WORDS, dtype)
    # The kernel stores block i at i times its size, so the table holds where block 0 would be.
    table = np.array([address(result) - before * _WORDS * dtype.itemsize], np.int64)
    function = _function(what)
    given = ctypes.c_void_p(address(table)), ctypes.c_void_p(address(parameters))
    work = count * _NANOSECONDS
    pool = current_pool()
    if work > THREADING_NANOSECONDS and pool is not None and pool.threads > 1:
        parts = min(pool.threads, int(work / THREADING_NANOSECONDS * 2))
        bounds = [before + blocks * i // parts for i in range(parts + 1)]
        pool.run(lambda i: function.releasing_gil(*given, bounds[i], bounds[i + 1]), parts)
    elif blocks:
        (function.releasing_gil if work > GIL_RELEASE_NANOSECONDS else function.holding_gil)(
            *given, before, before + blocks
        )
    return result[first - before * _WORDS :][:count]


@cache
def _function(what: str) -> NativeFunction:
    return compiler().function(*_text(what))


@cache
def _text(what: str) -> tuple[str, str]:
    module = Module()
    before: list[str] = []
    inside: list[str] = []
    setup, body = (VectorWriter(module, _COUNTERS, lines) for lines in (before, inside))
    given = [_parameter(setup, i, "i64") for i in range(5)]
    keys = [_key(setup, round, given) for round in range(_ROUNDS)]
    drawn = _rounds(body, _block_counters(body, given), keys)
    _store(setup, body, what, drawn)
    text = "\n".join(
        [
            "(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {",
            "entry:",
            "  %out = load ptr, ptr %ptrs, align 8",
            *before,
            "  br label %next",
            "next:",
            "  %i = phi i64 [%start, %entry], [%i.next, %next]",
            *inside,
            "  %i.next = add i64 %i, 1",
            "  %more = icmp ult i64 %i.next, %stop",
            "  br i1 %more, label %next, label %done",
            "done:",
            "  ret void",
            "}",
        ]
    )
    return name_module(text, "\n".join(module.declared.values()))


def _parameter(lanes: VectorWriter, i: int, element: str) -> str:
    """Load a parameter into all lanes."""
    place = lanes.write(f"getelementptr i64, ptr %sizes, i64 {i}")
    one = lanes.write(f"load i64, ptr {place}, align 8")
    if element != "i64":
        one = lanes.write(f"trunc i64 {one} to {element}")
    return lanes.broadcast(element, one)


def _key(lanes: VectorWriter, round: int, given: list[str]) -> tuple[str, str]:
    """Return the two words of the key in a round; the upper halves of lanes are not read."""
    first, second = (
        lanes.binary("add", "i64", k, lanes.constant(round * w & _LOW, "i64"))
        for k, w in zip(given, _WEYL, strict=False)
    )
    return first, second


def _block_counters(lanes: VectorWriter, given: list[str]) -> list[str]:
    """Return the counters of a block: its index, the upper half with that of the step, step,
    stream."""
    iota = ", ".join(f"i64 {i}" for i in range(_COUNTERS))
    start = lanes.write(f"shl i64 %i, {_COUNTERS.bit_length() - 1}")
    index = lanes.binary("add", "i64", lanes.broadcast("i64", start), f"<{iota}>")
    upper = lanes.binary("lshr", "i64", index, lanes.constant(32, "i64"))
    return [index, lanes.binary("or", "i64", upper, given[2]), given[3], given[4]]


def _rounds(lanes: VectorWriter, c: list[str], keys: list[tuple[str, str]]) -> list[str]:
    """Write ten rounds; each counter is the lower half of its lane."""
    low, half = lanes.constant(_LOW, "i64"), lanes.constant(32, "i64")
    for first, second in keys:
        p0, p1 = (
            lanes.binary("mul", "i64", lanes.binary("and", "i64", x, low), lanes.constant(m, "i64"))
            for x, m in ((c[0], _MULTIPLIERS[0]), (c[2], _MULTIPLIERS[1]))
        )
        mixed = []
        for product, other, key in ((p1, c[1], first), (p0, c[3], second)):
            high = lanes.binary("lshr", "i64", product, half)
            mixed.append(lanes.binary("xor", "i64", lanes.binary("xor", "i64", high, other), key))
        c = [mixed[0], p1, mixed[1], p0]
    return c


def _store(setup: VectorWriter, body: VectorWriter, what: str, drawn: list[str]) -> None:
    """Store the four words of each counter side by side."""
    halves = [body.convert("trunc", word, "i64", "i32") for word in drawn]
    kind = body.vector("i32")
    count = 2 * _COUNTERS
    side = ", ".join(f"i32 {i}" for i in range(count))
    pairs = [
        body.write(f"shufflevector {kind} {a}, {kind} {b}, <{count} x i32> <{side}>")
        for a, b in (halves[:2], halves[2:])
    ]
    order = ", ".join(f"i32 {i % 4 * _COUNTERS + i // 4}" for i in range(_WORDS))
    joined = f"<{count} x i32>"
    words = body.write(
        f"shufflevector {joined} {pairs[0]}, {joined} {pairs[1]}, <{_WORDS} x i32> <{order}>"
    )
    stored, value = "i32", words
    if what == "below":
        wide = VectorWriter(body.module, _WORDS, body.lines)
        bound = _parameter(VectorWriter(setup.module, _WORDS, setup.lines), 5, "i32")
        value = wide.convert("zext", wide.binary("icmp ult", "i32", words, bound), "i1", "i8")
        stored = "i8"
    place = body.write(f"getelementptr <{_WORDS} x {stored}>, ptr %out, i64 %i")
    body.lines.append(f"  store <{_WORDS} x {stored}> {value}, ptr {place}, align 1")
