"""Memory of each device over time in a predicted step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphflow.placement.clusters.devices import CLIENT

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData

POINTS = 600
"""Of a curve; of the moments that fall together the greatest amount is kept."""


def curves(plan: PlanData) -> dict[str, list[tuple[float, float]]]:
    """device -> (seconds, bytes) from which time on how much is held; a step curve.

    A node's outputs live from its start until their last reader on the device, or the transfer of
    them, has finished; a tensor that comes from elsewhere lives from the start of its transfer.
    What stays between steps is the plan's peak less the greatest amount of these.
    """
    events: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.cluster.devices}
    last: dict[tuple[str, str], float] = {}
    for node in plan.nodes:
        for name in node.inputs:
            key = (name, node.device)
            last[key] = max(last.get(key, 0.0), node.finish)
    leaves: dict[str, float] = {}
    for row in plan.transfers:
        maker = plan.maker(row.tensor)
        leaves[maker] = max(leaves.get(maker, 0.0), row.finish)
        end = last.get((maker, row.target), row.finish)
        if row.target in events:
            events[row.target] += [(row.start, row.bytes), (max(end, row.finish), -row.bytes)]
    for node in plan.nodes:
        if node.device == CLIENT or node.op == "variable" or node.device not in events:
            continue
        end = max(node.finish, last.get((node.name, node.device), 0.0), leaves.get(node.name, 0.0))
        events[node.device] += [(node.start, node.bytes), (end, -node.bytes)]
    return {
        name: _curve(rows, float(plan.peak_memory.get(name, 0)), plan.makespan)
        for name, rows in events.items()
    }


def _curve(rows: list[tuple[float, float]], peak: float, end: float) -> list[tuple[float, float]]:
    if not rows:
        return [(0.0, peak), (end, peak)]
    when = np.array([row[0] for row in rows])
    change = np.array([row[1] for row in rows], dtype=np.float64)
    # What begins as something else ends overlaps it, as the simulator counts it.
    order = np.lexsort((-change, when))
    when, held = when[order], np.cumsum(change[order])
    held += max(0.0, peak - float(held.max()))
    if len(when) > POINTS:
        bins = np.minimum((when / max(end, when[-1]) * POINTS).astype(np.int64), POINTS - 1)
        first = np.flatnonzero(np.r_[True, bins[1:] != bins[:-1]])
        when, held = when[first], np.maximum.reduceat(held, first)
    base = max(0.0, peak - float(held.max())) if when[0] > 0 else float(held[0])
    return [(0.0, base), *zip(when.tolist(), held.tolist(), strict=True)]
