"""The order of a device's nodes, where not only the end of a step decides it.

A placer decides in which order a device runs its nodes, so that a step ends soonest. A pipeline's
schedule decides otherwise: for the memory of activations, or because the tasks of another stage
wait. Its nodes have a turn, and those of a lower one go first. Of the others, updates that no later
task waits for go last, and the rest as soon as they can.
What replicas exchange beside the way to the end of a step, such as sums of gradients, could all
wait for the end as far as a simulator sees: there the order is that in which it was built.
Devices that look rows of tables up at each other send the keys first, and then answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.ops.communication.collectives import groups_of
from graphflow.placement.placers.construction.evaluator import Evaluator
from graphflow.placement.problems.problem import Assignment, Problem

ROUTES = frozenset({"route_ids", "route_rows"})
"""Ops that find the keys of the rows that a device asks others for."""


def by_turns(
    readers: Sequence[Sequence[int]], turns: Sequence[int], rank: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Nodes after what they read, those of lower turns first, then those of lower rank; each with
    its turn: at least that of what it reads.

    Args:
        readers: of each node, once for each edge.
        turns: of each node; -1: that of what it reads.
    """
    missing = [0] * len(readers)
    for targets in readers:
        for target in targets:
            missing[target] += 1
    after = [max(turn, 0) for turn in turns]
    ready = [(after[n], rank[n], n) for n, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        turn, _, node = heapq.heappop(ready)
        yield node, turn
        for reader in readers[node]:
            after[reader] = max(after[reader], turn)
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (after[reader], rank[reader], reader))


def order_in_turns(graph: Graph) -> list[Node] | None:
    """The order in which one device goes through the nodes of a graph whose nodes have turns; None
    where it has none. Built one after the other, all micro-batches of a layer would find its
    weights in the cache, and keep what their backward passes read."""
    turns = [node.turn for node in graph.nodes]
    if max(turns, default=-1) < 0:
        return None
    number = {node: i for i, node in enumerate(graph.nodes)}
    readers = [[number[reader] for reader in graph.consumers[node]] for node in graph.nodes]
    places = range(len(turns))
    _put_off(turns, places, readers, graph.nodes)
    return [graph.nodes[i] for i, _ in by_turns(readers, turns, places)]


def in_turns(assignment: Assignment, problem: Problem, nodes: Sequence[Node]) -> Assignment:
    """The assignment with its nodes in the order of their turns, as far as what they read allows;
    those of a graph without turns, whose devices exchange something, as they were built, but for
    lookups in tables of other devices.

    Args:
        nodes: of the problem, in its order; nodes of the problem beyond them have no turn.
    """
    turns = [node.turn for node in nodes]
    if max(turns, default=-1) < 0:
        return _lookups_first(_as_built(assignment, problem, nodes), problem, nodes)
    rank = [0] * problem.nodes
    for place, node in enumerate(assignment.order.tolist()):
        rank[node] = place
    readers: list[list[int]] = [[] for _ in range(problem.nodes)]
    for source, target in problem.edges.tolist():
        readers[source].append(target)
    turns += [-1] * (problem.nodes - len(turns))
    _put_off(turns, problem.topological.tolist(), readers, nodes)
    order = [node for node, _ in by_turns(readers, turns, rank)]
    return replace(assignment, order=np.array(order, np.int64))


def _put_off(
    turns: list[int],
    topological: Sequence[int],
    readers: Sequence[Sequence[int]],
    nodes: Sequence[Node],
) -> None:
    """Give what no task reads, now or later, the turn after all: the updates of one of a device's
    stages would hold up the passes of its next one. Exchanges are not put off: they take their time
    beside the passes."""
    last = max(turns) + 1
    waited = [turn >= 0 for turn in turns]
    for i in reversed(topological):
        exchanged = i < len(nodes) and nodes[i].op.joint is not None
        waited[i] = waited[i] or exchanged or any(waited[reader] for reader in readers[i])
        if not waited[i]:
            turns[i] = last


def _as_built(assignment: Assignment, problem: Problem, nodes: Sequence[Node]) -> Assignment:
    """Order nodes as they were built if devices exchange tensors and the result still fits.

    In build order a gradient is computed while its operands are in the caches, and travels at once
    instead of waiting for the critical path.
    """
    at = dict(zip(nodes, assignment.device.tolist(), strict=False))
    if all(len({at.get(node) for node in group}) == 1 for group in groups_of(nodes)):
        return assignment
    return _reorder(assignment, problem, problem.topological.tolist())


def _lookups_first(assignment: Assignment, problem: Problem, nodes: Sequence[Node]) -> Assignment:
    """Let devices first send keys of rows that they look up, and then the rows that others ask for,
    if the result still fits.

    Other devices wait for both. A device that began with something else, such as the answer to the
    first keys that came, would send its own keys behind many rows.
    """
    at = dict(zip(nodes, assignment.device.tolist(), strict=False))
    transfers: dict[Node, int] = {}  # from one device to another, since the keys were found
    stage = dict.fromkeys(nodes, 2)
    for node in nodes:
        found = [-1 if node.op.name not in ROUTES else 0]
        for each in (tensor.node for tensor in node.inputs):
            before = transfers.get(each, -1)
            travels = before >= 0 and at.get(each) != at.get(node)
            found.append(before + travels)
            if travels:
                stage[each] = min(stage[each], before)
        transfers[node] = max(found)
    if min(stage.values(), default=2) == 2:
        return assignment
    for node in reversed(nodes):
        for each in (tensor.node for tensor in node.inputs):
            stage[each] = min(stage.get(each, 2), stage[node])
    stages = [stage[node] for node in nodes] + [2] * (problem.nodes - len(nodes))
    return _reorder(assignment, problem, sorted(assignment.order.tolist(), key=stages.__getitem__))


def _reorder(assignment: Assignment, problem: Problem, order: list[int]) -> Assignment:
    """Return the assignment with its nodes in another order, if it fits in memory then."""
    found = Evaluator(problem).by_order(assignment.device.tolist(), order)
    return replace(assignment, order=np.array(order, np.int64)) if found.fits else assignment


__all__ = ["by_turns", "in_turns", "order_in_turns"]
