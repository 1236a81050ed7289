"""Graphs: closure, order, names, verification, rewriting; at any depth."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import FeedError, GraphError
from graphflow.frontend.builders import assign, constant, placeholder, variable
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph, bind_attrs
from graphflow.ir.op import FUNCTIONS as G
from graphflow.ir.op import Tensor, device, name_scope
from graphflow.ir.spec import Dim


def random_tensors(picks: list[tuple[int, int]]) -> list[Tensor]:
    tensors = [placeholder("float32", (2,)), placeholder("float32", (2,))]
    for a, b in picks:
        tensors.append(tensors[a % len(tensors)] + tensors[b % len(tensors)])
    return tensors


PICKS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=30)


@given(PICKS, st.randoms(use_true_random=False))
def test_order_is_topological_and_the_same_however_outputs_are_asked(picks, random) -> None:
    tensors = random_tensors(picks)
    outputs = random.sample(tensors, min(3, len(tensors)))
    nodes = Graph(outputs).verify().nodes
    assert nodes == Graph(outputs[::-1]).nodes
    seen = set()
    for node in nodes:
        assert all(t.node in seen for t in node.inputs)
        seen.add(node)


@given(PICKS)
def test_consumers_are_the_inverse_of_inputs(picks) -> None:
    graph = Graph(random_tensors(picks))
    for node in graph.nodes:
        for consumer in graph.consumers[node]:
            assert node in [t.node for t in consumer.inputs]
        assert len(set(graph.consumers[node])) == len(graph.consumers[node])
    edges = {(t.node, node) for node in graph.nodes for t in node.inputs}
    assert edges == {(n, c) for n, cs in graph.consumers.items() for c in cs}


def test_a_graph_holds_what_its_outputs_need_and_no_more() -> None:
    x, unused = placeholder("float32", name="x"), placeholder("float32", name="unused")
    y = x * 2.0
    _ = unused + y
    graph = Graph(y)
    assert [n.name for n in graph.placeholders] == ["x"] and len(graph) == 3


def test_names_are_unique_and_follow_build_order() -> None:
    x = placeholder("float32", (2, 2), name="x")
    y = x @ x
    z = y @ x
    graph = Graph([z, placeholder("float32", name="matmul_1"), placeholder("float32", name="x")])
    names = list(graph.names.values())
    assert len(set(names)) == len(names)
    assert (graph.names[y.node], graph.names[z.node]) == ("matmul", "matmul_1")
    assert graph.by_name["matmul_1"] is z.node and "x_1" in graph.by_name


def test_what_is_no_tensor_is_no_output() -> None:
    with pytest.raises(GraphError, match="3"):
        Graph([3])  # type: ignore[list-item]


def test_a_variable_is_assigned_once_in_a_step_and_the_error_names_both_lines() -> None:
    v = variable(np.zeros(2), name="count")
    first, second = assign(v, v + 1.0), assign(v, v + 2.0)
    Graph(first).verify()
    with pytest.raises(GraphError, match=r"'count'.*twice") as raised:
        Graph([first, second]).verify()
    assert len(re.findall(r"test_graph\.py:\d+", str(raised.value))) == 3


def test_rewriting_replaces_nodes_and_passes_their_names_on() -> None:
    x = placeholder("float32", (3,), name="x")
    y = G["exp"](G["negative"](-x))
    graph = Graph(y)

    def drop_double_negation(node, inputs):
        if node.op.name == "negative" and inputs[0].node.op.name == "negative":
            return inputs[0].node.inputs
        return None

    smaller = Graph(graph.rewrite(drop_double_negation).outputs).verify()
    assert [n.op.name for n in smaller.nodes] == ["placeholder", "exp"]
    a = np.array([0.0, 1.0, 2.0], "float32")
    np.testing.assert_allclose(evaluate(smaller.outputs, {x: a})[0], np.exp(a), rtol=1e-6)
    assert smaller.nodes[-1].location == y.node.location


@given(PICKS)
def test_rewriting_nothing_keeps_every_node(picks) -> None:
    graph = Graph(random_tensors(picks))
    same = graph.rewrite(lambda node, inputs: None)
    assert same.nodes == graph.nodes and same.names == graph.names


def test_printing_shows_each_node_its_pin_and_what_is_returned() -> None:
    x = placeholder("float32", ("n", 2), name="x")
    with device("gpu"), name_scope("a"):
        y = x + constant(np.float32(1.5))
    text = str(Graph(y))
    assert "x: float32(n, 2) = placeholder(shape=(n, 2), dtype='float32')" in text
    assert "a/add: float32(n, 2) = add(x, a/constant) @ gpu" in text
    assert text.endswith("return a/add")


def test_equations_come_with_the_node_that_assumed_them() -> None:
    x, y = placeholder("float32", ("n",)), placeholder("float32", ("m",))
    z = x + y
    assert Graph(z).equations == ((z.node, (Dim.symbol("n"), Dim.symbol("m"))),)


def test_attributes_bind_inside_tuples() -> None:
    n = Dim.symbol("n")
    attrs = {"shape": (n, (2 * n, 3)), "axis": 1, "value": "x"}
    assert bind_attrs(attrs, {"n": 4}) == {"shape": (4, (8, 3)), "axis": 1, "value": "x"}


def test_a_chain_of_ten_thousand_nodes_is_ordinary() -> None:
    from graphflow.transforms.reverse_mode import gradients

    x = placeholder("float32", ())
    one = constant(np.float32(1))
    y = x
    for _ in range(10_000):
        y = y + one
    graph = Graph(y).verify()
    assert len(graph) == 10_002
    (slope,) = gradients(y, [x])
    value, slope_value = evaluate([y, slope], {x: np.float32(2)})
    assert (value, slope_value) == (10_002, 1)
    assert graph.rewrite(lambda node, inputs: None) is graph


@pytest.mark.slow
def test_a_chain_of_a_million_nodes_is_built_and_differentiated() -> None:
    from graphflow.transforms.reverse_mode import gradients

    x = placeholder("float32", ())
    y = x
    for _ in range(1_000_000):
        y = -y
    graph = Graph([y, *gradients(y, [x])]).verify()
    assert len(graph) > 2_000_000


def test_what_is_not_fed_is_named() -> None:
    x = placeholder("float32", (), name="rate")
    with pytest.raises(FeedError, match=r"'rate'.*test_graph\.py"):
        evaluate([x + 1.0])
