"""The greedy placer: simulate from the sources, each node to the device that finishes it first;
then look again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError
from graphflow.placement.placers.base import Placer, memory_error, register_placer
from graphflow.placement.placers.construction.coarsening import Units, levels, mean_transfer
from graphflow.placement.placers.construction.device_groups import islands, on_island
from graphflow.placement.placers.construction.earliest_finish import (
    by_affinity,
    by_memory,
    earliest_finish,
)
from graphflow.placement.placers.construction.evaluator import (
    EvaluatedPlacement,
    Evaluator,
    lower_bound,
)
from graphflow.placement.placers.round_robin import round_robin
from graphflow.placement.placers.single import cheapest_devices, singles
from graphflow.placement.problems.problem import Assignment, Problem
from graphflow.placement.simulation.memory_use import peak_memory

ISLANDS = 2
"""Hosts (of different kinds) that are tried alone, where the way between hosts is long."""
SWAPPED = 24
"""Levels of at most this many units are also searched for swaps."""


@dataclass(frozen=True)
class Greedy(Placer):
    """Earliest finish time from the sources, at several grains, refined; the best in the simulator
    wins.

    Nodes are taken critical path first and in build order; alone, with their colocation group, and
    with the neighbours from which it would cost more to part them than they compute (see
    `coarsen`). The best is refined by moving (and, while there are few, swapping) units, coarse to
    fine. Where some devices are far from others, the answers on a host alone compete, as do one
    device alone, each of them, and round robin, so that the answer is never predicted slower than
    these. Deterministic: the budget counts work, not time.

    Args:
        budget: node and edge visits to spend on simulating candidates; one of each kind is tried in
            any case.
        thrift: seconds of makespan that a second of transfer must save to be worth it: sending
            keeps processors busy that the model believes idle, and small predicted gains are within
            its error.

    Raises:
        MemoryLimitError: nothing that was tried fits the devices' memory; peak memory is by
            liveness.

    Time O((n + e)·d) for each candidate, about 5 µs a node or edge. After Topcuoglu, Hariri & Wu,
    IEEE TPDS 13(3), 2002 (upward ranks) and Sarkar, 1989 (clusters by grain).
    """

    budget: int = 400_000
    thrift: float = 0.02

    def __post_init__(self) -> None:
        if not 0.0 <= self.thrift <= 1.0:
            raise PlacementError(f"thrift must lie between 0 and 1, not {self.thrift!r}")
        if not isinstance(self.budget, int) or self.budget < 0:
            raise PlacementError(f"budget counts visits: an integer >= 0, not {self.budget!r}")

    def place(self, problem: Problem) -> Assignment:
        if int(problem.allowed.sum(axis=1).max(initial=1)) == 1:  # nothing to choose but the order
            best = Evaluator(problem).best(cheapest_devices(problem).tolist())
        else:
            best = self._search(problem)
            for members in islands(problem)[:ISLANDS]:
                alone = self._search(on_island(problem, members)).run
                there = Evaluator(problem).by_order(alone.device, alone.order)
                best = _least([best, there])
        if not best.fits:
            raise memory_error(problem, peak_memory(problem, best.run))
        return best.run.assignment()

    def _search(self, problem: Problem) -> EvaluatedPlacement:
        plain = Evaluator(problem)
        baseline = _least([*singles(plain), round_robin(plain)])
        bound = lower_bound(problem) * (1 + 1e-9)
        if baseline.fits and baseline.key[1] <= bound:
            return baseline
        evaluator = Evaluator(problem, self.thrift)
        best = evaluator.judge(baseline.run)
        grains = levels(problem)
        best = _least([best, *_constructions(evaluator, grains)])
        if not best.fits:
            best = _least([best, *_frugal(evaluator, grains)])
        evaluations = self.budget // max(1, problem.nodes + len(problem.edges)) - plain.evaluations
        best = _refine(evaluator, grains, best, evaluations, bound)
        return _least([baseline, plain.judge(best.run)])


def _least(candidates: list[EvaluatedPlacement]) -> EvaluatedPlacement:
    return min(candidates, key=lambda candidate: candidate.key)


def mean_ranks(problem: Problem) -> list[float]:
    """Upward ranks with mean computation and mean transfer times, before anything is placed."""
    finite = np.where(problem.allowed, problem.compute, 0.0).sum(axis=1) / problem.allowed.sum(
        axis=1
    )
    seconds, mean = finite.tolist(), mean_transfer(problem).tolist()
    ranks = [0.0] * problem.nodes
    start, edges = problem.successors.start.tolist(), problem.successors.edges.tolist()
    targets = problem.edges[:, 1].tolist()
    for node in reversed(problem.topological.tolist()):
        leaving = edges[start[node] : start[node + 1]]
        ranks[node] = seconds[node] + max(
            (mean[edge] + ranks[targets[edge]] for edge in leaving), default=0.0
        )
    return ranks


def _constructions(evaluator: Evaluator, grains: list[Units]) -> Iterator[EvaluatedPlacement]:
    """Placements from scratch, at every grain."""
    by_rank = [-rank for rank in mean_ranks(evaluator.problem)]
    for level, units in enumerate(grains):
        device, order = earliest_finish(units, by_rank)
        yield evaluator.by_rank(device)
        if level == 0:
            yield evaluator.by_order(device, order)
            device, order = earliest_finish(units, evaluator.natural)
            yield evaluator.by_order(device, order)
        yield evaluator.by_rank(by_affinity(units))


def _frugal(evaluator: Evaluator, grains: list[Units]) -> Iterator[EvaluatedPlacement]:
    """Placements for when memory is short: by room, and in orders that keep little alive."""
    for units in grains:
        for device in (by_memory(units), by_affinity(units)):
            yield evaluator.by_order(device, evaluator.frugal)
            yield evaluator.best(device)


def _refine(
    evaluator: Evaluator, grains: list[Units], best: EvaluatedPlacement, limit: int, bound: float
) -> EvaluatedPlacement:
    """Move units while it helps, coarse grains first, until nothing helps or the budget is
    spent.
    """
    improved = True
    tried: set[tuple[int, ...]] = set()  # maps that were no better than the best is, or it itself
    while improved:
        improved = False
        for units in reversed(grains):
            stop = evaluator.evaluations + max(0, limit - evaluator.evaluations + 1) // 2
            for proposal in _proposals(units):
                if evaluator.evaluations >= stop or (best.fits and best.key[1] <= bound):
                    break
                device = _apply_proposal(units, best.run.device, proposal)
                if device == best.run.device:
                    continue
                candidate = _rival(evaluator, device, best, tried)
                if candidate is not None and candidate.key < best.key:
                    best, improved = candidate, True
    return best


def _proposals(units: Units) -> Iterator[tuple[int, int, bool]]:
    """(unit, device, False): move it there; (unit, other unit, True): swap them. Heaviest first."""
    for unit in units.heaviest_first:
        for at in np.flatnonzero(units.allowed[unit]).tolist():
            yield unit, at, False
    if units.count <= SWAPPED:
        for first in units.heaviest_first:
            for second in units.heaviest_first:
                if first < second:
                    yield first, second, True


def _apply_proposal(units: Units, device: list[int], proposal: tuple[int, int, bool]) -> list[int]:
    """A device map after a proposal; the same one where it does not apply."""
    unit, other, swap = proposal
    targets = [(unit, other)]
    if swap:
        here, there = device[units.members[unit][0]], device[units.members[other][0]]
        if not (units.allowed[unit, there] and units.allowed[other, here]):
            return device
        targets = [(unit, there), (other, here)]
    moved = list(device)
    for which, at in targets:
        for node in units.members[which]:
            moved[node] = at
    return moved


def _rival(
    evaluator: Evaluator, device: list[int], best: EvaluatedPlacement, tried: set[tuple[int, ...]]
) -> EvaluatedPlacement | None:
    """A map that was run, unless it is known to be no better. Short of memory, orders matter as
    much as devices."""
    if best.fits:
        known = tuple(device)
        if known in tried:
            evaluator.evaluations += 1
            return None
        tried.add(known)
        return evaluator.rival(device, best)
    return _least([evaluator.best(device), evaluator.by_order(device, best.run.order)])


register_placer("greedy", Greedy())
