"""The event loop as machine code against the one in plain Python: the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.placement import Problem
from graphflow.placement.placers.construction.evaluator import Evaluator, upward_ranks
from graphflow.placement.simulation import native_execution
from graphflow.placement.simulation.execution_result import ExecutionResult
from graphflow.placement.simulation.memory_use import peak_memory
from graphflow.placement.simulation.simulator import execute, schedule
from tests.placement.instances import problems


def any_map(problem: Problem, seed: int) -> list[int]:
    """A device for each node, of those that it may use."""
    rng = np.random.default_rng(seed)
    return [int(rng.choice(np.flatnonzero(row))) for row in problem.allowed]


def results(problem: Problem, seed: int) -> list[ExecutionResult]:
    """A device map run by ranks, by build order and in the order of the first of these runs."""
    device = any_map(problem, seed)
    ranks = [-rank for rank in upward_ranks(problem, device)]
    first = schedule(problem, device, ranks)
    place = [0.0] * problem.nodes
    for turn, node in enumerate(first.order):
        place[node] = float(turn)
    natural = schedule(problem, device, Evaluator(problem).natural)
    return [first, natural, execute(problem, device, place, first.order)]


@given(problem=problems(max_nodes=24), seed=st.integers(0, 99))
def test_machine_code_simulates_to_the_bits_of_python(problem: Problem, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_execution, "NATIVE_ABOVE", 10**9)
        expected = results(problem, seed)
        peaks = [peak_memory(problem, run).tolist() for run in expected]
        patch.setattr(native_execution, "NATIVE_ABOVE", -1)
        assert results(problem, seed) == expected
        assert [peak_memory(problem, run).tolist() for run in expected] == peaks


@given(problem=problems(max_nodes=24))
def test_slots_are_the_tensors_of_each_node_in_order_of_their_first_edge(
    problem: Problem,
) -> None:
    expected: list[dict[int, tuple[float, set[int]]]] = [{} for _ in range(problem.nodes)]
    for (source, target), tensor, size in zip(
        problem.edges.tolist(), problem.tensor.tolist(), problem.bytes.tolist(), strict=True
    ):
        expected[source].setdefault(tensor, (size, set()))[1].add(target)
    assert problem.outputs == tuple(
        tuple((tensor, size, tuple(sorted(to))) for tensor, (size, to) in made.items())
        for made in expected
    )
    reads = [reader for made in expected for _, to in made.values() for reader in to]
    assert problem.input_counts == tuple(reads.count(node) for node in range(problem.nodes))


def with_shared_links(problem: Problem, seed: int) -> Problem:
    """The problem with links that some pairs of its devices share."""
    rng, d = np.random.default_rng(seed), problem.devices
    routes = [
        (a, b, link)
        for a in range(d)
        for b in range(d)
        for link in range(2)
        if a != b and rng.random() < 0.5
    ]
    return replace(
        problem, contention=True, shared=rng.choice([0.5, 1.0, 3.0], 2),
        routes=np.array(routes, dtype=np.int64).reshape(-1, 3),
    )  # fmt: skip


@given(problem=problems(max_nodes=24), seed=st.integers(0, 999))
def test_machine_code_shares_links_to_the_bits_of_python(problem: Problem, seed: int) -> None:
    shared = with_shared_links(problem, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_execution, "NATIVE_ABOVE", 10**9)
        expected = results(shared, seed)
        patch.setattr(native_execution, "NATIVE_ABOVE", -1)
        assert results(shared, seed) == expected
