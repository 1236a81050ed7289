"""Gradients: accumulation, higher orders, where nothing flows, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import DifferentiationError, DTypeError, ShapeError
from graphflow.frontend.builders import constant, placeholder, variable
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS as G
from graphflow.ir.op import Op, device, name_scope
from graphflow.transforms.forward_mode import jvp
from graphflow.transforms.reverse_mode import gradients
from graphflow.transforms.vmap import vmap

A = np.array([0.5, -1.0, 2.0])


def slopes(y: Any, xs: list, feeds: dict) -> list[np.ndarray]:
    return evaluate(gradients(y, xs), feeds)


def test_a_tensor_used_twice_adds_its_gradients() -> None:
    x = placeholder("float64", (3,))
    (value,) = slopes(G["sum"](x * x + x), [x], {x: A})
    np.testing.assert_allclose(value, 2 * A + 1)


def test_differentiating_again_and_again_is_exact() -> None:
    x = placeholder("float64", (3,))
    y = x * x * x * x
    for wanted in (4 * A**3, 12 * A**2, 24 * A, 24 + 0 * A, 0 * A):
        (y,) = gradients(y, [x])
        np.testing.assert_allclose(evaluate([y], {x: A})[0], wanted)


def test_an_array_counts_as_summed_and_cotangents_weigh_it() -> None:
    x = placeholder("float64", (3,))
    feeds = {x: A}
    np.testing.assert_allclose(slopes(x * x, [x], feeds)[0], 2 * A)
    weighed = gradients(x * x, [x], np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(evaluate(weighed, feeds)[0], 2 * A * [1, 2, 3])
    several = gradients([x * x, x * 3.0], [x], [None, constant(np.full(3, 2.0))])
    np.testing.assert_allclose(evaluate(several, feeds)[0], 2 * A + 6)


def test_gradients_of_broadcast_inputs_have_the_inputs_shape() -> None:
    x, b = placeholder("float64", ("n", 3)), placeholder("float64", (3,))
    s = placeholder("float64")
    gx, gb, gs = gradients(G["sum"](x * b + s), [x, b, s])
    assert (gx.shape, gb.shape, gs.shape) == (x.shape, (3,), ())
    values = evaluate([gb, gs], {x: np.ones((5, 3)), b: A, s: 0.0})
    np.testing.assert_allclose(values[0], [5, 5, 5])
    assert values[1] == 15


def test_what_y_does_not_depend_on_has_gradient_zero() -> None:
    x, other = placeholder("float64", (3,)), placeholder("float64", ("n", 2))
    gx, go = gradients(G["sum"](x), [x, other])
    assert go.shape == other.shape
    np.testing.assert_array_equal(
        evaluate([go, gx], {x: A, other: np.ones((2, 2))})[0], np.zeros((2, 2))
    )


def test_the_gradient_of_y_by_itself_is_one_and_by_what_lies_between_is_partial() -> None:
    x = placeholder("float64", (3,))
    h = x * 2.0
    y = h * h
    gy, gh = gradients(y, [y, h])
    values = evaluate([gy, gh], {x: A})
    np.testing.assert_array_equal(values[0], np.ones(3))
    np.testing.assert_allclose(values[1], 4 * A)


def test_one_tensor_asked_twice_has_one_gradient() -> None:
    x = placeholder("float64", (3,))
    a, b = gradients(x * x, [x, x])
    assert a is b


def test_nothing_flows_through_ints_or_stop_gradient() -> None:
    x = placeholder("float64", (3,))
    stopped = G["stop_gradient"](x) * x
    through_ints = x.astype("int64").astype("float64") * x
    feeds = {x: A}
    np.testing.assert_allclose(slopes(stopped, [x], feeds)[0], A)
    np.testing.assert_allclose(slopes(through_ints, [x], feeds)[0], np.trunc(A))


def test_contributions_are_added_in_the_order_in_which_consumers_were_built() -> None:
    x = placeholder("float64", ())
    parts = [x * float(c) for c in (1e16, 1.0, -1e16)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        y = parts[order[0]] + parts[order[1]] + parts[order[2]]
        assert slopes(y, [x], {x: 0.0})[0] == (1e16 + 1.0) - 1e16


def test_gradient_nodes_count_as_made_at_their_forward_nodes_line_and_pin() -> None:
    x = placeholder("float32", (2, 2))
    with device("/worker:1/cpu:0"), name_scope("tower"):
        y = x @ x
    (slope,) = gradients(G["sum"](y), [x])
    forward = set(Graph(y).nodes)
    backward = [n for n in Graph(slope).nodes if n.op.name == "matmul" and n not in forward]
    assert len(backward) == 2
    for node in backward:
        assert node.location == y.node.location
        assert node.device == y.node.device and node.origin is y.node
        assert node.name.startswith("gradients/")


def test_what_is_derived_in_a_scope_is_named_there() -> None:
    """A stage of a pipeline may be told by its scope, gradients in it included."""
    x = placeholder("float32", (2, 3), name="x")
    with name_scope("first"):
        y = G["tanh"](x)
    with name_scope("second"):
        derived = [
            *gradients(G["sum"](y * y), [x]),
            *jvp(G["tanh"], (x,), (G["ones_like"](x),)),
            vmap(lambda row: gradients(G["sum"](G["exp"](row)), [row])[0])(x),
        ]
    fresh = [n.name for n in Graph(derived).nodes if n not in Graph([y]).names]
    assert all(name.startswith("second/") for name in fresh)
    assert {n.split("/")[1] for n in fresh if n.count("/") > 1} == {"gradients", "tangents", "vmap"}
    assert max(name.count("/") for name in fresh) == 2


def test_gradients_do_not_depend_on_when_they_are_asked() -> None:
    w = variable(A, name="w")
    y = G["sum"](G["exp"](w) * w)
    first = str(Graph(gradients(y, [w])))
    assert first == str(Graph(gradients(y, [w])))


def test_an_op_with_several_outputs_is_handed_a_cotangent_for_each() -> None:
    pair = Op(
        "pair",
        infer=lambda x: (x, x),
        kernel=lambda xp, x: (x * 2, x * 3),
        vjp=lambda g, y, x: (g[0] * 2.0 + g[1] * 3.0,),
    )
    x = placeholder("float64", (3,))
    a, b = pair(x)
    np.testing.assert_allclose(slopes(a * b, [x], {x: A})[0], 12 * A)
    np.testing.assert_allclose(slopes(b, [x], {x: A})[0], [3, 3, 3])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, n: gradients(n, [x]), DifferentiationError, "int64"),
        (lambda x, n: gradients(x, [n]), DifferentiationError, "astype"),
        (lambda x, n: gradients(x, x), DifferentiationError, r"gf\.gradients\(y, \[x\]\)"),
        (lambda x, n: gradients(x, [3.0]), DifferentiationError, "not a tensor"),
        (lambda x, n: gradients(x, [x], [None, None]), DifferentiationError, "2 cotangents"),
        (lambda x, n: gradients(x, [x], 1.0), ShapeError, r"\(\) for an output of shape \(3,\)"),
        (lambda x, n: gradients(x, [x], constant(np.ones(3, "f4"))), DTypeError, "float64"),
        (lambda x, n: gradients(x, [x], np.ones(2)), ShapeError, r"\(2,\)"),
    ],
)
def test_mistakes_name_the_line_and_the_remedy(call: Any, error: type, words: str) -> None:
    x, n = placeholder("float64", (3,)), placeholder("int64", (3,))
    with pytest.raises(error, match=rf"test_reverse_mode\.py:\d+.*{words}"):
        call(x, n)


def test_a_vjp_of_the_wrong_length_is_named() -> None:
    wrong = Op("wrong", infer=lambda x: x, kernel=lambda xp, x: x, vjp=lambda g, y, x: (g, g))
    x = placeholder("float64", (3,))
    with pytest.raises(DifferentiationError, match="wrong gave 2 cotangents for 1 inputs"):
        gradients(wrong(x), [x])
