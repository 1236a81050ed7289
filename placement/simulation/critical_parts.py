"""The nodes and transfers that the end of a simulated step waits for.

A change of their seconds changes the makespan by as much, one of any other's by nothing, as long as
the changes are small. So these are the parts whose errors are those of the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from graphflow.placement.problems.problem import Problem
from graphflow.placement.simulation.simulator import Timeline

_ALIKE = 1e-9
"""Share of the makespan within which two instants are one."""


def critical_parts(problem: Problem, timeline: Timeline) -> tuple[list[int], list[int]]:
    """Return nodes, and numbers of `timeline.transfers`, back from the end of the step.

    A node waited for the node before it on its device, or for a tensor. A transfer waited for its
    producer, or for the transfer before it on the same link.
    """
    if not problem.nodes:
        return [], []
    return _Search(problem, timeline).path()


class _Search:
    """Finds what a node or a transfer waited for."""

    def __init__(self, problem: Problem, timeline: Timeline) -> None:
        self._problem = problem
        self._start, self._finish = timeline.start.tolist(), timeline.finish.tolist()
        self._device = timeline.device.tolist()
        self._tensor = problem.tensor.tolist()
        self._near = _ALIKE * timeline.makespan
        self._last = int(timeline.finish.argmax())
        self._before = _previous(timeline.order.tolist(), self._device)
        rows = timeline.transfers
        self._maker, self._leaves = rows["node"].tolist(), rows["start"].tolist()
        self._arrives = rows["finish"].tolist()
        ends = list(zip(rows["source"].tolist(), rows["target"].tolist(), strict=True))
        to = zip(rows["tensor"].tolist(), rows["target"].tolist(), strict=True)
        self._coming = {key: number for number, key in enumerate(to)}
        by_start = sorted(range(len(ends)), key=self._leaves.__getitem__)
        self._ahead = _previous(by_start, ends)

    def path(self) -> tuple[list[int], list[int]]:
        nodes: list[int] = []
        moves: list[int] = []
        node: int | None = self._last
        while node is not None:
            nodes.append(node)
            before = self._before.get(node)
            if before is not None and self._finish[before] >= self._start[node] - self._near:
                node = before
                continue
            row = self._latest_arrival(node)
            if row is None:
                break
            moves.append(row)
            while self._finish[self._maker[row]] < self._leaves[row] - self._near:
                ahead = self._ahead.get(row)
                if ahead is None:
                    break
                row = ahead
                moves.append(row)
            node = self._maker[row]
        return nodes, moves

    def _latest_arrival(self, node: int) -> int | None:
        """Return the transfer that brought a node's last input; None if none did."""
        edges = self._problem.predecessors.edges_of(node).tolist()
        keys = [(self._tensor[edge], self._device[node]) for edge in edges]
        rows = [self._coming[key] for key in keys if key in self._coming]
        return max(rows, key=self._arrives.__getitem__, default=None)


def _previous(order: Sequence[int], place: Sequence[Hashable]) -> dict[int, int]:
    """Return for each item of an order the one before it in the same place."""
    last: dict[Hashable, int] = {}
    found = {}
    for item in order:
        if place[item] in last:
            found[item] = last[place[item]]
        last[place[item]] = item
    return found
