"""The event loop of large problems as machine code, with the results of `simulator.execute`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from graphflow.placement.compiled_loops.loop_compiler import native
from graphflow.placement.problems.problem import Floats, Problem
from graphflow.placement.simulation import event_loop
from graphflow.placement.simulation.execution_result import ExecutionResult

NATIVE_ABOVE = 2_000
"""Nodes and edges from which the event loop runs as machine code."""


def is_native(problem: Problem) -> bool:
    """Return True if a problem is simulated as machine code: it is large, and no links are
    shared."""
    return problem.nodes + len(problem.edges) > NATIVE_ABOVE and not problem.ways


def execute_native(
    problem: Problem,
    device: list[int],
    priority: list[int] | list[float],
    order: list[int] | None,
) -> ExecutionResult:
    """`execute` as machine code, to the same bits."""
    n, d, slots = problem.nodes, problem.devices, problem.slots
    where = np.array(device, dtype=np.int64)
    room = np.cumsum(np.bincount(where, minlength=d)) - np.bincount(where, minlength=d)
    turns = np.array([] if order is None else order, dtype=np.int64)
    queues = turns[np.argsort(where[turns], kind="stable")]
    most = len(slots.reader)
    start, finish, arrival, left, arrived = (np.zeros(k) for k in (n, n, n, most, most))
    started, finished, ran, moved, to = (np.zeros(k, np.int64) for k in (n, n, n, most, most))
    count = native(event_loop, "run_events")(
        n, d, problem.contention, where, np.array(priority, dtype=np.float64), order is not None,
        queues, room, *link_arrays(problem), slots.start, slots.size, slots.read_start,
        slots.reader, np.bincount(slots.reader, minlength=n), np.zeros(n), np.zeros(n, np.int64),
        np.zeros(d, np.int64), np.zeros(2 * n), np.zeros(2 * n, np.int64), np.zeros(d, np.int64),
        np.zeros(d, np.int64), np.zeros(d, np.int64), np.zeros(d * d), np.zeros(d, np.int64),
        np.zeros(d), arrival, start, finish, started, finished, ran, moved, to, left, arrived,
    )  # fmt: skip
    slot = moved[:count]
    node = slots.node[slot]
    columns = (slots.tensor[slot], node, where[node], to[:count], left[:count], arrived[:count])
    rows: Iterator[Any] = zip(
        *(column.tolist() for column in (*columns, slots.size[slot])), strict=True
    )
    return ExecutionResult(
        device, start.tolist(), finish.tolist(), started.tolist(), finished.tolist(),
        ran.tolist(), list(rows), float(finish.max(initial=0.0)),
    )  # fmt: skip


def link_arrays(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Return compute, latency and bandwidth, flat, as the native loops take them."""
    compute, latency, bandwidth = (
        np.ascontiguousarray(array).reshape(-1)
        for array in (problem.compute, problem.latency, problem.bandwidth)
    )
    return compute, latency, bandwidth
