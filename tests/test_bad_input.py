"""Mistakes in building, feeding, fetching and placing: each an error of graphflow that names this
file's line and a remedy, raised where the mistake is made; and the session goes on.

Each case is a function that makes the mistake, in a session or before one; the line that the error
must name is marked `# here`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    ArgumentError,
    CheckError,
    ClusterError,
    DeviceError,
    DifferentiationError,
    DTypeError,
    FeedError,
    FetchError,
    GraphError,
    GraphflowError,
    MemoryLimitError,
    OpError,
    SessionError,
    ShapeError,
    VariableError,
)

Case = Callable[[gf.Session], Any]
CASES: list[tuple[str, type[GraphflowError], str, Case]] = []


def case(error: type[GraphflowError], remedy: str) -> Callable[[Case], Case]:
    """Enter a mistake: its class, and words of the remedy (a pattern)."""

    def enter(make: Case) -> Case:
        CASES.append((make.__name__, error, remedy, make))
        return make

    return enter


# Building -------------------------------------------------------------------------------------


@case(ShapeError, r"3 != 4.*transpose")
def inner_sizes_differ(s: gf.Session) -> None:
    x, w = gf.placeholder("float32", (None, 3), name="x"), gf.variable(np.ones((4, 2), "float32"))
    x @ w  # here


@case(ShapeError, r"do not broadcast: 3 != 4")
def shapes_that_do_not_broadcast(s: gf.Session) -> None:
    x, b = gf.placeholder("float32", (None, 3), name="x"), gf.variable(np.ones(4, "float32"))
    x + b  # here


@case(DTypeError, r"astype")
def kinds_that_do_not_mix(s: gf.Session) -> None:
    x, n = gf.placeholder("float32", (None, 3), name="x"), gf.placeholder("int64", (), name="n")
    x * n  # here


@case(DTypeError, r"astype")
def a_float_for_integers(s: gf.Session) -> None:
    n = gf.placeholder("int64", (), name="n")
    n + 1.5  # here


@case(ShapeError, r"6 != 8")
def a_reshape_to_another_number_of_elements(s: gf.Session) -> None:
    gf.reshape(gf.constant(np.ones((2, 3))), (4, 2))  # here


@case(ShapeError, r"axis 5")
def an_axis_that_is_not_there(s: gf.Session) -> None:
    gf.sum(gf.placeholder("float32", (None, 3), name="x"), axis=5)  # here


@case(GraphError, r"gf\.where|Session\.run")
def a_choice_by_a_symbolic_value(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")
    if x > 0:  # here
        raise AssertionError("a symbolic tensor is neither true nor false")


@case(DTypeError, r"float32")
def a_dtype_that_is_none(s: gf.Session) -> None:
    gf.placeholder("float8", (3,))  # here


@case(DifferentiationError, r"astype|float")
def a_gradient_of_integers(s: gf.Session) -> None:
    n = gf.variable(np.int64(1), name="n")
    gf.gradients(n * 2, [n])  # here


@case(ArgumentError, r"from 0")
def a_negative_rate(s: gf.Session) -> None:
    gf.optim.Adam(-1e-3)  # here


@case(VariableError, r"depends on no trainable variable")
def nothing_to_train(s: gf.Session) -> None:
    gf.optim.Adam().minimize(gf.mean(gf.placeholder("float32", (None, 3), name="x")))  # here


@case(VariableError, r"not a variable")
def an_assignment_to_what_is_no_variable(s: gf.Session) -> None:
    gf.assign(gf.constant(1.0), 2.0)  # here


# Feeding --------------------------------------------------------------------------------------


@case(FeedError, r"add it to the feeds")
def a_feed_that_is_missing(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")  # here
    s.run(x + 1)


@case(FeedError, r"add it to the feeds")
def a_placeholder_that_is_fetched_and_never_fed(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")  # here
    s.run([x])


@case(FeedError, r"leave it out")
def a_feed_that_nothing_reads(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")  # here
    s.run(gf.constant(1.0), {x: np.ones((2, 3))})


@case(FeedError, r"only placeholders are fed")
def a_feed_for_a_variable(s: gf.Session) -> None:
    v = gf.variable(1.0, name="v")  # here
    s.run(v, {v: 2.0})


@case(FeedError, r"use the tensor itself")
def a_feed_by_name(s: gf.Session) -> None:
    s.run(gf.placeholder("float32", (None, 3), name="x") + 1, {"y": np.ones((2, 3))})  # here


@case(FeedError, r"\(None, 3\).*\(2, 4\).*reshape")
def a_feed_of_another_shape(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")  # here
    s.run(x + 1, {x: np.ones((2, 4))})


@case(FeedError, r"\(None, 3\).*\(3,\).*reshape")
def a_feed_of_another_rank(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")  # here
    s.run(x + 1, {x: np.ones(3)})


@case(FeedError, r"astype\('int64'\)")
def a_feed_of_another_dtype(s: gf.Session) -> None:
    x = gf.placeholder("int64", (None,), name="x")  # here
    s.run(x + 1, {x: np.ones(3)})


@case(FeedError, r"give an array")
def a_feed_that_is_no_array(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")  # here
    s.run(x + 1, {x: [[1, 2], [3]]})


@case(FeedError, r"give both the same size")
def feeds_that_disagree_on_a_named_size(s: gf.Session) -> None:
    x = gf.placeholder("float32", ("n",), name="x")
    y = gf.placeholder("float32", ("n",), name="y")  # here
    s.run([x, y], {x: [1], y: [1, 2]})


@case(FeedError, r"give sizes that fit")
def feeds_that_an_op_needs_to_be_equal(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    y = gf.placeholder("float32", (None,), name="y")
    z = x + y  # here
    s.run(z, {x: [1, 2, 3], y: [1, 2]})


# Fetching -------------------------------------------------------------------------------------


@case(FetchError, r"fetch the tensor itself")
def a_fetch_by_name(s: gf.Session) -> None:
    s.run(["x"])  # here


@case(FetchError, r"did a function forget to return one")
def a_fetch_of_nothing(s: gf.Session) -> None:
    s.run({"loss": None})  # here


@case(VariableError, r"assign the combined value once")
def a_variable_assigned_twice_in_a_step(s: gf.Session) -> None:
    v = gf.variable(1.0, name="v")
    s.run([gf.assign(v, v + 1), gf.assign(v, v + 2)])  # here


@case(VariableError, r"give one another name")
def two_variables_of_one_name(s: gf.Session) -> None:
    s.run(gf.variable(1.0, name="w") + gf.variable(2.0, name="w"))  # here


@case(VariableError, r"reshape")
def a_value_of_another_shape_for_a_variable(s: gf.Session) -> None:
    v = gf.variable([1.0, 2.0], name="v")  # here
    s.set(v, [1, 2, 3])


# Placing --------------------------------------------------------------------------------------


@case(DeviceError, r"write '/worker:1/cpu:0'")
def a_device_name_that_is_none(s: gf.Session) -> None:
    with gf.device("tpu:0"):  # here
        raise AssertionError("the name is refused before the block")


@case(DeviceError, r"no device fits .*there are")
def a_device_that_the_cluster_has_not(s: gf.Session) -> None:
    with gf.device("/worker:5"):
        y = gf.constant(1.0) + 1  # here
    s.run(y)


@case(DeviceError, r"no device fits .*there are")
def a_pin_that_no_kernel_serves(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3), name="x")
    with gf.device("gpu"):
        y = x * 2  # here
    s.run(y, {x: np.ones((2, 3))})


@case(MemoryLimitError, r"smaller batches")
def a_step_that_fits_in_no_memory(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 10**6), name="x")
    y = gf.sum(gf.exp(gf.broadcast_to(gf.expand_dims(x, 0), (10**7, *x.shape))))  # here
    s.run(y, {x: np.ones((1, 10**6))})


@case(MemoryLimitError, r"smaller batches")
def a_variable_that_fits_in_no_memory(s: gf.Session) -> None:
    v = gf.variable(gf.init.zeros((10**6, 10**7)), name="huge")  # here
    s.run(gf.sum(v))


# Running --------------------------------------------------------------------------------------


@case(CheckError, r"must be finite.*false for 1 of 2")
def a_check_that_is_false(s: gf.Session) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    y = gf.debug.check(gf.log(x), gf.isfinite(gf.log(x)), "logs must be finite")  # here
    s.run(y, {x: [1, 0]})


@case(OpError, r"negative integer powers.*inputs are")
def an_op_that_fails(s: gf.Session) -> None:
    n = gf.placeholder("int64", (), name="x")
    y = gf.pow(n, n)  # here
    s.run(y, {n: -2})


CLUSTERS = {
    "one device": gf.Cluster.here(),
    "two devices": gf.Cluster.here(devices=["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("name", "error", "remedy", "make"), CASES, ids=[c[0] for c in CASES])
def test_a_mistake_is_an_error_with_line_and_remedy_and_the_session_goes_on(
    name: str, error: type[GraphflowError], remedy: str, make: Case, cluster: str
) -> None:
    v = gf.variable(1.0, name="kept")
    step = gf.assign(v, v * 2)
    with gf.Session(CLUSTERS[cluster]) as s:
        s.run(step)
        for _ in range(2):
            with pytest.raises(error, match=f"(?s){remedy}") as caught:
                make(s)
            assert f"test_bad_input.py:{_marked_line(make)}" in str(caught.value)
        assert s.run(step) == 4


def _marked_line(make: Case) -> int:
    """The line that the error must name."""
    lines, first = inspect.getsourcelines(make)
    (marked,) = [first + i for i, line in enumerate(lines) if "# here" in line]
    return marked


MISSPELT: list[tuple[type[GraphflowError], Callable[[], Any], str]] = [
    (ArgumentError, lambda: gf.variable([1.0], nam="w"), "variable at .*'nam' .*'name'"),
    (ArgumentError, lambda: gf.placeholder("float32", shpe=(2,)), "placeholder at .*'shape'"),
    (ArgumentError, lambda: gf.optim.Adam(1e-3, beta_1=0.9), r"Adam at .*'beta_1' .*'beta1'"),
    (
        ArgumentError,
        lambda: gf.optim.SGD(momentum=0.9),
        "SGD at .*missing .*'lr'",
    ),
    (ArgumentError, lambda: gf.random.normal((2,), men=1.0), "normal at .*'mean'"),
    (ArgumentError, lambda: gf.init.glorot((2, 2), dtpe="float64"), "glorot at .*'dtype'"),
    (ArgumentError, lambda: gf.nn.conv2d(weights=1), "conv at .*'weights' .*'weight'"),
    (ClusterError, lambda: gf.Cluster.local(worker=2), "local at .*'worker' .*'workers'"),
    (SessionError, lambda: gf.Session(checkpoints="c"), "Session at .*'checkpoint'"),
]


@pytest.mark.parametrize(("error", "make", "told"), MISSPELT)
def test_a_misspelt_argument_is_told_what_was_meant_on_the_users_line(
    error: type[GraphflowError], make: Callable[[], Any], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        make()
    assert "test_bad_input.py:" in str(caught.value)
