"""Profile a few steps of fetches in this process, before their first plan.

    fetches + feeds ─profile_first_steps→ spans ─observe→ TraceCorrections ─→ the first plan

The plan then rests on measured times of its nodes, not on the calibration of ops alone.

Other load on the machine must not count. So a device of one thread is timed by the CPU time of this
thread; a device of several threads by wall time.

Devices that compute at the same time share caches and memory bandwidth. To measure that, another
thread runs the same steps at the same time.

Only fetches without side effects are profiled, on this machine's devices, and only if that takes
moments. The results are kept with those of traces, so that the next session of such nodes starts at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, monotonic_ns, thread_time_ns
from typing import Any

import numpy as np

from graphflow.base.formatting import show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import is_interrupt
from graphflow.base.progress import show_stage
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, owner_module
from graphflow.ir.spec import evaluate, kind
from graphflow.ops.kernels.jit.compiler import limit_compilation
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.machine.host_facts import cores, host_memory
from graphflow.placement.cost_model.trace_observations import TraceObservation, trace_observations
from graphflow.placement.placers.construction.execution_order import order_in_turns
from graphflow.planning.feedback.node_observations import node_seconds, observe_steps
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.host.session_state import DRAWS
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, partition
from graphflow.runtime.program.span_recorder import clock
from graphflow.runtime.telemetry.logs import Log


@dataclass(frozen=True)
class ProfilingLimits:
    """Limits of a profiling run.

    Args:
        step_seconds: predicted time of a step beyond which nothing is profiled. At least two run.
        seconds: time of the whole run, after which no further step begins.
        characters: LLVM IR of kernels that may be compiled, of which LLVM takes about 1 µs for a
            character. If a graph's new kernels are more, nothing is profiled.
    """

    step_seconds: float
    seconds: float
    characters: int


FIRST_PLAN = ProfilingLimits(0.35, 0.7, 400_000)
"""Limits before the first plan of fetches, for which somebody waits."""
SEARCH = ProfilingLimits(3.0, 1.0, 4_000_000)
"""Limits before a search for a strategy, which takes many times as long."""
MAX_PROFILED_STEPS = 5
MIN_UNKNOWN_SHARE = 0.1
"""Least share of a step's predicted time in nodes that were never measured."""
MAX_MEMORY_SHARE = 0.25
"""Largest share of this machine's memory that the fetches may take."""
STATEFUL = frozenset({"variable", "assign", "placeholder", "constant", "group", "check"})
"""Ops that are not pure, and yet change nothing outside their session."""

_log = Log("graphflow.trial")


def profile_first_steps(
    learned: TraceCorrections,
    cluster: Cluster,
    survey: ClusterSurvey,
    compiled: CompiledFetches,
    bindings: Mapping[str, int],
    arrays: Mapping[Node, np.ndarray[Any, Any]] | None = None,
    busy: bool = False,
    limits: ProfilingLimits = FIRST_PLAN,
) -> int:
    """Run fetches on one device of this process and learn what their nodes take.

    Args:
        bindings: sizes of the graph's symbols.
        arrays: what is fed; default: zeros, and floats from [0, 1).
        busy: beside a neighbour that does the same, as devices do that share a step.
        limits: how much all this may take. Beyond, nothing is learned, and the log says why.

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
    if new <= MIN_UNKNOWN_SHARE * total:
        return 0
    if total > limits.step_seconds:
        _log.tell("trial.ended", reason=f"a step is predicted to take {show_seconds(total)}")
        return 0
    until = monotonic() + limits.seconds
    show_stage("trial, compiling kernels")
    device = cluster.workers[0].devices[0]
    now = thread_time_ns if device.threads == 1 else monotonic_ns
    stages = [_ProfiledDevice(device.threads, now) for _ in range(2 if busy and cores() > 1 else 1)]
    try:
        for stage in stages:
            stage.load(
                graph, bindings, arrays or synthetic_feeds(graph, bindings), limits.characters
            )
        with _load_neighbours(stages[1:]):
            return stages[0].run_steps(learned, known, until)
    except Exception as error:  # the real step will raise it for the user
        if is_interrupt(error):
            raise
        _log.tell("trial.ended", reason=str(error))
        return 0
    finally:
        for stage in stages:
            stage.close()


@contextmanager
def _load_neighbours(stages: Sequence[_ProfiledDevice]) -> Iterator[None]:
    """Run the steps of neighbour devices, each on a thread, until the block ends."""
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
    """Return True if the cluster is this machine's CPUs, and the graph has no side effects and
    fits.

    Args:
        times: how many copies must fit in memory.
    """
    here = cluster.kind in ("here", "local")
    return (
        here
        and can_repeat(cluster, graph)
        and has_room(graph, bindings, host_memory() / max(times, 1))
    )


def can_repeat(cluster: Cluster, graph: Graph) -> bool:
    """Return True if the devices are CPUs, and further runs of the graph have no side effects."""
    if {device.kind for worker in cluster.workers for device in worker.devices} != {"cpu"}:
        return False
    if not all(n.op.pure or n.op.random or n.op.name in STATEFUL for n in graph.walk()):
        return False
    # a user's op may crash its process
    return all(owner_module(n.op) is None for n in graph.walk())


def has_room(graph: Graph, bindings: Mapping[str, int], memory: float) -> bool:
    """Return True if all of a graph's tensors take a small share of so many bytes."""
    sizes = (evaluate(t.spec.nbytes, bindings) for node in graph.nodes for t in node.outputs)
    return sum(sizes) <= MAX_MEMORY_SHARE * memory


def synthetic_feeds(graph: Graph, bindings: Mapping[str, int]) -> dict[Node, np.ndarray[Any, Any]]:
    """Return feeds for all placeholders: floats from [0, 1), indices within bounds, else zeros."""
    random = np.random.default_rng(0)
    made = {}
    for node in graph.placeholders:
        spec = node.specs[0].bind(bindings)
        shape: Any = spec.shape
        if kind(spec.dtype) == "float":
            array = random.random(shape)
        else:
            bound = _index_bound(graph, node.outputs[0], bindings)
            most = np.iinfo(spec.dtype).max if spec.dtype.kind in "iu" else 1
            array = random.integers(0, min(bound, most), shape)
        made[node] = np.asarray(array).astype(spec.dtype)
    return made


def _index_bound(graph: Graph, tensor: Tensor, bindings: Mapping[str, int]) -> int:
    """Return the number of rows or classes among which a tensor's elements choose; 1 if unknown.

    Equal indices would read the same row again and again, from the cache.
    """
    bounds = []
    for node in graph.consumers[tensor.node]:
        if node.op.alias or node.op.name == "astype":
            bounds.append(_index_bound(graph, node.outputs[0], bindings))
        elif node.op.refuse is not None and node.inputs[1] is tensor:
            shape = node.attrs.get("shape", node.inputs[0].shape)
            bounds.append(evaluate(shape[node.attrs.get("axis", -1)], bindings))
    return min((bound for bound in bounds if bound > 1), default=1)


class _ProfiledDevice:
    """A device of this process, with variables of its own.

    Args:
        now: the clock for nodes, in nanoseconds.
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
        characters: int,
    ) -> None:
        """Compile a graph, keep its feeds, and run a warm-up step.

        Raises:
            DeviceError: a node inside a body is pinned to another device.
            CompilationLimitExceeded: too many of its kernels are not compiled yet.
        """
        self._bindings = bindings
        self._feeds = {graph.names[node]: array for node, array in arrays.items()}
        devices = {node: self._DEVICE for node in graph.nodes if node.op.name not in UNPLACED_OPS}
        names = {node: graph.names[node] for node in graph.variables}
        parts = partition(graph, devices, order_in_turns(graph), names, [self._DEVICE])
        self._host.add(self._NAME, self._NAME, list(parts.values()))
        with limit_compilation(characters):
            self._step(0)

    def run_steps(
        self, learned: TraceCorrections, known: Mapping[str, TraceObservation], until: float
    ) -> int:
        """Run steps until a time of `monotonic`, at least one; return their number."""
        steps: list[dict[str, float]] = []
        while len(steps) < MAX_PROFILED_STEPS and not (steps and monotonic() > until):
            show_stage("trial steps", len(steps), MAX_PROFILED_STEPS)
            steps.append(self._step(1 + len(steps)))
        observe_steps(learned, known, steps)
        return len(steps)

    def repeat(self, over: threading.Event) -> None:
        """Run steps until `over` is set or one fails: the profiled device then fails in the same
        way."""
        step = 1
        with suppress(Exception):
            while not over.is_set():
                self._step(step)
                step += 1

    def _step(self, step: int) -> dict[str, float]:
        """Run a step, and return the seconds of each node."""
        bindings = {**self._bindings, DRAWS: step}
        before = clock.set(self._now)
        try:
            computed = self._host.compute(
                self._NAME, self._NAME, step, bindings, self._feeds, True, 60.0
            )
            self._host.commit(self._NAME, step)  # the commit's spans arrive with the next step
        finally:
            clock.reset(before)
        spans = ((name, start, end) for _, name, start, end in computed.spans)
        return node_seconds(spans)

    def close(self) -> None:
        self._host.close(self._NAME)
