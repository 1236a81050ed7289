"""Placements that fit in memory as the runtime lays it out, where placers' own count was too low.

Placers count a tensor from its maker to its last reader. The runtime keeps what a GPU receives from
other devices for the whole step. A placement that moves weights to the CPU, and reads them on the
GPU, then saves nothing. So nodes between which large tensors pass stay together, and if that is not
enough, placers get less room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from graphflow.ops.kernels.jit.kernel_recording import MOST_SCRATCH
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.problems.problem import Assignment, Ints, Problem

ROUNDS = 5
"""Placements with less and less room that are tried."""
GROUP_SHARE = 1 / 16
"""Share of a device's room that nodes may take which are kept together."""
SHRINK = 0.95
"""Share of the room that follows from the last excess, for the next placement; its square for the
one after that, and so on."""
SURE_SHARE = 0.5
"""Share of a device's room up to which the bytes of all tensors leave no doubt, with `MOST_SCRATCH`
for its kernels: the runtime also takes workspaces and layouts of weights."""

TakenMemory = Callable[[GraphProblem, Assignment], Sequence[int]]
"""Bytes of each device that the runtime takes for an assignment."""


def excess(made: GraphProblem, assignment: Assignment, taken: TakenMemory) -> dict[int, float]:
    """Return the devices that lack memory, with bytes needed by bytes there."""
    problem = made.problem
    room = problem.capacity.tolist()
    tensors = enumerate(_tensor_bytes(problem, assignment))
    if all(not need or need + MOST_SCRATCH <= SURE_SHARE * room[at] for at, need in tensors):
        return {}  # the exact layout takes a while
    needs = enumerate(taken(made, assignment))
    return {at: need / room[at] for at, need in needs if need > room[at]}


def _tensor_bytes(problem: Problem, assignment: Assignment) -> list[float]:
    """Return the bytes of all tensors of each device, each in memory of its own."""
    device = assignment.device
    own = (
        problem.memory if problem.output_memory is None else problem.memory + problem.output_memory
    )
    totals = np.bincount(device, weights=own, minlength=problem.devices)
    source, target = device[problem.edges[:, 0]], device[problem.edges[:, 1]]
    moved = np.flatnonzero(source != target)
    keys = np.stack([problem.tensor[moved], target[moved]], axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    received = moved[first]
    np.add.at(totals, target[received], problem.bytes[received])
    return list(totals.tolist())


def tighter(made: GraphProblem, groups: Ints, capacity: NDArray[np.float64]) -> GraphProblem:
    """Return a problem with other colocation groups and less room."""
    return replace(made, problem=replace(made.problem, groups=groups, capacity=capacity))


def shrink(
    capacity: NDArray[np.float64], lacks: Mapping[int, float], tries: int
) -> NDArray[np.float64]:
    """Return less room for the devices that lack memory, by the result of `excess`.

    Args:
        tries: placements that were tried; each further one gets even less, since placers may give
            the same answer for a little less room.
    """
    made = capacity.copy()
    for at, ratio in lacks.items():
        made[at] *= SHRINK**tries / ratio
    return made


def heavy_groups(problem: Problem, lacks: Mapping[int, float]) -> Ints:
    """Return colocation groups that also hold together the ends of the largest edges.

    A group grows up to `GROUP_SHARE` of the room of a device that lacks memory, by the bytes of all
    its nodes. A weight then stays with its products, its gradient and its update, and activations
    travel between layers.
    """
    outputs = 0.0 if problem.output_memory is None else problem.output_memory
    most = GROUP_SHARE * min(problem.capacity[at] for at in lacks)
    most = max(most, 2 * problem.bytes.max(initial=0))  # both ends of any edge
    leader, size, allowed = list(range(problem.nodes)), problem.memory + outputs, problem.allowed
    allowed = allowed.copy()

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = node = leader[leader[node]]
        return node

    def join(one: int, other: int, limit: float) -> None:
        one, other = find(one), find(other)
        both = allowed[one] & allowed[other]
        if one != other and both.any() and size[one] + size[other] <= limit:
            leader[other], allowed[one] = one, both
            size[one] += size[other]

    first: dict[int, int] = {}
    for node, group in enumerate(problem.groups.tolist()):
        if group >= 0:
            join(first.setdefault(group, node), node, np.inf)
    for source, target in problem.edges[np.argsort(-problem.bytes, kind="stable")].tolist():
        join(source, target, most)
    return np.array([find(node) for node in range(problem.nodes)], dtype=np.int64)
