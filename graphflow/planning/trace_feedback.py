"""Learn from the traced steps of a session for its next plans; time steps that compute nothing.

    Trace ─learn→ TraceCorrections ─→ plan_graph(learned=…)

`TraceCorrections` holds ratios of measured to predicted times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from time import monotonic_ns, perf_counter
from typing import Any

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.frontend.builders import placeholder
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Node
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.calibrate import StepCost, save_step_cost, step_cost_of
from graphflow.placement.calibration.cluster_rates import link_classes, link_matrices
from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.calibration.trace_corrections import (
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
from graphflow.runtime.partitioning.partition import UNPLACED_OPS
from graphflow.runtime.tracing.events import TraceEvent, TraceStep

MIN_STEPS = 3
"""Least number of untraced steps from which the duration of a whole step is learned."""
IDLE_STEPS = 30
"""Idle steps that are timed; as many before them warm up."""
IDLE_SECONDS = 1.0
"""Time limit for idle steps, after which a few suffice."""


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
    for sizes, steps in by_sizes.items():
        known = trace_observations(
            compiled.graph, cluster, dict(sizes), compiled.devices, survey.profiles
        )
        took = [_compute_seconds(step) for step in steps]
        for worker, speed in traced_speeds(known, took).items():
            speeds[worker] = min(speed, speeds.get(worker, 1.0))
        slow = {w.index for w in cluster.workers if min(d.speed for d in w.devices) < 1.0}
        slow |= {worker for worker, speed in speeds.items() if speed < 1.0}
        teaching = {name: each for name, each in known.items() if each.worker not in slow}
        for step, seconds in zip(steps, took, strict=True):
            observe_nodes(learned, teaching, seconds)
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


def _compute_seconds(step: TraceStep) -> dict[str, float]:
    """Return the seconds of each node of a step, by name."""
    return node_seconds((e.name, e.start, e.end) for e in step.events if e.kind == "compute")


def node_seconds(
    timed: Iterable[tuple[str, int, int]], clock: Callable[[], int] = monotonic_ns
) -> dict[str, float]:
    """Return the seconds of each node by name, given names, starts and ends (ns) of spans.

    Args:
        clock: the clock of the spans.
    """
    took: dict[str, float] = {}
    for name, start, end in timed:
        seconds = (end - start) * 1e-9 - span_overhead(clock)
        took[name] = took.get(name, 0.0) + max(seconds, 1e-9)
    return took


def observe_nodes(
    learned: TraceCorrections, known: Mapping[str, TraceObservation], took: Mapping[str, float]
) -> None:
    """Learn the times of nodes that have something to teach."""
    for name, seconds in took.items():
        if name in known:
            learned.observe(known[name].bucket, seconds, known[name].predicted)


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


@cache
def span_overhead(clock: Callable[[], int] = monotonic_ns) -> float:
    """Return the seconds that recording a span takes; they lie between its two clock readings."""
    spans: list[tuple[str, str, int, int]] = []
    names, lines, start = {0: "name"}, [0], clock()

    def mark(line: int) -> None:
        nonlocal start
        end = clock()
        spans.append(("device", names[lines[line]], start, end))
        start = end

    for _ in range(500):
        mark(0)
    return median(end - begin for _, _, begin, end in spans) * 1e-9


# What a step costs ----------------------------------------------------------------------------


def idle_fetches(devices: Sequence[str]) -> tuple[CompiledFetches, Node]:
    """Return placed fetches that compute next to nothing on each device, and their placeholder."""
    x = placeholder("float32", ())
    graph = Graph([FUNCTIONS["add"](x, 1.0) for _ in devices])
    compiled = CompiledFetches(graph.outputs, graph, graph)
    where = dict(zip((t.node for t in graph.outputs), devices, strict=True))
    compiled.devices = {
        node: where[node] for node in graph.nodes if node.op.name not in UNPLACED_OPS
    }
    return compiled, x.node


def feed_fetches(device: str, nbytes: int) -> tuple[CompiledFetches, Node]:
    """Return fetches that read one of the bytes fed to a device, and their placeholder."""
    x = placeholder("uint8", (nbytes,))
    graph = Graph([x[:1] + 1])
    compiled = CompiledFetches(graph.outputs, graph, graph)
    compiled.devices = {node: device for node in graph.nodes if node.op.name not in UNPLACED_OPS}
    return compiled, x.node


def step_cost(
    cluster: Cluster,
    survey: ClusterSurvey,
    timed: Callable[[Sequence[str]], float],
    keep: bool = True,
) -> StepCost:
    """Return the cost of a step beyond its nodes and transfers; measure it unless it is on file.

    Args:
        timed: returns the seconds of a step of `idle_fetches` on some devices.
        keep: keep what is measured for later sessions.
    """
    kind = session_kind(cluster)
    if _is_this_machine(cluster):
        known = step_cost_of(calibrate.profile(_kinds(cluster)), kind)
        if known is not None:
            return known
    units = _units(cluster)
    latency, _ = link_matrices(cluster, survey.profiles, survey.links)
    there_and_back = float(latency[-1, 0] + latency[0, -1])
    one, *two = (max(timed(units[:n]) - there_and_back, 1e-6) for n in (1, 2) if n <= len(units))
    cost = one, max(one, *two) if two else one
    if two and keep and _is_this_machine(cluster):
        save_step_cost(kind, cost)
    return cost


def _units(cluster: Cluster) -> tuple[str, ...]:
    """Return the first device of each worker; all devices of this process."""
    if cluster.kind == "here":
        return cluster.devices
    first: dict[int | None, str] = {}
    for name in cluster.devices:
        first.setdefault(DeviceName.parse(name).worker, name)
    return tuple(first.values())


def step_seconds(call: Callable[[], Any]) -> float:
    """Return the typical seconds of a warm step; over slow links from only a few steps."""
    times: list[float] = []
    until = perf_counter() + IDLE_SECONDS
    while len(times) < 2 * IDLE_STEPS and (len(times) < 4 or perf_counter() < until):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return lower_quartile(times[len(times) // 2 :])


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of some calls, after one that warms up."""
    call()
    times: list[float] = []
    for _ in range(max(1, repeats)):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)
