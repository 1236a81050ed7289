"""Which values of a model become variables, and that all of them do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import graphflow as gf
from graphflow.errors import OnnxError
from tests.onnx.models import INT64, info, initializer, model

node = helper.make_node


def draw_normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def load_model(nodes: Any, initializers: dict[str, Any], shape: Any = (None, 8), **how: Any) -> Any:
    proto = model(
        nodes,
        [info("x", shape)],
        [info("y", None)],
        [initializer(name, value) for name, value in initializers.items()],
    )
    return gf.onnx.load(proto, **how)


def gelu() -> Any:
    """A layer, then x + k·x³ as exporters write it: all numbers are initializers."""
    return [
        node("MatMul", ["x", "w"], ["a"]),
        node("Pow", ["a", "three"], ["p"]),
        node("Mul", ["p", "k"], ["q"]),
        node("Add", ["a", "q"], ["y"]),
    ]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_training_leaves_the_constants_of_formulas_alone(shape: Any) -> None:
    numbers = {"three": np.full(shape, 3.0), "k": np.full(shape, 0.0447)}
    m = load_model(gelu(), {"w": draw_normal(8, 8) * 0.3, **numbers})
    assert set(m.variables) == {"w"}
    loss = gf.mean(m.outputs["y"] * m.outputs["y"])
    step = gf.optim.SGD(0.1).minimize(loss)
    with gf.Session() as s:
        losses = [
            float(s.run([loss, step], {m.inputs["x"]: draw_normal(16, 8)})[0]) for _ in range(4)
        ]
    assert losses == sorted(losses, reverse=True) and np.isfinite(losses).all()


WEIGHTS = [
    ("Add", np.ones(8), True),
    ("Mul", np.ones((8, 1)), True),
    ("Mul", np.float32(2), False),
    ("Div", np.ones(1), False),
    ("Pow", np.full(8, 2.0), False),
    ("Add", np.where(np.tri(8) > 0, 0, -np.inf), False),
    ("Add", np.where(np.tri(8) > 0, 0, np.finfo("float32").min), False),
    ("PRelu", np.full(1, 0.1), True),
    ("Max", np.full(1, 0.1), False),
]


@pytest.mark.parametrize(("op", "value", "is_weight"), WEIGHTS)
def test_a_weight_is_told_by_its_uses(op: str, value: Any, is_weight: bool) -> None:
    m = load_model([node(op, ["x", "c"], ["y"])], {"c": value}, (8, 8))
    assert set(m.variables) == ({"c"} if is_weight else set())


def test_a_bias_of_one_element_is_a_weight() -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["y"])]
    m = load_model(nodes, {"w": draw_normal(8, 1), "b": [0.0]})
    assert set(m.variables) == {"w", "b"}


def test_uses_are_followed_into_functions_subgraphs_and_other_forms() -> None:
    cube = helper.make_function(
        "own", "Cube", ["a", "n"], ["b"], [node("Pow", ["a", "n"], ["b"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    then = helper.make_graph([node("MatMul", ["x", "v"], ["t"])], "t", [], [info("t", None)])
    orelse = helper.make_graph([node("Identity", ["x"], ["e"])], "e", [], [info("e", None)])
    proto = model(
        [
            node("Cube", ["x", "n"], ["c"], domain="own"),
            node("If", ["go"], ["i"], then_branch=then, else_branch=orelse),
            node("Unsqueeze", ["k", "axes"], ["wide"]),
            node("Pow", ["i", "wide"], ["j"]),
            node("Add", ["c", "j"], ["y"]),
        ],
        [info("x", [8, 8]), helper.make_tensor_value_info("go", 9, [])],
        [info("y", [8, 8])],
        [
            initializer("n", np.full(8, 3)),
            initializer("v", draw_normal(8, 8)),
            initializer("k", np.full(8, 2)),
            initializer("axes", [0], "int64"),
        ],
        own=1,
    )
    proto.functions.append(cube)
    assert set(gf.onnx.load(proto).variables) == {"v"}


def test_constants_and_single_numbers_become_variables_by_name() -> None:
    w = draw_normal(8, 8)
    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(w))
    nodes = [constant, node("MatMul", ["x", "w"], ["a"]), node("Mul", ["a", "scale"], ["y"])]
    assert not load_model(nodes, {"scale": 2.0}).variables
    m = load_model(nodes, {"scale": 2.0}, variables=["w", "scale"])
    assert set(m.variables) == {"w", "scale"}
    assert all(v.node.attrs["trainable"] for v in m.variables.values())
    x = draw_normal(2, 8)
    assert np.allclose(m.run([x])["y"], 2 * x @ w, rtol=1e-5)


@pytest.mark.parametrize(
    ("names", "told"), [("w", "list of names"), (["v"], "neither"), (["i"], "int64")]
)
def test_what_cannot_be_a_variable_is_refused(names: Any, told: str) -> None:
    proto = model(
        [node("Gather", ["x", "i"], ["y"])],
        [info("x", [3])],
        [info("y", [2])],
        [initializer("i", [2, 0], "int64")],
    )
    with pytest.raises(OnnxError, match=told):
        gf.onnx.load(proto, variables=names)


def cut() -> Any:
    """Two layers with a step on the host between them."""
    nodes = [
        node("MatMul", ["x", "v"], ["a"]),
        node("NonZero", ["a"], ["places"]),
        node("Cast", ["places"], ["p"], to=1),
        node("Transpose", ["p"], ["t"]),
        node("BatchNormalization", ["t", "s", "b", "mean", "var"], ["n"]),
        node("MatMul", ["n", "w"], ["y"]),
    ]
    two = {name: np.ones(2) for name in ("s", "b", "mean", "var")}
    return load_model(nodes, {"v": draw_normal(8, 8), "w": draw_normal(2, 3), **two})


def test_the_variables_of_a_model_in_several_graphs_are_complete() -> None:
    m = cut()
    assert not m.whole
    assert set(m.variables) == {"v", "w", "s", "b", "mean", "var"}
    before = dict(m.variables)
    m.run([draw_normal(3, 8)])
    assert m.variables == before
    trained = {name for name, v in before.items() if v.node.attrs["trainable"]}
    assert trained == {"v", "w", "s", "b"}


def test_steps_on_the_host_read_the_values_that_a_session_holds() -> None:
    proto = model(
        [node("Add", ["x", "w"], ["a"]), node("Compress", ["w", "on"], ["y"], axis=0)],
        [info("x", [2]), helper.make_tensor_value_info("on", 9, [2])],
        [info("a", [2]), info("y", None)],
        [initializer("w", [1, 2])],
    )
    m = gf.onnx.load(proto)
    with gf.Session() as s:
        s.set(m.variables["w"], np.array([5, 6], "float32"))
        got = m.run({"x": np.zeros(2, "float32"), "on": np.array([True, False])}, s)
    assert got["y"].tolist() == [5] and got["a"].tolist() == [5, 6]


def test_an_input_that_is_fed_takes_the_place_of_its_initializer() -> None:
    proto = model(
        [node("Reshape", ["x", "to"], ["r"]), node("Add", ["r", "b"], ["y"])],
        [info("x", ["N"]), info("b", [1]), info("to", [2], INT64)],
        [info("y", None)],
        [initializer("b", [1]), initializer("to", [1, -1], "int64")],
    )
    m = gf.onnx.load(proto)
    x = np.zeros(4, "float32")
    assert m.run({"x": x})["y"].tolist() == [[1, 1, 1, 1]]
    fed = {"x": x, "b": np.full(1, 7, "float32"), "to": np.array([2, 2])}
    assert m.run(fed)["y"].tolist() == [[7, 7], [7, 7]]
    assert m.run([x])["y"].tolist() == [[1, 1, 1, 1]]
