"""What fits nowhere: which nodes, how many bytes are missing, and errors that say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import MemoryLimitError, ProblemError
from graphflow.placement import Problem, place
from graphflow.placement.problems.infeasibility import shortages

INF = float("inf")


def problem(**changes: Any) -> Problem:
    given: dict[str, Any] = {
        "compute": np.ones((3, 2)),
        "edges": [[0, 1], [1, 2]],
        "bytes": [1.0, 1.0],
        "memory": [0.0, 60.0, 10.0],
        "output_memory": [5.0, 5.0, 5.0],
        "capacity": [100.0, 50.0],
    }
    return Problem(**(given | changes))


def test_where_everything_could_fit_nothing_is_short() -> None:
    assert shortages(problem()) == []
    assert shortages(problem(capacity=None)) == []


def test_a_node_that_exceeds_every_device_is_named_with_what_is_missing() -> None:
    (one,) = shortages(problem(memory=[0.0, 120.0, 10.0], capacity=[100.0, 90.0]))
    assert (one.nodes, one.need, one.room, one.device) == ((1,), 125.0, 100.0, 0)
    assert one.missing == 25.0


def test_a_pin_to_a_small_device_counts() -> None:
    compute = np.ones((3, 2))
    compute[1, 0] = INF
    (one,) = shortages(problem(compute=compute))
    assert (one.nodes, one.room, one.device, one.missing) == ((1,), 50.0, 1, 15.0)


def test_a_group_needs_room_for_all_that_stays_and_its_largest_output() -> None:
    (one,) = shortages(problem(groups=[-1, 4, 4], memory=[0.0, 60.0, 40.0]))
    assert one.nodes == (1, 2) and one.need == 105.0


def test_all_together_may_be_more_than_all_devices_hold() -> None:
    found = shortages(problem(memory=[40.0, 60.0, 60.0], capacity=[70.0, 65.0]))
    assert [each.device for each in found] == [None]
    assert found[0].missing == 25.0 and found[0].nodes == (1, 2, 0)


@pytest.mark.parametrize("placer", ["greedy", "auto", "heft", "local_search"])
def test_placers_say_which_nodes_cannot_fit_and_how_much_is_missing(placer: str) -> None:
    impossible = problem(memory=[0.0, 120.0, 10.0], capacity=[100.0, 90.0])
    with pytest.raises(MemoryLimitError) as caught:
        place(impossible, placer)
    assert "node 1 alone needs 125 B, and the roomiest device that it may use, 0, has 100 B" in str(
        caught.value
    )
    assert "(25 B missing)" in str(caught.value)


def test_a_plan_that_fits_nowhere_names_the_variable_its_line_and_what_is_missing() -> None:
    w = gf.variable(gf.init.zeros((1024, 1024)), name="huge")
    cluster = gf.Cluster.hypothetical(2, "t4", memory=1 << 20, network="10gbe")
    with pytest.raises(MemoryLimitError) as caught:
        gf.plan(gf.sum(w), cluster)
    text = str(caught.value)
    assert "variable 'huge' (made at" in text and "test_infeasibility.py:" in text
    assert "alone needs 8 MiB" in text or "alone needs 4 MiB" in text
    assert "MiB missing)" in text


def test_a_group_without_a_common_device_is_told_by_the_nodes_that_contradict() -> None:
    compute = np.ones((5, 3))
    compute[1, 0] = compute[3, 1] = compute[4, 2] = INF
    with pytest.raises(ProblemError) as caught:
        Problem(compute, [[0, 1]], [1.0], groups=[0, 0, 0, 0, 0])
    text = str(caught.value)
    assert "node 1: [1, 2]; node 3: [0, 2]; node 4: [0, 1]" in text
    assert caught.value.nodes == (1, 3, 4)
    compute[3] = [INF, 1.0, INF]
    compute[4] = [1.0, INF, INF]
    with pytest.raises(ProblemError, match=r"\(node 3: \[1\]; node 4: \[0\]\)"):
        Problem(compute, [[0, 1]], [1.0], groups=[0, 0, 0, 0, 0])


@given(st.integers(0, 2**32 - 1))
def test_what_is_short_is_short_for_every_device_map(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = problem(
        memory=rng.integers(0, 100, 3), output_memory=rng.integers(0, 50, 3),
        capacity=rng.integers(20, 150, 2),
    )  # fmt: skip
    fits = False
    for code in range(8):
        device = np.array([code >> i & 1 for i in range(3)])
        least = np.zeros(2)  # what stays, and the largest output
        for p in range(2):
            mine = device == p
            least[p] = made.memory[mine].sum()
            assert made.output_memory is not None
            least[p] += made.output_memory[mine].max(initial=0.0)
        fits = fits or bool(np.all(least <= made.capacity))
    if shortages(made):
        assert not fits
