"""The optimum of small problems, with a proof: HiGHS, and all partial schedules but the dominated
ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError
from graphflow.placement.placers.auto import Auto
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.construction.evaluator import (
    EvaluatedPlacement,
    Evaluator,
    lower_bound,
)
from graphflow.placement.placers.construction.mixed_integer import solve_relaxation
from graphflow.placement.placers.list_schedule import Flat
from graphflow.placement.problems.problem import Assignment, Floats, Problem
from graphflow.placement.simulation.simulator import simulate

SLACK = 1e-9
SOLVED = 1e-6
"""Share above the bound that counts as reached: a solver's tolerance."""
CHOICES = 30
"""Nodes by devices up to which a partial schedule is expanded in about 0.1 ms."""
LARGEST = 200
"""Nodes; each layer of larger problems would be cut at once, and the answer is auto's anyway."""


@dataclass(frozen=True)
class Proof:
    """An answer, its makespan in the simulator, and what no assignment can beat. Seconds.

    Without contention and limits on memory over time, an answer whose bound was reached is optimal;
    with them the bound is that of the problem without. `by` says what gave the bound; a solver's
    proofs hold to a millionth.
    """

    assignment: Assignment
    makespan: float
    bound: float
    by: str = "paths and sums"

    @property
    def optimal(self) -> bool:
        """Whether nothing better exists."""
        return self.makespan <= self.bound * (1 + SOLVED)

    @property
    def gap(self) -> float:
        """How much better something else might be, as a share of the bound."""
        return self.makespan / self.bound - 1.0 if self.makespan > self.bound else 0.0


@dataclass(frozen=True)
class Exact(Placer):
    """A mixed-integer program, and partial schedules layer by layer: one more node on any device,
    after all that is there.

    HiGHS first looks at who runs what, without their order, which is all that matters where
    devices are full; then, on small graphs, at their order, too; then come partial schedules. A
    partial schedule is dropped if another of the same nodes (those still to be read on the same
    devices) has every device free and every such node done no later, or if its bound (the longest
    way on with every later node on its best device) is not below the best answer known, which is
    `auto`'s at first. Where a layer outgrows its share of `states`, the worst by bound are dropped
    too, and the least of their bounds is the bound of the answer. `prove` reports it.

    Args:
        states: partial schedules to expand in all, about 0.1 ms each; fewer of them where each has
            many that may follow.

    Raises:
        PlacementError: a setting without sense.
        MemoryLimitError: nothing that was tried fits.

    Time and memory exponential in the nodes up to `states`; about 16 nodes with transfers on 3
    devices, and 30 without, are proven in seconds. Source of the partial schedules: after Held &
    Karp, J. SIAM 10(1), 1962 (sets as states).
    """

    states: int = 200_000

    def __post_init__(self) -> None:
        if type(self.states) is not int or self.states < 0:
            raise PlacementError(f"states must be an integer >= 0, not {self.states!r}")

    def place(self, problem: Problem) -> Assignment:
        return self.prove(problem).assignment

    def prove(self, problem: Problem) -> Proof:
        """The best assignment found, and the bound.

        Raises:
            PlacementError: not a Problem.
            MemoryLimitError: nothing was found that fits the devices' memory.
        """
        if not isinstance(problem, Problem):
            raise PlacementError(
                f"prove() takes a Problem, not {type(problem).__name__}; graphs are placed by "
                "gf.plan"
            )
        known = Auto().place(problem)
        proof = Proof(known, simulate(problem, known).makespan, lower_bound(problem))
        if problem.nodes and not proof.optimal:
            proof = _by_program(problem, proof, False)
        if problem.nodes and not proof.optimal:
            proof = _by_program(problem, proof, True)
        if 0 < problem.nodes <= LARGEST and not proof.optimal:
            proof = self._by_layers(problem, proof)
        return proof

    def _by_layers(self, problem: Problem, proof: Proof) -> Proof:
        search = _Layers(problem, proof.makespan)
        bound = search.run(search.width(self.states))
        device = [0] * problem.nodes
        for node, at in search.order:
            device[node] = at
        order = [node for node, _ in search.order]
        run = Evaluator(problem).by_order(device, order) if order else None
        return _sharper(proof, bound, "partial schedules", run)


def _by_program(problem: Problem, proof: Proof, ordered: bool) -> Proof:
    """Solve by HiGHS, and run its device map in the best known order."""
    found = solve_relaxation(problem, proof.makespan, ordered)
    if found is None:
        return proof
    run = None
    if found.device is not None:
        run = Evaluator(problem).best(found.device.tolist())
    return _sharper(proof, found.bound, "HiGHS", run)


def _sharper(proof: Proof, bound: float, how: str, run: EvaluatedPlacement | None) -> Proof:
    """A proof with what was found since."""
    if run is not None and run.fits and run.run.makespan < proof.makespan:
        proof = replace(proof, assignment=run.run.assignment(), makespan=run.run.makespan)
    if bound > proof.bound:
        proof = replace(proof, bound=bound, by=how)
    return replace(proof, bound=proof.makespan) if proof.optimal else proof


Live = tuple[tuple[int, int, float], ...]
"""Nodes that others still wait for (or whose team does): node, device, when it is done."""


@dataclass(frozen=True)
class _SearchState:
    """A partial schedule: its nodes as bits, the devices in use as bits, what matters from here."""

    nodes: int
    begun: int
    free: tuple[float, ...]
    room: tuple[float, ...]
    live: Live
    bound: float
    before: _SearchState | None
    placed: tuple[int, int]


class _Layers:
    """The search over partial schedules with one node more in every layer."""

    def __init__(self, problem: Problem, best: float) -> None:
        flat = Flat(problem, False)
        self.n, self.d, self.best = problem.nodes, problem.devices, best
        self.cost: list[list[float]] = flat.costs.tolist()
        latency = np.where(np.eye(self.d, dtype=bool), 0.0, problem.latency)
        bandwidth = np.where(np.eye(self.d, dtype=bool), np.inf, problem.bandwidth)
        self.inputs: list[dict[int, list[list[float]]]] = [{} for _ in range(self.n)]
        self.readers: list[int] = [0] * self.n
        rows = zip(problem.edges.tolist(), problem.bytes.tolist(), strict=True)
        for (source, target), size in rows:
            cost = latency + size / bandwidth
            known = self.inputs[target].get(source)
            cost = cost if known is None else np.maximum(cost, known)
            self.inputs[target][source] = cost.tolist()
            self.readers[source] |= 1 << target
        self.need = [sum(1 << u for u in of_node) for of_node in self.inputs]
        self.team = flat.team.tolist()
        self.mates = [
            sum(1 << u for u in range(self.n) if self.team[u] == self.team[v] >= 0)
            for v in range(self.n)
        ]
        need, room = flat.memory
        self.memory, self.room = need.tolist(), tuple(room.tolist())
        self.least = [min(row) for row in self.cost]
        self.ahead = self._remaining_bounds(problem)
        self.twins = _twins(problem, latency, bandwidth)
        self.order: list[tuple[int, int]] = []

    def width(self, states: int) -> int:
        """Return the number of states to keep in a layer; a state's work grows with the square of
        the choices.
        """
        kinds = sum(not same for same in self.twins)
        choices = self.n * min(self.d, kinds + 2)
        return max(1, int(states * CHOICES**2 / self.n / max(CHOICES, choices) ** 2))

    def run(self, width: int) -> float:
        """The bound on every assignment; a better complete schedule is left in `order`."""
        layer = [_SearchState(0, 0, (0.0,) * self.d, self.room, (), 0.0, None, (-1, -1))]
        dropped = np.inf
        for _ in range(self.n):
            found: dict[tuple[int, tuple[int, ...]], list[_SearchState]] = {}
            for state in layer:
                self._expand(state, found)
            layer = [state for states in found.values() for state in states]
            if len(layer) > width:
                layer.sort(key=lambda state: state.bound)
                dropped = min(dropped, layer[width].bound)
                del layer[width:]
        if not layer:
            return float(min(self.best, dropped))
        last = min(layer, key=lambda state: state.bound)
        step = last
        while step.before is not None:
            self.order.append(step.placed)
            step = step.before
        self.order.reverse()
        return float(min(last.bound, dropped))

    def _expand(
        self, state: _SearchState, found: dict[tuple[int, tuple[int, ...]], list[_SearchState]]
    ) -> None:
        at = {node: (device, done) for node, device, done in state.live}
        for node in range(self.n):
            if state.nodes >> node & 1 or self.need[node] & ~state.nodes:
                continue
            home = -1
            for mate in range(self.n) if self.mates[node] & state.nodes else ():
                if self.mates[node] >> mate & 1 and mate in at:
                    home = at[mate][0]
                    break
            for device in range(self.d) if home < 0 else (home,):
                if self.cost[node][device] == np.inf:
                    continue
                need = self.memory[node] if home < 0 else 0.0
                if need > 0.0 and state.room[device] < need:
                    continue
                if any(not state.begun >> twin & 1 for twin in self.twins[device]):
                    continue  # the same as on the twin, which comes first
                self._add(state, at, node, device, need, found)

    def _add(
        self,
        state: _SearchState,
        at: dict[int, tuple[int, float]],
        node: int,
        device: int,
        need: float,
        found: dict[tuple[int, tuple[int, ...]], list[_SearchState]],
    ) -> None:
        begin = state.free[device]
        for source, seconds in self.inputs[node].items():
            where, done = at[source]
            begin = max(begin, done + seconds[where][device])
        end = begin + self.cost[node][device]
        bound = max(state.bound, end + self.ahead[node][device])
        if bound >= self.best * (1 - SLACK):
            return
        nodes = state.nodes | 1 << node
        free = (*state.free[:device], end, *state.free[device + 1 :])
        rest = sum(self.least[v] for v in range(self.n) if not nodes >> v & 1)
        bound = max(bound, (sum(free) + rest) / self.d)
        live = tuple(
            entry
            for entry in sorted((*state.live, (node, device, end)))
            if (self.readers[entry[0]] | self.mates[entry[0]]) & ~nodes
        )
        bound = max(bound, self._ready_bound(nodes, free, live))
        if bound >= self.best * (1 - SLACK):
            return
        room = (*state.room[:device], state.room[device] - need, *state.room[device + 1 :])
        begun = state.begun | 1 << device
        made = _SearchState(nodes, begun, free, room, live, bound, state, (node, device))
        rivals = found.setdefault((nodes, (begun, *(entry[1] for entry in live))), [])
        if not any(_dominates(rival, made) for rival in rivals):
            rivals[:] = [rival for rival in rivals if not _dominates(made, rival)]
            rivals.append(made)

    def _ready_bound(self, nodes: int, free: tuple[float, ...], live: Live) -> float:
        """No ready node finishes the step sooner, wherever it goes."""
        at = {node: (device, done) for node, device, done in live}
        bound = 0.0
        for node in range(self.n):
            if nodes >> node & 1 or self.need[node] & ~nodes:
                continue
            soonest = np.inf
            for device in range(self.d):
                begin = free[device]
                for source, seconds in self.inputs[node].items():
                    where, done = at[source]
                    begin = max(begin, done + seconds[where][device])
                soonest = min(soonest, begin + self.cost[node][device] + self.ahead[node][device])
            bound = max(bound, soonest)
        return bound

    def _remaining_bounds(self, problem: Problem) -> list[list[float]]:
        """Seconds from the end of a node on a device to the end of the step, at the very best."""
        ahead = np.zeros((self.n, self.d))
        for node in reversed(problem.topological.tolist()):
            way = ahead[node] + np.array(self.cost[node])
            for source, seconds in self.inputs[node].items():
                ahead[source] = np.maximum(ahead[source], (np.array(seconds) + way).min(axis=1))
        table: list[list[float]] = ahead.tolist()
        return table


def _dominates(one: _SearchState, other: _SearchState) -> bool:
    """Return True if all that can follow `other` can follow `one`, no later."""
    if any(a > b for a, b in zip(one.free, other.free, strict=True)):
        return False
    if any(a[2] > b[2] for a, b in zip(one.live, other.live, strict=True)):
        return False
    return all(a >= b for a, b in zip(one.room, other.room, strict=True))


def _twins(problem: Problem, latency: Floats, bandwidth: Floats) -> list[list[int]]:
    """Return for each device the lower ones that are equal to it in every cost."""
    twins: list[list[int]] = []
    for at in range(problem.devices):
        same = []
        for other in range(at):
            swap = np.arange(problem.devices)
            swap[[at, other]] = other, at
            alike = np.array_equal(problem.compute[:, at], problem.compute[:, other])
            alike = alike and problem.capacity[at] == problem.capacity[other]
            for matrix in (latency, bandwidth):
                alike = alike and np.array_equal(matrix, matrix[swap][:, swap])
            if alike:
                same.append(other)
        twins.append(same)
    return twins


register_placer("exact", Exact())
