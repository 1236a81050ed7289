"""Placements built from the sources: as plain Python and compiled, to the same answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from graphflow.placement import Problem
from graphflow.placement.placers.construction.coarsening import Units, levels
from graphflow.placement.placers.construction.earliest_finish import earliest_finish
from graphflow.placement.placers.greedy import mean_ranks
from graphflow.placement.placers.loops import dispatch
from tests.placement.instances import problems


def place_at_every_grain(problem: Problem) -> list[tuple[list[int], list[int]]]:
    """Placements at every grain, critical path first and in build order."""
    orders = ([-rank for rank in mean_ranks(problem)], [float(v) for v in range(problem.nodes)])
    return [earliest_finish(units, order) for units in levels(problem) for order in orders]


@given(problem=problems(capacity=True, max_nodes=24))
def test_compiled_it_places_as_plain_python_does(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_loaded", set())
        patch.setattr(dispatch, "COMPILE_ABOVE", 10**12)
        expected = place_at_every_grain(problem)
        patch.setattr(dispatch, "COMPILE_ABOVE", -1)
        assert place_at_every_grain(problem) == expected


@given(problem=problems(max_nodes=24))
def test_units_share_a_device_and_the_order_is_topological(problem: Problem) -> None:
    for device, order in place_at_every_grain(problem):
        place = {node: turn for turn, node in enumerate(order)}
        assert sorted(order) == list(range(problem.nodes))
        assert all(place[a] < place[b] for a, b in problem.edges.tolist())
        assert all(problem.allowed[node, at] for node, at in enumerate(device))
        for group in set(problem.groups.tolist()) - {-1}:
            assert len({device[v] for v in np.flatnonzero(problem.groups == group)}) == 1


def test_a_node_goes_where_it_finishes_first() -> None:
    # Two independent nodes: the second one finds the first device taken.
    problem = Problem(np.array([[3.0, 4.0], [3.0, 4.0]]), np.zeros((0, 2), int), np.zeros(0))
    device, order = earliest_finish(Units(problem, np.arange(2)), [0.0, 1.0])
    assert (device, order) == ([0, 1], [0, 1])


def test_a_full_device_is_left_out_unless_all_are_full() -> None:
    compute = np.array([[1.0, 9.0], [1.0, 9.0]])
    problem = Problem(
        compute, np.zeros((0, 2), int), np.zeros(0), memory=np.array([4.0, 4.0]),
        capacity=np.array([5.0, 5.0]),
    )  # fmt: skip
    device, _ = earliest_finish(Units(problem, np.arange(2)), [0.0, 1.0])
    assert device == [0, 1]
