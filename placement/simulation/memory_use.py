"""The most memory that a simulated step has in use at once on each device."""

from __future__ import annotations

import numpy as np

from graphflow.placement.problems.problem import Floats, Ints, Problem
from graphflow.placement.simulation.execution_result import ExecutionResult, TransferRow
from graphflow.placement.simulation.native_execution import is_large


def peak_memory(problem: Problem, run: ExecutionResult) -> Floats:
    """(d,) bytes: persistent memory plus the most transient memory alive at once, by device.

    Where instants coincide, what the order of execution does not decide counts as alive.
    """
    device = np.array(run.device, dtype=np.int64)
    resident = np.bincount(device, weights=problem.memory, minlength=problem.devices).astype(
        np.float64
    )
    if problem.output_memory is None or problem.nodes == 0:
        return resident
    where, when, tick, change = (
        _event_columns(problem, run, device) if is_large(problem) else _event_rows(problem, run)
    )
    order = np.lexsort((tick, when, where))
    for at in range(problem.devices):
        mine = order[where[order] == at]
        if len(mine):
            resident[at] += max(0.0, float(np.cumsum(change[mine]).max()))
    return resident


def _event_rows(problem: Problem, run: ExecutionResult) -> tuple[Ints, Floats, Floats, Floats]:
    """Return the devices, times, ticks and bytes of allocations and releases."""
    assert problem.output_memory is not None
    output_memory = problem.output_memory.tolist()
    rows: list[tuple[int, float, float, float]] = []
    sent: dict[tuple[int, int], TransferRow] = {(row[0], row[3]): row for row in run.transfers}
    late = float(2 * problem.nodes)
    for node, outputs in enumerate(problem.outputs):
        at = run.device[node]
        end = (run.finish[node], float(run.finished[node]))
        for tensor, size, readers in outputs:
            ends: dict[int, tuple[float, float]] = {}
            for reader in readers:
                done = (run.finish[reader], float(run.finished[reader]))
                to = run.device[reader]
                if done > ends.get(to, (-1.0, -1.0)):
                    ends[to] = done
            for to, done in ends.items():
                if to == at:
                    end = max(end, done)
                    continue
                row = sent[tensor, to]
                end = max(end, (row[5], late))
                if size:
                    rows.append((to, row[4], -1.0, size))
                    rows.append((to, done[0], done[1], -size))
        if output_memory[node]:
            rows.append((at, run.start[node], float(run.started[node]), output_memory[node]))
            rows.append((at, end[0], end[1], -output_memory[node]))
    columns = [np.array(column) for column in zip(*rows, strict=True)] or [np.zeros(0)] * 4
    return columns[0].astype(np.int64), columns[1], columns[2], columns[3]


def _event_columns(
    problem: Problem, run: ExecutionResult, device: Ints
) -> tuple[Ints, Floats, Floats, Floats]:
    """`_event_rows` of a large problem, in an order of their own: by array operations.

    Ticks number the starts and ends of nodes in order of time. So the last reader of a tensor is
    the one of the greatest tick.
    """
    assert problem.output_memory is not None
    n, d, slots = problem.nodes, problem.devices, problem.slots
    start, finish = np.array(run.start), np.array(run.finish)
    started, finished = np.array(run.started), np.array(run.finished)
    time_of = np.zeros(2 * n)
    time_of[finished] = finish
    slot = np.repeat(np.arange(len(slots.node)), np.diff(slots.read_start))
    keys, place = np.unique(slot * d + device[slots.reader], return_inverse=True)
    last = np.zeros(len(keys), np.int64)  # tick of a tensor's last reader on a device
    np.maximum.at(last, place, finished[slots.reader])
    slot, to = keys // d, keys % d
    maker = slots.node[slot]
    away = to != device[maker]
    sends, arrives = _transfer_times(problem, run)
    rows = np.arange(n)
    node = np.concatenate([rows, maker[~away], maker[away]])
    when = np.concatenate([finish, time_of[last[~away]], arrives])
    tick = np.concatenate([finished, last[~away], np.full(len(arrives), 2 * n)])
    order = np.lexsort((tick, when, node))
    end = order[np.searchsorted(node[order], rows, side="right") - 1]  # the latest of each node
    size, made = slots.size[slot[away]], problem.output_memory
    return (
        np.concatenate([to[away], to[away], device, device]),
        np.concatenate([sends, time_of[last[away]], start, when[end]]),
        np.concatenate([np.full(len(size), -1.0), last[away], started, tick[end]]),
        np.concatenate([size, -size, made, -made]),
    )


def _transfer_times(problem: Problem, run: ExecutionResult) -> tuple[Floats, Floats]:
    """Return when transfers begin and arrive, by their tensor's slot and their target."""
    if not run.transfers:
        return np.zeros(0), np.zeros(0)
    tensor, _, _, target, sends, arrives, _ = map(np.array, zip(*run.transfers, strict=True))
    known = np.argsort(problem.slots.tensor)
    slot = known[np.searchsorted(problem.slots.tensor, tensor, sorter=known)]
    order = np.argsort(slot * problem.devices + target)
    return sends[order], arrives[order]
