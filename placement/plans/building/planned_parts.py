"""The nodes and transfers of a plan as records: names, times, reasons and intervals.

GraphProblem + PlanModel ─planned_nodes, planned_transfers→ PlannedNode, PlannedTransfer
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from math import inf

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.communication.collectives import own_inputs
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.cost_model.device_constraints import colocation_groups
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.plans.building.body_nodes import body_nodes
from graphflow.placement.plans.building.step_uncertainty import node_interval
from graphflow.placement.plans.explanations import reason
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.plans.plan_records import PlannedNode, PlannedTransfer


def planned_nodes(
    made: GraphProblem, model: PlanModel, tasks: Sequence[str]
) -> tuple[PlannedNode, ...]:
    """Return the nodes of a plan in the order of execution.

    Args:
        tasks: what the nodes of a pipeline belong to, by their turns.
    """
    timeline, names = model.timeline, made.graph.names
    beside = {
        node: leader for node, leader in colocation_groups(made.graph).items() if node is not leader
    }
    planned = []
    rows, home = made.problem.compute_rows, timeline.device.tolist()
    start, finish = timeline.start.tolist(), timeline.finish.tolist()
    told = cache(lambda specs: (", ".join(map(str, specs)), sum(map(nbytes, specs))))
    file = cache(os.path.basename)
    for i in timeline.order.tolist():
        if i >= len(made.nodes):
            continue
        node = made.nodes[i]
        output, size = told(tuple([made.specs[t] for t in node.outputs]))
        leader = beside.get(node)
        planned.append(
            PlannedNode(
                name=names[node],
                op=node.op.name,
                device=made.devices[home[i]],
                start=start[i],
                finish=finish[i],
                output=output,
                bytes=size,
                inputs=tuple(
                    [
                        names[source]
                        for source in dict.fromkeys([t.node for t in node.inputs])
                        if source in made.index
                    ]
                ),
                location=f"{file(node.location.file)}:{node.location.line}",
                why=reason(model, i, node.op.name, None if leader is None else names[leader]),
                candidates={
                    name: seconds
                    for name, seconds in zip(made.devices[:-1], rows[i], strict=False)
                    if seconds < inf
                },
                holds=body_nodes(node) if node.attrs else (),
                fused=_kernel(made, model, node),
                task=tasks[node.turn] if 0 <= node.turn < len(tasks) else "",
                **node_interval(made, i, home[i]),
            )
        )
    return tuple(planned)


def _kernel(made: GraphProblem, model: PlanModel, node: Node) -> str:
    """The last node of the kernel that a node is part of: those of its region that are with it."""
    device = model.assignment.device
    here = [
        n for n in made.regions.get(node, ()) if device[made.index[n]] == device[made.index[node]]
    ]
    return made.graph.names[here[-1]] if len(here) > 1 else ""


def planned_transfers(made: GraphProblem, model: PlanModel) -> tuple[PlannedTransfer, ...]:
    """Return the transfers of a plan, in order of readiness, without tokens of parties."""
    edges = _edge_numbers(made, model)
    planned = []
    for row in model.timeline.transfers:
        if made.parties and not row["bytes"]:
            continue
        tensor, source, target = int(row["tensor"]), int(row["source"]), int(row["target"])
        planned.append(
            PlannedTransfer(
                tensor=model.tensors[tensor],
                source=made.devices[source],
                target=made.devices[target],
                start=float(row["start"]),
                finish=float(row["finish"]),
                bytes=int(row["bytes"]),
                edge=edges.get((tensor, target), -1),
            )
        )
    return tuple(planned)


def _edge_numbers(made: GraphProblem, model: PlanModel) -> dict[tuple[int, int], int]:
    """Numbers of the cut edges as the partition counts them: by maker, then by first reader."""
    ids = {tensor: i for i, tensor in enumerate(made.tensors)}
    device = model.assignment.device.tolist()
    order = [
        i
        for i in model.timeline.order.tolist()
        if i < len(made.nodes) and made.devices[device[i]] != CLIENT
    ]
    exchanged = set(made.shares.values())
    targets: dict[int, dict[int, None]] = {}
    for i in order:
        node = made.nodes[i]
        for tensor in own_inputs(node) if node in exchanged else node.inputs:
            source = made.index.get(tensor.node)
            if source is not None and device[source] not in (device[i], made.problem.client):
                targets.setdefault(ids[tensor], {})[device[i]] = None
    numbers: dict[tuple[int, int], int] = {}
    for i in order:
        for tensor in made.nodes[i].outputs:
            for target in targets.get(ids.get(tensor, -1), ()):
                numbers[ids[tensor], target] = len(numbers)
    return numbers


def tensor_name(graph: Graph, tensor: Tensor, collective: Node | None = None) -> str:
    """Return the name of a tensor, or of what an exchange moves of it: "x:all_reduce"."""
    if collective is not None:
        return f"{graph.names[tensor.node]}:{collective.op.name}"
    return graph.names[tensor.node] + (f":{tensor.index}" if tensor.index else "")
