"""Coarsening: which nodes had better move together.

A placer that weighs one node at a time cannot see that a weight, its product, the product's
gradient and the weight's update belong together. Here nodes merge into units along heavy edges: two
units merge when sending what passes between them takes longer than the lesser of them computes (its
grain). Each level is coarser than the one before.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Floats, Ints, Problem

GRAINS = (8.0, 2.0, 0.5)
BALANCE = 0.6
ROUNDS = 12


@dataclass(frozen=True, eq=False)
class Units:
    """A partition of the nodes into units that are placed as one.

    Args:
        of_node: (n,) the unit of each node; units are numbered by their first node.
    """

    problem: Problem
    of_node: Ints

    @cached_property
    def count(self) -> int:
        """Number of units."""
        return int(self.of_node.max()) + 1 if len(self.of_node) else 0

    @cached_property
    def members(self) -> list[list[int]]:
        """The nodes of each unit."""
        members: list[list[int]] = [[] for _ in range(self.count)]
        for node, unit in enumerate(self.of_node.tolist()):
            members[unit].append(node)
        return members

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """(units, d) devices that all members can use."""
        allowed = np.ones((self.count, self.problem.devices), dtype=bool)
        np.logical_and.at(allowed, self.of_node, self.problem.allowed)
        return allowed

    @cached_property
    def work(self) -> Floats:
        """(units, d) seconds all members compute; inf where they may not."""
        work = np.zeros((self.count, self.problem.devices))
        np.add.at(work, self.of_node, np.where(self.problem.allowed, self.problem.compute, 0.0))
        return np.where(self.allowed, work, np.inf)

    @cached_property
    def memory(self) -> Floats:
        """(units,) persistent bytes."""
        return np.bincount(self.of_node, weights=self.problem.memory, minlength=self.count).astype(
            np.float64
        )

    @cached_property
    def pairs(self) -> tuple[Ints, Ints, Floats]:
        """Pairs of units (a < b) and the mean seconds that the tensors between them need."""
        return _pairs(self.problem, self.of_node)

    @cached_property
    def heaviest_first(self) -> list[int]:
        """Units by their work, most first."""
        return [int(unit) for unit in np.argsort(-_mean(self.work, self.allowed), kind="stable")]


def levels(problem: Problem) -> list[Units]:
    """Finest first: colocation groups alone, then ever larger grains, and a few balanced units for
    each device.

    Every level has at most 4/5 of the units of the one before; the balanced one keeps below a share
    of the work, because on slow links a grain can swallow everything.
    """
    groups = Units(problem, _groups(problem))
    coarse = [_merge(groups, GRAINS[0], np.inf)]
    for grain in GRAINS[1:]:
        coarse.append(_merge(coarse[-1], grain, np.inf))
    usable = max(1, int(problem.allowed.any(axis=0).sum()) - (problem.client is not None))
    share = float(_mean(problem.compute, problem.allowed).sum()) / usable
    coarse.append(_merge(coarse[0], 0.0, BALANCE * share))
    found = [groups]
    for units in sorted(coarse, key=lambda units: -units.count):
        if units.count <= 0.8 * found[-1].count:
            found.append(units)
    return found


def _groups(problem: Problem) -> Ints:
    nodes = problem.nodes
    label = np.where(problem.groups >= 0, problem.groups + nodes, np.arange(nodes))
    return _renumber(label)


def _renumber(label: NDArray[np.int64]) -> Ints:
    """Labels renumbered from 0 in order of first appearance."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _merge(units: Units, grain: float, limit: float) -> Units:
    """Merge along edges of at least `grain` × the lesser unit's seconds, none beyond `limit`
    seconds.
    """
    for _ in range(ROUNDS):
        first, second, seconds = units.pairs
        parent = list(range(units.count))
        work = _mean(units.work, units.allowed).tolist()
        allowed = units.allowed.copy()
        order = np.argsort(-seconds, kind="stable")
        merged = False
        for a, b, weight in zip(
            first[order].tolist(), second[order].tolist(), seconds[order].tolist(), strict=True
        ):
            a, b = _root(parent, a), _root(parent, b)
            if a == b or weight < grain * min(work[a], work[b]) or work[a] + work[b] > limit:
                continue
            common = allowed[a] & allowed[b]
            if not common.any():
                continue
            parent[b] = a
            work[a] += work[b]
            allowed[a] = common
            merged = True
        if not merged:
            break
        roots = np.array([_root(parent, unit) for unit in range(units.count)], dtype=np.int64)
        units = Units(units.problem, _renumber(roots[units.of_node]))
    return units


def _root(parent: list[int], unit: int) -> int:
    while parent[unit] != unit:
        parent[unit] = parent[parent[unit]]
        unit = parent[unit]
    return unit


def _pairs(problem: Problem, of_node: Ints) -> tuple[Ints, Ints, Floats]:
    source, target = of_node[problem.edges[:, 0]], of_node[problem.edges[:, 1]]
    cut = np.flatnonzero(source != target)
    once = np.unique(np.stack([problem.tensor[cut], target[cut]]), axis=1, return_index=True)[1]
    cut = cut[once]
    seconds = mean_transfer(problem)[cut]
    count = int(of_node.max()) + 1 if len(of_node) else 1
    low, high = np.minimum(source[cut], target[cut]), np.maximum(source[cut], target[cut])
    keys, inverse = np.unique(low * count + high, return_inverse=True)
    return (
        keys // count,
        keys % count,
        np.bincount(inverse, weights=seconds, minlength=len(keys)).astype(np.float64),
    )


def mean_transfer(problem: Problem) -> Floats:
    """(e,) seconds of each edge's tensor, the mean over pairs of different devices (other than the
    client).
    """
    apart = ~np.eye(problem.devices, dtype=bool)
    if problem.client is not None:
        apart[problem.client] = apart[:, problem.client] = False
    if not apart.any():
        return np.zeros(len(problem.edges))
    return np.asarray(
        problem.latency[apart].mean() + problem.bytes * (1.0 / problem.bandwidth[apart]).mean()
    )


def _mean(seconds: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Mean over the devices that may be used."""
    total = np.where(allowed, seconds, 0.0).sum(axis=1)
    return np.asarray(total / np.maximum(1, allowed.sum(axis=1)))
