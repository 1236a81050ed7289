"""GPUs that a session takes by itself: found, opened and measured when a graph may gain by them.

    graph ─may_help→ no:  the CPU alone, as on a machine without a GPU
                     yes: find → open → measure → the cluster that plans are made for

A process that runs small graphs only neither imports CuPy nor creates a context on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from graphflow.base.formatting import show_seconds
from graphflow.base.process.interrupts import is_interrupt
from graphflow.base.progress import show_progress
from graphflow.errors import DeviceError, GraphflowError
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.placement.calibration.calibrate import link_of
from graphflow.placement.calibration.profile_file import Profile, profile_path, read_profile
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Device
from graphflow.placement.clusters.machine.host_facts import MEMORY_SHARE
from graphflow.placement.cost_model.problem_builder import build_problem
from graphflow.planning.planner import Planner
from graphflow.runtime.host.host_interface import LocalHosts
from graphflow.runtime.telemetry.logs import Log

MANY_NODES = 1000
"""Nodes from which a graph is planned without a look at what it would take on the CPU."""
SLOW_FLOPS, SLOW_BANDWIDTH, SLOW_LAUNCH = 2e9, 2e9, 2e-6
"""Speeds of a CPU that was never measured: slow ones, so that graphs are planned when in doubt."""

_log = Log("graphflow.session")


class AutomaticGpus:
    """The GPUs of this machine that a session has not opened yet.

    Args:
        hosts: of the session.
        cpus: the cluster with which the session began.
        find: returns the cluster with the GPUs that are here.

    Attributes:
        note: why the latest graph stayed on the CPU.
    """

    def __init__(self, hosts: LocalHosts, cpus: Cluster, find: Callable[[], Cluster]) -> None:
        self.note = ""
        self._hosts = hosts
        self._cpus = cpus
        self._find = find

    def find(self) -> Cluster:
        """Return the cluster with the GPUs that are here, opened or not."""
        return self._find()

    def may_help(self, graph: Graph, shapes: Mapping[Node, tuple[int, ...]]) -> bool:
        """Return True if a graph may be faster with a GPU, or is pinned to one.

        A step with a GPU waits for a copy there and for one back. A graph that is predicted to take
        less than that on the CPU is not planned for anything else.

        Args:
            shapes: of the placeholders.
        """
        if len(graph.nodes) > MANY_NODES or any(n.device.kind == "gpu" for n in graph.walk()):
            return True
        kept = read_profile(profile_path())
        known = kept if kept is not None and "cpu" in kept["devices"] else None
        try:
            seconds = self._cpu_seconds(graph, shapes, known)
        except GraphflowError:  # the same error is raised where the sizes or pins are used
            return False
        latency, _ = link_of(known or {}, "gpu")
        self.note = (
            f"no GPU is asked for: predicted {show_seconds(seconds)} on {self._cpus.devices[0]}, "
            f"and {show_seconds(2 * latency)} for a copy to a GPU and back"
        )
        return seconds > 2 * latency

    def _cpu_seconds(
        self, graph: Graph, shapes: Mapping[Node, tuple[int, ...]], profile: Profile | None
    ) -> float:
        """Return the predicted seconds of all nodes on the CPU."""
        cluster = self._cpus
        if profile is None:
            cluster = Cluster.hypothetical(
                1, "cpu:0", flops=SLOW_FLOPS, bandwidth=SLOW_BANDWIDTH, launch=SLOW_LAUNCH,
                memory=cluster.workers[0].devices[0].memory,
            )  # fmt: skip
        made = build_problem(graph, cluster, bind(graph, shapes), contention=False)
        times = made.problem.compute[:, 0]
        return float(times[np.isfinite(times)].sum())

    def open(self, planner: Planner) -> Cluster:
        """Open and measure the GPUs; return the cluster of the CPU and of those that work.

        The planner plans for that cluster from now on. The log says which GPU was left out, and
        why.
        """
        with show_progress("opening the GPUs of this machine"):
            cluster = self._open_each()
        if cluster is self._cpus:
            return cluster
        try:
            planner.move(cluster)
            planner.ensure_survey()
        except Exception as error:  # raised by CuPy, its compiler, or libraries that it loads
            planner.move(self._cpus)
            if is_interrupt(error):
                raise
            _tell_unusable(", ".join(d.name for d in _gpus(cluster)), error)
            return self._cpus
        return cluster

    def _open_each(self) -> Cluster:
        try:
            found = self._find()
        except DeviceError as error:
            _tell_unusable("gpu", error)
            return self._cpus
        opened: list[Device] = []
        for gpu in _gpus(found):
            try:
                free = int(self._hosts.open_gpu(gpu.name) * MEMORY_SHARE)
            except DeviceError as error:
                _tell_unusable(gpu.name, error)
            else:
                opened.append(replace(gpu, memory=max(1, min(gpu.memory, free))))
        if not opened:
            return self._cpus
        (worker,) = self._cpus.workers
        devices = (*worker.devices, *opened)
        return replace(found, workers=(replace(worker, devices=devices),))


def _gpus(cluster: Cluster) -> list[Device]:
    return [device for device in cluster.workers[0].devices if device.kind == "gpu"]


def _tell_unusable(device: str, error: Exception) -> None:
    _log.tell("gpu.unusable", device=device, error=type(error).__name__, reason=str(error))
