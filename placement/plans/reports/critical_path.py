"""The critical path of a plan: what the end of a step waits for, part by part."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from graphflow.base.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import PlannedNode, PlannedTransfer


@dataclass(frozen=True)
class PathSegment:
    """A part of the critical path: a node, a transfer, or a wait for nothing that a plan shows.

    `where` is a device, or a link "a → b"; `location` the user's line.
    """

    kind: str
    name: str
    where: str
    start: float
    finish: float
    location: str


def critical_path(plan: PlanData) -> tuple[PathSegment, ...]:
    """Return what the end of a step waits for, back to its start: inputs, transfers, busy devices.

    Time O(n log n + e): every part is found by what ended when it began.
    """
    came = _Arrivals(plan)
    nodes = [came.of_node(node) for node in plan.nodes if node.finish > node.start]
    ends = nodes + [came.of_transfer(row) for row in plan.transfers]
    if not ends:
        return ()
    part: PathSegment | None = max(ends, key=lambda each: each.finish)
    path: list[PathSegment] = []
    while part is not None and len(path) <= 2 * (len(plan.nodes) + len(plan.transfers)):
        path.append(part)
        before = came.before(part)
        if before is not None and part.start - before.finish > 1e-9 * plan.makespan:
            gap = (before.finish, part.start)
            path.append(PathSegment("waiting", "", part.where, *gap, ""))
        part = before
    return tuple(each for each in reversed(path) if each.finish > each.start)


class _Arrivals:
    """Finds what a node or a transfer waited for."""

    def __init__(self, plan: PlanData) -> None:
        self._plan = plan
        self._nodes = plan.by_name
        self._sent = {(plan.maker(row.tensor), row.target): row for row in plan.transfers}
        self._lines: dict[str, list[PlannedNode]] = {}
        for node in sorted(plan.nodes, key=lambda node: (node.start, node.finish)):
            if node.finish > node.start:
                self._lines.setdefault(node.device, []).append(node)
        self._ends = {at: [node.finish for node in line] for at, line in self._lines.items()}
        self._wires: dict[str, list[PlannedTransfer]] = {}
        for row in sorted(plan.transfers, key=lambda row: (row.start, row.finish)):
            self._wires.setdefault(f"{row.source} → {row.target}", []).append(row)
        self._leaves = {wire: [row.start for row in rows] for wire, rows in self._wires.items()}

    def of_node(self, node: PlannedNode) -> PathSegment:
        return PathSegment(
            "computing", node.name, node.device, node.start, node.finish, node.location
        )

    def of_transfer(self, row: PlannedTransfer) -> PathSegment:
        maker = self._nodes.get(self._plan.maker(row.tensor))
        where = f"{row.source} → {row.target}"
        line = maker.location if maker is not None else ""
        return PathSegment("moving", row.tensor, where, row.start, row.finish, line)

    def before(self, part: PathSegment) -> PathSegment | None:
        """Return the part that ended last of those that had to end before another could begin."""
        if part.kind == "moving":
            return self._before_transfer(part)
        node = self._nodes[part.name]
        found: list[PathSegment] = []
        for name in node.inputs:
            source = self._nodes[name]
            row = self._sent.get((name, node.device))
            if source.device == node.device:
                found.append(self.of_node(source))
            elif row is not None:
                found.append(self.of_transfer(row))
        ends = self._ends.get(node.device, [])
        at = bisect_right(ends, node.start)
        if at:  # what kept the device busy; nodes that take no time keep nobody waiting
            found.append(self.of_node(self._lines[node.device][at - 1]))
        return self._latest(found)

    def _before_transfer(self, part: PathSegment) -> PathSegment | None:
        """Return what a transfer waited for: its producer, or the transfer before it on the
        link.
        """
        maker = self._nodes.get(self._plan.maker(part.name))
        if maker is not None and maker.finish >= part.start:
            return self._latest([self.of_node(maker)])
        found = [] if maker is None else [self.of_node(maker)]
        at = bisect_left(self._leaves[part.where], part.start)
        if at:
            left = self.of_transfer(self._wires[part.where][at - 1])
            found.append(replace(left, finish=min(left.finish, part.start)))
        return self._latest(found)

    @staticmethod
    def _latest(found: list[PathSegment]) -> PathSegment | None:
        """The last to end; where several end at once, one that took time."""
        real = [each for each in found if each.finish > 0.0]
        return max(
            real, key=lambda each: (each.finish, each.finish > each.start, each.start), default=None
        )
