"""Learn from the traced steps of a session for its next plans.

    Trace ─learn→ TraceCorrections ─→ plan_graph(learned=…)

`TraceCorrections` holds ratios of measured to predicted times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import median

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.cluster_rates import link_classes
from graphflow.placement.calibration.corrections_file import read_corrections, write_corrections
from graphflow.placement.calibration.profile_file import profile_path
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.trace_observations import trace_observations
from graphflow.placement.plans.building.step_totals import session_kind, units
from graphflow.placement.plans.plan import Plan
from graphflow.planning.feedback.node_observations import compute_seconds, observe_steps
from graphflow.planning.feedback.traced_speeds import traced_speeds
from graphflow.planning.feedback.turn_observations import observe_messages, observe_turns
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.tracing.events import TraceEvent, TraceStep

MIN_STEPS = 3
"""Least number of untraced steps from which the duration of a whole step is learned."""


def load_corrections(cluster: Cluster) -> TraceCorrections:
    """Return what earlier processes learned about the cluster's machine; nothing for other
    machines."""
    if not _is_this_machine(cluster):
        return TraceCorrections()
    return read_corrections(calibrate.profile(_kinds(cluster)))


def is_known(cluster: Cluster) -> bool:
    """Return True if the cluster is this machine and was calibrated, so that planning is cheap."""
    return _is_this_machine(cluster) and profile_path().is_file()


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
        observe_turns(learned, cluster, survey.profiles, compiled, dict(sizes), steps)
        observe_messages(learned, links, steps)
        for step in steps:
            for kind, nbytes, moving in _observed_transfers(step, links):
                learned.observe_link(kind, nbytes, moving)
    return speeds


def learn_steps(learned: TraceCorrections, plan: Plan, took: Sequence[float]) -> bool:
    """Learn from the durations of untraced steps; return False if there are too few.

    Args:
        plan: the placement of the steps, predicted with all that is known of the nodes by now.
    """
    if len(took) < MIN_STEPS:
        return False
    learned.observe_error(plan.fingerprint, plan.makespan, median(took))
    predicted = plan.makespan - plan.overhead
    learned.observe_step(session_kind(plan.cluster), units(plan), predicted, median(took))
    return True


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
