"""Distinct numbers among many, by a native radix sort: a few passes, whatever the order was."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import KernelWriter
from graphflow.ops.kernels.fusion.parallel_call import call_parallel, native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.scratch_memory import scratch

_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS  # counters that the first cache holds
_PLACE_BITS = 32
"""A number and its place share a word."""
_LEAST_NUMBERS = 512
"""Numbers below which numpy is as fast."""
_NANOSECONDS = 10.0  # a number, roughly


def find_distinct(xp: Any, numbers: Any, bound: int) -> tuple[Any, Any]:
    """Return the distinct numbers, ascending, and the position of each number among them.

    Args:
        numbers: (k,) integers in [0, bound).

    Returns:
        (n,) and (k,), int64.
    """
    count = numbers.shape[0]
    native = xp is np and is_jit_enabled() and count >= _LEAST_NUMBERS
    if not native or max(bound, count) > 1 << (_PLACE_BITS - 1):
        distinct, places = xp.unique(numbers, return_inverse=True)
        return distinct.astype(np.int64, copy=False), places.reshape(-1)
    numbers = np.ascontiguousarray(numbers, np.int64)
    distinct, places = np.empty(count, np.int64), np.empty(count, np.int64)
    memory = [scratch(np, f"distinct {i}", (count,), np.int64) for i in range(2)]
    counters = scratch(np, "distinct counters", (_DIGITS,), np.int64)
    passes = max(1, -(-(bound - 1).bit_length() // _DIGIT_BITS))
    arrays = [numbers, distinct, places, *memory, counters]
    call_parallel(native_function(_write_sort), arrays, [count, passes], 1, _NANOSECONDS * count)
    return distinct[: int(counters[0])], places


def _write_sort() -> tuple[str, str]:
    """Write the sort; it leaves the number of distinct numbers in the first counter.

    Pointers: numbers, distinct, places, two arrays of as many words, counters. Sizes: numbers,
    passes.
    """
    flow = KernelWriter()
    numbers, distinct, places, first, second, counters = (flow.pointer(i) for i in range(6))
    count, passes = flow.size(0), flow.size(1)

    def load(base: str, at: str) -> str:
        return flow.load_index(base, "i64", at)

    def store(value: str | int, base: str, at: str) -> None:
        flow.store("i64", str(value), flow.gep(base, "i64", at), 8)

    def pack(i: str) -> None:
        high = flow.step("shl", load(numbers, i), _PLACE_BITS)
        store(flow.step("or", high, i), first, i)

    flow.loop("0", count, (), pack)

    def one_pass(number: str, source: str, target: str) -> list[str]:
        shift = flow.add(flow.mul(number, _DIGIT_BITS), _PLACE_BITS)

        def digit(word: str) -> str:
            return flow.step("and", flow.step("lshr", word, shift), _DIGITS - 1)

        def tally(i: str) -> None:
            at = digit(load(source, i))
            store(flow.add(load(counters, at), 1), counters, at)

        def start(at: str, total: str) -> list[str]:
            here = load(counters, at)
            store(total, counters, at)
            return [flow.add(total, here)]

        def move(i: str) -> None:
            word = load(source, i)
            at = digit(word)
            place = load(counters, at)
            store(word, target, place)
            store(flow.add(place, 1), counters, at)

        flow.loop("0", _DIGITS, (), lambda at: store(0, counters, at))
        flow.loop("0", count, (), tally)
        flow.loop("0", _DIGITS, [("i64", "0")], start)
        flow.loop("0", count, (), move)
        return [target, source]

    ordered, _ = flow.loop("0", passes, [("ptr", first), ("ptr", second)], one_pass)

    def number(i: str, found: str, before: str) -> list[str]:
        word = load(ordered, i)
        value = flow.step("lshr", word, _PLACE_BITS)
        is_new = flow.write(f"zext i1 {flow.step('icmp ne', value, before)} to i64")
        at = flow.add(found, is_new)
        store(value, distinct, at)
        store(at, places, flow.step("and", word, (1 << _PLACE_BITS) - 1))
        return [at, value]

    last, _ = flow.loop("0", count, [("i64", "-1"), ("i64", "-1")], number)
    store(flow.add(last, 1), counters, "0")
    return flow.finish()


__all__ = ["find_distinct"]
