"""Large fetched tensors are computed in memory that the caller owns; others are copied."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.program import direct_results
from graphflow.runtime.program.direct_results import MIN_BYTES, find_direct_results
from graphflow.runtime.program.span_recorder import Span
from tests.properties.random_graphs import has_same_bits, random_case, reference
from tests.runtime.programs import compile_program, initial_state, make_partition

SIZE = MIN_BYTES // 4


def _direct(*fetches: gf.Tensor) -> list[str]:
    """Return the names of the fetches that are computed in memory of the caller."""
    part = make_partition(*fetches)
    found = find_direct_results(part, plan_layout(part, {}))
    return [name for name, tensor in part.fetches.items() if tensor in found]


def _x(size: int = SIZE) -> gf.Tensor:
    return gf.placeholder("float32", (size,), name="x")


@pytest.mark.parametrize("build, found", [
    (lambda: _x() + 1.0, ["0"]),
    (lambda: _x(SIZE - 1) + 1.0, []),  # a copy takes less
    (lambda: gf.variable(np.zeros(SIZE, "float32"), name="v"), []),
    (lambda: gf.reshape(_x() + 1.0, (2, -1)), []),  # a view of what is computed
])  # fmt: skip
def test_large_results_that_are_computed_are_direct(
    build: Callable[[], gf.Tensor], found: list[str]
) -> None:
    assert _direct(build()) == found


def test_fetches_that_share_memory_are_copied() -> None:
    y = _x() + 1.0
    assert _direct(y, gf.reshape(y, (2, -1))) == []
    with gf.Session() as session:
        once, again, turned = session.run([y, y, gf.reshape(y, (2, -1))], {"x": np.zeros(SIZE)})
    once.fill(7)
    assert again.max() == turned.max() == 1


def test_results_of_earlier_steps_stay_as_they_are() -> None:
    y = gf.tanh(_x()) * 2.0
    total = gf.sum(y)
    with gf.Session() as session:
        first, its_sum = session.run([y, total], {"x": np.full(SIZE, 0.5, "float32")})
        kept = first.copy()
        second, _ = session.run([y, total], {"x": np.zeros(SIZE, "float32")})
        second.fill(np.nan)
        third, its_sum_again = session.run([y, total], {"x": np.full(SIZE, 0.5, "float32")})
    assert has_same_bits(first, kept) and has_same_bits(third, kept)
    assert its_sum == its_sum_again


def test_a_result_that_a_variable_takes_over_is_not_shared_with_it() -> None:
    v = gf.variable(np.zeros(SIZE, "float32"), name="v")
    y = v + 1.0
    with gf.Session() as session:
        for step in range(1, 4):
            result, _ = session.run([y, gf.assign(v, y)])
            assert result.min() == result.max() == step
            result.fill(99)


def test_a_traced_step_gives_one_span_for_a_direct_result() -> None:
    part = make_partition(gf.tanh(_x()))
    spans: list[Span] = []
    compile_program(part).run({"x": np.zeros(SIZE, "float32")}, 1, 0, spans)
    assert [name for _, name, _, _ in spans] == ["x", part.graph.names[part.fetches["0"].node]]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_direct_results_of_any_size_have_the_bits_of_copied_ones(seed: int) -> None:
    case = random_case(seed)
    part = make_partition(*case.fetches)
    state = initial_state(part)
    expected = reference(case, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_results, "MIN_BYTES", 1)
        for step, feeds in enumerate(map(case.feeds, range(2))):
            named = {case.graph.names.get(t.node, "unused"): a for t, a in feeds.items()}
            batch = next(a.shape[0] for a in feeds.values() if a.ndim)
            program = compile_program(part, state, {"batch": batch})
            results = program.compute(named, step + 1, step)
            kept = {name: array.copy() for name, array in results.items()}
            for array in results.values():
                array.fill(0)
            program.commit()
            for name, array in kept.items():
                assert has_same_bits(array, expected.fetched[step][int(name)]), (seed, step, name)
    for name, value in expected.variables.items():
        assert has_same_bits(state[name], value)
