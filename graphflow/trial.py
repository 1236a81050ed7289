"""Trial: a few steps of fetches in this process, traced, before they are placed for the first time,
so that the plan rests on what the nodes took here, and not on the calibration of ops alone.

    fetches + feeds ─try_out→ spans of one device ─observe→ Learned ─→ the first plan

Only for devices of this machine, for fetches that touch nothing outside, and as long as it takes
moments. What it teaches is kept with what traces teach, so that the next session that runs such
nodes starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

import numpy as np

from graphflow.compiled import Compiled
from graphflow.graph import Graph
from graphflow.learning import node_seconds, teach
from graphflow.op import Node, owner
from graphflow.placement.cluster import Cluster
from graphflow.placement.cost import Lesson, lessons
from graphflow.placement.host import host_memory
from graphflow.placement.learned import Learned
from graphflow.runtime.host import DRAWS, Host
from graphflow.runtime.logs import Log
from graphflow.runtime.partition import FREE, partition
from graphflow.runtime.survey import Survey
from graphflow.spec import evaluate, kind

LONGEST = 3.0
"""Predicted seconds of a step beyond which nothing is tried out."""
SECONDS = 0.5
"""Of all steps after the first; at least one is run, and at most `STEPS`."""
STEPS = 5
SHARE = 0.1
"""Of a step's predicted time that must be in nodes that nothing was learned about."""
ROOM = 0.25
"""Of this machine's memory that the fetches may take."""
STATEFUL = frozenset({"variable", "assign", "placeholder", "constant", "group"})
"""Ops that are not pure, and yet touch nothing outside their session."""

_log = Log("graphflow.trial")


def try_out(
    learned: Learned,
    cluster: Cluster,
    survey: Survey,
    compiled: Compiled,
    bindings: Mapping[str, int],
    arrays: Mapping[Node, np.ndarray[Any, Any]] | None = None,
) -> int:
    """Run fetches on one device of this process and learn what their nodes take.

    Args:
        bindings: sizes of the graph's symbols.
        arrays: what is fed; default: zeros, and floats from [0, 1).

    Returns:
        x
    """
    graph = compiled.graph
    if not may_be_tried(cluster, graph, bindings):
        return 0
    known = lessons(graph, cluster, bindings, {}, survey.profiles)
    total = sum(lesson.predicted for lesson in known.values())
    new = sum(each.predicted for each in known.values() if not learned.knows(each.bucket))
    if new <= SHARE * total or total > LONGEST:
        return 0
    device = cluster.workers[0].devices[0]
    stage = _Stage(device.threads)
    try:
        stage.set(graph, bindings, arrays or _made_up(graph, bindings))
        return stage.play(learned, known)
    except Exception as error:  # the real step will say it to the user
        _log.tell("trial.ended", reason=str(error))
        return 0
    finally:
        stage.close()


def may_be_tried(cluster: Cluster, graph: Graph, bindings: Mapping[str, int]) -> bool:
    """Whether the cluster is this machine's processors, and the graph changes nothing but its own
    variables and fits beside them."""
    here = cluster.kind in ("here", "local")
    kinds = {device.kind for worker in cluster.workers for device in worker.devices}
    if not here or kinds != {"cpu"}:
        return False
    if not all(n.op.pure or n.op.random or n.op.name in STATEFUL for n in graph.walk()):
        return False
    if any(owner(n.op) is not None for n in graph.walk()):
        return False  # a user's op may end its process: that is to be a worker's, not this one
    sizes = (evaluate(t.spec.nbytes, bindings) for node in graph.nodes for t in node.outputs)
    return sum(sizes) <= ROOM * host_memory()


def _made_up(graph: Graph, bindings: Mapping[str, int]) -> dict[Node, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    made = {}
    for node in graph.placeholders:
        spec = node.specs[0].bind(bindings)
        shape: Any = spec.shape
        floats = kind(spec.dtype) == "float"
        made[node] = (random.random(shape) if floats else np.zeros(shape)).astype(spec.dtype)
    return made


class _Stage:
    """One device of this process, with variables of its own."""

    _NAME = "trial"
    _DEVICE = "/worker:0/cpu:0"

    def __init__(self, threads: int | None) -> None:
        self._host = Host(0, [self._DEVICE], threads, lambda parcel: None)
        self._host.open(self._NAME)
        self._bindings: Mapping[str, int] = {}
        self._feeds: dict[str, np.ndarray[Any, Any]] = {}

    def set(
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
        devices = {node: self._DEVICE for node in graph.nodes if node.op.name not in FREE}
        names = {node: graph.names[node] for node in graph.variables}
        parts = partition(graph, devices, None, names, [self._DEVICE])
        self._host.add(self._NAME, self._NAME, list(parts.values()))

    def play(self, learned: Learned, known: Mapping[str, Lesson]) -> int:
        """Steps, the first to warm up, until the time is over; how many there were after it.

        The faster half of them counts: what else the machine does makes the others slow.
        """
        self._step(0)
        until = monotonic() + SECONDS
        steps: list[dict[str, float]] = []
        while len(steps) < STEPS and not (steps and monotonic() > until):
            steps.append(self._step(1 + len(steps)))
        steps.sort(key=lambda took: sum(took.values()))
        for took in steps[: (len(steps) + 1) // 2]:
            teach(learned, known, took)
        return len(steps)

    def _step(self, step: int) -> dict[str, float]:
        """Seconds of each node."""
        computed = self._host.compute(
            self._NAME, self._NAME, step, {**self._bindings, DRAWS: step}, self._feeds, True, 60.0
        )
        self._host.commit(self._NAME, step)  # its spans come with those of the next step
        return node_seconds((name, start, end) for _, name, start, end in computed.spans)

    def close(self) -> None:
        self._host.close(self._NAME)
