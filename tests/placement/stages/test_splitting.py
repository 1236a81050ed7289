"""Pipeline splits against brute force on tiny graphs, and PipeDream's recurrence against its cost.

The evaluator here is a second one, straight from the definition of the objective.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import MemoryLimitError, PlacementError, ProblemError
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems.problem import Problem
from graphflow.placement.stages import loops as stage_loops
from graphflow.placement.stages.bounds import closure_bound, cover_bound, fluid_bound
from graphflow.placement.stages.local_search import neighbourhoods
from graphflow.placement.stages.pipedream import Level, PipeStage, pipedream_plan
from graphflow.placement.stages.splitting import is_contiguous, split_stages, stage_loads
from graphflow.placement.stages.units import stage_units


def host_routed(rng: np.random.Generator, n: int, stages: int, capacity: float) -> Problem:
    """A random layered graph on equal accelerators and one host, the last device."""
    edges = [(u, v) for v in range(n) for u in range(v) if rng.random() < 0.35]
    cost = rng.integers(0, 4, n).astype(float)
    fast = rng.integers(0, 9, n).astype(float)
    return Problem(
        compute=np.column_stack([fast] * stages + [3 * fast]),
        edges=edges,
        bytes=[cost[u] for u, _ in edges],
        tensor=[u for u, _ in edges],
        memory=np.ones(n),
        capacity=[capacity] * stages + [np.inf],
        groups=np.where(np.arange(n) % 3 == 0, rng.integers(0, 3, n), -1),
    )


def defined_loads(problem: Problem, device: np.ndarray, host: int) -> np.ndarray:
    """Loads by the words of the definition."""
    loads = np.zeros(problem.devices)
    for node, p in enumerate(device.tolist()):
        loads[p] += problem.compute[node, p]
    price = {int(u): float(b) for (u, _), b in zip(problem.edges, problem.bytes, strict=True)}
    for u, seconds in price.items():
        readers = {int(device[v]) for s, v in problem.edges if s == u} - {int(device[u])}
        for p in [*readers, *([int(device[u])] if readers else [])]:
            loads[p] += seconds if p != host else 0.0
    return loads


def is_possible(problem: Problem, device: np.ndarray) -> bool:
    for p in range(problem.devices):
        if problem.memory[device == p].sum() > problem.capacity[p]:
            return False
    groups = problem.groups
    return all(len(set(device[groups == g].tolist())) == 1 for g in set(groups[groups >= 0]))


def least_max_load(problem: Problem, host: int, contiguous: bool) -> float:
    forward = np.zeros(problem.nodes, bool)
    least = np.inf
    for choice in product(range(problem.devices), repeat=problem.nodes):
        device = np.array(choice)
        if is_possible(problem, device) and not (
            contiguous and not is_contiguous(problem, device, forward)
        ):
            least = min(least, defined_loads(problem, device, host).max())
    return float(least)


@pytest.mark.parametrize("seed", range(6))
def test_annealing_finds_the_optimum_of_tiny_graphs(seed: int) -> None:
    problem = host_routed(np.random.default_rng(seed), 7, 2, capacity=4)
    split = split_stages(problem, 2, hosts=[2], budget=60_000, pivots=2_000)
    assert is_possible(problem, split.device)
    assert split.max_load == pytest.approx(least_max_load(problem, 2, contiguous=False))
    assert split.bound <= split.max_load + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_all_ideals_give_no_worse_than_the_best_convex_split_with_an_order(seed: int) -> None:
    problem = host_routed(np.random.default_rng(seed), 7, 3, capacity=9)
    loose = Problem(
        compute=problem.compute[:, :3], edges=problem.edges, bytes=problem.bytes,
        tensor=problem.tensor,
        bandwidth=np.ones((3, 3)),
    )  # fmt: skip
    ideals = split_stages(loose, 3, budget=0)
    chains = split_stages(loose, 3, budget=0, ideals=0)
    assert ideals.tried[0][0] == "contiguous, all ideals"
    assert ideals.contiguous
    assert ideals.max_load <= chains.max_load + 1e-9
    assert ideals.max_load == pytest.approx(least_ordered_load(loose))


def least_ordered_load(problem: Problem) -> float:
    """Over all splits whose edges never lead to an earlier device."""
    least = np.inf
    for choice in product(range(problem.devices), repeat=problem.nodes):
        device = np.array(choice)
        if (device[problem.edges[:, 0]] <= device[problem.edges[:, 1]]).all():
            least = min(least, defined_loads(problem, device, -1).max())
    return float(least)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 14), st.integers(1, 4))
def test_every_split_keeps_groups_and_memory_and_loads_are_as_defined(
    seed: int, n: int, stages: int
) -> None:
    problem = host_routed(np.random.default_rng(seed), n, stages, capacity=3)
    split = split_stages(problem, stages, hosts=[stages], budget=3_000, pivots=100)
    assert is_possible(problem, split.device)
    assert split.loads == pytest.approx(defined_loads(problem, split.device, stages))
    assert split.bound <= split.max_load + 1e-9
    assert split.max_load == pytest.approx(min(value for _, value in split.tried))


def test_the_same_arguments_give_the_same_split() -> None:
    problem = host_routed(np.random.default_rng(5), 30, 3, capacity=12)
    one, two = (split_stages(problem, 3, hosts=[3], budget=20_000, pivots=1_000) for _ in range(2))
    assert np.array_equal(one.device, two.device)


def test_a_backward_pass_on_its_forward_stages_is_contiguous() -> None:
    """Four layers forward and back, each with its backward node: two stages, cut in the middle."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    problem = Problem(
        compute=np.ones((8, 2)), edges=edges, bytes=np.full(7, 0.25),
        groups=[0, 1, 2, 3, 3, 2, 1, 0],
    )  # fmt: skip
    split = split_stages(problem, 2, backward=np.arange(8) >= 4, budget=0)
    assert split.device.tolist() in ([0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1, 1])
    assert split.contiguous
    assert split.max_load == pytest.approx(4.5)  # a tensor out and a tensor in, each


def test_a_tensor_read_twice_on_a_stage_is_paid_for_once() -> None:
    problem = Problem(
        compute=np.ones((3, 2)), edges=[(0, 1), (0, 2)], bytes=[2.0, 2.0], tensor=[0, 0]
    )
    assert stage_loads(problem, [0, 1, 1], stages=2).tolist() == [3.0, 4.0]


def test_memory_that_no_split_can_give_is_an_error_with_numbers() -> None:
    problem = Problem(compute=np.ones((3, 2)), edges=[], bytes=[], memory=[2.0, 2.0, 2.0],
                      capacity=[3.0, 2.0])  # fmt: skip
    with pytest.raises(MemoryLimitError, match=r"2 B \(node 2\) fits on no device .*1 B are left"):
        split_stages(problem, 2)
    with pytest.raises(MemoryLimitError, match=r"the roomiest has 1 B \(1 B missing\)"):
        split_stages(replace(problem, capacity=[1.0, 1.0]), 2)


def test_memory_that_fits_only_one_way_is_found() -> None:
    """Falling sizes first puts 5 with 4, and then nothing holds 3, 3 and 3."""
    sizes = [5.0, 4.0, 3.0, 3.0, 3.0]
    problem = Problem(compute=np.ones((5, 2)), edges=[(0, 4), (1, 4)], bytes=[1.0, 1.0],
                      memory=sizes, capacity=[9.0, 9.0])  # fmt: skip
    split = split_stages(problem, 2)
    used = np.bincount(split.device, weights=sizes)
    assert used.tolist() == [9.0, 9.0]
    with pytest.raises(MemoryLimitError, match="1 B are missing in all"):
        split_stages(replace(problem, capacity=[9.0, 8.0]), 2)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (3, {}, "3 stages asked"),
        ([0, 0], {}, "must be different devices"),
        (1, {"hosts": [7]}, "must be different devices"),
        (2, {"objective": "latency"}, "objective is 'latency'"),
        (2, {"budget": -1}, "must not be negative"),
        ("2", {}, "stages must be a list of device indices, not '2'"),
        ([0, 1.5], {}, "stages must be a list"),
        (1, {"hosts": ["a"]}, "hosts must be a list"),
        (2, {"pivots": 1.5}, "pivots must be an integer"),
        (2, {"seconds": "x"}, "seconds must be a finite number"),
    ],
)
def test_settings_without_sense_are_refused(
    stages: Any, options: dict[str, Any], message: str
) -> None:
    problem = Problem(compute=np.ones((2, 2)), edges=[(0, 1)], bytes=[1.0])
    with pytest.raises(PlacementError, match=message):
        split_stages(problem, stages, **options)


def test_loads_of_what_is_no_assignment_are_refused() -> None:
    problem = Problem(compute=np.ones((2, 2)), edges=[(0, 1)], bytes=[1.0])
    with pytest.raises(ProblemError, match="device has 1 entries; the problem has 2"):
        stage_loads(problem, [0], stages=2)
    with pytest.raises(PlacementError, match="node 1 lies on a device that is neither"):
        stage_loads(problem, [0, 7], stages=2)
    with pytest.raises(ProblemError, match=r"expected .2,. bools"):
        split_stages(problem, 2, backward=["no", "yes"])
    with pytest.raises(
        PlacementError, match=r"levels must hold Level\(workers, bandwidth\), not 5"
    ):
        pipedream_plan([1.0], [1.0], [1.0], [5])  # type: ignore[list-item]


def test_a_clock_ends_the_search_and_is_told() -> None:
    problem = host_routed(np.random.default_rng(5), 30, 3, capacity=12)
    split = split_stages(problem, 3, hosts=[3], seconds=0.0)
    assert not split.reproducible
    assert split.max_load <= split_stages(problem, 3, hosts=[3], budget=0, pivots=0).max_load
    assert not split_stages(problem, 3, hosts=[3], budget=10**9, seconds=0.05).reproducible


# Bounds and neighbourhoods --------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_no_bound_is_above_the_optimum(seed: int, n: int) -> None:
    problem = host_routed(np.random.default_rng(seed), n, 2, capacity=4)
    least = least_max_load(problem, 2, contiguous=False)
    units = stage_units(problem, np.arange(3), np.array([2]))
    fluid = fluid_bound(units)
    closure = closure_bound(units, fluid)
    cover = cover_bound(units, closure, 1.5 * least + 1.0, [], 2_000)
    assert fluid <= closure <= cover <= least * (1 + 1e-9) + 1e-9


def test_a_cover_bound_knows_that_five_equal_units_need_two_on_one_of_four() -> None:
    problem = Problem(compute=np.ones((5, 4)), edges=[(0, 1)], bytes=[0.0])
    units = stage_units(problem, np.arange(4), np.zeros(0, np.int64))
    assert fluid_bound(units) == pytest.approx(1.25)
    assert cover_bound(units, 1.25, 2.0, [], 5_000) == pytest.approx(2.0, rel=2e-3)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000))
def test_neighbourhoods_keep_what_fits_and_never_get_worse(seed: int) -> None:
    problem = host_routed(np.random.default_rng(seed), 14, 3, capacity=5)
    units = stage_units(problem, np.arange(4), np.array([3]))
    before = np.full(units.count, 3)
    for where in neighbourhoods(units, before, 400, seed, 0.0):
        assert units.fits(where)
        assert units.max_load(where) <= units.max_load(before) * (1 + 1e-12)
        before = where
    assert units.max_load(before) <= units.max_load(np.full(units.count, 3))


# PipeDream ------------------------------------------------------------------------------------


def enumerate_replications(layers: np.ndarray, i: int, j: int, levels: list[Level]) -> float:
    """Least seconds of layers i..j-1 on one machine of the last level, by enumeration."""
    if not levels:
        return float(layers[i:j, 0].sum())
    *below, level = levels
    least = np.inf
    for m in range(1, level.workers + 1):
        alone = max(
            enumerate_replications(layers, i, j, below),
            2 * (m - 1) * layers[i:j, 2].sum() / level.bandwidth,
        )
        if m == level.workers:
            least = min(least, alone / m)
    for s in range(i + 1, j):
        for m in range(1, level.workers):
            stage = max(
                enumerate_replications(layers, s, j, below),
                2 * (m - 1) * layers[s:j, 2].sum() / level.bandwidth,
            ) / m  # fmt: skip
            sent = 2 * layers[s - 1, 1] / level.bandwidth
            rest = enumerate_replications(
                layers, i, s, [*below, Level(level.workers - m, level.bandwidth)]
            )
            least = min(least, max(stage, sent, rest))
    return least


@pytest.mark.parametrize("seed", range(5))
def test_pipedream_agrees_with_enumeration_on_tiny_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = rng.integers(1, 20, (5, 3)).astype(float)
    levels = [Level(2, 8.0), Level(3, 2.0)]
    plan = pipedream_plan(*layers.T, levels)
    assert plan.seconds == pytest.approx(enumerate_replications(layers, 0, 5, levels))
    assert sum(stage.replicas for stage in plan.stages) == 3
    assert [s.start for s in plan.stages] == [0, *(s.stop for s in plan.stages[:-1])]
    assert plan.stages[-1].stop == 5


def test_light_weights_are_replicated_and_heavy_ones_are_not() -> None:
    """As in the paper: convolutions in data parallel, the large layers at the end on their own."""
    plan = pipedream_plan([6.0, 6.0, 4.0], [1.0, 1.0, 1.0], [0.1, 0.1, 90.0], [Level(4, 10.0)])
    assert plan.stages == (
        PipeStage(0, 2, 3, ()),
        PipeStage(2, 3, 1, ()),
    )
    assert plan.seconds == pytest.approx(4.0)


def test_pipedream_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ProblemError, match="expected the same"):
        pipedream_plan([1.0], [1.0, 2.0], [1.0], [Level(1, 1.0)])
    with pytest.raises(ProblemError, match="finite"):
        pipedream_plan([np.nan], [1.0], [1.0], [Level(1, 1.0)])
    with pytest.raises(PlacementError, match="levels is empty"):
        pipedream_plan([1.0], [1.0], [1.0], [])
    with pytest.raises(PlacementError, match="at least one worker"):
        pipedream_plan([1.0], [1.0], [1.0], [Level(0, 1.0)])


def test_annealing_makes_the_same_moves_in_python_and_as_machine_code() -> None:
    problem = host_routed(np.random.default_rng(7), 20, 3, capacity=9)
    units = stage_units(problem, np.arange(4), np.array([3]))
    d, tensors, n = units.devices, len(units.maker), units.count
    made = []
    for run in (stage_loops.anneal, native(stage_loops, "anneal")):
        where, best, load = np.full(n, 3), np.zeros(n, np.int64), np.zeros(d)
        room = [np.zeros(size, np.int64) for size in (tensors * d, tensors, 26, 26)]
        least = run(
            1_500, 0.4, 1e-5, 2, 24, 0.0, d, np.array([77]), best, where, load, np.zeros(d),
            *room, np.full(n, -1), *units.hypergraph,
        )  # fmt: skip
        made.append((least, best.tolist(), where.tolist(), load.tolist()))
    assert made[0] == made[1]
