"""Problems: what they accept, refuse and derive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphflow.errors import PlacementError, ProblemError
from graphflow.placement import Assignment, Problem, place

CHAIN: dict[str, Any] = {
    "compute": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "edges": [[0, 1], [1, 2]],
    "bytes": [8.0, 8.0],
}
INF, NAN = float("inf"), float("nan")

BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "compute that is NaN",
        {"compute": [[1, NAN], [1, 1], [1, 1]]},
        r"compute\[0, 1\] = nan is NaN",
    ),
    ("compute that is negative", {"compute": [[1, 1], [-2, 1], [1, 1]]}, r"compute\[1, 0\] = -2"),
    ("bytes that are negative", {"bytes": [8.0, -1.0]}, r"bytes\[1\] = -1 is negative"),
    ("bytes that are infinite", {"bytes": [8.0, INF]}, r"bytes\[1\] = inf is infinite"),
    ("a latency that is NaN", {"latency": [[0, NAN], [0, 0]]}, r"latency\[0, 1\]"),
    ("devices without a connection", {"bandwidth": [[1, 0], [1, 1]]}, "not connected"),
    ("a negative capacity", {"capacity": [-1, 1]}, r"capacity\[0\] = -1"),
    ("memory that is infinite", {"memory": [1, INF, 1]}, r"memory\[1\] = inf"),
    ("outputs that are NaN", {"output_memory": [1, NAN, 1]}, r"output_memory\[1\] = nan"),
    ("a cycle", {"edges": [[0, 1], [1, 0]]}, "cycle: 0 -> 1 -> 0|cycle: 1 -> 0 -> 1"),
    ("an edge to itself", {"edges": [[0, 1], [2, 2]]}, "edge 1 leads from node 2 to itself"),
    ("an edge to nowhere", {"edges": [[0, 1], [1, 3]]}, r"edges\[1, 1\] = 3 is not a node"),
    ("edges of three columns", {"edges": [[0, 1, 2]]}, r"expected \(e, 2\)"),
    ("edges that are not whole", {"edges": [[0.5, 1.0]]}, "integers"),
    ("bytes of another length", {"bytes": [8.0]}, r"bytes has shape \(1,\)"),
    ("groups of another length", {"groups": [1]}, r"groups has shape \(1,\)"),
    ("a node to prefer that is not there", {"prefer": [-1, 7, -1]}, r"prefer\[1\] = 7"),
    ("a client that is not there", {"client": 5}, "client is 5; there are 2 devices"),
    ("a node without a device", {"compute": [[1, 1], [INF, INF], [1, 1]]}, "node 1 has no device"),
    (
        "a group that no device serves",
        {"compute": [[1, INF], [INF, 1], [1, 1]], "groups": [4, 4, -1]},
        r"group 4 has no device .*node 0: \[0\]; node 1: \[1\]",
    ),
    ("a tensor of two makers", {"tensor": [3, 3]}, "come from nodes 0 and 1"),
    ("no devices", {"compute": np.zeros((3, 0))}, "at least one device"),
    ("words for numbers", {"bytes": ["a", "b"]}, "bytes is not an array"),
]


@pytest.mark.parametrize(
    ("change", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_a_wrong_problem_is_refused_with_the_place_and_the_number(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProblemError, match=message):
        Problem(**{**CHAIN, **change})


def test_a_tensor_has_one_size() -> None:
    with pytest.raises(ProblemError, match="with 8 and 9 bytes"):
        Problem(np.ones((3, 1)), [[0, 1], [0, 2]], [8.0, 9.0], tensor=[5, 5])  # type: ignore[arg-type]


def test_an_error_carries_the_nodes_at_fault() -> None:
    with pytest.raises(PlacementError) as caught:
        Problem(**{**CHAIN, "compute": [[1, 1], [INF, INF], [INF, INF]]})
    assert caught.value.nodes == (1, 2)


def test_a_textbook_problem_needs_three_arrays() -> None:
    problem = Problem(**CHAIN)
    assert (problem.nodes, problem.devices) == (3, 2)
    assert problem.bandwidth[0, 1] == 1.0
    assert problem.tensor.tolist() == [0, 1]
    assert problem.topological.tolist() == [0, 1, 2]
    assert not problem.compute.flags.writeable


def test_an_empty_problem_is_a_problem() -> None:
    assert Problem(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0)).nodes == 0  # type: ignore[arg-type]


def test_topological_order_takes_the_lowest_index_first() -> None:
    problem = Problem(np.ones((4, 1)), np.array([[3, 1], [1, 0]]), np.zeros(2))
    assert problem.topological.tolist() == [2, 3, 1, 0]


def test_adjacency_lists_the_edges_of_a_node() -> None:
    problem = Problem(np.ones((3, 1)), np.array([[0, 2], [0, 1], [1, 2]]), np.zeros(3))
    assert problem.successors.edges_of(0).tolist() == [0, 1]
    assert problem.predecessors.edges_of(2).tolist() == [0, 2]
    assert problem.input_counts == (0, 1, 2)


def test_a_group_may_live_where_all_its_members_may() -> None:
    problem = Problem(
        np.array([[1, INF], [1, 1], [1, 1]]),
        np.zeros((0, 2), int),
        np.zeros(0),
        groups=np.array([0, 0, -1]),
    )
    assert problem.allowed.tolist() == [[True, False], [True, False], [True, True]]


@pytest.mark.parametrize(
    ("device", "order", "message"),
    [
        ([0, 0, 0], [0, 2, 1], "node 2 comes before its input, node 1"),
        ([0, 0, 9], [0, 1, 2], r"device\[2\] = 9 is not a device"),
        ([1, 0, 0], [0, 1, 2], "node 0 cannot run on device 1"),
        ([0, 1, 0], [0, 1, 2], "group 7 is torn"),
        ([0, 0], [0, 1], "places 2 nodes; the problem has 3"),
    ],
)
def test_an_assignment_that_breaks_a_rule_is_refused(
    device: list[int], order: list[int], message: str
) -> None:
    problem = Problem(**{**CHAIN, "compute": [[1, INF], [1, 1], [1, 1]], "groups": [-1, 7, 7]})
    with pytest.raises(ProblemError, match=message):
        Assignment(np.array(device), np.array(order)).validate(problem)


def test_an_order_names_every_node_once() -> None:
    with pytest.raises(ProblemError, match="exactly once"):
        Assignment(np.array([0, 0]), np.array([0, 0]))


def test_other_seconds_leave_what_follows_from_the_edges() -> None:
    problem = Problem(compute=np.ones((3, 2)), edges=[(0, 1), (1, 2)], bytes=[1.0, 2.0])
    slower = problem.with_compute(2 * problem.compute)
    assert slower.compute.tolist() == [[2.0, 2.0]] * 3
    assert slower.compute_rows == [[2.0, 2.0]] * 3
    assert slower.outputs is problem.outputs
    assert slower.topological is problem.topological


def test_other_seconds_may_not_free_a_node_or_be_wrong() -> None:
    problem = Problem(compute=[[1.0, np.inf]], edges=[], bytes=[])
    with pytest.raises(ProblemError, match="other devices"):
        problem.with_compute([[1.0, 1.0]])
    with pytest.raises(ProblemError, match="negative"):
        problem.with_compute([[-1.0, np.inf]])


def test_large_shuffled_graphs_are_put_in_the_same_order_by_machine_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphflow.placement.problems import problem as module

    rng = np.random.default_rng(3)
    ranks = np.sort(rng.integers(0, 300, (900, 2)), axis=1)
    edges = rng.permutation(300)[ranks[ranks[:, 0] < ranks[:, 1]]]
    compute, bytes_ = np.ones((300, 2)), np.zeros(len(edges))
    plain = Problem(compute, edges, bytes_).topological
    monkeypatch.setattr(module, "NATIVE_ABOVE", 0)
    assert np.array_equal(Problem(compute, edges, bytes_).topological, plain)
    with pytest.raises(ProblemError, match="cycle: 2 -> 1 -> 2"):
        Problem(np.ones((3, 1)), [(0, 1), (1, 2), (2, 1)], np.zeros(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client": "gpu"}, "client must be the index of a device, not 'gpu'"),
        ({"client": 0.5}, "client must be the index"),
        ({"shared": [1.0], "routes": [(0, 1)]}, "routes has shape"),
        ({"routes": "x"}, "routes must hold integers"),
        ({"compute": np.ones((3, 2)) * 1j}, "compute must hold numbers, not complex128"),
        ({"memory": [True, False, True]}, "memory must hold numbers, not bool"),
        ({"latency": [[0, np.inf], [0, 0]]}, r"latency\[0, 1\] = inf .* not connected"),
        ({"bandwidth": [[1, 1], [0, 1]]}, r"bandwidth\[1, 0\] = 0 .* not connected"),
        ({"compute": [[1, 1], [-1, 1], [1, 1]]}, r"compute\[1, 0\] = -1 is negative"),
        ({"compute": [[1, 1], [1, np.nan], [1, 1]]}, r"compute\[1, 1\] = nan is NaN"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "compute": np.ones((3, 2)), "edges": [(0, 1), (1, 2)], "bytes": [1.0, 1.0],
    }  # fmt: skip
    with pytest.raises(ProblemError, match=message):
        Problem(**(given | changes))


def test_only_problems_are_placed() -> None:
    with pytest.raises(PlacementError, match=r"place\(\) takes a Problem, not str"):
        place("x", "heft")  # type: ignore[arg-type]
