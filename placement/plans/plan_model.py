"""PlanModel: the placement problem behind a plan and its answer, kept to ask what else could be."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Assignment, Problem
from graphflow.placement.simulation.execution_result import ExecutionResult
from graphflow.placement.simulation.simulator import Timeline, execute, simulate


@dataclass(frozen=True, eq=False)
class PlanModel:
    """The problem behind a plan and its answer, kept to ask what else could have been.

    Args:
        names: of the problem's nodes; fetches have the name of what is fetched.
        tensors: names by tensor id.
        devices: names by index, the client last.
        limits: node name -> what took choices away.
    """

    problem: Problem
    assignment: Assignment
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    devices: tuple[str, ...]
    limits: Mapping[str, str]

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return simulate(self.problem, self.assignment)

    @cached_property
    def position(self) -> list[int]:
        """Place of each node in the order."""
        position = [0] * self.problem.nodes
        for place, node in enumerate(self.assignment.order.tolist()):
            position[node] = place
        return position

    def run_with_move(self, node: int, device: int) -> ExecutionResult:
        """The step with a node, and what must live with it, on another device; the order stays."""
        group = int(self.problem.groups[node])
        devices = self.assignment.device.tolist()
        team = [v for v, g in enumerate(self.problem.groups.tolist()) if g == group >= 0] or [node]
        for member in team:
            devices[member] = device
        return execute(self.problem, devices, self.position, self.assignment.order.tolist())

    def finishes(self, node: int) -> dict[int, float]:
        """Return when a node would finish on each device that may run it, all else being equal."""
        problem = self.problem
        here = self._home[node]
        found = {}
        coming: list[int] | None = None
        for at, may in enumerate(problem.allowed_rows[node]):
            if not may:
                continue
            if at == here:
                found[at] = self._finish[node]
                continue
            begin = self._free(node, at)
            if coming is None:
                coming = problem.predecessors.edges_of(node).tolist()
            for edge in coming:
                begin = max(begin, self._arrival(edge, at))
            found[at] = begin + problem.compute_rows[node][at]
        return found

    @cached_property
    def _home(self) -> list[int]:
        """The device of each node, for loops in plain Python."""
        return list(self.timeline.device.tolist())

    @cached_property
    def _finish(self) -> list[float]:
        """When each node finishes."""
        return list(self.timeline.finish.tolist())

    @cached_property
    def _edges(self) -> list[tuple[int, int, float]]:
        """Source, tensor and bytes of each edge."""
        problem = self.problem
        rows = (problem.edges[:, 0].tolist(), problem.tensor.tolist(), problem.bytes.tolist())
        return list(zip(*rows, strict=True))

    @cached_property
    def _arrived(self) -> dict[tuple[int, int], float]:
        rows = self.timeline.transfers
        return {(int(r["tensor"]), int(r["target"])): float(r["finish"]) for r in rows}

    @cached_property
    def _lines(self) -> dict[int, tuple[list[int], list[int]]]:
        """Nodes of each device in order, and their positions in the global order."""
        lines = {}
        for at in range(self.problem.devices):
            mine = self.timeline.on(at).tolist()
            lines[at] = (mine, [self.position[node] for node in mine])
        return lines

    def before(self, node: int, at: int) -> int | None:
        """The node that a device runs last before the turn of `node`."""
        from bisect import bisect_left

        mine, places = self._lines[at]
        index = bisect_left(places, self.position[node])
        return mine[index - 1] if index else None

    def _free(self, node: int, at: int) -> float:
        last = self.before(node, at)
        return 0.0 if last is None else self._finish[last]

    def _arrival(self, edge: int, at: int) -> float:
        problem = self.problem
        source, tensor, size = self._edges[edge]
        home, made = self._home[source], self._finish[source]
        if home == at:
            return made
        known = self._arrived.get((tensor, at))
        if known is not None:
            return known
        moving = size / float(problem.bandwidth[home, at])
        return made + float(problem.latency[home, at]) + moving
