"""Learning: from the traced steps of a session to what its next plan knows; and steps that do
nothing, to time what a step costs by itself.

    Trace ─learn→ TraceCorrections (ratios, measured by predicted) ─→ plan_graph(learned=…)
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
from graphflow.placement.plans.planning import session_kind, units
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.partitioning.partition import UNPLACED_OPS
from graphflow.runtime.tracing.events import TraceEvent, TraceStep

MIN_STEPS = 3
"""Steps that were not traced, from which a lesson about steps as a whole is drawn."""
IDLE_STEPS = 30
"""Steps that do nothing, to time what a step costs; as many before them warm up."""
IDLE_SECONDS = 1.0
"""Seconds for them, after which a few will do."""


def load_corrections(cluster: Cluster) -> TraceCorrections:
    """What was learned before of the cluster's machine; nothing of other machines is kept."""
    if not _is_this_machine(cluster):
        return TraceCorrections()
    return read_corrections(calibrate.profile(_kinds(cluster)))


def is_known(cluster: Cluster) -> bool:
    """Whether the cluster's machine is this one and was calibrated, so that planning is cheap."""
    return _is_this_machine(cluster) and calibrate.profile_path().is_file()


def save_corrections(learned: TraceCorrections, cluster: Cluster) -> None:
    """Keep what was learned for later processes, if it is of this machine."""
    if _is_this_machine(cluster):
        write_corrections(learned)


def _is_this_machine(cluster: Cluster) -> bool:
    return cluster.kind in ("here", "local")


def _kinds(cluster: Cluster) -> set[str]:
    return {device.kind for worker in cluster.workers for device in worker.devices}


# From traces ----------------------------------------------------------------------------------


def learn(
    learned: TraceCorrections, cluster: Cluster, survey: ClusterSurvey, compiled: CompiledFetches
) -> None:
    """Take in the traced steps of a set of fetches, those that its trace block has so far.

    The first one warms up: it counts only if it is alone.
    """
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
        for step in steps:
            _learn_nodes(learned, known, step)
            for kind, nbytes, seconds in _observed_transfers(step, links):
                learned.observe_link(kind, nbytes, seconds)


def learn_steps(learned: TraceCorrections, plan: Plan, took: Sequence[float]) -> bool:
    """Take in what whole steps took, that were placed as a plan says and not traced; whether that
    is enough to tell anything.

    Args:
        plan: made with all that is known of the nodes by now.
    """
    if len(took) < MIN_STEPS:
        return False
    predicted = plan.makespan - plan.overhead
    learned.observe_step(session_kind(plan.cluster), units(plan), predicted, median(took))
    return True


def _learn_nodes(
    learned: TraceCorrections, known: Mapping[str, TraceObservation], step: TraceStep
) -> None:
    timed = ((e.name, e.start, e.end) for e in step.events if e.kind == "compute")
    observe_nodes(learned, known, node_seconds(timed))


def node_seconds(
    timed: Iterable[tuple[str, int, int]], clock: Callable[[], int] = monotonic_ns
) -> dict[str, float]:
    """Seconds of each node, by name, from the names, starts and ends (ns) of its spans.

    Args:
        clock: that they were read from.
    """
    took: dict[str, float] = {}
    for name, start, end in timed:
        seconds = (end - start) * 1e-9 - span_overhead(clock)
        took[name] = took.get(name, 0.0) + max(seconds, 1e-9)
    return took


def observe_nodes(
    learned: TraceCorrections, known: Mapping[str, TraceObservation], took: Mapping[str, float]
) -> None:
    """Note what nodes took of which there is something to learn."""
    for name, seconds in took.items():
        if name in known:
            learned.observe(known[name].bucket, seconds, known[name].predicted)


def _observed_transfers(
    step: TraceStep, links: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, int, float]]:
    """Kind of link, bytes and seconds of each transfer.

    One that was waited for has come when its reader goes on. Between threads a transfer is the
    waking of its reader: one that nobody waited for teaches nothing.
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
    """What a span's own mark takes: it lies between two readings of the clock."""
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
    """Fetches that take next to nothing on each of some devices, placed, and their placeholder."""
    x = placeholder("float32", ())
    graph = Graph([FUNCTIONS["add"](x, 1.0) for _ in devices])
    compiled = CompiledFetches(graph.outputs, graph, graph)
    where = dict(zip((t.node for t in graph.outputs), devices, strict=True))
    compiled.devices = {
        node: where[node] for node in graph.nodes if node.op.name not in UNPLACED_OPS
    }
    return compiled, x.node


def step_cost(
    cluster: Cluster, survey: ClusterSurvey, timed: Callable[[Sequence[str]], float]
) -> StepCost:
    """What a step costs beyond its nodes and transfers: kept from before, or measured now.

    Args:
        timed: seconds of a step of `idle` fetches on some devices.
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
    if two and _is_this_machine(cluster):
        save_step_cost(kind, cost)
    return cost


def _units(cluster: Cluster) -> tuple[str, ...]:
    """The first device of each worker; of this process all."""
    if cluster.kind == "here":
        return cluster.devices
    first: dict[int | None, str] = {}
    for name in cluster.devices:
        first.setdefault(DeviceName.parse(name).worker, name)
    return tuple(first.values())


def step_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a step that was warmed up, by a quick one; over slow links, of the few that there
    is time for."""
    times: list[float] = []
    until = perf_counter() + IDLE_SECONDS
    while len(times) < 2 * IDLE_STEPS and (len(times) < 4 or perf_counter() < until):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return lower_quartile(times[len(times) // 2 :])
