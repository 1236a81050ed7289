"""Pipeline splits: which device holds which stage, so that the busiest one is least busy.

    split = split_stages(problem, stages=6, hosts=[6])

A steady pipeline takes a sample per `max_load` seconds: every accelerator spends its nodes'
seconds, those to fetch each tensor from the host that it reads from elsewhere (once), and those to
hand each of its tensors that is read elsewhere to the host (once). Hosts spend only their nodes'.
Forward and backward nodes add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError, ProblemError
from graphflow.placement.problems.arrays import array_of
from graphflow.placement.problems.problem import Floats, Ints, Problem
from graphflow.placement.stages.bounds import closure_bound, cover_bound, fluid_bound
from graphflow.placement.stages.contiguous import (
    best_cuts,
    best_ideals,
    ideals_of,
    items_of,
    orders,
)
from graphflow.placement.stages.local_search import Anneal, anneal_split, neighbourhoods
from graphflow.placement.stages.memory import find_fit
from graphflow.placement.stages.units import StageUnits, stage_units

ANNEALS = (
    (Anneal(0.4, 2, 24), "contiguous"), (Anneal(0.4, 2, 60), "contiguous"),
    (Anneal(0.02, 4, 60), "contiguous"), (Anneal(0.4, 2, 24), "contiguous"),
    (Anneal(0.1, 4, 24), "contiguous"), (Anneal(0.02, 2, 24), "best"),
    (Anneal(0.005, 4, 24), "best"), (Anneal(0.002, 6, 24), "best"),
    (Anneal(0.02, 2, 24), "second"), (Anneal(0.005, 4, 24), "last"),
)  # fmt: skip
"""Anneals that a budget is shared among, and where each starts: from the best contiguous split, the
best so far, the second best of the hot ones, or the one before. Hot ones with a soft norm cross
between balanced splits; cold ones with a hard norm settle, and do so twice, because the best may
lie in a dead end."""

PAIR_STEPS = 2e9
"""Steps that the dynamic program over all ideals may take: a few seconds."""
SMALL = 50_000
"""Moves per unit that no anneal goes beyond."""
AGREED = 3
"""Anneals that come to the same best max load are enough; twice as many if that is the first."""
PROBE = 20_000
"""Moves by which the pace is judged where a clock limits the search."""
OPTIMAL = 1e-6
"""Share above the bound that counts as reached."""


@dataclass(frozen=True, eq=False)
class Split:
    """An answer of `split_stages`.

    Args:
        device: (n,) device of each node.
        loads: (d,) seconds per sample that each device of the problem is busy.
        bound: seconds that no split's max load can be below; see `stage_bound`.
        contiguous: whether no path of forward nodes leaves an accelerator and comes back to it.
        tried: what was tried, and the max load it reached.
        reproducible: whether the same arguments give it again; not if a clock was given.
    """

    device: Ints
    loads: Floats
    bound: float
    contiguous: bool
    tried: tuple[tuple[str, float], ...]
    reproducible: bool = True

    @property
    def max_load(self) -> float:
        """Seconds per sample of the busiest device."""
        return float(self.loads.max(initial=0.0))

    @property
    def optimal(self) -> bool:
        """Whether nothing better exists."""
        return self.gap <= OPTIMAL

    @property
    def gap(self) -> float:
        """How much better something else might be, as a share of the bound."""
        return self.max_load / self.bound - 1.0 if self.bound > 0 else 0.0


@checks_arguments(PlacementError)
def split_stages(
    problem: Problem,
    stages: int | Sequence[int],
    objective: str = "max_load",
    *,
    hosts: Sequence[int] = (),
    backward: ArrayLike | None = None,
    budget: int = 20_000_000,
    pivots: int = 12_000,
    ideals: int = 1_500,
    seed: int = 0,
    seconds: float | None = None,
) -> Split:
    """Split a problem into pipeline stages with the least max load that was found.

    The best contiguous split (over all ideals where there are few, else over some topological
    orders), then annealing over any sets, then neighbourhoods of the busiest device searched whole
    by HiGHS, until the bound is reached. Groups stay together and capacities hold. The same
    arguments give the same answer, unless `seconds` are given.

    Args:
        problem: `bytes` over `bandwidth` (plus `latency`) to and from the first host price a
            transfer; without hosts, the slowest link to another stage does.
        stages: devices that hold a stage, or how many (the first that are not hosts).
        objective: "max_load"; PipeDream's planner with replication is `pipedream_plan`.
        hosts: devices that hold nodes too but pay for no transfer.
        backward: (n,) whether a node belongs to the backward pass; default none. Only decides what
            contiguous means.
        budget: moves to evaluate while annealing, about 0.5 µs each; 0: contiguous splits only.
        pivots: steps of HiGHS's simplex method, about 0.3 ms each, a quarter of them for
            neighbourhoods and the rest for the dearest bound.
        ideals: up to how many of them the dynamic program runs over all; fewer on large graphs.
        seed: of the annealing.
        seconds: after which nothing more is tried; contiguous splits and quick bounds are made in
            any case. The answer depends on how busy the machine is.

    Raises:
        PlacementError: a setting without sense.
        ProblemError: a node has no device among these.
        MemoryLimitError: no split that fits was found.

    Source: Tarnawski et al., NeurIPS 2020 (objective, dynamic programs).
    """
    if objective != "max_load":
        raise PlacementError(
            f"objective is {objective!r}; 'max_load' is the one there is "
            "(replication: pipedream_plan)"
        )
    whole = {"budget": budget, "pivots": pivots, "ideals": ideals, "seed": seed}
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlacementError(f"{name} must be an integer and must not be negative: {value!r}")
    if seconds is not None and (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds < np.inf
    ):
        raise PlacementError(f"seconds must be a finite number >= 0, not {seconds!r}")
    deadline = None if seconds is None else monotonic() + seconds
    host, chosen = _devices(problem, stages, hosts)
    flags = np.zeros(problem.nodes, bool) if backward is None else _flags(backward)
    if flags.shape != (problem.nodes,) or flags.dtype.kind not in "bi":
        raise ProblemError(
            f"backward has shape {flags.shape} and {flags.dtype}; expected ({problem.nodes},) bools"
        )
    flags = flags.astype(bool)
    units = stage_units(problem, chosen, host)
    homeless = np.flatnonzero(~np.isfinite(units.compute).any(axis=1))
    if len(homeless):
        node = int(np.flatnonzero(units.unit == homeless[0])[0])
        raise ProblemError(
            f"node {node} (with its group) can run on none of devices {chosen.tolist()}; "
            "add a host or another stage"
        )
    if not problem.nodes:
        return Split(np.zeros(0, np.int64), np.zeros(problem.devices), 0.0, True, ())
    tried = _contiguous_splits(problem, units, flags, ideals)
    if not tried:
        tried["by memory"] = find_fit(units)
    bound = closure_bound(units, fluid_bound(units))
    search = _SplitSearch(units, tried, bound, deadline)
    if budget:
        search.anneal(budget, seed)
        search.neighbourhoods(pivots // 4, seed)
    values = {name: units.max_load(where) for name, where in tried.items()}
    best = min(values, key=lambda name: values[name])
    if search.wanted:
        bound = cover_bound(
            units, bound, values[best], tried.values(), 3 * pivots // 4, search.left
        )
    device: Ints = chosen[tried[best][units.unit]]
    return Split(
        device,
        stage_loads(problem, device, hosts=hosts, stages=stages),
        values[best] if values[best] <= bound * (1 + OPTIMAL) else bound,
        is_contiguous(problem, device, flags, hosts),
        tuple(values.items()),
        seconds is None,
    )


def _flags(backward: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(backward)
    except ValueError as error:
        raise ProblemError(f"backward is no array of bools: {error}") from None


def stage_loads(
    problem: Problem,
    device: ArrayLike,
    *,
    stages: int | Sequence[int],
    hosts: Sequence[int] = (),
) -> Floats:
    """(d,) seconds per sample that each device is busy under an assignment; see `split_stages`.

    Raises:
        PlacementError: a node lies on a device that is neither a stage nor a host.
    """
    host, chosen = _devices(problem, stages, hosts)
    column = np.full(problem.devices, -1, dtype=np.int64)
    column[chosen] = np.arange(len(chosen))
    homes = array_of("device", device, np.int64, 1)
    if len(homes) != problem.nodes:
        raise ProblemError(
            f"device has {len(homes)} entries; the problem has {problem.nodes} nodes"
        )
    known = (homes >= 0) & (homes < problem.devices)
    where = np.where(known, column[np.where(known, homes, 0)], -1)
    if (where < 0).any():
        node = int(np.flatnonzero(where < 0)[0])
        raise PlacementError(f"node {node} lies on a device that is neither a stage nor a host")
    alone = Problem(
        compute=problem.compute, edges=problem.edges, bytes=problem.bytes, tensor=problem.tensor,
        latency=problem.latency, bandwidth=problem.bandwidth,
    )  # fmt: skip
    loads = np.zeros(problem.devices)
    loads[chosen] = stage_units(alone, chosen, host).loads(where)
    return loads


def is_contiguous(
    problem: Problem, device: Ints, backward: NDArray[np.bool_], hosts: Sequence[int] = ()
) -> bool:
    """Return True if no path of forward nodes leaves a device that is no host and comes back to
    it.
    """
    left: list[set[int]] = [set() for _ in range(problem.nodes)]
    before: list[list[int]] = [[] for _ in range(problem.nodes)]
    for source, target in problem.edges.tolist():
        if not backward[source] and not backward[target]:
            before[target].append(source)
    for node in problem.topological.tolist():
        home = int(device[node])
        for source in before[node]:
            left[node] |= left[source]
            if device[source] != home:
                left[node].add(int(device[source]))
        if home in left[node] and home not in hosts:
            return False
    return True


def _devices(
    problem: Problem, stages: int | Sequence[int], hosts: Sequence[int]
) -> tuple[Ints, Ints]:
    """The hosts, and all devices that may hold nodes."""
    if not isinstance(problem, Problem):
        raise PlacementError(f"stages are split of a Problem, not of {type(problem).__name__}")
    host = sorted(set(_indices("hosts", hosts)))
    free = [p for p in range(problem.devices) if p not in host and p != problem.client]
    if type(stages) is int:
        if not 0 < stages <= len(free):
            raise PlacementError(
                f"{stages} stages asked; {len(free)} of {problem.devices} devices can hold one"
            )
        chosen = free[:stages]
    else:
        chosen = _indices("stages", stages)
    wrong = [p for p in [*chosen, *host] if not 0 <= p < problem.devices]
    if wrong or not chosen or len(set(chosen)) < len(chosen) or set(chosen) & set(host):
        raise PlacementError(
            f"stages {chosen} and hosts {host} must be different devices of the "
            f"{problem.devices} there are"
        )
    return np.array(host, dtype=np.int64), np.array([*chosen, *host], dtype=np.int64)


def _indices(name: str, devices: int | Sequence[int]) -> list[int]:
    """Devices as they were given, checked."""
    found = None if isinstance(devices, str | int) else np.atleast_1d(_to_array(devices))
    if found is None or (found.size and found.dtype.kind not in "iu") or found.ndim != 1:
        raise PlacementError(f"{name} must be a list of device indices, not {devices!r}")
    return [int(p) for p in found]


def _to_array(devices: Sequence[int]) -> NDArray[Any]:
    try:
        return np.array(list(devices))
    except (TypeError, ValueError):
        return np.array([""])


def _contiguous_splits(
    problem: Problem, units: StageUnits, backward: NDArray[np.bool_], most: int
) -> dict[str, Ints]:
    items = items_of(problem, units, backward)
    words = items.count // 64 + 1
    pair = items.count + 2 * words * len(units.maker)
    most = min(most, int((2 * PAIR_STEPS / pair) ** 0.5))
    sets = ideals_of(items, most) if items.count < most else None
    found: dict[str, Ints] = {}
    if sets is not None:
        split = best_ideals(units, items, sets)
        return {} if split is None else {"contiguous, all ideals": split}
    for name, order in orders(items).items():
        split = best_cuts(units, items, order)
        if split is not None:
            found[f"contiguous, {name}"] = split
    return found


class _SplitSearch:
    """The search that improves a split and adds every result to `tried`."""

    def __init__(
        self, units: StageUnits, tried: dict[str, Ints], bound: float, deadline: float | None
    ) -> None:
        self.units, self.tried = units, tried
        self.deadline = deadline
        self.bound = bound * (1 + OPTIMAL)
        self._pace = 0.0

    @property
    def left(self) -> float:
        """Seconds before the deadline."""
        return np.inf if self.deadline is None else self.deadline - monotonic()

    @property
    def best(self) -> Ints:
        """The best split so far."""
        return min(self.tried.values(), key=self.units.max_load)

    @property
    def wanted(self) -> bool:
        """Whether a better one may exist, and there is time to look for it."""
        alone = self.units.devices == 1 or self.units.count == 1
        return not alone and self.left > 0.0 and self.units.max_load(self.best) > self.bound

    def anneal(self, budget: int, seed: int) -> None:
        """Anneal from the best contiguous split, then from what came out."""
        start = last = self.best
        hot: list[Ints] = []
        share = min(max(1, budget // len(ANNEALS)), SMALL * self.units.count)
        for turn, (how, source) in enumerate(ANNEALS):
            steps = self._affordable(share)
            if not self.wanted or steps == 0:
                return
            if source == "contiguous":
                here = start
            elif source == "best":
                here = self.best
            else:
                here = last if source == "last" else sorted(hot, key=self.units.max_load)[1]
            last = anneal_split(self.units, here, steps, how, seed + turn, self.bound)
            if source == "contiguous":
                hot.append(last)
            self.tried[f"annealed {turn + 1}"] = last
            reached = self.units.max_load(self.best) * (1 + OPTIMAL)
            found = [w for name, w in self.tried.items() if name.startswith("annealed")]
            stuck = self.units.max_load(start) <= reached  # perhaps it only was too deep a valley
            if sum(self.units.max_load(w) <= reached for w in found) == AGREED * (1 + stuck):
                return

    def neighbourhoods(self, pivots: int, seed: int) -> None:
        """Search around the busiest device of the best split."""
        if not self.wanted:
            return
        found = neighbourhoods(self.units, self.best, pivots, seed, self.bound, self._times)
        for where in found:
            self.tried["neighbourhoods"] = where

    @property
    def _times(self) -> Iterator[float]:
        """Seconds that each further step may take."""
        while self.left > 0.0:
            yield self.left

    def _affordable(self, steps: int) -> int:
        """Return how many moves fit before the deadline, at the pace of a first few."""
        if self.deadline is None or not self.wanted:
            return steps
        if not self._pace:
            anneal_split(self.units, self.best, 1, ANNEALS[0][0], 0, self.bound)  # compiled
            begin = perf_counter()
            anneal_split(self.units, self.best, PROBE, ANNEALS[0][0], 0, self.bound)
            self._pace = max(perf_counter() - begin, 1e-6) / PROBE
        return max(0, min(steps, int(self.left / self._pace)))
