"""Construction of a placement from the sources: each ready node (with its unit) to the device that
finishes it first.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from graphflow.placement.placers.construction.coarsening import Units
from graphflow.placement.problems.problem import Problem


def earliest_finish(units: Units, priority: list[float]) -> tuple[list[int], list[int]]:
    """Devices and order by list scheduling, ready nodes in order of least `priority`.

    The first node of a unit decides for all of it, with the whole unit's seconds in the balance.
    Counted are the node's computation, transfers (a tensor that is there already does not travel
    again), what devices and links are
    busy with, work promised to a device by units begun there, and memory: a device where the node
    would exceed the capacity is out, unless all are. Ties go to the preferred neighbour's device,
    then to the lowest index.

    Time O((n + e)·d + n log n).
    """
    problem = units.problem
    state = _PartialSchedule(units)
    missing = list(problem.input_counts)
    ready = [(priority[node], node) for node in range(problem.nodes) if missing[node] == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        node = heappop(ready)[1]
        order.append(node)
        state.put(node, state.choose(node))
        for _, _, readers in problem.outputs[node]:
            for reader in readers:
                missing[reader] -= 1
                if missing[reader] == 0:
                    heappush(ready, (priority[reader], reader))
    return state.device, order


class _PartialSchedule:
    """A schedule under construction: which node occupies which device until when, and transfers."""

    def __init__(self, units: Units) -> None:
        problem = units.problem
        n, d = problem.nodes, problem.devices
        self.problem = problem
        self.unit: list[int] = units.of_node.tolist()
        self.work, self.memory = units.work.tolist(), units.memory.tolist()
        self.choices: list[list[int]] = [np.flatnonzero(row).tolist() for row in units.allowed]
        self.prefer = problem.prefer.tolist()
        self.home = [-1] * units.count
        self.device = [-1] * n
        self.finish = [0.0] * n
        self.available, self.promised = [0.0] * d, [0.0] * d
        self.inputs: list[list[tuple[int, int, float]]] = [[] for _ in range(n)]
        self.unread: dict[int, int] = {}
        for node, outputs in enumerate(problem.outputs):
            for tensor, size, readers in outputs:
                self.unread[tensor] = len(readers)
                for reader in readers:
                    self.inputs[reader].append((tensor, node, size))
        self.arrived: dict[tuple[int, int], float] = {}
        self.copies: dict[int, list[int]] = {}
        self.link: dict[tuple[int, int], float] = {}
        self.capacity: list[float] = problem.capacity.tolist()
        self.limited = bool(np.isfinite(problem.capacity).any())
        self.transient = (
            [0.0] * n if problem.output_memory is None else problem.output_memory.tolist()
        )
        self.counts_copies = problem.output_memory is not None
        self.used = [0.0] * d
        self.alive = [len(outputs) for outputs in problem.outputs]
        for unit, choices in enumerate(self.choices):
            if len(choices) == 1:  # room that nobody else may take
                self.used[choices[0]] += self.memory[unit]
                self.memory[unit] = 0.0

    def choose(self, node: int) -> int:
        unit = self.unit[node]
        if self.home[unit] >= 0:
            return self.home[unit]
        choices = self.choices[unit]
        if len(choices) == 1:
            return choices[0]
        if self.limited:
            room = [self.capacity[at] - self.used[at] - self._need(node, at) for at in choices]
            roomy = [at for at, left in zip(choices, room, strict=True) if left >= 0.0]
            choices = roomy or [choices[room.index(max(room))]]
        liked = self.device[self.prefer[node]] if self.prefer[node] >= 0 else -1
        best, best_score = choices[0], float("inf")
        for at in choices:
            begin = max(
                self.available[at],
                max((self._arrival(*i, at) for i in self.inputs[node]), default=0.0),
            )
            score = begin + self.promised[at] + self.work[unit][at]
            if score < best_score * (1 - 1e-12) or (
                at == liked and score <= best_score * (1 + 1e-12)
            ):
                best, best_score = at, score
        return best

    def put(self, node: int, at: int) -> None:
        unit, seconds = self.unit[node], self.problem.compute_rows[node][at]
        if self.limited:
            self.used[at] += self._need(node, at)
        if self.home[unit] < 0:
            self.home[unit] = at
            self.promised[at] += self.work[unit][at]
        self.promised[at] = max(0.0, self.promised[at] - seconds)
        begin = self.available[at]
        for tensor, maker, size in self.inputs[node]:
            arrival = self._arrival(tensor, maker, size, at)
            source = self.device[maker]
            if source != at and (tensor, at) not in self.arrived:
                self.arrived[tensor, at] = arrival
                self.copies.setdefault(tensor, []).append(at)
                self.link[source, at] = arrival - self.problem.latency_rows[source][at]
            begin = max(begin, arrival)
            self._release(tensor, maker, size)
        if self.limited and not self.problem.outputs[node]:
            self.used[at] -= self.transient[node]
        self.device[node] = at
        self.finish[node] = self.available[at] = begin + seconds

    def _arrival(self, tensor: int, maker: int, size: float, at: int) -> float:
        source = self.device[maker]
        if source == at:
            return self.finish[maker]
        known = self.arrived.get((tensor, at))
        if known is not None:
            return known
        leaves = self.finish[maker]
        if self.problem.contention:
            leaves = max(leaves, self.link.get((source, at), 0.0))
        return (
            leaves
            + self.problem.latency_rows[source][at]
            + size / self.problem.bandwidth_rows[source][at]
        )

    def _need(self, node: int, at: int) -> float:
        """Bytes that a node adds to a device."""
        unit = self.unit[node]
        need: float = self.transient[node] + (self.memory[unit] if self.home[unit] < 0 else 0.0)
        if self.counts_copies:
            for tensor, maker, size in self.inputs[node]:
                if self.device[maker] != at and (tensor, at) not in self.arrived:
                    need += size
        return need

    def _release(self, tensor: int, maker: int, size: float) -> None:
        """Free a tensor and its copies when its last reader has been placed."""
        self.unread[tensor] -= 1
        if not self.limited or self.unread[tensor]:
            return
        if self.counts_copies:
            for at in self.copies.get(tensor, ()):
                self.used[at] -= size
        self.alive[maker] -= 1
        if self.alive[maker] == 0:
            self.used[self.device[maker]] -= self.transient[maker]


def by_affinity(units: Units) -> list[int]:
    """Devices unit by unit, heaviest first: least load, where what it exchanges with units already
    placed counts as load.

    Time O((units + pairs)·d).
    """
    problem = units.problem
    neighbours: list[list[tuple[int, float]]] = [[] for _ in range(units.count)]
    for a, b, weight in zip(*(array.tolist() for array in units.pairs), strict=True):
        neighbours[a].append((b, weight))
        neighbours[b].append((a, weight))
    return _pack(units, units.heaviest_first, neighbours, problem)


def by_memory(units: Units) -> list[int]:
    """Devices unit by unit, most persistent memory first: where most room is left."""
    problem = units.problem
    room = problem.capacity.tolist()
    home = [0] * units.count
    order = np.argsort(-units.memory, kind="stable").tolist()
    order.sort(key=lambda unit: int(units.allowed[unit].sum()) > 1)
    for unit in order:
        choices = np.flatnonzero(units.allowed[unit]).tolist()
        home[unit] = max(choices, key=lambda at: (room[at], -at))
        room[home[unit]] -= units.memory[unit]
    return [home[unit] for unit in units.of_node.tolist()]


def _pack(
    units: Units, order: list[int], neighbours: list[list[tuple[int, float]]], problem: Problem
) -> list[int]:
    work, memory = units.work.tolist(), units.memory.tolist()
    choices = [np.flatnonzero(row).tolist() for row in units.allowed]
    room, load = problem.capacity.tolist(), [0.0] * problem.devices
    home = [-1] * units.count
    for unit in sorted(order, key=lambda u: len(choices[u]) > 1):
        near = [0.0] * problem.devices
        total = 0.0
        for other, weight in neighbours[unit]:
            if home[other] >= 0:
                near[home[other]] += weight
                total += weight
        fits = [at for at in choices[unit] if room[at] >= memory[unit]] or choices[unit]
        at = min(fits, key=lambda at: (load[at] + work[unit][at] + total - near[at], at))
        home[unit] = at
        load[at] += work[unit][at]
        room[at] -= memory[unit]
    return [home[unit] for unit in units.of_node.tolist()]
