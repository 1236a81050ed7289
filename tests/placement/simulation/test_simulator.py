"""The simulator: its rules on small cases by hand, its invariants on random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import PlacementError, ProblemError
from graphflow.placement import Assignment, Problem, Timeline, simulate
from graphflow.placement.placers.construction.evaluator import lower_bound
from graphflow.placement.placers.exact import Exact
from graphflow.placement.simulation.memory_use import peak_memory
from graphflow.placement.simulation.simulator import execute, schedule
from tests.placement.instances import problems, topcuoglu


def fan(contention: bool, shared: bool, capacity: float = np.inf) -> Problem:
    """Node 0 on device 0 feeds nodes 1 and 2 on device 1: 10 bytes at 1 byte/s, 2 s of latency."""
    return Problem(
        compute=np.array([[1.0, np.inf], [np.inf, 1.0], [np.inf, 1.0]]),
        edges=np.array([[0, 1], [0, 2]]),
        bytes=np.array([10.0, 10.0]),
        tensor=np.array([7, 7]) if shared else np.array([7, 8]),
        latency=np.full((2, 2), 2.0),
        memory=np.array([100.0, 0.0, 3.0]),
        output_memory=np.array([10.0, 1.0, 1.0]),
        capacity=np.array([capacity, capacity]),
        contention=contention,
    )


def run(problem: Problem, device: list[int], order: list[int] | None = None) -> Timeline:
    nodes = np.arange(problem.nodes) if order is None else np.array(order)
    return simulate(problem, Assignment(np.array(device), nodes))


def test_a_shared_tensor_travels_once() -> None:
    timeline = run(fan(contention=True, shared=True), [0, 1, 1])
    assert len(timeline.transfers) == 1
    (row,) = timeline.transfers
    assert (row["tensor"], row["node"], row["source"], row["target"]) == (7, 0, 0, 1)
    assert (row["start"], row["finish"], row["bytes"]) == (1.0, 13.0, 10.0)
    assert timeline.finish.tolist() == [1.0, 14.0, 15.0]
    assert timeline.traffic == {(0, 1): 10.0}


def test_links_without_contention_carry_everything_at_once() -> None:
    timeline = run(fan(contention=False, shared=False), [0, 1, 1])
    assert timeline.transfers["finish"].tolist() == [13.0, 13.0]


def test_contention_serialises_the_bytes_and_overlaps_the_latency() -> None:
    timeline = run(fan(contention=True, shared=False), [0, 1, 1])
    assert timeline.transfers["start"].tolist() == [1.0, 11.0]
    assert timeline.transfers["finish"].tolist() == [13.0, 23.0]
    assert timeline.makespan == 24.0


def test_nothing_travels_within_a_device() -> None:
    problem = Problem(np.ones((2, 2)), np.array([[0, 1]]), np.array([50.0]))
    assert run(problem, [1, 1]).makespan == 2.0
    assert run(problem, [0, 1]).makespan == 52.0


def test_each_device_follows_the_order_even_when_another_node_is_ready() -> None:
    # Node 1 waits for node 0 on the other device; node 2 could run at once but comes
    # later in the order.
    problem = Problem(np.ones((3, 2)), np.array([[0, 1]]), np.array([5.0]))
    assert run(problem, [0, 1, 1], [0, 1, 2]).finish.tolist() == [1.0, 7.0, 8.0]
    assert run(problem, [0, 1, 1], [2, 0, 1]).finish.tolist() == [1.0, 7.0, 1.0]


def test_memory_is_counted_by_liveness() -> None:
    timeline = run(fan(contention=True, shared=True), [0, 1, 1])
    # Device 0 holds the variable and the output until it is sent; device 1 the
    # variable, the copy and one output at a time, for neither output has a reader.
    assert timeline.peak_memory.tolist() == [110.0, 14.0]


def test_a_chain_holds_two_tensors_at_a_time() -> None:
    n = 6
    edges = np.stack([np.arange(n - 1), np.arange(1, n)], axis=1)
    problem = Problem(np.ones((n, 1)), edges, np.full(n - 1, 8.0), output_memory=np.full(n, 8.0))
    assert run(problem, [0] * n).peak_memory.tolist() == [16.0]


def test_nodes_that_cost_nothing_still_hold_their_memory() -> None:
    problem = Problem(
        np.zeros((3, 1)),
        np.array([[0, 1], [1, 2]]),
        np.ones(2),
        output_memory=np.array([4.0, 4.0, 4.0]),
    )
    assert run(problem, [0, 0, 0]).peak_memory.tolist() == [8.0]


def test_transient_memory_is_not_counted_where_it_is_not_given() -> None:
    problem = Problem(
        np.ones((2, 2)), np.array([[0, 1]]), np.array([50.0]), memory=np.array([1.0, 2.0])
    )
    assert run(problem, [0, 1]).peak_memory.tolist() == [1.0, 2.0]


def test_the_published_heft_schedule_ends_at_80() -> None:
    device = [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
    assert run(topcuoglu(), device, [0, 3, 2, 1, 4, 5, 8, 6, 7, 9]).makespan == pytest.approx(80.0)


def test_devices_and_idle_times_are_told() -> None:
    problem = Problem(np.ones((3, 2)), np.array([[0, 1]]), np.array([5.0]))
    timeline = run(problem, [0, 1, 1])
    assert timeline.devices == 2
    assert timeline.busy.tolist() == [1.0, 2.0]
    assert timeline.idle.tolist() == [7.0, 6.0]
    assert timeline.on(1).tolist() == [1, 2]


@st.composite
def draw_placed_problem(draw: st.DrawFn) -> tuple[Problem, list[int]]:
    problem = draw(problems())
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    home = {
        g: int(rng.choice(np.flatnonzero(problem.allowed[v])))
        for v, g in enumerate(problem.groups.tolist())
    }
    return problem, [
        home[g] if g >= 0 else int(rng.choice(np.flatnonzero(problem.allowed[v])))
        for v, g in enumerate(problem.groups.tolist())
    ]


@given(draw_placed_problem())
def test_no_device_does_two_things_at_once_and_every_input_arrives_first(
    case: tuple[Problem, list[int]],
) -> None:
    problem, device = case
    timeline = run(problem, device, problem.topological.tolist())
    for at in range(problem.devices):
        mine = timeline.on(at)
        assert np.all(timeline.start[mine[1:]] >= timeline.finish[mine[:-1]])
    arrived = {(row["tensor"], row["target"]): row["finish"] for row in timeline.transfers}
    assert len(arrived) == len(timeline.transfers)
    for (source, target), tensor in zip(
        problem.edges.tolist(), problem.tensor.tolist(), strict=True
    ):
        if device[source] == device[target]:
            assert timeline.start[target] >= timeline.finish[source]
        else:
            assert timeline.start[target] >= arrived[tensor, device[target]]
    assert timeline.makespan >= lower_bound(problem) - 1e-9
    assert timeline.makespan == max(timeline.finish.tolist())


@given(draw_placed_problem())
def test_a_link_under_contention_moves_one_tensor_at_a_time(
    case: tuple[Problem, list[int]],
) -> None:
    problem, device = case
    timeline = run(problem, device, problem.topological.tolist())
    for source in range(problem.devices):
        for target in range(problem.devices):
            on_link = timeline.transfers[
                (timeline.transfers["source"] == source) & (timeline.transfers["target"] == target)
            ]
            moved = on_link["start"] + on_link["bytes"] / problem.bandwidth[source, target]
            latency = problem.latency[source, target]
            assert np.allclose(on_link["finish"], moved + latency)
            if problem.contention:
                assert np.all(on_link["start"][1:] >= moved[:-1] - 1e-9)
            else:
                assert np.array_equal(on_link["start"], timeline.finish[on_link["node"]])


@given(draw_placed_problem(), st.integers(0, 2**32 - 1))
def test_simulating_the_order_of_a_schedule_gives_the_same_times(
    case: tuple[Problem, list[int]], seed: int
) -> None:
    problem, device = case
    made = schedule(
        problem, device, np.random.default_rng(seed).integers(0, 5, problem.nodes).tolist()
    )
    timeline = simulate(problem, made.assignment())
    assert timeline.start.tolist() == made.start
    assert timeline.makespan == made.makespan
    assert timeline.peak_memory.tolist() == peak_memory(problem, made).tolist()


@given(draw_placed_problem())
def test_peak_memory_is_at_least_what_is_alive_when_any_node_runs(
    case: tuple[Problem, list[int]],
) -> None:
    problem, device = case
    order = problem.topological.tolist()
    made = execute(problem, device, [float(order.index(v)) for v in range(problem.nodes)], order)
    peak = peak_memory(problem, made)
    assert problem.output_memory is not None
    for node in range(problem.nodes):
        at = device[node]
        inputs = {
            (tensor if device[source] != at else ("made", source)): (
                size if device[source] != at else problem.output_memory[source]
            )
            for (source, target), tensor, size in zip(
                problem.edges.tolist(), problem.tensor.tolist(), problem.bytes.tolist(), strict=True
            )
            if target == node
        }
        resident = problem.memory[np.array(device) == at].sum()
        assert peak[at] >= resident + problem.output_memory[node] + sum(inputs.values()) - 1e-9


def test_what_is_no_problem_or_no_assignment_is_told() -> None:
    problem = Problem(np.ones((2, 1)), np.zeros((0, 2), int), np.zeros(0))
    with pytest.raises(ProblemError, match="not Problem and list"):
        simulate(problem, [0, 0])  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="takes a Problem, not str"):
        Exact().prove("problem")  # type: ignore[arg-type]
