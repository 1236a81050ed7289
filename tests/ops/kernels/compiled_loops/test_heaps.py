"""Heaps in flat arrays against `heapq`, as plain Python and compiled."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.ops.kernels.compiled_loops import heaps
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

ENTRY = st.tuples(st.sampled_from([0.0, 1.0, 2.5, float("inf")]), st.integers(0, 5))


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
@given(steps=st.lists(st.one_of(st.none(), ENTRY), max_size=60))
def test_entries_come_out_in_the_order_of_heapq(
    compiled: bool, steps: list[tuple[float, int] | None]
) -> None:
    push: Any = native(heaps, "heap_push") if compiled else heaps.heap_push
    pop: Any = native(heaps, "heap_pop") if compiled else heaps.heap_pop
    first = 3  # a heap may begin anywhere
    keys, items = np.zeros(first + 60), np.zeros(first + 60, np.int64)
    expected: list[tuple[float, int]] = []
    for entry in steps:
        if entry is not None:
            push(keys, items, first, len(expected), *entry)
            heapq.heappush(expected, entry)
        elif expected:
            assert pop(keys, items, first, len(expected)) == heapq.heappop(expected)[1]
        if expected:
            assert (keys[first], items[first]) == expected[0]
