"""Learn from the traced steps of a session for its next plans.

    Trace ─learn→ TraceCorrections ─→ plan_graph(learned=…)

`TraceCorrections` holds ratios of measured to predicted times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from statistics import median

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.cluster_rates import link_classes
from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.calibration.trace_corrections import (
    Bucket,
    TraceCorrections,
    read_corrections,
    write_corrections,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.trace_observations import TraceObservation, trace_observations
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_builder import session_kind, units
from graphflow.planning.traced_speeds import traced_speeds
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.tracing.events import TraceEvent, TraceStep

MIN_STEPS = 3
"""Least number of untraced steps from which the duration of a whole step is learned."""

OUTLIER_RATIO = 2.0
"""How many times longer than in its quickest step a node takes at most, undisturbed."""


def load_corrections(cluster: Cluster) -> TraceCorrections:
    """Return what earlier processes learned about the cluster's machine; nothing for other
    machines."""
    if not _is_this_machine(cluster):
        return TraceCorrections()
    return read_corrections(calibrate.profile(_kinds(cluster)))


def is_known(cluster: Cluster) -> bool:
    """Return True if the cluster is this machine and was calibrated, so that planning is cheap."""
    return _is_this_machine(cluster) and calibrate.profile_path().is_file()


def save_corrections(learned: TraceCorrections, cluster: Cluster) -> None:
    """Keep what was learned for later processes, if the cluster is this machine."""
    if _is_this_machine(cluster):
        write_corrections(learned)


def _is_this_machine(cluster: Cluster) -> bool:
    return cluster.kind in ("here", "local")


def _kinds(cluster: Cluster) -> set[str]:
    return {device.kind for worker in cluster.workers for device in worker.devices}


# From traces ----------------------------------------------------------------------------------


def learn(
    learned: TraceCorrections, cluster: Cluster, survey: ClusterSurvey, compiled: CompiledFetches
) -> dict[int, float]:
    """Learn from the traced steps in a set of fetches' trace block so far.

    The first step warms up: it counts only if it is the only one. Nodes of slow workers teach
    nothing about others, so they do not count.

    Args:
        cluster: with the speeds of workers that are known so far.

    Returns:
        The speeds of workers that the steps allow to compare.
    """
    speeds: dict[int, float] = {}
    traced = list(zip(compiled.trace.steps, compiled.traced, strict=True))
    by_sizes: dict[tuple[tuple[str, int], ...], list[TraceStep]] = {}
    for step, bindings in traced[1:] or traced:
        by_sizes.setdefault(tuple(sorted(bindings.items())), []).append(step)
    names = cluster.devices
    links = {(names[i], names[j]): kind for (i, j), kind in link_classes(cluster).items()}
    times = compiled.recent_seconds
    untraced = median(times) if len(times) >= MIN_STEPS else inf
    for sizes, steps in by_sizes.items():
        known = trace_observations(
            compiled.graph, cluster, dict(sizes), compiled.devices, survey.profiles
        )
        took = [compute_seconds(compiled, step) for step in steps]
        for worker, speed in traced_speeds(known, took).items():
            speeds[worker] = min(speed, speeds.get(worker, 1.0))
        slow = {w.index for w in cluster.workers if min(d.speed for d in w.devices) < 1.0}
        slow |= {worker for worker, speed in speeds.items() if speed < 1.0}
        teaching = {name: each for name, each in known.items() if each.worker not in slow}
        observe_steps(learned, teaching, took, untraced)
        for step in steps:
            for kind, nbytes, moving in _observed_transfers(step, links):
                learned.observe_link(kind, nbytes, moving)
    return speeds


def compute_seconds(compiled: CompiledFetches, step: TraceStep) -> dict[str, float]:
    """Return the seconds of each node of a step by name, on the device where it is placed."""
    where = {compiled.graph.names[node]: device for node, device in compiled.devices.items()}
    return node_seconds(
        (event.name, event.start, event.end)
        for event in step.events
        if event.kind == "compute" and where.get(event.name) == event.track
    )


def observe_steps(
    learned: TraceCorrections,
    known: Mapping[str, TraceObservation],
    steps: Sequence[Mapping[str, float]],
    untraced: float = inf,
) -> float:
    """Learn the times of nodes from traced steps; return the busiest worker's seconds in a step.

    A worker of one device cannot compute for longer than a whole step takes. If it does so in
    traced steps, tracing slowed its nodes down, and their times are scaled.

    Args:
        steps: seconds of nodes, by name.
        untraced: the seconds of an untraced step; inf if unknown.
    """
    steps = replace_outliers(steps)
    busy: dict[int, float] = {}
    for name, at in known.items():
        seconds = [took[name] for took in steps if name in took]
        if seconds:  # as they count later
            busy[at.worker] = busy.get(at.worker, 0.0) + lower_quartile(seconds)
    computed = max(busy.values(), default=0.0)
    scale = min(1.0, untraced / computed) if computed else 1.0
    for took in steps:
        observe_nodes(learned, known, {name: seconds * scale for name, seconds in took.items()})
    return computed * scale


def replace_outliers(steps: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the seconds of nodes in steps without those that other work of the machine delayed.

    A node that took much longer than in its quickest step lost its processor for a while, and
    counts with the least.
    """
    least: dict[str, float] = {}
    for took in steps:
        for name, seconds in took.items():
            least[name] = min(seconds, least.get(name, seconds))
    return [
        {n: s if s <= OUTLIER_RATIO * least[n] else least[n] for n, s in took.items()}
        for took in steps
    ]


def learn_steps(learned: TraceCorrections, plan: Plan, took: Sequence[float]) -> bool:
    """Learn from the durations of untraced steps; return False if there are too few.

    Args:
        plan: the placement of the steps, predicted with all that is known of the nodes by now.
    """
    if len(took) < MIN_STEPS:
        return False
    predicted = plan.makespan - plan.overhead
    learned.observe_step(session_kind(plan.cluster), units(plan), predicted, median(took))
    return True


def node_seconds(timed: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Return the seconds of each node by name, given names, starts and ends (ns) of spans."""
    took: dict[str, float] = {}
    for name, start, end in timed:
        took[name] = took.get(name, 0.0) + max((end - start) * 1e-9, 1e-9)
    return took


def observe_nodes(
    learned: TraceCorrections, known: Mapping[str, TraceObservation], took: Mapping[str, float]
) -> None:
    """Learn the times of nodes that have something to teach, from one step."""
    for bucket, (measured, predicted) in sums_by_bucket(known, took).items():
        learned.observe(bucket, measured, predicted)


def sums_by_bucket(
    known: Mapping[str, TraceObservation], took: Mapping[str, float]
) -> dict[Bucket, tuple[float, float]]:
    """Return measured and predicted seconds of each bucket of nodes.

    A plan adds up the nodes of a bucket, and a sum scatters less than its parts.
    """
    sums: dict[Bucket, tuple[float, float]] = {}
    for name, seconds in took.items():
        if name in known:
            measured, predicted = sums.get(known[name].bucket, (0.0, 0.0))
            sums[known[name].bucket] = measured + seconds, predicted + known[name].predicted
    return sums


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


def _observed_transfers(
    step: TraceStep, links: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, int, float]]:
    """Yield kind of link, bytes and seconds of each transfer.

    If a reader waited, the transfer ends when the reader continues. Between threads a transfer is
    only the wake-up of its reader, so one without a wait teaches nothing.
    """
    waits = {(e.edge, e.use): e for e in step.events if e.kind == "wait"}
    for event in step.events:
        kind = links.get((event.source, event.target)) if event.kind == "transfer" else None
        if kind is None:
            continue
        wait: TraceEvent | None = waits.get((event.edge, event.use))
        waited = wait is not None and wait.start < event.start
        if waited and wait is not None:
            yield kind, event.bytes, (max(event.end, wait.end) - event.start) * 1e-9
        elif kind not in ("thread", "gpu"):
            yield kind, event.bytes, (event.end - event.start) * 1e-9
