"""The event loop of large problems as machine code, with the results of `simulator.execute`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems.problem import Floats, Ints, Problem
from graphflow.placement.simulation import event_loop, shared_event_loop
from graphflow.placement.simulation.execution_result import ExecutionResult

NATIVE_ABOVE = 2_000
"""Nodes and edges from which the event loop runs as machine code."""


def is_large(problem: Problem) -> bool:
    """Return True if a problem is simulated as machine code."""
    return problem.nodes + len(problem.edges) > NATIVE_ABOVE


def execute_native(
    problem: Problem,
    device: list[int],
    priority: list[int] | list[float],
    order: list[int] | None,
) -> ExecutionResult:
    """`execute` as machine code, to the same bits."""
    n, slots = problem.nodes, problem.slots
    run = _run_shared if problem.ways else _run_alone
    arrival, start, finish = (np.zeros(n) for _ in range(3))
    started, finished, ran = (np.zeros(n, np.int64) for _ in range(3))
    results = (arrival, start, finish, started, finished, ran)
    where = np.array(device, dtype=np.int64)
    slot, to, left, arrived = run(
        problem, where, np.array(priority, dtype=np.float64), order, results
    )
    node = slots.node[slot]
    columns = (slots.tensor[slot], node, where[node], to, left, arrived, slots.size[slot])
    rows: Iterator[Any] = zip(*(column.tolist() for column in columns), strict=True)
    return ExecutionResult(
        device, start.tolist(), finish.tolist(), started.tolist(), finished.tolist(),
        ran.tolist(), list(rows), float(finish.max(initial=0.0)),
    )  # fmt: skip


_Moved = tuple[Ints, Ints, Floats, Floats]
"""Of each transfer: its slot, its target, when it starts and when it arrives."""


def _queues(problem: Problem, where: Ints, order: list[int] | None) -> tuple[bool, Ints, Ints]:
    """Return whether there is an order, each device's nodes in it, and where these begin."""
    counts = np.bincount(where, minlength=problem.devices)
    turns = np.array([] if order is None else order, dtype=np.int64)
    queues = turns[np.argsort(where[turns], kind="stable")]
    return order is not None, queues, np.cumsum(counts) - counts


def _run_alone(
    problem: Problem, where: Ints, priority: Floats, order: list[int] | None, results: Any
) -> _Moved:
    """Run a device map where every pair of devices has a link of its own."""
    n, d, slots = problem.nodes, problem.devices, problem.slots
    most = len(slots.reader)
    left, arrived, moved, to = (np.zeros(most, t) for t in (float, float, np.int64, np.int64))
    count = native(event_loop, "run_events")(
        n, d, problem.contention, where, priority, *_queues(problem, where, order),
        *link_arrays(problem), slots.start, slots.size, slots.read_start,
        slots.reader, np.bincount(slots.reader, minlength=n), np.zeros(n), np.zeros(n, np.int64),
        np.zeros(d, np.int64), np.zeros(2 * n), np.zeros(2 * n, np.int64), np.zeros(d, np.int64),
        np.zeros(d, np.int64), np.zeros(d, np.int64), np.zeros(d * d), np.zeros(d, np.int64),
        np.zeros(d), *results, moved, to, left, arrived,
    )  # fmt: skip
    return moved[:count], to[:count], left[:count], arrived[:count]


def _run_shared(
    problem: Problem, where: Ints, priority: Floats, order: list[int] | None, results: Any
) -> _Moved:
    """Run a device map where transfers share links."""
    n, d, slots = problem.nodes, problem.devices, problem.slots
    most, shared, capacity = len(slots.reader), len(problem.shared), 4 * len(slots.reader)
    pair = problem.routes[:, 0] * d + problem.routes[:, 1]
    way_start = np.concatenate([[0], np.cumsum(np.bincount(pair, minlength=d * d))])
    way = np.ascontiguousarray(problem.routes[np.argsort(pair, kind="stable"), 2])

    def ints(*counts: int) -> Iterator[Ints]:
        return (np.zeros(count, np.int64) for count in counts)

    while True:
        left, arrived = np.zeros(most), np.zeros(most)
        slot, pairs, to = ints(most, most, most)
        for array in results:
            array[:] = 0
        count = native(shared_event_loop, "run_shared_events")(
            n, d, capacity, where, priority, *_queues(problem, where, order),
            *link_arrays(problem), slots.start, slots.size, slots.read_start, slots.reader,
            way_start, way, problem.shared, np.bincount(slots.reader, minlength=n), np.zeros(n),
            *ints(n, d), np.zeros(2 * n + capacity), *ints(2 * n + capacity, capacity, capacity),
            *ints(d, d, d, d, d * d, d * d, d * d, most), slot, pairs, to, np.zeros(most),
            np.zeros(most), np.zeros(most), *ints(most, most, most, most), np.zeros(most),
            *ints(most, shared, shared), np.zeros(shared), *results, left, arrived,
        )  # fmt: skip
        if count >= 0:
            return slot[:count], to[:count], left[:count], arrived[:count]
        capacity *= 2


def link_arrays(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Return compute, latency and bandwidth, flat, as the native loops take them."""
    compute, latency, bandwidth = (
        np.ascontiguousarray(array).reshape(-1)
        for array in (problem.compute, problem.latency, problem.bandwidth)
    )
    return compute, latency, bandwidth
