"""Pipelines that flush: stages on devices of their own, and micro-batches in the order of a
schedule.

    whole graph ─stages_of→ stage of each node ─partition over micro-batches→ shards
                ─schedule→ a device and a turn for each node

The batch is split into micro-batches as data parallelism splits it. So means, sums and gradients
are those of the whole batch. The micro-batches of a stage share a device, and the schedule gives
each task its turn. What stages exchange are ordinary edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod

from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import MICRO, PATH, DeviceAssignment, Mesh, Place
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.pipelining.schedule import (
    Phase,
    Schedule,
    Task,
    execution_order,
    schedule_error,
)
from graphflow.parallel.pipelining.stage_report import StagedPipeline
from graphflow.parallel.pipelining.stages import UNSTAGED_OPS, origin_of, weight_gradients
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.partitioner import partition_graph
from graphflow.parallel.sharding.propagation.replication import NOT_REPLICATED, ReplicationConfig
from graphflow.passes import MergeBodies


def partition_pipeline(
    graph: Graph,
    stages: Mapping[Node, int],
    schedule: Schedule,
    devices: Sequence[DeviceName],
    batch: Sequence[Tensor],
    outer: Mapping[str, int] | None = None,
    annotations: Mapping[Tensor, Layout] | None = None,
    known: Mapping[Node, ShardedVariable] | None = None,
    fed: Mapping[str, int] | None = None,
    replication: ReplicationConfig = NOT_REPLICATED,
) -> ShardedGraph:
    """Return a training graph as a pipeline that flushes.

    Args:
        graph: the graph as the user built it, with gradients and updates.
        stages: the stage of each node of its forward pass, see `stages_of`.
        schedule: the schedule.
        devices: the devices of the schedule's first device, one for each place of `outer`; then
            those of its second device, and so on.
        batch: the placeholders whose first axis is the batch.
        outer: the sizes of other mesh axes, along which each stage is split as well.
        annotations: the layouts of some tensors along these.
        known: the shards of variables that exist already.
        fed: the sizes of symbols, if a step is about to be fed; see `partition_graph`.
        replication: how the devices of a stage work together, if there are several.
    """
    outer = dict(outer or {})
    where = assign_stages(graph, stages)
    paths = paths_of(schedule)
    sizes = {**outer, **({PATH: len(paths)} if len(paths) > 1 else {}), MICRO: len(paths[0])}
    beside, first = prod(outer.values()), len(outer)
    homes = schedule.homes

    def microbatch(place: Place) -> int:
        """Return the micro-batch of a place."""
        return paths[place[first] if len(paths) > 1 else 0][place[-1]]

    def home_of(node: Node, place: Place) -> int:
        """Return the device index of a node at a place."""
        number = 0
        for at, size in zip(place, outer.values(), strict=False):
            number = number * size + at
        return homes[_stage_of(where, node), microbatch(place)] * beside + number

    mesh = Mesh(sizes, [DeviceName()] * prod(sizes.values()), frozenset({MICRO}))
    layouts = dict(annotations or {})
    inner = tuple(sizes)[first:]
    for tensor in batch:
        if tensor.node in graph.names:
            layout = layouts.get(tensor, whole(tensor.ndim))
            layouts[tensor] = layout.with_dim(0, AxisSplit((*layout.dims[0].axes, *inner)))
    found = DeviceAssignment(home_of, devices)
    cut = partition_graph(graph, mesh, layouts, known, found, replication, fed)
    phases = assign_phases(graph, stages, schedule)
    numbers = [microbatch(place) for place in mesh.places]
    pipeline = StagedPipeline.from_devices(schedule, stages, devices, beside)
    return replace(_set_turns(cut, phases, where, schedule, numbers), pipeline=pipeline)


def merge_bodies(graph: Graph, stages: Mapping[Node, int]) -> tuple[Graph, Mapping[Node, int]]:
    """Return the graph in which a loop and its extension by a gradient are one node, with the
    stages of its nodes.

    Readers of a merged node are new nodes of the same name, so stages are looked up by name.
    """
    merged = MergeBodies()(graph) if graph.holders else graph
    if merged is graph:
        return graph, stages
    before = {name: node for node, name in graph.names.items()}
    known = ((node, before[name]) for node, name in merged.names.items())
    return merged, {**stages, **{node: stages[old] for node, old in known if old in stages}}


def paths_of(schedule: Schedule) -> list[list[int]]:
    """Return the micro-batches of each path through the devices.

    Raises:
        ScheduleError: paths have different numbers of micro-batches.
    """
    homes = schedule.homes
    found: dict[tuple[int, ...], list[int]] = {}
    for i in range(schedule.microbatches):
        found.setdefault(tuple(homes[s, i] for s in range(schedule.stages)), []).append(i)
    paths = list(found.values())
    if len(set(map(len, paths))) > 1:
        few, many = min(paths, key=len), max(paths, key=len)
        raise schedule_error(
            f"schedule {schedule.name!r}",
            f"micro-batches take {len(paths)} paths through the devices, {len(few)} in one "
            f"(such as {few[0]}) and {len(many)} in another (such as {many[0]}); send as many in "
            "each, as gf.parallel.chimera(2, 4) does, or all in one",
        )
    return paths


def assign_stages(graph: Graph, stages: Mapping[Node, int]) -> dict[Node, int]:
    """Return the stage of every node of a graph.

    Gradients and updates are in the stage of the node that they belong to. A node made of gradients
    (a clipped one) is where its largest input is. Other fetches are where their last input is.
    Variables that the forward pass does not read (a norm's running moments) are where they are
    assigned.
    """
    found = _assign_stages(graph, stages, {})
    assigned = {node.inputs[0].node: found[node] for node in graph.of_op("assign")}
    kept = {v: stage for v, stage in assigned.items() if origin_of(v, stages) not in stages}
    return _assign_stages(graph, stages, kept)


def _assign_stages(
    graph: Graph, stages: Mapping[Node, int], variables: Mapping[Node, int]
) -> dict[Node, int]:
    """Return the stage of every node, given those of some variables."""
    found: dict[Node, int] = {}
    late: set[Node] = set()  # gradients and nodes that depend on them
    for node in graph.nodes:
        origin = origin_of(node, stages)
        if node in stages:
            found[node] = stages[node]
        elif node in variables:
            found[node] = variables[node]
        elif origin in stages:
            found[node] = stages[origin]
            late.add(node)
        elif any(t.node in late for t in node.inputs):
            _, found[node] = max((_element_count(t), found[t.node]) for t in node.inputs)
            late.add(node)
        else:
            found[node] = max((found[t.node] for t in node.inputs), default=0)
    return found


def _element_count(tensor: Tensor) -> float:
    """Return the size of a tensor; infinity if it is symbolic, as only the batch is."""
    return tensor.size if isinstance(tensor.size, int) else inf


def _stage_of(where: Mapping[Node, int], node: Node) -> int:
    """Return the stage of a node of the graph, or of a node that was made for it."""
    while node not in where and node.origin is not None:
        node = node.origin
    return where.get(node, 0)


def assign_phases(
    graph: Graph, stages: Mapping[Node, int], schedule: Schedule
) -> dict[Node, Phase]:
    """Return the phase of each node. Updates have none."""
    late = weight_gradients(graph, stages) if schedule.splits_backward else set[Node]()
    found: dict[Node, Phase] = {}
    seen = {n for n in graph.nodes if n.op.name in ("placeholder", "constant") or n in stages}
    for node in graph.nodes:
        origin = origin_of(node, stages)
        if node.op.name in ("assign", "group", *UNSTAGED_OPS) or origin.op.name == "variable":
            continue
        if node in stages:
            found[node] = "F"
        elif origin in stages:
            found[node] = "W" if node in late else "B"
        elif node.inputs and all(found.get(t.node) == "F" or t.node in seen for t in node.inputs):
            found[node] = "F"  # a fetch besides the loss
    return found


def _set_turns(
    cut: ShardedGraph,
    phases: Mapping[Node, Phase],
    where: Mapping[Node, int],
    schedule: Schedule,
    numbers: Sequence[int],
) -> ShardedGraph:
    """Return the partitioned graph with the turn of its task on each node.

    Args:
        cut: the partitioned graph.
        phases: the phase of each node of the whole graph.
        where: the stage of each node.
        schedule: the schedule.
        numbers: the micro-batch of each place.
    """
    ranks = {task: turn for turn, (_, task) in enumerate(execution_order(schedule))}
    tasks: dict[Node, Task] = {}
    for node, phase in phases.items():
        for tensor in node.outputs:
            for i, part in zip(numbers, cut.values[tensor].shards, strict=True):
                task = Task(phase, where[node], i)
                if ranks[task] <= ranks[tasks.get(part.node, task)]:
                    tasks[part.node] = task
    _assign_partial_tasks(tasks, cut.graph, phases, where, ranks)

    def set_turn(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        if node not in tasks:
            return None
        return node.with_inputs(inputs, turn=ranks[tasks[node]]).outputs

    def change(graph: Graph) -> Graph:
        again = recompute_forward(graph, tasks, ranks) if schedule.recompute else graph
        return again.rewrite(set_turn)

    return cut.map_graph(change)


def _assign_partial_tasks(
    tasks: dict[Node, Task],
    graph: Graph,
    phases: Mapping[Node, Phase],
    where: Mapping[Node, int],
    ranks: Mapping[Task, int],
) -> None:
    """Add the tasks of nodes that the partitioner inserted.

    A node that belongs to one micro-batch (a partial product, a part of a mean) has that
    micro-batch's task. A sum over micro-batches grows with each of them, so that not all parts are
    kept until the last.
    """
    for node in graph.nodes:
        read = [t.node for t in node.inputs if t.node.op.name not in (*UNSTAGED_OPS, "variable")]
        if node in tasks or not read:
            continue
        made_for = node.origin
        found = {tasks[n].microbatch if n in tasks else -1 for n in read}
        if made_for is not None and made_for in phases and len(found) == 1 and found != {-1}:
            tasks[node] = Task(phases[made_for], where[made_for], *found)
        elif node.op.name == "add" and -1 not in found:
            tasks[node] = max((tasks[n] for n in read), key=ranks.__getitem__)


def recompute_forward(graph: Graph, tasks: dict[Node, Task], ranks: Mapping[Task, int]) -> Graph:
    """Return the graph in which each backward pass computes its stage's forward pass again.

    It starts from what other stages sent. Nothing else is kept in between.

    Args:
        graph: the graph.
        tasks: the task of each node; those of new nodes are added.
        ranks: the turn of each task.

    Source: Huang et al., GPipe, NeurIPS 2019.
    """
    mapped: dict[Tensor, Tensor] = {}
    again: dict[Task, dict[Tensor, Tensor]] = {}  # what each backward pass recomputes
    for node in graph.nodes:
        task = tasks.get(node)
        inputs = [mapped.get(t, t) for t in node.inputs]
        if task is not None:
            back = Task("B", task.stage, task.microbatch)
            twins = again.setdefault(back, {})
            once_more = [twins.get(t, new) for t, new in zip(node.inputs, inputs, strict=True)]
            if task.phase == "F":
                twin = node.with_inputs(tuple(once_more), turn=ranks[back])
                tasks[twin] = back
                twins.update(zip(node.outputs, twin.outputs, strict=True))
            else:
                inputs = once_more
        if any(a is not b for a, b in zip(inputs, node.inputs, strict=True)):
            made = node.with_inputs(tuple(inputs))
            mapped.update(zip(node.outputs, made.outputs, strict=True))
            if task is not None:
                tasks[made] = task
    return Graph([mapped.get(t, t) for t in graph.outputs])
