"""Reports of a pipeline: the contents of each stage, the bytes that it sends, and its idle time.

ShardedGraph + StagedPipeline ─stage_rows→ [StageRow, …]
                              ─predict_timeline→ ScheduleTimeline
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphflow.base.lazy_dataclass import dataclass
from graphflow.frontend.pytree import symbols_of
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.ir.spec import Dim, product
from graphflow.parallel.mesh.layouts import SentTensor
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.pipelining.schedule import Schedule, Task, execution_order
from graphflow.parallel.pipelining.timeline import ScheduleTimeline, run

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster

REPLICATED_OPS = ("placeholder", "constant")
"""Ops whose values no device sends to another: the client feeds all readers, and programs hold
constants."""
MAX_NAMES = 3
"""The most scopes of a stage that are printed."""


@dataclass(frozen=True, eq=False)
class StagedPipeline:
    """A pipeline: its schedule, and the stages of the nodes of the user's graph.

    Attributes:
        schedule: the order of tasks. The turn of a node is its task's position in
            `execution_order`.
        stages: the stage of each node and variable of the forward pass.
        devices: for each stage, all its devices.
        devices_per_task: how many devices work on a task together.
    """

    schedule: Schedule
    stages: Mapping[Node, int]
    devices: tuple[tuple[DeviceName, ...], ...]
    devices_per_task: int = 1

    @classmethod
    def from_devices(
        cls,
        schedule: Schedule,
        stages: Mapping[Node, int],
        devices: Sequence[DeviceName],
        beside: int = 1,
    ) -> StagedPipeline:
        """Return a pipeline on the devices of a schedule, `beside` of them for each of its own."""
        homes: dict[int, dict[int, None]] = {}
        for (stage, _), home in schedule.homes.items():
            homes.setdefault(stage, {})[home] = None
        found = (
            tuple(device for home in homes[s] for device in devices[home * beside :][:beside])
            for s in range(schedule.stages)
        )
        return cls(schedule, stages, tuple(found), beside)

    @property
    def teams(self) -> dict[DeviceName, tuple[DeviceName, ...]]:
        """For each device, the devices that work on its tasks together."""
        found = {}
        for group in self.devices:
            for start in range(0, len(group), self.devices_per_task):
                team = group[start : start + self.devices_per_task]
                found.update(dict.fromkeys(team, team))
        return found

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks by turn."""
        return tuple(task for _, task in execution_order(self.schedule))

    @property
    def labels(self) -> tuple[str, ...]:
        """The tasks as they are drawn: F0; F0/4 if a device has several stages."""
        several = self.schedule.several
        return tuple(
            f"{t.phase}{t.microbatch}/{t.stage}" if several else f"{t.phase}{t.microbatch}"
            for t in self.tasks
        )


@dataclass(frozen=True)
class StageRow:
    """The contents of a stage.

    Attributes:
        number: the stage, from 0.
        devices: its devices.
        names: the scopes of its nodes, or their names if they are in no scope.
        nodes: the number of its nodes of the forward pass, as the user built it.
        parameters: the elements of its variables.
        bytes: their bytes.
        forward, backward: the bytes that it sends to other devices in a forward and in a backward
            pass of the first micro-batch.
    """

    number: int
    devices: tuple[str, ...]
    names: tuple[str, ...]
    nodes: int
    parameters: int
    bytes: int
    forward: int
    backward: int


def stage_rows(
    pipeline: StagedPipeline,
    source: Graph,
    cut: Graph,
    partitioner: SizePartitioner,
    apart: Collection[SentTensor],
) -> list[StageRow]:
    """Return what each stage has.

    Args:
        pipeline: the stages and the schedule.
        source: the graph as the user built it.
        cut: the partitioned graph.
        partitioner: the extents of shards.
        apart: what is sent in collectives, which are reported separately.
    """
    sent = _bytes_by_task(pipeline, cut, partitioner, apart)
    found = []
    for number in range(pipeline.schedule.stages):
        mine = [n for n, stage in pipeline.stages.items() if stage == number and n in source.names]
        computed = [n for n in mine if n.op.name != "variable"]
        variables = [n.specs[0] for n in mine if n.op.name == "variable"]
        sizes = [partitioner.guess(product(spec.shape)) for spec in variables]
        found.append(
            StageRow(
                number,
                tuple(map(str, pipeline.devices[number])),
                _stage_names(computed),
                len(computed),
                sum(sizes),
                sum(n * v.dtype.itemsize for n, v in zip(sizes, variables, strict=True)),
                sent.get(Task("F", number, 0), 0),
                sent.get(Task("B", number, 0), 0),
            )
        )
    return found


def bytes_between_stages(
    pipeline: StagedPipeline,
    cut: Graph,
    partitioner: SizePartitioner,
    apart: Collection[SentTensor],
) -> int:
    """Return the bytes that stages send each other in a step.

    Args:
        pipeline: the stages and the schedule.
        cut: the partitioned graph.
        partitioner: the extents of shards.
        apart: what is sent in collectives, which are reported separately.
    """
    return sum(_bytes_by_task(pipeline, cut, partitioner, apart).values())


def _stage_names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the outermost scopes of a stage's nodes, in order; if there is only one, the scopes in
    it."""
    parts = [node.name.split("/") for node in nodes]
    while len({p[0] for p in parts}) == 1 and all(len(p) > 2 for p in parts):
        parts = [[f"{p[0]}/{p[1]}", *p[2:]] for p in parts]
    return tuple(dict.fromkeys(p[0] for p in parts))


def format_names(names: Sequence[str]) -> str:
    """Join names for a table; the first and the last one, if there are many."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


def _bytes_by_task(
    pipeline: StagedPipeline,
    cut: Graph,
    partitioner: SizePartitioner,
    apart: Collection[SentTensor],
) -> dict[Task | None, int]:
    """Return the bytes that each task sends to devices of other stages; each tensor counts once for
    each device.

    The key None stands for nodes without a task: weights, updates, norms of gradients. Collectives,
    and what the devices of one stage exchange, are reported separately.
    """
    tasks = pipeline.tasks
    home = pipeline.teams
    found: dict[Task | None, int] = {}
    known = set(apart)
    for node in cut.nodes:
        if node.device not in home or node.op.joint is not None:
            continue
        for tensor in node.inputs:
            maker = tensor.node
            there = home.get(maker.device, home[node.device])
            stays = maker.op.name in REPLICATED_OPS or there == home[node.device]
            if stays or (tensor, node.device) in known:
                continue
            known.add((tensor, node.device))
            size = partitioner.guess(product(tensor.shape)) * tensor.spec.dtype.itemsize
            task = tasks[maker.turn] if maker.turn >= 0 else None
            found[task] = found.get(task, 0) + size
    return found


def predict_timeline(
    pipeline: StagedPipeline, cut: Graph, partitioner: SizePartitioner, cluster: Cluster
) -> ScheduleTimeline:
    """Return the timeline with the seconds that a cluster's cost model gives each task. Transfers
    take no time."""
    from graphflow.placement.cost_model.problem_builder import build_problems

    bindings = {symbol: partitioner.guess(Dim.symbol(symbol)) for symbol in symbols_of(cut.nodes)}
    problem = build_problems(cut, cluster, bindings)[1]
    index = {name: i for i, name in enumerate(problem.devices)}
    seconds = problem.problem.compute
    tasks = pipeline.tasks
    total = {phase: [0.0] * pipeline.schedule.stages for phase in ("F", "B", "W")}
    for i, node in enumerate(problem.nodes):
        at = index.get(str(node.device))
        if node.turn >= 0 and at is not None:
            task = tasks[node.turn]
            total[task.phase][task.stage] += float(seconds[i, at])
    each = pipeline.schedule.microbatches * pipeline.devices_per_task
    means = {phase: [s / each for s in found] for phase, found in total.items()}
    plain = replace(pipeline.schedule, recompute=False)  # B includes the recomputation
    return run(plain, means["F"], means["B"], means["W"])


__all__ = [
    "StageRow",
    "StagedPipeline",
    "bytes_between_stages",
    "stage_rows",
    "predict_timeline",
    "format_names",
]
