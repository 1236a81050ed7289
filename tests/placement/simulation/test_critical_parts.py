"""The parts that the end of a step waits for: they fill it, and only they lengthen it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.placement import Assignment, Problem, place, simulate
from graphflow.placement.simulation.critical_parts import critical_parts
from tests.placement.instances import problems


def test_a_path_goes_back_through_the_transfer_that_came_last() -> None:
    problem = Problem(
        compute=np.array([[2.0, 9.0], [9.0, 4.0], [9.0, 1.0]]),
        edges=np.array([[0, 2], [1, 2]]),
        bytes=np.array([3.0, 3.0]),
    )
    timeline = simulate(problem, Assignment(np.array([0, 1, 1]), np.array([0, 1, 2])))
    nodes, moves = critical_parts(problem, timeline)
    assert nodes == [2, 0] and [int(timeline.transfers[row]["node"]) for row in moves] == [0]


def test_a_transfer_waits_for_the_one_before_it_on_its_link() -> None:
    problem = Problem(
        compute=np.array([[1.0, 9.0], [1.0, 9.0], [9.0, 1.0], [9.0, 1.0]]),
        edges=np.array([[0, 2], [1, 3]]),
        bytes=np.array([10.0, 10.0]),
        contention=True,
    )
    timeline = simulate(problem, Assignment(np.array([0, 0, 1, 1]), np.arange(4)))
    nodes, moves = critical_parts(problem, timeline)
    assert nodes == [3, 0] and len(moves) == 2


def test_a_problem_without_nodes_has_no_path() -> None:
    problem = Problem(compute=np.zeros((0, 1)), edges=[], bytes=[])
    timeline = simulate(problem, Assignment(np.array([], int), np.array([], int)))
    assert critical_parts(problem, timeline) == ([], [])


@given(problems(), st.sampled_from(["greedy", "round_robin", "heft"]))
def test_the_parts_of_a_path_take_the_whole_step(problem: Problem, placer: str) -> None:
    timeline = simulate(problem, place(problem, placer))
    nodes, moves = critical_parts(problem, timeline)
    rows = timeline.transfers[moves]
    took = problem.compute[nodes, timeline.device[nodes]].sum()
    moved = (rows["finish"] - rows["start"]).sum()
    # Latencies of transfers that queue on one link overlap: they are counted once each.
    assert took + moved >= timeline.makespan * (1 - 1e-9)
    if len(moves) < 2:
        assert took + moved == pytest.approx(timeline.makespan)


@given(problems(), st.integers(0, 13))
def test_a_longer_part_of_the_path_lengthens_the_step_by_as_much(
    problem: Problem, which: int
) -> None:
    assignment = place(problem, "greedy")
    timeline = simulate(problem, assignment)
    nodes, _ = critical_parts(problem, timeline)
    if not nodes:
        return
    node, longer = nodes[which % len(nodes)], problem.compute.copy()
    longer[node] += 1e-3
    slower = simulate(problem.with_compute(longer), assignment)
    assert slower.makespan == pytest.approx(timeline.makespan + 1e-3)
