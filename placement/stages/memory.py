"""A split that fits, where memory is so short that no contiguous one does.

Step of `split_stages`: units by falling memory first, then HiGHS, which finds what can be packed,
or proves that nothing can and says how much is missing.
"""

from __future__ import annotations

import numpy as np

from graphflow.base.formatting import show_memory
from graphflow.errors import MemoryLimitError
from graphflow.placement.problems.problem import Floats, Ints
from graphflow.placement.solvers.highs import MixedIntegerProgram
from graphflow.placement.stages.units import StageUnits

NODES = 2_000
"""Of the search tree."""
MOST = 20_000
"""Choices (a unit on a device) up to which HiGHS is asked."""


def find_fit(units: StageUnits) -> Ints:
    """(u,) devices that hold everything, with small loads where there is a choice.

    Raises:
        MemoryLimitError: none was found, or there is none; says which and how much is missing.
    """
    _each_alone(units)
    where, left, unit = _by_size(units)
    if where is not None:
        return where
    bound = 0.0
    if units.compute.size <= MOST:
        where, bound = _pack(units)
        if where is not None:
            return where
    proof = (
        f"whatever goes where, {show_memory(bound)} are missing in all" if bound > 0.0
        else "none was found"
    )  # fmt: skip
    raise _error(
        units,
        unit,
        f"no split fits: a unit of {show_memory(units.memory[unit])} "
        f"({_describe_unit(units, unit)}) fits on no device beside the others "
        f"({show_memory(float(left.max()))} are left at most; {proof})",
    )


def _each_alone(units: StageUnits) -> None:
    """Every unit fits by itself on some device that can run it."""
    usable = np.isfinite(units.compute)
    room = np.where(usable, units.capacity, -np.inf).max(axis=1)
    wrong = np.flatnonzero(units.memory > room)
    if len(wrong):
        worst = int(wrong[np.argmax((units.memory - room)[wrong])])
        need, most = float(units.memory[worst]), float(room[worst])
        raise _error(
            units,
            worst,
            f"a unit of {show_memory(need)} ({_describe_unit(units, worst)}) fits on no device "
            f"that can run it: the roomiest has {show_memory(most)} "
            f"({show_memory(need - most)} missing)",
        )


def _by_size(units: StageUnits) -> tuple[Ints | None, Floats, int]:
    """Units by falling memory, each where it fits and the load stays least; what is left, and the
    unit that found no room."""
    room, load = units.capacity.copy(), np.zeros(units.devices)
    where: Ints = np.zeros(units.count, dtype=np.int64)
    for u in np.lexsort((-units.compute.min(axis=1), -units.memory)).tolist():
        value = np.where(room >= units.memory[u], load + units.compute[u], np.inf)
        p = int(np.argmin(value))
        if not np.isfinite(value[p]):
            return None, np.where(np.isfinite(units.compute[u]), room, 0.0), u
        where[u], load[p] = p, value[p]
        room[p] -= units.memory[u]
    return where, room, -1


def _pack(units: StageUnits) -> tuple[Ints | None, float]:
    """A packing with least load beyond memory, or None and the bytes that are missing at least."""
    model = MixedIntegerProgram()
    first = model.columns(units.compute.size, upper=1.0, integer=True)
    unit = float(units.memory.max(initial=0.0)) or 1.0
    over = model.columns(units.devices, cost=1.0)
    for u in range(units.count):
        row = {}
        for p in range(units.devices):
            column = first + u * units.devices + p
            if np.isfinite(units.compute[u, p]):
                row[column] = 1.0
            else:
                model.upper[column] = 0.0
        model.row(row, lower=1.0, upper=1.0)
    for p in range(units.devices):
        row = {
            first + u * units.devices + p: float(units.memory[u]) / unit
            for u in range(units.count)
            if units.memory[u] > 0
        }
        if np.isfinite(units.capacity[p]):
            model.row(row | {over + p: -1.0}, upper=float(units.capacity[p]) / unit)
    found = model.solve(nodes=NODES, gap=1e-6)
    if found.values is not None:
        share = found.values[: units.compute.size].reshape(units.count, units.devices)
        where: Ints = np.argmax(share, axis=1)
        if units.fits(where):
            return where, 0.0
    return None, max(0.0, found.bound - 1e-6) * unit


def _describe_unit(units: StageUnits, unit: int) -> str:
    nodes = np.flatnonzero(units.unit == unit).tolist()
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    more = ", …" if len(nodes) > 5 else ""
    return f"the group of nodes {', '.join(map(str, nodes[:5]))}{more}"


def _error(units: StageUnits, unit: int, message: str) -> MemoryLimitError:
    error = MemoryLimitError(f"{message}; add a stage or memory, or split the group")
    error.nodes = tuple(np.flatnonzero(units.unit == unit).tolist())
    return error
