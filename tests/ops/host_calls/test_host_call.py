"""Host calls: values, checks of what comes back, purity, gradients, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DifferentiationError, OpError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY
from graphflow.ops.host_calls.host_call import HostFunction
from graphflow.passes import optimize


def median(x: np.ndarray) -> np.ndarray:
    return np.median(x, axis=0)


def test_a_function_of_arrays_runs_inside_the_graph() -> None:
    x = gf.placeholder("float64", ("n", 3))
    y = gf.host_call(median, x * 2.0, spec=gf.spec("float64", (3,)), name="median") + 1.0
    value = np.random.default_rng(0).normal(size=(7, 3))
    with gf.Session() as session:
        have = session.run(y, {x: value})
    np.testing.assert_array_equal(have, np.median(value * 2.0, axis=0) + 1.0)


def test_several_results_and_symbolic_sizes() -> None:
    x = gf.placeholder("float32", ("n", 2))

    def both(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return a[::-1], np.argmax(a, axis=1)

    y, i = gf.host_call(
        both, x, spec=(gf.spec("float32", ("n", 2)), gf.spec("int64", (x.shape[0],)))
    )
    with gf.Session() as session:
        for n in (1, 3):
            a = np.random.default_rng(n).random((n, 2), "float32")
            have, where = session.run([y, i], {x: a})
            np.testing.assert_array_equal(have, a[::-1])
            np.testing.assert_array_equal(where, a.argmax(1))


def test_a_result_in_another_memory_order_is_taken_as_it_reads() -> None:
    x = gf.constant(np.arange(6.0).reshape(2, 3))
    y = gf.host_call(lambda a: a.T, x, spec=gf.spec("float64", (3, 2)))
    with gf.Session() as session:
        assert session.run(y).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_the_function_gets_is_its_own() -> None:
    kept: list[np.ndarray] = []

    def spoil(a: np.ndarray) -> np.ndarray:
        kept.append(a)
        a += 100.0
        return a

    x = gf.placeholder("float64", (2,))
    doubled = x * 2.0
    y = gf.host_call(spoil, doubled, spec=gf.spec("float64", (2,)))
    with gf.Session() as session:
        first = session.run([doubled, y], {x: [1.0, 2.0]})
        session.run([doubled, y], {x: [5.0, 6.0]})
    assert [a.tolist() for a in first] == [[2, 4], [102, 104]]
    assert [a.tolist() for a in kept] == [[102, 104], [110, 112]]


def test_calls_run_in_each_step_and_in_the_order_in_which_they_were_built() -> None:
    seen: list[int] = []

    def note(number: int) -> gf.Tensor:
        return gf.host_call(
            lambda: (seen.append(number), np.int64(number))[1], spec=gf.spec("int64")
        )

    calls = [note(i) for i in range(4)]
    with gf.Session() as session:
        for _ in range(2):
            session.run(calls[::-1])
    assert seen == [0, 1, 2, 3] * 2


def test_only_pure_calls_are_merged_and_folded() -> None:
    def three() -> np.ndarray:
        return np.asarray(3.0)

    counts = {}
    for pure in (False, True):
        pair = [gf.host_call(three, spec=gf.spec("float64"), pure=pure) for _ in range(2)]
        graph = optimize(gf.Graph(pair))
        counts[pure] = len(graph.of_op("host_call")) + len(graph.of_op("pure_host_call"))
    assert counts == {False: 2, True: 0}


def test_16_bit_floats_arrive_as_they_are() -> None:
    seen: list[Any] = []
    x = gf.constant(np.ones(3, "float16"))
    y = gf.host_call(lambda a: (seen.append(a.dtype), a)[1], x, spec=gf.spec("float16", (3,)))
    with gf.Session() as session:
        session.run(y)
    assert seen == [np.float16]


# Gradients --------------------------------------------------------------------------------------


def cube(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    return x**3 * n


def cube_back(g: np.ndarray, y: np.ndarray, x: np.ndarray, n: np.ndarray) -> np.ndarray:
    return g * 3 * x**2 * n


def test_another_function_gives_the_gradient() -> None:
    x, n = gf.placeholder("float64", (3,)), gf.placeholder("int64", ())
    y = gf.host_call(cube, x, n, spec=gf.spec("float64", (3,)), vjp=cube_back)
    (slope,) = gf.gradients(gf.sum(y * y), [x])
    (have,) = evaluate([slope], {x: [1.0, 2.0, 3.0], n: 2})
    np.testing.assert_allclose(have, [24.0, 768.0, 5832.0])


def test_without_one_there_is_none() -> None:
    x = gf.placeholder("float64", (3,))
    y = gf.host_call(median, x, spec=gf.spec("float64"))
    with pytest.raises(DifferentiationError, match=r"median.*test_host_call\.py:\d+.*vjp="):
        gf.gradients(y, [x])
    twice = gf.host_call(lambda v: v * 2, x, spec=gf.spec("float64", (3,)), vjp=lambda g, y, x: g)
    (first,) = gf.gradients(gf.sum(twice), [x])
    with pytest.raises(DifferentiationError, match="has no gradient"):
        gf.gradients(first, [x])


def test_a_map_calls_once_for_each_example() -> None:
    rows: list[np.ndarray] = []

    def note(row: np.ndarray) -> np.ndarray:
        rows.append(row)
        return row.max()

    x = gf.placeholder("float64", (3, 2))
    y = gf.vmap(lambda row: gf.host_call(note, row, spec=gf.spec("float64")))(x)
    with gf.Session() as session:
        have = session.run(y, {x: [[1, 2], [4, 3], [0, 5]]})
    assert have.tolist() == [2, 4, 5]
    assert [r.tolist() for r in rows] == [[1, 2], [4, 3], [0, 5]]


# What goes wrong when the graph runs --------------------------------------------------------------


@pytest.mark.parametrize(
    "returned, message",
    [
        (np.zeros((2,)), r"is float64\(2,\); spec says float64\(3,\)"),
        (np.zeros(3, "float32"), r"is float32\(3,\); spec says float64\(3,\)"),
        ((np.zeros(3), np.zeros(3)), "returned 2 arrays; spec says 1"),
        (None, r"is object\(\); spec says"),
    ],
)
def test_a_result_that_is_not_what_spec_says_is_an_error_with_the_users_line(
    returned: Any, message: str
) -> None:
    y = gf.host_call(lambda: returned, spec=gf.spec("float64", (3,)))
    with gf.Session() as session, pytest.raises(OpError, match=r"test_host_call\.py:\d+") as found:
        session.run(y)
    assert found.match(message)


def test_an_error_in_the_function_keeps_its_traceback_and_the_line_of_the_call() -> None:
    def fails(x: np.ndarray) -> np.ndarray:
        raise LookupError("no such customer")

    x = gf.placeholder("float32", ())
    y = gf.host_call(fails, x, spec=gf.spec("float32"), name="customers")
    with gf.Session() as session, pytest.raises(OpError, match="no such customer") as found:
        session.run(y, {x: 1.0})
    assert found.match(r"customers.*test_host_call\.py:\d+")


# Names of functions, and bad input ---------------------------------------------------------------


def test_a_function_of_a_module_is_known_by_its_name_and_others_are_not() -> None:
    def call_of(fn: Any) -> HostFunction:
        return gf.host_call(fn, 1.0, spec=gf.spec("float32")).node.attrs["call"]

    assert call_of("numpy:float32").import_path == "numpy:float32"
    assert call_of(np.sort).import_path is None or call_of(np.sort).import_path.startswith("numpy")
    assert call_of(lambda x: x).import_path is None
    assert call_of(HostFunction.name.fget).import_path is None


HERE = r"host_call at .*test_host_call\.py:\d+: .*"


def test_wrong_arguments_are_told_with_the_users_line() -> None:
    one = gf.spec("float32")
    with pytest.raises(ArgumentError, match=HERE + "fn must be a function"):
        gf.host_call(3, spec=one)
    with pytest.raises(ArgumentError, match=HERE + "vjp must be a function"):
        gf.host_call(median, spec=one, vjp=3)
    with pytest.raises(ArgumentError, match=HERE + "spec is gf.spec"):
        gf.host_call(median, spec="float32")
    with pytest.raises(ArgumentError, match=HERE + "a size n that no argument has"):
        gf.host_call(median, spec=gf.spec("float32", ("n",)))
    with pytest.raises(ArgumentError, match=HERE + "pure must be True or False"):
        gf.host_call(median, spec=one, pure="yes")
    with pytest.raises(ArgumentError, match=HERE + "named as 'module:function'"):
        gf.host_call("median", spec=one)
    with pytest.raises(ArgumentError, match=HERE + "has no function of that name"):
        gf.host_call("numpy:no_such_thing", spec=one)
    with pytest.raises(OpError, match=r"cannot import 'no_such_module'.*PYTHONPATH"):
        gf.host_call("no_such_module:f", spec=one)


def test_both_ops_run_on_the_cpu_only() -> None:
    assert {REGISTRY[n].device_kinds for n in ("host_call", "pure_host_call")} == {("cpu",)}
