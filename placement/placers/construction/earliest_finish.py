"""Construction of a placement from the sources: each ready node (with its unit) to the device that
finishes it first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.placement.placers.construction.coarsening import Units
from graphflow.placement.placers.loops.dispatch import Loops, loops
from graphflow.placement.problems.problem import Floats, Ints, Problem

PLACEMENTS = 8.0
"""How many placements a placer builds of one problem, to judge whether compiling is worth it."""


def earliest_finish(units: Units, priority: list[float]) -> tuple[list[int], list[int]]:
    """Devices and order by list scheduling, ready nodes in order of least `priority`.

    The first node of a unit decides for all of it, with the whole unit's seconds in the balance.
    Counted are the node's computation, transfers (a tensor that is there already does not travel
    again), what devices and links are
    busy with, work promised to a device by units begun there, and memory: a device where the node
    would exceed the capacity is out, unless all are. Ties go to the preferred neighbour's device,
    then to the lowest index.

    Time O((n + e)·d + n log n).
    """
    problem, slots = units.problem, units.problem.slots
    n, d = problem.nodes, problem.devices
    run = loops("earliest_finish", PLACEMENTS * (n + len(problem.edges)) * d)
    take, floats, ints = run.take, run.floats, run.ints
    memory, used = _reserve(units)
    transient = problem.output_memory
    read, count = np.diff(slots.read_start), len(slots.node)
    incoming = np.argsort(slots.reader, kind="stable")
    inputs = np.bincount(slots.reader, minlength=n)
    device, order = ints(n, -1), ints(n)
    run.earliest_finish(
        n, d, bool(np.isfinite(problem.capacity).any()), problem.contention,
        transient is not None, take(np.array(priority, dtype=np.float64)), take(units.of_node),
        take(problem.prefer), take(units.allowed.astype(np.int64)), take(units.work),
        take(memory), floats(n) if transient is None else take(transient), take(problem.capacity),
        take(problem.compute), take(problem.latency), take(problem.bandwidth),
        take(np.concatenate([[0], np.cumsum(inputs)])),
        take(np.repeat(np.arange(count), read)[incoming]), take(slots.node), take(slots.size),
        take(slots.start), take(slots.read_start), take(slots.reader), _counts(run, inputs),
        _counts(run, read), _counts(run, np.diff(slots.start)), ints(units.count, -1), floats(d),
        floats(d), _counts(run, used), floats(d * d), floats(count * d), floats(d), floats(n),
        ints(n), device, floats(n), order,
    )  # fmt: skip
    return list(map(int, device)), list(map(int, order))


def _counts(run: Loops, array: Ints | Floats) -> Any:
    """Return a writable copy of an array as the loops take it."""
    return array.copy() if run.compiled else array.tolist()


def _reserve(units: Units) -> tuple[Floats, Floats]:
    """Return the persistent bytes of units that have a choice, and what the others take of each
    device: room that nobody else may take."""
    memory, used = units.memory.copy(), np.zeros(units.problem.devices)
    only = np.flatnonzero(units.allowed.sum(axis=1) == 1)
    np.add.at(used, units.allowed[only].argmax(axis=1), memory[only])
    memory[only] = 0.0
    return memory, used


def by_affinity(units: Units) -> list[int]:
    """Devices unit by unit, heaviest first: least load, where what it exchanges with units already
    placed counts as load.

    Time O((units + pairs)·d).
    """
    problem = units.problem
    neighbours: list[list[tuple[int, float]]] = [[] for _ in range(units.count)]
    for a, b, weight in zip(*(array.tolist() for array in units.pairs), strict=True):
        neighbours[a].append((b, weight))
        neighbours[b].append((a, weight))
    return _pack(units, units.heaviest_first, neighbours, problem)


def by_memory(units: Units) -> list[int]:
    """Devices unit by unit, most persistent memory first: where most room is left."""
    problem = units.problem
    room = problem.capacity.tolist()
    home = [0] * units.count
    order = np.argsort(-units.memory, kind="stable").tolist()
    order.sort(key=lambda unit: int(units.allowed[unit].sum()) > 1)
    for unit in order:
        choices = np.flatnonzero(units.allowed[unit]).tolist()
        home[unit] = max(choices, key=lambda at: (room[at], -at))
        room[home[unit]] -= units.memory[unit]
    return [home[unit] for unit in units.of_node.tolist()]


def _pack(
    units: Units, order: list[int], neighbours: list[list[tuple[int, float]]], problem: Problem
) -> list[int]:
    work, memory = units.work.tolist(), units.memory.tolist()
    choices = [np.flatnonzero(row).tolist() for row in units.allowed]
    room, load = problem.capacity.tolist(), [0.0] * problem.devices
    home = [-1] * units.count
    for unit in sorted(order, key=lambda u: len(choices[u]) > 1):
        near = [0.0] * problem.devices
        total = 0.0
        for other, weight in neighbours[unit]:
            if home[other] >= 0:
                near[home[other]] += weight
                total += weight
        fits = [at for at in choices[unit] if room[at] >= memory[unit]] or choices[unit]
        at = min(fits, key=lambda at: (load[at] + work[unit][at] + total - near[at], at))
        home[unit] = at
        load[at] += work[unit][at]
        room[at] -= memory[unit]
    return [home[unit] for unit in units.of_node.tolist()]
