"""Try fetches on the workers of a session before their first plan, on variables of their own.

    whole graph on a worker of each kind ─→ times of its nodes, and of a step beyond them
    a copy of it on each worker at once  ─→ the same while neighbours are busy

The workers run what they will run later, in the same processes and memory. So launches, caches,
page faults and messages cost what they will cost. A step is timed without a trace. Traced steps
then tell how its time divides among the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from graphflow.base.formatting import show_count, show_seconds
from graphflow.base.process.interrupts import is_interrupt
from graphflow.base.progress import show_stage
from graphflow.errors import WorkerLost
from graphflow.execution.compiled_fetches import CompiledFetches, worker_of
from graphflow.ir.graph import Graph
from graphflow.ir.graph_fingerprint import fingerprint
from graphflow.ir.op import Node
from graphflow.placement.calibration.cluster_rates import device_classes, link_matrices
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.machine.host_facts import cores
from graphflow.placement.cost_model.trace_observations import TraceObservation, trace_observations
from graphflow.placement.placers.construction.execution_order import order_in_turns
from graphflow.placement.plans.building.step_totals import session_kind
from graphflow.planning.feedback.node_observations import compute_seconds, observe_steps
from graphflow.planning.trials.probe_steps import StepProbe, time_calls
from graphflow.planning.trials.profiling_run import (
    can_repeat,
    has_room,
    may_profile,
    synthetic_feeds,
)
from graphflow.planning.trials.step_cost import units_of
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition
from graphflow.runtime.telemetry.logs import Log

STEP_SECONDS = 0.5
"""Longest step that is tried, as calibration predicts it. Somebody waits for the first plan."""
LONG_STEP = 0.1
"""Seconds of a step from which one untraced step and two traced ones are enough."""
ROUND_SECONDS = 0.2
"""Time limit of the rounds of shorter steps."""
TRIAL_SECONDS = 1.0
"""A trial that took this long on one worker is not repeated on all of them."""
SENDING_SECONDS = 0.5
"""Longest time in which copies of a graph reach the workers, with the arrays that it holds."""
MAX_COPIES = 16
"""Most workers that run a copy at once."""
MAX_KINDS = 300
"""Kinds of nodes beyond which compiling their kernels would take too long."""
ROUNDS = 6
"""Rounds of steps at most; they give more samples than corrections count of each kind of node."""

_log = Log("graphflow.trial")

Run = Callable[[CompiledFetches, Mapping[Node, np.ndarray[Any, Any]], dict[str, int]], object]
"""Runs a step: (fetches, feeds, sizes of symbols)."""


class WorkerTrial:
    """Tries fetches on the workers of a cluster, which are processes of this or other machines.

    Args:
        learned: takes what was measured.
        run: runs a step of fetches that have partitions.
    """

    def __init__(
        self,
        learned: TraceCorrections,
        cluster: Cluster,
        survey: ClusterSurvey,
        probe: StepProbe,
        run: Run,
    ) -> None:
        self._learned = learned
        self._cluster = cluster
        self._survey = survey
        self._probe = probe
        self._run = run
        devices = {name: cluster.device(name) for name in units_of(cluster)}
        self._units = [n for n, d in devices.items() if d.speed == 1.0 and not d.is_described]

    def profile(
        self,
        compiled: CompiledFetches,
        bindings: dict[str, int],
        arrays: Mapping[Node, np.ndarray[Any, Any]] | None = None,
    ) -> int:
        """Learn what the nodes of fetches and their steps take; return how many phases ran.

        Args:
            bindings: sizes of the graph's symbols.
            arrays: what is fed; default: made up.

        Raises:
            WorkerLost: a worker was lost meanwhile. Other errors are left to the first real step.
        """
        learned = 0
        begun = perf_counter()
        name = f"{fingerprint(compiled.graph)} {sorted(bindings.items())}"
        classes = device_classes(self._cluster)
        phases = {
            f"{name} {len(each)} {classes[each[0]]}": each
            for each in self._copies(compiled.graph, bindings)
        }
        new = {key: each for key, each in phases.items() if not self._learned.has_profiled(key)}
        if not new:
            return 0
        idle = trace_observations(
            compiled.graph, self._cluster, bindings, {}, self._survey.profiles
        )
        if not _is_short(idle) or not self._is_soon_sent(
            compiled.graph, max(map(len, new.values()))
        ):
            return 0
        for key, units in new.items():
            if learned and perf_counter() - begun > TRIAL_SECONDS:
                break
            try:
                is_first = classes[units[0]] == classes[self._cluster.devices[0]]
                known = idle if is_first and len(units) == 1 else None
                self._profile_copies(compiled, bindings, arrays, units, known)
            except Exception as error:
                if is_interrupt(error) or isinstance(error, WorkerLost):
                    raise
                _log.tell("trial.ended", reason=str(error))
                break
            self._learned.note_profiled(key)
            learned += 1
        return learned

    def _copies(self, graph: Graph, bindings: Mapping[str, int]) -> list[Sequence[str]]:
        """Return the devices of each phase: one of each kind, and then all if each has a core.

        Workers that are slow at the moment take no part, nor those whose speed a file gives.
        """
        classes = device_classes(self._cluster)
        one_each = {classes[device]: [device] for device in reversed(self._units)}
        phases: list[Sequence[str]] = list(reversed(one_each.values()))
        local = self._cluster.kind == "local"
        if 1 < len(self._units) <= (cores() if local else MAX_COPIES):
            phases.append(self._units)
        return [each for each in phases if self._may_run(graph, bindings, each)]

    def _may_run(self, graph: Graph, bindings: Mapping[str, int], units: Sequence[str]) -> bool:
        """Return True if a graph may run on these devices at once."""
        if self._cluster.kind == "local":
            return may_profile(self._cluster, graph, bindings, len(units))
        room = min(self._cluster.device(device).memory for device in units)
        return can_repeat(self._cluster, graph) and has_room(graph, bindings, room)

    def _is_soon_sent(self, graph: Graph, copies: int) -> bool:
        """Return True if so many copies of a graph soon reach their workers.

        The log tells if not. On this machine they always do.
        """
        if self._cluster.kind == "local":
            return True
        held = [node.attrs["initial"] for node in graph.variables]
        size = sum(array.nbytes for array in held if isinstance(array, np.ndarray))
        seconds = self._client_seconds(copies * size, self._units[0])
        if seconds > SENDING_SECONDS:
            _log.tell("trial.ended", reason=f"sending the graph takes {show_seconds(seconds)}")
        return seconds <= SENDING_SECONDS

    def _profile_copies(
        self,
        compiled: CompiledFetches,
        bindings: dict[str, int],
        arrays: Mapping[Node, np.ndarray[Any, Any]] | None,
        units: Sequence[str],
        known: Mapping[str, TraceObservation] | None,
    ) -> None:
        """Run a copy of the fetches on each device at once, and learn from the first device.

        Args:
            known: what calibration predicts for its nodes; None: to be predicted.
        """
        graph = compiled.graph
        parts = {
            device: self._copy(compiled, device, number) for number, device in enumerate(units)
        }
        copies = CompiledFetches(compiled.fetches, graph, graph, compiled.sizes, partitions=parts)
        copies.devices = {n: units[0] for n in graph.nodes if n.op.name not in UNPLACED_OPS}
        names = {
            worker_of(device): [_variable_name(graph.names[n], i) for n in graph.variables]
            for i, device in enumerate(units)
        }
        fed = arrays or synthetic_feeds(graph, bindings)
        run = partial(self._run, copies, fed, bindings)
        with self._probe.load_program(copies, names):
            show_stage(f"trial on {show_count(len(units), 'worker')}, compiling kernels")
            run()
            show_stage(f"trial on {show_count(len(units), 'worker')}")
            took = time_calls(run, 0.0, 1)
            if took[0] > LONG_STEP:
                traced = self._probe.trace_steps(run)
            else:
                took, traced = self._probe.measure_rounds(run, ROUND_SECONDS, ROUNDS)
        sent = sum(array.nbytes for array in fed.values())
        client = self._client_seconds(sent, units[0])
        if known is None:
            known = trace_observations(
                graph, self._cluster, bindings, copies.devices, self._survey.profiles,
                busy=len(units) > 1,
            )  # fmt: skip
        steps = [compute_seconds(copies, step) for step in traced]
        computed = observe_steps(self._learned, known, steps, median(took) - client)
        kind = session_kind(self._cluster)
        self._learned.observe_step(kind, len(units), computed + client, median(took))

    def _client_seconds(self, sent: int, device: str) -> float:
        """Return the seconds that feeds of so many bytes travel to a device, and small results
        back."""
        latency, bandwidth = link_matrices(self._cluster, self._survey.profiles, self._survey.links)
        at = self._cluster.devices.index(device)
        return float(latency[-1, at] + sent / bandwidth[-1, at] + latency[at, -1])

    def _copy(self, compiled: CompiledFetches, device: str, number: int) -> Partition:
        """Return a partition that is the whole graph; only the first copy returns the fetches."""
        graph = compiled.graph
        devices = {n: device for n in graph.nodes if n.op.name not in UNPLACED_OPS}
        names = {n: _variable_name(graph.names[n], number) for n in graph.variables}
        parts = partition(
            graph, devices, order_in_turns(graph), names, self._cluster.devices,
            self._cluster.pinned,
        )  # fmt: skip
        (part,) = parts.values()
        return part if number == 0 else replace(part, fetches={})


def _is_short(idle: Mapping[str, TraceObservation]) -> bool:
    """Return True if a step and the kinds of its nodes are few enough; the log tells if not."""
    total = sum(each.predicted for each in idle.values())
    kinds = len({each.bucket for each in idle.values()})
    if total <= STEP_SECONDS and kinds <= MAX_KINDS:
        return True
    _log.tell(
        "trial.ended",
        reason=f"a step of {kinds} kinds of nodes is predicted to take {show_seconds(total)}",
    )
    return False


def _variable_name(name: str, copy: int) -> str:
    """Return the name of a variable's copy, which no variable of a session has."""
    return f"trial {copy}/{name}"
