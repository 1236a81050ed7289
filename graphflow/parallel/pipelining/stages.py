"""Stages of a network: which of its nodes each device of a pipeline has.

Stages are given as name scopes, as lists of nodes, or as a number. For a number the planner finds
the split whose slowest stage is fastest. A variable lives in the first stage that reads it.
Placeholders and constants are in no stage: they are wherever they are read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphflow.base.argument_checks import did_you_mean
from graphflow.errors import ScheduleError
from graphflow.frontend.pytree import symbols_of
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, user_location

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster

UNSTAGED_OPS = ("constant", "placeholder")
"""Ops that are in no stage."""
NOMINAL = 64
"""The number that stands for sizes that are known only when a step is fed."""
FREE_LINK = 1e18
"""Bytes/s of a link that costs nothing."""


def stages_of(
    loss: Tensor | Sequence[Tensor],
    stages: int | Sequence[Any],
    cluster: Cluster | None = None,
) -> dict[Node, int]:
    """Return the stage of each node that a loss, or several losses, depend on.

    Args:
        loss: the loss or losses.
        stages: their number; or a list with, for each stage, a name scope, a tensor, or a list of
            these. A tensor stands for its node.
        cluster: the cluster for whose devices the planner decides: by the speeds that it describes,
            else by usual ones. Measured speeds do not count, so that each run has the same stages.

    Raises:
        ScheduleError: a node is in no stage or in two, a scope has no nodes, a stage reads from a
            later one, or there are more stages than nodes.
    """
    graph = Graph([loss] if isinstance(loss, Tensor) else loss)
    nodes = _computing_nodes(graph)
    if isinstance(stages, int) and not isinstance(stages, bool):
        found = _plan_stages(graph, nodes, stages, cluster)
    elif isinstance(stages, list | tuple) and stages:
        found = _stages_of_list(graph, nodes, stages)
    else:
        raise ScheduleError(
            f"stages at {user_location()} is {stages!r}: give a number, or a list with a name "
            "scope or nodes for each stage"
        )
    _check_direction(graph, found)
    for variable in graph.variables:
        found[variable] = min(found[reader] for reader in graph.consumers[variable])
    return found


def check_stage_count(losses: Sequence[Tensor], stages: int) -> None:
    """Refuse more stages than a network has nodes.

    Raises:
        ScheduleError: see above.
    """
    if losses:
        _check_count(_computing_nodes(Graph(losses)), stages)


def _computing_nodes(graph: Graph) -> list[Node]:
    """Return the nodes that are in a stage because they compute."""
    return [n for n in graph.nodes if n.op.name not in (*UNSTAGED_OPS, "variable")]


def _check_count(nodes: Sequence[Node], stages: int) -> None:
    """Refuse a number of stages below 1 or above the number of nodes.

    Raises:
        ScheduleError: see above.
    """
    if not 1 <= stages <= len(nodes):
        raise ScheduleError(
            f"{stages} stages for a network of {len(nodes)} nodes; give 1 to {len(nodes)}"
        )


def _stages_of_list(graph: Graph, nodes: Sequence[Node], stages: Sequence[Any]) -> dict[Node, int]:
    """Return the stage of each node, given a list of stages.

    Raises:
        ScheduleError: a stage is empty, or a node is in no stage or in two.
    """
    found: dict[Node, int] = {}
    for number, given in enumerate(stages):
        if isinstance(given, list | tuple) and not given:
            raise ScheduleError(
                f"stage {number} is empty: give it nodes or scopes, or leave it out"
            )
        for part in given if isinstance(given, list | tuple) else [given]:
            for node in _members(graph, nodes, part, number):
                if found.setdefault(node, number) != number:
                    raise ScheduleError(
                        f"{graph.names[node]!r} (made at {node.location}) is in stages "
                        f"{found[node]} and {number}; leave it out of one"
                    )
        if not any(found.get(node) == number for node in nodes):
            raise ScheduleError(
                f"stage {number} computes nothing: it has only placeholders, constants or "
                "variables; give it what reads them, or leave it out"
            )
    missing = [node for node in nodes if node not in found]
    if missing:
        listed = ", ".join(f"{graph.names[n]!r} ({n.location})" for n in missing[:5])
        raise ScheduleError(
            f"{len(missing)} of {len(nodes)} nodes are in none of the {len(stages)} stages: "
            f"{listed}{', …' if len(missing) > 5 else ''}; put them under one of the scopes, or "
            "list them"
        )
    return found


def _members(graph: Graph, nodes: Sequence[Node], part: Any, stage: int) -> list[Node]:
    """Return the nodes that one entry of a stage names.

    Raises:
        ScheduleError: it names none, or a node that the loss does not depend on.
    """
    if isinstance(part, Tensor):
        part = part.node
    if isinstance(part, Node):
        if part not in graph.names:
            raise ScheduleError(
                f"{part.name!r} (made at {part.location}) is in stage {stage}, but the loss does "
                "not depend on it"
            )
        return [part]
    if not isinstance(part, str):
        raise ScheduleError(f"stage {stage} has {part!r}: give name scopes, tensors or nodes")
    scope = part.rstrip("/") + "/"
    members = [node for node in nodes if node.name.startswith(scope)]
    if not members:
        raise ScheduleError(
            f"stage {stage}: no node is under the name scope {part!r}; "
            f"{_describe_scopes(nodes, part)}"
        )
    return members


def _describe_scopes(nodes: Sequence[Node], wanted: str) -> str:
    """Describe the scopes of a network: those with a similar name, and the outermost ones."""
    parts = [node.name.split("/")[:-1] for node in nodes]
    every = dict.fromkeys("/".join(p[: k + 1]) for p in parts for k in range(len(p)))
    if not every:
        return "there are none: use gf.name_scope, or layers with names"
    outermost = ", ".join(name for name in every if "/" not in name)
    hint = did_you_mean(wanted, every, 3, 0.5)
    return f"{hint} There are {outermost}" if hint else f"there are {outermost}"


def _check_direction(graph: Graph, found: Mapping[Node, int]) -> None:
    """Refuse stages that read from later stages.

    Raises:
        ScheduleError: see above.
    """
    for node, stage in found.items():
        for source in (t.node for t in node.inputs):
            if found.get(source, -1) > stage:
                reader, read = graph.names[node], graph.names[source]
                raise ScheduleError(
                    f"{reader!r} (made at {node.location}) in stage {stage} reads {read!r} (made "
                    f"at {source.location}) of stage {found[source]}; a stage reads from earlier "
                    f"ones only: put {read!r} into stage {stage} or one before, or {reader!r} into "
                    f"stage {found[source]} or one behind"
                )


# Stages from the planner ----------------------------------------------------------------------


def _plan_stages(
    graph: Graph, nodes: Sequence[Node], count: int, cluster: Cluster | None
) -> dict[Node, int]:
    """Let the planner split a network into a number of stages.

    Raises:
        ScheduleError: there are more stages than nodes.
    """
    _check_count(nodes, count)
    from graphflow.placement.calibration.cluster_rates import is_described
    from graphflow.placement.cost_model.problem_builder import build_problems
    from graphflow.placement.problems.problem import Problem
    from graphflow.placement.stages.splitting import split_stages

    there = cluster
    if there is None or not is_described(there) or len(there.devices) < 2:
        there = _nominal_cluster(cluster)
    bindings = dict.fromkeys(symbols_of(graph.nodes), NOMINAL)
    whole = build_problems(graph, there, bindings)[0]
    problem = whole.problem
    kept = np.array([whole.index[node] for node in nodes])
    row = np.full(problem.nodes, -1)
    row[kept] = np.arange(len(kept))
    inside = (row[problem.edges] >= 0).all(axis=1)
    bandwidth = float(problem.bandwidth[0, 1])
    while True:
        part = Problem(  # equal devices: stages are not pinned to any
            np.repeat(problem.compute[kept, :1], count, axis=1),
            row[problem.edges[inside]],
            problem.bytes[inside],
            tensor=problem.tensor[inside],
            bandwidth=np.full((count, count), bandwidth),
        )
        split = split_stages(part, count, budget=0, pivots=0)
        if len(set(split.device.tolist())) == count or bandwidth > FREE_LINK:
            break
        bandwidth *= 4  # the link was too slow for so many stages: assume a faster one
    device = dict(zip(nodes, split.device.tolist(), strict=True))
    numbers = _number_devices(nodes, device)
    return {node: numbers[device[node]] for node in nodes}


def _nominal_cluster(cluster: Cluster | None) -> Cluster:
    """Return two devices of the cluster's kind, with usual speeds and a usual link."""
    from graphflow.placement.clusters.cluster import Cluster

    gpu = cluster is not None and any(d.kind == "gpu" for w in cluster.workers for d in w.devices)
    flops, bandwidth, link = (3e13, 2e12, 2e10) if gpu else (1e11, 1e10, 4e9)
    return Cluster.hypothetical(
        2, flops=flops, bandwidth=bandwidth, memory=1 << 50, link_bandwidth=link
    )


def _number_devices(nodes: Sequence[Node], device: Mapping[Node, int]) -> dict[int, int]:
    """Number devices so that each reads from lower numbers only.

    Raises:
        ScheduleError: stages read from each other.
    """
    before: dict[int, set[int]] = {device[node]: set() for node in nodes}
    mine = set(nodes)
    for node in nodes:
        for source in (t.node for t in node.inputs):
            if source in mine and device[source] != device[node]:
                before[device[node]].add(device[source])
    numbers: dict[int, int] = {}
    while len(numbers) < len(before):
        free = [d for d in before if d not in numbers and before[d] <= numbers.keys()]
        if not free:
            raise ScheduleError("the planner found stages that read from each other")
        numbers[free[0]] = len(numbers)
    return numbers


# Phases ---------------------------------------------------------------------------------------


def origin_of(node: Node, stages: Container[Node] = ()) -> Node:
    """Return the user's node for which a node was made (a gradient, an update); the node itself
    otherwise.

    A network may contain gradients itself. Then it is the first origin that is in a stage.
    """
    while node.origin is not None and node not in stages:
        node = node.origin
    return node


def weight_gradients(graph: Graph, forward: Mapping[Node, int]) -> set[Node]:
    """Return the nodes of a training graph that only the gradients of weights need.

    No other node's gradient waits for them, so a schedule may delay them.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024: B and W.
    """
    passes_on: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in forward:
            continue
        mine = origin_of(node, forward)
        for reader in graph.consumers[node]:
            other = origin_of(reader, forward)
            onward = other is not mine and other in forward and other.op.name != "variable"
            if reader in passes_on or onward:
                passes_on.add(node)
                break
    return {n for n in graph.nodes if n not in forward and n not in passes_on}
