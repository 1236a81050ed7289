"""Speeds of workers by traced steps: workers are compared by nodes of one kind that they ran.

    nodes of a trace ─traced_speeds→ {worker: share of the fastest one's speed}

A node's time alone does not tell a slow worker from a wrong prediction. So only kinds of nodes
count that at least two workers ran, relative to the worker that was fastest at each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.calibration.trace_corrections import Bucket
from graphflow.placement.calibration.worker_speeds import as_speed
from graphflow.placement.cost_model.trace_observations import TraceObservation

MIN_SHARE = 0.2
"""Least share of a worker's time in a step that must be comparable."""


def traced_speeds(
    known: Mapping[str, TraceObservation], steps: Sequence[Mapping[str, float]]
) -> dict[int, float]:
    """Return speeds of the workers that can be compared; 1 if one is no slower than another.

    A worker is slow if it was so in three of four steps. Other work of its machine delays single
    ones.

    Args:
        known: By name of a node.
        steps: Measured seconds of nodes, by name.
    """
    ratios: dict[Bucket, dict[int, list[float]]] = {}
    for took in steps:
        for name in took.keys() & known.keys():
            at = known[name]
            by_worker = ratios.setdefault(at.bucket, {})
            by_worker.setdefault(at.worker, []).append(took[name] / at.predicted)
    fastest = {
        bucket: min(median(of_worker) for of_worker in by_worker.values())
        for bucket, by_worker in ratios.items()
        if len(by_worker) > 1
    }
    found: dict[int, list[float]] = {}
    for took in steps:
        for worker, slowness in _slowness(known, took, fastest).items():
            found.setdefault(worker, []).append(slowness)
    return {w: as_speed(1.0 / lower_quartile(slowness)) for w, slowness in found.items()}


def _slowness(
    known: Mapping[str, TraceObservation],
    took: Mapping[str, float],
    fastest: Mapping[Bucket, float],
) -> dict[int, float]:
    """Return for each worker how many times longer than the fastest one it took in a step."""
    every: dict[int, float] = {}
    measured: dict[int, float] = {}
    expected: dict[int, float] = {}
    for name in took.keys() & known.keys():
        at, seconds = known[name], took[name]
        every[at.worker] = every.get(at.worker, 0.0) + seconds
        if at.bucket in fastest:
            likely = at.predicted * fastest[at.bucket]
            measured[at.worker] = measured.get(at.worker, 0.0) + seconds
            expected[at.worker] = expected.get(at.worker, 0.0) + likely
    return {
        worker: seconds / expected[worker]
        for worker, seconds in measured.items()
        if seconds >= MIN_SHARE * every[worker]
    }
