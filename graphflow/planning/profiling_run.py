"""Trial: a few steps of fetches in this process, traced, before they are placed for the first time,
so that the plan rests on what the nodes took here, and not on the calibration of ops alone.

    fetches + feeds ─try_out→ spans of one device ─observe→ TraceCorrections ─→ the first plan

What else the machine does meanwhile must not count. A device of one thread is timed by the
processor time of this thread, which stands still while others compute; of several threads by the
wall. A node's time is the least of some steps, and tells as much as there are steps that agree.

Two devices that compute at the same time share caches and the way to memory. What that costs a
graph shows where another thread goes through the same steps meanwhile.

Only for devices of this machine, for fetches that touch nothing outside, and as long as it takes
moments. What it teaches is kept with what traces teach, so that the next session that runs such
nodes starts at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, monotonic_ns, thread_time_ns
from typing import Any

import numpy as np

from graphflow.base.interrupts import is_interrupt
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, owner_module
from graphflow.ir.spec import evaluate, kind
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.host_facts import cores, host_memory
from graphflow.placement.cost_model.trace_observations import TraceObservation, trace_observations
from graphflow.placement.placers.construction.execution_order import order_in_turns
from graphflow.planning.trace_feedback import node_seconds
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.host.session_state import DRAWS
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, partition
from graphflow.runtime.program.program import clock
from graphflow.runtime.telemetry.logs import Log

MAX_STEP_SECONDS = 3.0
"""Predicted seconds of a step beyond which nothing is tried out."""
PROFILING_SECONDS = 0.5
"""Of all steps after the first; at least one is run, and at most `STEPS`."""
MAX_PROFILED_STEPS = 5
AGREEMENT_RATIO = 1.3
"""Steps in which a node took at most this many times its least agree on what it takes."""
MIN_UNKNOWN_SHARE = 0.1
"""Of a step's predicted time that must be in nodes that nothing was learned about."""
MAX_MEMORY_SHARE = 0.25
"""Of this machine's memory that the fetches may take."""
STATEFUL = frozenset({"variable", "assign", "placeholder", "constant", "group"})
"""Ops that are not pure, and yet touch nothing outside their session."""

_log = Log("graphflow.trial")


def profile_first_steps(
    learned: TraceCorrections,
    cluster: Cluster,
    survey: ClusterSurvey,
    compiled: CompiledFetches,
    bindings: Mapping[str, int],
    arrays: Mapping[Node, np.ndarray[Any, Any]] | None = None,
    busy: bool = False,
) -> int:
    """Run fetches on one device of this process and learn what their nodes take.

    Args:
        bindings: sizes of the graph's symbols.
        arrays: what is fed; default: zeros, and floats from [0, 1).
        busy: beside a neighbour that does the same, as devices do that share a step.

    Returns:
        How many steps taught something; 0: all was known, or may not be tried.
    """
    graph = compiled.graph
    if not may_profile(cluster, graph, bindings, 2 if busy else 1):
        return 0
    known = trace_observations(graph, cluster, bindings, {}, survey.profiles, busy)
    total = sum(lesson.predicted for lesson in known.values())
    seen = learned.has_observed if busy else learned.knows
    new = sum(each.predicted for each in known.values() if not seen(each.bucket))
    if new <= MIN_UNKNOWN_SHARE * total or total > MAX_STEP_SECONDS:
        return 0
    device = cluster.workers[0].devices[0]
    now = thread_time_ns if device.threads == 1 else monotonic_ns
    stages = [_ProfiledDevice(device.threads, now) for _ in range(2 if busy and cores() > 1 else 1)]
    try:
        for stage in stages:
            stage.load(graph, bindings, arrays or synthetic_feeds(graph, bindings))
        with _load_neighbours(stages[1:]):
            return stages[0].run_steps(learned, known)
    except Exception as error:  # the real step will say it to the user
        if is_interrupt(error):
            raise
        _log.tell("trial.ended", reason=str(error))
        return 0
    finally:
        for stage in stages:
            stage.close()


@contextmanager
def _load_neighbours(stages: Sequence[_ProfiledDevice]) -> Iterator[None]:
    """Neighbours that go through their steps, each on a thread, until the block ends."""
    over = threading.Event()
    threads = [
        threading.Thread(target=stage.repeat, args=(over,), name="trial", daemon=True)
        for stage in stages
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def may_profile(
    cluster: Cluster, graph: Graph, bindings: Mapping[str, int], times: int = 1
) -> bool:
    """Whether the cluster is this machine's processors, and the graph changes nothing but its own
    variables and fits beside them, so many times."""
    here = cluster.kind in ("here", "local")
    kinds = {device.kind for worker in cluster.workers for device in worker.devices}
    if not here or kinds != {"cpu"}:
        return False
    if not all(n.op.pure or n.op.random or n.op.name in STATEFUL for n in graph.walk()):
        return False
    if any(owner_module(n.op) is not None for n in graph.walk()):
        return False  # a user's op may end its process: that is to be a worker's, not this one
    sizes = (evaluate(t.spec.nbytes, bindings) for node in graph.nodes for t in node.outputs)
    return times * sum(sizes) <= MAX_MEMORY_SHARE * host_memory()


def synthetic_feeds(graph: Graph, bindings: Mapping[str, int]) -> dict[Node, np.ndarray[Any, Any]]:
    """Feeds: zeros, and floats from [0, 1)."""
    random = np.random.default_rng(0)
    made = {}
    for node in graph.placeholders:
        spec = node.specs[0].bind(bindings)
        shape: Any = spec.shape
        floats = kind(spec.dtype) == "float"
        made[node] = (random.random(shape) if floats else np.zeros(shape)).astype(spec.dtype)
    return made


class _ProfiledDevice:
    """One device of this process, with variables of its own.

    Args:
        now: nanoseconds by which nodes are timed.
    """

    _NAME = "trial"
    _DEVICE = "/worker:0/cpu:0"

    def __init__(self, threads: int | None, now: Callable[[], int]) -> None:
        self._now = now
        self._host = DeviceHost(0, [self._DEVICE], threads, lambda parcel: None)
        self._host.open(self._NAME)
        self._bindings: Mapping[str, int] = {}
        self._feeds: dict[str, np.ndarray[Any, Any]] = {}

    def load(
        self,
        graph: Graph,
        bindings: Mapping[str, int],
        arrays: Mapping[Node, np.ndarray[Any, Any]],
    ) -> None:
        """Take a graph and its feeds.

        Raises:
            DeviceError: a node inside a body is pinned to another device.
        """
        self._bindings = bindings
        self._feeds = {graph.names[node]: array for node, array in arrays.items()}
        devices = {node: self._DEVICE for node in graph.nodes if node.op.name not in UNPLACED_OPS}
        names = {node: graph.names[node] for node in graph.variables}
        parts = partition(graph, devices, order_in_turns(graph), names, [self._DEVICE])
        self._host.add(self._NAME, self._NAME, list(parts.values()))

    def run_steps(self, learned: TraceCorrections, known: Mapping[str, TraceObservation]) -> int:
        """Steps, the first to warm up, until the time is over; how many there were after it."""
        self._step(0)
        until = monotonic() + PROFILING_SECONDS
        steps: list[dict[str, float]] = []
        while len(steps) < MAX_PROFILED_STEPS and not (steps and monotonic() > until):
            steps.append(self._step(1 + len(steps)))
        observe_least_times(learned, known, steps)
        return len(steps)

    def repeat(self, over: threading.Event) -> None:
        """Steps until it is over, or fails: whoever is timed beside it fails likewise."""
        step = 0
        with suppress(Exception):
            while not over.is_set():
                self._step(step)
                step += 1

    def _step(self, step: int) -> dict[str, float]:
        """Seconds of each node."""
        bindings = {**self._bindings, DRAWS: step}
        before = clock.set(self._now)
        try:
            computed = self._host.compute(
                self._NAME, self._NAME, step, bindings, self._feeds, True, 60.0
            )
            self._host.commit(self._NAME, step)  # its spans come with those of the next step
        finally:
            clock.reset(before)
        spans = ((name, start, end) for _, name, start, end in computed.spans)
        return node_seconds(spans, self._now)

    def close(self) -> None:
        self._host.close(self._NAME)


def observe_least_times(
    learned: TraceCorrections,
    known: Mapping[str, TraceObservation],
    steps: Sequence[Mapping[str, float]],
) -> None:
    """Note what nodes took in some steps: the least, once for each step that agrees on it."""
    for name, (seconds, times) in least_times(steps).items():
        for _ in range(times if name in known else 0):
            learned.observe(known[name].bucket, seconds, known[name].predicted)


def least_times(steps: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """By node, the least that it took in any step, and in how many steps it took about that."""
    found = {}
    for name in dict.fromkeys(name for took in steps for name in took):
        times = [took[name] for took in steps if name in took]
        least = min(times)
        found[name] = (least, sum(seconds <= AGREEMENT_RATIO * least for seconds in times))
    return found
