"""Observations of nodes in traced steps: seconds of each kind of node, without disturbances.

traced step ─compute_seconds→ seconds of nodes ─observe_steps→ TraceCorrections
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import median

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.calibration.node_bucket import Bucket
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.cost_model.trace_observations import TraceObservation
from graphflow.runtime.tracing.events import TraceStep

OUTLIER_RATIO = 2.0
"""How many times longer than in its quickest step a node takes at most, undisturbed."""
AGREEMENT_RATIO = 1.3
"""A step agrees with a node's least seconds if the node took at most this many times as long."""


def compute_seconds(compiled: CompiledFetches, step: TraceStep) -> dict[str, float]:
    """Return the seconds of each node of a step by name, on the device where it is placed."""
    where = {compiled.graph.names[node]: device for node, device in compiled.devices.items()}
    return node_seconds(
        (event.name, event.start, event.end)
        for event in step.events
        if event.kind == "compute" and where.get(event.name) == event.track
    )


def node_seconds(timed: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Return the seconds of each node by name, given names, starts and ends (ns) of spans."""
    took: dict[str, float] = {}
    for name, start, end in timed:
        took[name] = took.get(name, 0.0) + max((end - start) * 1e-9, 1e-9)
    return took


def busiest_seconds(steps: Sequence[TraceStep]) -> float:
    """Return the seconds that the busiest device computes, the median over traced steps."""
    found = []
    for step in steps:
        busy: dict[str, int] = {}
        for event in step.events:
            if event.kind == "compute":
                busy[event.track] = busy.get(event.track, 0) + event.end - event.start
        found.append(max(busy.values(), default=0) * 1e-9)
    return median(found)


def observe_steps(
    learned: TraceCorrections,
    known: Mapping[str, TraceObservation],
    steps: Sequence[Mapping[str, float]],
    untraced: float = inf,
) -> float:
    """Learn the times of nodes from traced steps; return the busiest worker's seconds in a step.

    The nodes of a bucket count as one sample of each step. A plan adds them up, and a sum scatters
    less than its parts. There are as many samples as steps that agree about the nodes. A node about
    which most steps disagree was delayed, and counts as others of its bucket do.

    A worker of one device cannot compute for longer than a whole step takes. If it does so in
    traced steps, tracing slowed its nodes down, and their times are scaled.

    Args:
        known: what calibration predicts for nodes, by name.
        steps: seconds of nodes, by name.
        untraced: the seconds of an untraced step; inf if unknown.
    """
    least = _least_seconds(steps)
    kept = _replace_slower(steps, least)
    busy: dict[int, float] = {}
    for name, at in known.items():
        seconds = [took[name] for took in kept if name in took]
        if seconds:  # as they count later
            busy[at.worker] = busy.get(at.worker, 0.0) + lower_quartile(seconds)
    computed = max(busy.values(), default=0.0)
    scale = min(1.0, untraced / computed) if computed else 1.0
    agreeing = _agreeing_steps(steps, least)
    usual = _usual_ratios(known, least)
    samples = _samples(known, least, agreeing)
    for number, took in enumerate(kept):
        sums: dict[Bucket, tuple[float, float]] = {}
        for name in took.keys() & known.keys():
            bucket, predicted = known[name].bucket, known[name].predicted
            measured = took[name]
            if 2 * agreeing[name] < len(steps):
                measured = min(measured, predicted * usual[bucket])
            before = sums.get(bucket, (0.0, 0.0))
            sums[bucket] = before[0] + measured, before[1] + predicted
        for bucket, (measured, predicted) in sums.items():
            if number < samples[bucket]:
                learned.observe(bucket, measured * scale, predicted)
    return computed * scale


def replace_outliers(steps: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the seconds of nodes in steps without those that other work of the machine delayed.

    A node that took much longer than in its quickest step lost its processor for a while, and
    counts with the least.
    """
    return _replace_slower(steps, _least_seconds(steps))


def _replace_slower(
    steps: Sequence[Mapping[str, float]], least: Mapping[str, float]
) -> list[dict[str, float]]:
    """Return steps in which nodes that took far longer than their least seconds took these."""
    return [
        {n: s if s <= OUTLIER_RATIO * least[n] else least[n] for n, s in took.items()}
        for took in steps
    ]


def _least_seconds(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least seconds of each node."""
    least: dict[str, float] = {}
    for took in steps:
        for name, seconds in took.items():
            least[name] = min(seconds, least.get(name, seconds))
    return least


def _agreeing_steps(
    steps: Sequence[Mapping[str, float]], least: Mapping[str, float]
) -> dict[str, int]:
    """Return by node how many steps agree with its least seconds."""
    return {
        name: sum(took.get(name, inf) <= AGREEMENT_RATIO * seconds for took in steps)
        for name, seconds in least.items()
    }


def _samples(
    known: Mapping[str, TraceObservation],
    least: Mapping[str, float],
    agreeing: Mapping[str, int],
) -> dict[Bucket, int]:
    """Return by bucket how many steps agree about its nodes, 1 at least.

    The mean over the nodes counts, weighted by their seconds.
    """
    weights: dict[Bucket, float] = {}
    counts: dict[Bucket, float] = {}
    for name, seconds in least.items():
        if name in known:
            bucket = known[name].bucket
            weights[bucket] = weights.get(bucket, 0.0) + seconds
            counts[bucket] = counts.get(bucket, 0.0) + seconds * agreeing[name]
    return {bucket: max(1, round(counts[bucket] / weights[bucket])) for bucket in weights}


def _usual_ratios(
    known: Mapping[str, TraceObservation], least: Mapping[str, float]
) -> dict[Bucket, float]:
    """Return by bucket the lower quartile of its nodes' ratios of measured to predicted seconds."""
    ratios: dict[Bucket, list[float]] = {}
    for name, seconds in least.items():
        if name in known:
            ratios.setdefault(known[name].bucket, []).append(seconds / known[name].predicted)
    return {bucket: lower_quartile(each) for bucket, each in ratios.items()}
