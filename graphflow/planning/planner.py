"""Plans for a session: what it knows of its cluster and of traced steps, and the plans that follow.

A plan rests on the survey of the workers, on corrections learned from traces, and on the homes of
variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import numpy as np

from graphflow.execution.cluster_connection import links_of, speeds_of_workers, survey_of
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.replan_policy import GAIN
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.frontend.feeds import convert_feeds
from graphflow.ir.op import Node, Tensor
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.calibration.worker_speeds import is_alike, with_speeds
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.placers import Placer
from graphflow.placement.placers.single import OneDevice
from graphflow.placement.plans.building.plan_builder import FixedAssignment, plan_graph
from graphflow.placement.plans.plan import Plan
from graphflow.planning.feedback.node_observations import busiest_seconds
from graphflow.planning.feedback.trace_feedback import (
    is_known,
    learn,
    learn_steps,
    load_corrections,
    save_corrections,
)
from graphflow.planning.trials.probe_steps import StepProbe, median_seconds, time_calls
from graphflow.planning.trials.step_cost import feed_fetches, measure_client
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.partitioning.partition import partition

PROBE_STEPS = 30
"""Steps that tell what a step costs beyond its nodes; as many before them warm up."""
TRACED_STEPS = 3
"""Pairs of traced steps that tell how long the nodes of such a step take."""
PROBE_SECONDS = 0.3
"""Time limit of each of these, after which a few suffice."""


class Planner:
    """Plans for one cluster; its predictions improve with each traced step.

    Args:
        placer: name of the placement algorithm.
        trial: True to run a few steps in this process before fetches are planned, and to check
            the first plan over several devices by its steps.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: Hosts,
        state: VariableStore,
        steps: StepExecutor,
        placer: str,
        trial: bool,
    ) -> None:
        self.learned = TraceCorrections()
        self._cluster = cluster
        self._hosts = hosts
        self._state = state
        self._steps = steps
        self._placer = placer
        self._trial = trial
        self._probe = StepProbe(hosts, steps)
        self._survey: ClusterSurvey | None = None
        self._probed: dict[int, float] = {}  # speeds of workers, see `measure_speeds`
        self._traced: dict[int, float] = {}  # lower ones, by steps since then

    def plan(
        self,
        compiled: CompiledFetches,
        homes: Mapping[Node, str] | None = None,
        placer: str | Placer | None = None,
    ) -> Plan:
        """Return a plan of fetches, for the sizes for which they are placed.

        Args:
            homes: homes of variables, instead of the present ones.
        """
        bindings = compiled.bindings(compiled.sizes)
        survey = self.ensure_survey()
        return plan_graph(
            compiled.graph,
            self._cluster_at_speed(),
            compiled.sizes,
            bindings,
            placer or self._placer,
            self._state.homes if homes is None else homes,
            survey.profiles,
            survey.links,
            self.learned,
            survey.steps,
            () if compiled.division is None else compiled.division.tasks,
            GAIN if self.checks_first_plans else inf,
            () if compiled.division is None else compiled.division.notes,
        )

    def plan_as_placed(self, compiled: CompiledFetches) -> Plan:
        """Return the present placement with predictions by what is known now.

        A plan without its model is returned unchanged.
        """
        plan = compiled.plan
        if plan is None:  # fetches that were placed on a single device have none
            names = self._cluster.devices
            home = next(iter(compiled.devices.values()), names[0])
            placer = None if len(names) == 1 else OneDevice(names.index(home))
            return replace(self.plan(compiled, {}, placer), placer=self._placer)
        if plan.model is None:
            return plan
        names = (*self._cluster.devices, CLIENT)  # devices may have joined since
        at = np.array([names.index(name) for name in plan.model.devices])
        assignment = replace(plan.model.assignment, device=at[plan.model.assignment.device])
        return replace(self.plan(compiled, {}, FixedAssignment(assignment)), placer=plan.placer)

    @property
    def checks_first_plans(self) -> bool:
        """True if the first plan over several devices is compared with one device.

        Round robin is a baseline: whoever asks for it wants it as it is.
        """
        return self._trial and self._placer != "round_robin"

    # Learning ---------------------------------------------------------------------------------

    def profile_first_steps(
        self,
        compiled: CompiledFetches,
        bindings: dict[str, int],
        arrays: Mapping[Node, np.ndarray[Any, Any]] | None = None,
    ) -> None:
        """Measure the nodes and steps of fetches before they are planned.

        Args:
            arrays: what is fed; default: made up.
        """
        if not self._trial:
            return
        survey = self.ensure_survey()  # also loads what was learned before
        if self._cluster.kind != "here":
            from graphflow.planning.trials.worker_trial import WorkerTrial

            trial = WorkerTrial(
                self.learned, self._cluster_at_speed(), survey, self._probe, self._steps.run
            )
            done = trial.profile(compiled, bindings, arrays)
        else:
            from graphflow.planning.trials.profiling_run import profile_first_steps

            args = (self.learned, self._cluster, survey, compiled, bindings, arrays)
            done = profile_first_steps(*args)
        if done:
            save_corrections(self.learned, self._cluster)

    def learn(self, sets: Iterable[CompiledFetches]) -> None:
        """Learn from traced steps, for the next plans."""
        traced = [c for c in sets if c.trace.steps]
        for compiled in traced:
            if compiled.partitions and self._survey is not None:
                cluster = self._cluster_at_speed()
                for worker, speed in learn(self.learned, cluster, self._survey, compiled).items():
                    self._traced[worker] = min(speed, self._traced.get(worker, 1.0))
            compiled.keep_measured()
        if traced and self._survey is not None:
            save_corrections(self.learned, self._cluster)

    def learn_steps(self, steps: Iterable[tuple[Plan, Sequence[float]]]) -> bool:
        """Learn from plans and durations of their whole steps; return False if there were too
        few."""
        learned = [learn_steps(self.learned, plan, seconds) for plan, seconds in steps]
        if any(learned):
            save_corrections(self.learned, self._cluster)
        return any(learned)

    def move(self, cluster: Cluster) -> None:
        """Plan for another cluster from now on."""
        self._cluster, self._survey = cluster, None
        self._probed, self._traced = {}, {}

    # The survey -------------------------------------------------------------------------------

    def survey_if_cheap(self) -> None:
        """Survey the cluster if that takes moments; without a survey, traces teach nothing."""
        if is_known(self._cluster):
            self.ensure_survey()

    def ensure_survey(self) -> ClusterSurvey:
        """Return the measurements that planning needs; take them on the first call."""
        if self._survey is None:
            self._probed = speeds_of_workers(self._hosts, self._cluster)
            # what takes longer because a worker is slow at the moment is no fact of the machine
            keep = min(self._probed.values(), default=1.0) == 1.0
            found = survey_of(self._hosts, self._cluster, self._feed_seconds, keep)
            self.learned = load_corrections(self._cluster)
            self._survey = measure_client(self._cluster, found, self._seconds_beyond_nodes, keep)
        return self._survey

    def _cluster_at_speed(self) -> Cluster:
        """Return the cluster with the speeds of its workers.

        Traced steps can only lower what a probe found. A worker that idles for a part of each step
        may stay below a limit that the probe met.
        """
        speeds = {w: min(s, self._traced.get(w, 1.0)) for w, s in self._probed.items()}
        return with_speeds(self._cluster, speeds) if speeds else self._cluster

    def remeasure(self) -> None:
        """Measure the speeds of workers and the links to remote ones again.

        What was learned of a link is forgotten. So is the traced speed of a worker whose probe
        finds another speed than before.
        """
        if self._survey is None:
            return
        before, self._probed = self._probed, speeds_of_workers(self._hosts, self._cluster)
        kept = {w for w, s in self._probed.items() if is_alike(s, before[w])}
        self._traced = {w: s for w, s in self._traced.items() if w in kept}
        links = links_of(self._hosts, self._cluster, self._feed_seconds)
        if links is not None:
            self._survey = replace(self._survey, links=links)
            self.learned.forget_links()

    def _feed_seconds(self, worker: int, nbytes: int, repeats: int) -> float:
        """Return the median seconds that a feed of `nbytes` takes from here to a worker.

        They are half of a round trip, and the seconds by which the feed makes a step longer.
        """
        device = self._cluster.workers[worker].devices[0].name
        steps: list[float] = []
        for size in (1, nbytes):
            run, compiled = self._probe_step(*feed_fetches(device, size), np.ones(size, "uint8"))
            with self._probe.load_program(compiled):
                steps.append(median_seconds(run, repeats))
        round_trip = median_seconds(lambda: self._hosts.forget([], {worker: []}), repeats)
        return round_trip / 2 + max(0.0, steps[1] - steps[0])

    def _seconds_beyond_nodes(
        self, compiled: CompiledFetches, node: Node, shape: tuple[int, ...]
    ) -> float:
        """Return the seconds that a step of placed fetches takes beyond its nodes.

        Args:
            node, shape: their placeholder, and the shape of what it is fed.
        """
        run, compiled = self._probe_step(compiled, node, np.zeros(shape, np.float32))
        with self._probe.load_program(compiled):
            time_calls(run, PROBE_SECONDS, PROBE_STEPS)  # warms up
            took = time_calls(run, PROBE_SECONDS, PROBE_STEPS)
            traced = [step for _ in range(TRACED_STEPS) for step in self._probe.trace_steps(run)]
        return max(median(took) - busiest_seconds(traced), 0.0)

    def _probe_step(
        self, compiled: CompiledFetches, node: Node, fed: np.ndarray[Any, Any]
    ) -> tuple[Callable[[], Any], CompiledFetches]:
        """Partition placed fetches, and return a function that runs a step of them."""
        compiled.partitions = partition(
            compiled.graph, compiled.devices, None, {}, self._cluster.devices
        )
        return partial(self._run_fed, compiled, {node.outputs[0]: fed}), compiled

    def _run_fed(self, compiled: CompiledFetches, feeds: Mapping[Tensor, Any]) -> list[Any]:
        """Run a step of compiled fetches."""
        arrays = compiled.check_feeds(convert_feeds(feeds))
        bindings = compiled.bindings({node: a.shape for node, a in arrays.items()})
        return self._steps.run(compiled, arrays, bindings)
