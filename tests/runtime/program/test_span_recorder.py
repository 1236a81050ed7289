"""Times of traced steps: what lies between two nodes counts for neither."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.op import Node
from graphflow.ops.kernels.jit.call_table_driver import clock_nanoseconds
from graphflow.runtime.program.span_recorder import Span, SpanRecorder, clock, reading_nanoseconds
from tests.runtime.programs import CPU, compile_program, make_partition

CLOCKS = pytest.mark.parametrize("now", [time.monotonic_ns, time.thread_time_ns])


class Ticks:
    """A clock that shows when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def a_node() -> Node:
    return gf.placeholder("float32", (2,)).node


def test_what_happens_after_a_line_is_not_the_next_lines_time() -> None:
    ticks, node, other = Ticks(), a_node(), a_node()

    class SlowMeter:
        def record_line(self, of: Node) -> None:
            ticks.now += 1000

        def restart(self) -> None:
            ticks.now += 1000

    before = clock.set(ticks)
    try:
        record = SpanRecorder([node, other], lambda: None, SlowMeter())  # type: ignore[arg-type]
    finally:
        clock.reset(before)
    ticks.now += 5
    record(0)
    ticks.now += 7
    record(1)
    assert record.node_times() == [(node, 0, 5), (other, 1005, 1012)]


def test_consecutive_lines_of_a_node_are_one_span() -> None:
    ticks, node, other = Ticks(), a_node(), a_node()
    before = clock.set(ticks)
    try:
        record = SpanRecorder([node, node, other], lambda: None)
    finally:
        clock.reset(before)
    for line in range(3):
        ticks.now += 10
        record(line)
    assert record.node_times() == [(node, 0, 20), (other, 20, 30)]


@CLOCKS
def test_reading_a_clock_costs_something_and_less_than_ten_microseconds(
    now: Callable[[], int],
) -> None:
    assert 0 <= reading_nanoseconds(now) < 1e4
    number = {time.monotonic_ns: time.CLOCK_MONOTONIC}.get(now, time.CLOCK_THREAD_CPUTIME_ID)
    assert 0 <= clock_nanoseconds(number) < 1e4


@CLOCKS
def test_native_calls_are_timed_inside_native_code(now: Callable[[], int]) -> None:
    x = gf.placeholder("float32", (256, 256), name="x")
    y = x
    for i in range(8):
        y = gf.nn.softmax(y + float(i), axis=1)
    program = compile_program(make_partition(y))
    value = np.random.default_rng(0).random((256, 256), "float32")
    plain = program.compute({"x": value}, 1, 0)["0"]
    spans: list[Span] = []
    before = clock.set(now)
    start = now()
    try:
        traced = program.compute({"x": value}, 2, 0, spans)["0"]
    finally:
        clock.reset(before)
    whole = now() - start
    assert np.array_equal(plain, traced)
    mine = [(begin, end) for track, _, begin, end in spans if track == CPU]
    assert all(begin <= end for begin, end in mine)
    assert 0 < sum(end - begin for begin, end in mine) <= whole
    assert sorted(mine) == mine and all(a[1] <= b[0] for a, b in pairwise(mine))


def test_a_clock_that_native_code_cannot_read_times_each_call() -> None:
    x = gf.placeholder("float32", (4, 3), name="x")
    y = gf.reshape(gf.tanh(gf.reshape(gf.tanh(x, name="t0"), (3, 4)), name="t1"), (4, 3))
    program = compile_program(make_partition(y))
    value = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    count = 0

    def count_calls() -> int:
        nonlocal count
        count += 1
        return count

    spans: list[Span] = []
    before = clock.set(count_calls)
    try:
        traced = program.compute({"x": value}, 1, 0, spans)["0"]
    finally:
        clock.reset(before)
    assert np.array_equal(traced, program.compute({"x": value}, 2, 0)["0"])
    assert [name for _, name, _, _ in spans if name.startswith("t")] == ["t0", "t1"]
    assert all(end == begin + 1 for _, name, begin, end in spans if name.startswith("t"))
