"""Speeds of workers by traced steps: workers are compared by nodes of one kind that they ran.

    nodes of a trace ─traced_speeds→ {worker: share of the fastest one's speed}

A node's time alone does not tell a slow worker from a wrong prediction. So only kinds of nodes
count that at least two workers ran, relative to the worker that was fastest at each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.calibration.node_bucket import Bucket
from graphflow.placement.calibration.worker_speeds import as_speed
from graphflow.placement.cost_model.trace_observations import TraceObservation

MIN_SHARE = 0.2
"""Least share of a worker's time in nodes that can be compared."""
AGREEMENT = 0.75
"""Share of that time in kinds of nodes that all must be slower. What tensors are in the cache, for
one, makes some nodes of a kind slower than others."""


def traced_speeds(
    known: Mapping[str, TraceObservation], steps: Sequence[Mapping[str, float]]
) -> dict[int, float]:
    """Return speeds of the workers that can be compared, the fastest being 1.

    Args:
        known: By name of a node.
        steps: Measured seconds of nodes, by name. Of each kind of node the lower quartile counts,
            since other work of a machine delays single ones.
    """
    kinds: dict[Bucket, dict[int, list[tuple[float, float]]]] = {}
    total: dict[int, float] = {}
    for took in steps:
        for name in took.keys() & known.keys():
            at, seconds = known[name], took[name]
            by_worker = kinds.setdefault(at.bucket, {})
            by_worker.setdefault(at.worker, []).append((seconds / at.predicted, seconds))
            total[at.worker] = total.get(at.worker, 0.0) + seconds
    slowness: dict[int, list[tuple[float, float]]] = {}
    for by_worker in kinds.values():
        if len(by_worker) > 1:
            typical = {w: lower_quartile([ratio for ratio, _ in of]) for w, of in by_worker.items()}
            fastest = min(typical.values())
            for worker, of in by_worker.items():
                share = sum(seconds for _, seconds in of) / total[worker]
                slowness.setdefault(worker, []).append((typical[worker] / fastest, share))
    speeds = {
        worker: 1.0 / _agreed_value(of)
        for worker, of in slowness.items()
        if sum(share for _, share in of) >= MIN_SHARE
    }
    most = max(speeds.values(), default=1.0)
    return {worker: as_speed(speed / most) for worker, speed in speeds.items()}


def _agreed_value(values: Sequence[tuple[float, float]]) -> float:
    """Return the value that is not exceeded by 1 - `AGREEMENT` of the weights.

    Args:
        values: Each with its weight.
    """
    left = (1.0 - AGREEMENT) * sum(weight for _, weight in values)
    for value, weight in sorted(values):
        left -= weight
        if left <= 0:
            return value
    return max(value for value, _ in values)
