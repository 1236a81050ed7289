"""Branches beside each other: found where they pay, kept apart in memory, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.op import Tensor
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.runtime.memory import branch_planning as planning
from graphflow.runtime.memory import memory_layout as layout
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.native_calls import branch_parallelism as wide
from graphflow.runtime.native_calls.branch_parallelism import ParallelBranches, schedule_branches
from graphflow.runtime.native_calls.pointer_table import KernelCall
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from tests.properties.random_graphs import has_same_bits, random_case
from tests.runtime.programs import compile_program, initial_state, make_partition

NODE: Any = None


@pytest.fixture(autouse=True)
def jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the smallest branches for worth a thread."""
    monkeypatch.setattr(wide, "MIN_PARALLEL_NANOSECONDS", 1.0)
    monkeypatch.setattr(planning, "MIN_PARALLEL_NANOSECONDS", 1.0)
    monkeypatch.setattr(planning, "MIN_BRANCH_NANOSECONDS", 1.0)
    monkeypatch.setattr(planning, "MAX_LOAD_SHARE", 0.999)
    monkeypatch.setattr(layout, "_BRANCH_GROWTH", 1e9)


def call(work: float, reads: Sequence[int], writes: Sequence[int]) -> KernelCall:
    places = (*reads, *writes)
    return KernelCall(
        NODE, KernelTask("", "", (), 1, work), places, (64,) * len(places), len(reads)
    )


def towers(count: int, depth: int) -> tuple[Tensor, Tensor]:
    """Branches of one input that come together in a sum."""
    random = np.random.default_rng(0)
    x = gf.placeholder("float32", (24, 16), name="x")
    ends = []
    for _ in range(count):
        h = x
        for _ in range(depth):
            h = gf.tanh(h @ gf.constant(random.normal(size=(16, 16)).astype("float32")))
        ends.append(h)
    total = ends[0]
    for end in ends[1:]:
        total = total + end
    return x, total


def strands(program: Program) -> list[ParallelBranches]:
    return [line for line in program._code.compute.lines if isinstance(line, ParallelBranches)]


# Where ------------------------------------------------------------------------------------------


def test_calls_that_share_memory_are_one_strand_unless_they_only_read() -> None:
    a = [call(9e4, [0], [128]), call(9e4, [0], [256])]
    assert [[len(s) for s in group] for group in schedule_branches(a, 2)] == [[1, 1]]
    for b in (
        call(9e4, [128], [256]),  # reads what the first writes
        call(9e4, [64], [128]),  # writes there too
        call(9e4, [64], [0]),  # writes what it reads
        call(9e4, [64], [150]),  # overlaps by some bytes
    ):
        assert [len(group) for group in schedule_branches([a[0], b], 2)] == [1]
    assert [len(group) for group in schedule_branches(a, 1)] == [1]
    unknown = KernelCall(NODE, a[0].task, (0, 512))
    assert [len(group) for group in schedule_branches([a[0], unknown], 2)] == [1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 90)), max_size=30),
       st.integers(1, 4))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_groups_of_random_calls_keep_every_order_that_matters(
    items: list[tuple[int, int, int]], threads: int
) -> None:
    calls = [call(work * 1e3, [64 * a], [64 * b]) for a, b, work in items]
    found = schedule_branches(calls, threads)
    order: dict[int, tuple[int, int, int]] = {}
    for g, group in enumerate(found):
        assert len(group) <= threads
        for s, strand in enumerate(group):
            for i, each in enumerate(strand):
                order[id(each)] = (g, s, i)
    assert len(order) == len(calls)
    for i, first in enumerate(calls):
        for second in calls[i + 1 :]:
            (a, b), (c, d) = first.pointers, second.pointers
            if b in (c, d) or a == d:
                one, two = order[id(first)], order[id(second)]
                assert one[0] < two[0] or (one[:2] == two[:2] and one[2] < two[2])


# Programs ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("threads", [2, 3])
def test_towers_run_beside_each_other_with_the_bits_of_one_thread(threads: int) -> None:
    x, total = towers(4, 3)
    value = np.random.default_rng(1).normal(size=(24, 16)).astype("float32")
    part = make_partition(total)
    one, many = compile_program(part), compile_program(part, backend=CpuBackend(threads))
    assert not strands(one)
    (line,) = strands(many)
    assert len(line.segments) == threads
    want = one.compute({"x": value}, 1, 0)["0"]
    for step in range(20):
        assert has_same_bits(many.compute({"x": value}, step, 0)["0"], want)
    assert x.shape == (24, 16)


@pytest.mark.usefixtures("eager")
def test_traced_branches_are_spans_of_their_nodes() -> None:
    _, total = towers(3, 2)
    value = np.ones((24, 16), "float32")
    program = compile_program(make_partition(total), backend=CpuBackend(2))
    assert strands(program)
    spans: list[Span] = []
    traced = program.compute({"x": value}, 1, 0, spans)["0"]
    assert has_same_bits(traced, program.compute({"x": value}, 2, 0)["0"])
    assert len({name for _, name, _, _ in spans if "matmul" in name}) == 6


@pytest.mark.usefixtures("eager")
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_random_graphs_give_the_same_bits_on_any_number_of_threads(seed: int) -> None:
    case = random_case(seed)
    part = make_partition(*case.fetches)
    named = {case.graph.names.get(t.node, "unused"): a for t, a in case.feeds(0).items()}
    batch = next((a.shape[0] for a in named.values() if a.ndim), 3)
    results = []
    for threads in (1, 3):
        state = initial_state(part)
        program = compile_program(part, state, {"batch": batch}, CpuBackend(threads))
        results.append({**program.compute(named, 1, 0)})
        program.commit()
        results[-1].update(state)
    assert all(has_same_bits(results[1][name], array) for name, array in results[0].items())


def test_branches_take_no_more_memory_than_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, total = towers(4, 3)
    part = make_partition(total)
    usual = compile_program(part).memory.arena
    monkeypatch.setattr(wide, "MIN_PARALLEL_NANOSECONDS", 1.0)
    monkeypatch.setattr(planning, "MIN_PARALLEL_NANOSECONDS", 1.0)
    monkeypatch.setattr(planning, "MIN_BRANCH_NANOSECONDS", 1.0)
    more = compile_program(part).memory.arena
    assert usual < more <= 1.25 * usual + (2 << 20)
    monkeypatch.setattr(layout, "_BRANCH_GROWTH", 1.0)
    monkeypatch.setattr(layout, "_BRANCH_SLACK_BYTES", 0)
    assert compile_program(part).memory.arena == usual
