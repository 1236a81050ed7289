"""A placement problem as a mixed-integer program for HiGHS: a bound, and devices to begin with.

`Exact` asks it where its own search does not finish: independent nodes, and graphs whose devices
are full rather than waiting.
"""

from __future__ import annotations

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.list_schedule import Flat
from graphflow.placement.problems.problem import Floats, Ints, Problem
from graphflow.placement.solvers.highs import MixedIntegerProgram

LARGEST = 700
"""Rows for edges (each by devices) beyond which no program is made."""
PAIRS = 300
"""Pairs of nodes, by devices, up to which the program knows that one device runs one at a time."""
NODES = 30_000
"""Of the search tree, by rows for edges; at most 400."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A relaxation's result: `bound` is a lower bound in seconds; (n,) `device` a map, or None."""

    bound: float
    device: Ints | None


def solve_relaxation(problem: Problem, best: float, ordered: bool) -> Relaxed | None:
    """A bound on the makespan from who runs what, who waits for whom, and how full devices are;
    None where the program would be too large.

    Without contention: that only makes steps longer. `best` is a makespan that is known; with
    `ordered` the program also decides which of two nodes on a device comes first, and its optimum
    is that of the problem (memory over time is not counted).
    """
    program = _PlacementProgram(problem, best)
    if program.size > LARGEST:
        return None
    if ordered:
        if len(program.pairs) * problem.devices > PAIRS:
            return None
        program.disjunctions()
    found = program.model.solve(
        nodes=min(400, NODES // max(1, program.size)), cutoff=best, gap=1e-7
    )
    bound = min(best, found.bound) * (1 - 1e-7)
    device = None
    if found.values is not None:
        device = np.argmax(found.values[program.at], axis=1)
    return Relaxed(bound, device)


class _PlacementProgram:
    """Columns: the makespan, starts of nodes, and (n, d) whether a node is on a device (shared by
    a team)."""

    def __init__(self, problem: Problem, best: float) -> None:
        flat = Flat(problem, False)
        self.n, self.d, self.best = problem.nodes, problem.devices, best
        self.problem, self.cost = problem, np.asarray(flat.costs)
        self.size = len(problem.edges) * self.d
        eye = np.eye(self.d, dtype=bool)
        self.latency = np.where(eye, 0.0, problem.latency)
        self.bandwidth = np.where(eye, np.inf, problem.bandwidth)
        if self.size > LARGEST:
            return
        self.head, self.tail = self._heads(), self._tails()
        self.pairs = self._unrelated_pairs()
        self.model = MixedIntegerProgram()
        self.span = self.model.columns(1, cost=1.0, upper=best)
        self.start = self.model.columns(self.n)
        least = self.cost.min(axis=1)
        for v in range(self.n):
            self.model.lower[self.start + v] = float(self.head[v])
            late = best - least[v] - self.tail[v].min()
            self.model.upper[self.start + v] = max(float(self.head[v]), float(late))
        self.at = self._places(flat.team)
        self._precedence()
        self._area()

    def _weights(self, size: float) -> Floats:
        """(d, d) seconds of a tensor from device to device."""
        return np.asarray(self.latency + size / self.bandwidth)

    def _heads(self) -> Floats:
        """(n,) seconds before which a node cannot start."""
        end = np.zeros((self.n, self.d))
        head = np.zeros(self.n)
        order = {v: i for i, v in enumerate(self.problem.topological.tolist())}
        into: list[list[tuple[int, float]]] = [[] for _ in range(self.n)]
        for (u, v), size in zip(
            self.problem.edges.tolist(), self.problem.bytes.tolist(), strict=True
        ):
            into[v].append((u, size))
        for v in sorted(range(self.n), key=order.__getitem__):
            ready = np.zeros(self.d)
            for u, size in into[v]:
                ready = np.maximum(ready, (end[u][:, None] + self._weights(size)).min(axis=0))
            end[v] = ready + self.cost[v]
            head[v] = ready[np.isfinite(self.cost[v])].min()
        return head

    def _tails(self) -> Floats:
        """(n, d) seconds from a node's end on a device to the end of the step, at the very best."""
        tail = np.zeros((self.n, self.d))
        rows = list(zip(self.problem.edges.tolist(), self.problem.bytes.tolist(), strict=True))
        out: list[list[tuple[int, float]]] = [[] for _ in range(self.n)]
        for (u, v), size in rows:
            out[u].append((v, size))
        for u in reversed(self.problem.topological.tolist()):
            for v, size in out[u]:
                way = (self._weights(size) + self.cost[v] + tail[v]).min(axis=1)
                tail[u] = np.maximum(tail[u], way)
        return tail

    def _unrelated_pairs(self) -> list[tuple[int, int]]:
        """Pairs of nodes without a path between them."""
        below = [0] * self.n
        for v in reversed(self.problem.topological.tolist()):
            for e in self.problem.successors.edges_of(v).tolist():
                reader = int(self.problem.edges[e, 1])
                below[v] |= below[reader] | 1 << reader
        return [
            (u, v)
            for u in range(self.n)
            for v in range(u)
            if not (below[u] >> v & 1 or below[v] >> u & 1)
        ]

    def _places(self, team: Ints) -> Ints:
        """(n, d) columns; every node on one device."""
        at = np.zeros((self.n, self.d), dtype=np.int64)
        homes: dict[int, int] = {}
        for v in range(self.n):
            mate = int(team[v])
            if mate >= 0 and mate in homes:
                at[v] = homes[mate] + np.arange(self.d)
                continue
            first = self.model.columns(self.d, upper=1.0, integer=True)
            at[v] = first + np.arange(self.d)
            if mate >= 0:
                homes[mate] = first
            for p in np.flatnonzero(~np.isfinite(self.cost[v])).tolist():
                self.model.upper[first + p] = 0.0
            self.model.row({first + p: 1.0 for p in range(self.d)}, lower=1.0, upper=1.0)
        return at

    def _seconds(self, v: int, more: Floats | None = None) -> dict[int, float]:
        """A node's seconds where it is, as terms."""
        cost = self.cost[v] + (0.0 if more is None else more)
        return {int(a): float(c) for a, c in zip(self.at[v], cost, strict=True) if np.isfinite(c)}

    def _precedence(self) -> None:
        """A node starts when its inputs are there, and the step ends after every node."""
        rows = zip(self.problem.edges.tolist(), self.problem.bytes.tolist(), strict=True)
        for (u, v), size in rows:
            weights = self._weights(size)
            lag = {self.start + v: 1.0, self.start + u: -1.0}
            for column, seconds in self._seconds(u).items():
                lag[column] = -seconds
            if not weights.any() or np.array_equal(self.at[u], self.at[v]):
                self.model.row(lag, lower=0.0)
                continue
            for p in range(self.d):  # if u is on p, by where v is
                row, most = dict(lag), float(weights[p].max())
                row[int(self.at[u, p])] = row.get(int(self.at[u, p]), 0.0) - most
                for q in range(self.d):
                    row[int(self.at[v, q])] = row.get(int(self.at[v, q]), 0.0) - float(
                        weights[p, q]
                    )
                self.model.row(row, lower=-most)
        for v in range(self.n):
            row = {self.span: 1.0, self.start + v: -1.0}
            for column, seconds in self._seconds(v, self.tail[v]).items():
                row[column] = -seconds
            self.model.row(row, lower=0.0)

    def _area(self) -> None:
        """A device is busy with what is on it, and keeps it within its memory."""
        for p in range(self.d):
            here = np.flatnonzero(np.isfinite(self.cost[:, p]))
            if not len(here):
                continue
            row = {self.span: 1.0}
            for v in here.tolist():
                column = int(self.at[v, p])
                row[column] = row.get(column, 0.0) - float(self.cost[v, p])
            self.model.row(row, lower=0.0)
            room = float(self.problem.capacity[p])
            if np.isfinite(room):
                stays: dict[int, float] = {}
                for v in here.tolist():
                    column = int(self.at[v, p])
                    stays[column] = stays.get(column, 0.0) + float(self.problem.memory[v])
                self.model.row(stays, upper=room)

    def disjunctions(self) -> None:
        """Add the constraints that of two nodes on one device one comes first."""
        for u, v in self.pairs:
            first = self.model.columns(1, upper=1.0, integer=True)
            for one, other, sign in ((u, v, 1.0), (v, u, -1.0)):
                late = float(
                    self.model.upper[self.start + one] - self.model.lower[self.start + other]
                )
                for p in range(self.d):
                    seconds = float(self.cost[one, p])
                    if not np.isfinite(seconds + self.cost[other, p]):
                        continue
                    big = max(0.0, late + seconds)  # what frees the row
                    row = {self.start + other: 1.0, self.start + one: -1.0, first: -sign * big}
                    for at in (int(self.at[one, p]), int(self.at[other, p])):
                        row[at] = row.get(at, 0.0) - big
                    free = 3.0 if sign > 0 else 2.0
                    self.model.row(row, lower=seconds - free * big)
