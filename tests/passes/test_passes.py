"""Passes: valid in, valid out, the same values bit for bit, and what each is there for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.passes import (
    FoldConstants,
    FoldTransposes,
    MergeDuplicates,
    default_passes,
    optimize,
)

Array = np.ndarray[Any, Any]


def _ops(graph: gf.Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def _x(shape: tuple[int, ...] = (3, 3)) -> gf.Tensor:
    return gf.placeholder("float32", shape, name="x")


# Constants ------------------------------------------------------------------------------------


def test_what_depends_on_constants_only_is_one_constant() -> None:
    x = _x()
    graph = FoldConstants()(gf.Graph([x + gf.exp(gf.constant(1.0) + gf.zeros((3, 3)))]))
    assert _ops(graph) == ["placeholder", "constant", "add"]
    folded = graph.of_op("constant")[0].attrs["value"]
    np.testing.assert_allclose(folded, np.full((3, 3), np.exp(np.float32(1))), rtol=1e-6)


def test_a_large_fill_stays_a_fill() -> None:
    big = gf.zeros((200, 200))
    assert _ops(FoldConstants()(gf.Graph([big]))) == ["fill"]
    assert _ops(FoldConstants(limit=10**6)(gf.Graph([big]))) == ["constant"]


def test_a_product_of_constants_has_the_bits_of_a_running_program() -> None:
    """BLAS splits it otherwise when it may use more threads."""
    a, b = np.random.default_rng(0).normal(size=(2, 64, 64)).astype("float32").repeat(40, axis=2)
    x = gf.placeholder("float32", a.shape)
    with gf.Session() as s:
        fixed = s.run(gf.constant(a) @ gf.constant(np.ascontiguousarray(b.T)))
        fed = s.run(x @ gf.constant(np.ascontiguousarray(b.T)), {x: a})
    assert fixed.tobytes() == fed.tobytes()


def test_random_state_and_effects_are_never_folded() -> None:
    c = gf.constant([1.0, 2.0])
    v = gf.variable([0.0, 0.0], name="v")
    outputs = [
        gf.random.normal((2,)),
        gf.random.bernoulli(0.5, (2,)),
        v + c,
        gf.assign(v, c),
        gf.debug.check(c, c > 0, "never"),
        gf.debug.print(c),
    ]
    before = gf.Graph(outputs)
    after = FoldConstants()(before)
    for op in ("random_normal", "random_bernoulli", "add", "assign", "check", "print"):
        assert len(after.of_op(op)) == len(before.of_op(op)) == 1


def test_a_constant_that_fails_to_fold_fails_in_the_step_with_its_line() -> None:
    n = gf.constant(np.int64(-1))
    bad = gf.pow(gf.constant(np.int64(2)), n)
    with gf.Session() as s, pytest.raises(gf.errors.OpError, match=r"test_passes\.py:\d+"):
        s.run(bad)


def test_a_folded_node_keeps_its_name_line_and_pin() -> None:
    with gf.device("cpu:0"):
        y = gf.add(gf.constant(1.0), gf.constant(2.0), name="three")
    graph = FoldConstants()(gf.Graph([y]))
    (node,) = graph.nodes
    assert graph.names[node] == "three"
    assert node.location == y.node.location and node.device == y.node.device


# Duplicates -----------------------------------------------------------------------------------


def test_equal_expressions_are_computed_once() -> None:
    x = _x()
    graph = MergeDuplicates()(gf.Graph([gf.exp(x + 1.0), gf.exp(x + 1.0), gf.exp(x + 2.0)]))
    assert graph.outputs[0] is graph.outputs[1]
    assert graph.outputs[0] is not graph.outputs[2]
    assert len(graph.of_op("exp")) == 2


def test_random_nodes_variables_effects_and_other_pins_are_not_merged() -> None:
    x = _x((2,))
    with gf.device("cpu:0"):
        here = gf.exp(x)
    with gf.device("cpu:1"):
        there = gf.exp(x)
    outputs = [
        gf.random.normal((2,)), gf.random.normal((2,)),
        gf.nn.dropout(x, 0.5), gf.nn.dropout(x, 0.5),
        gf.variable([1.0, 2.0]), gf.variable([1.0, 2.0]),
        gf.debug.check(x, x > 0, "same"), gf.debug.check(x, x > 0, "same"),
        gf.debug.print(x, "same"), gf.debug.print(x, "same"),
        gf.exp(x), here, there,
    ]  # fmt: skip
    merged = MergeDuplicates()(gf.Graph(outputs))
    assert len(set(merged.outputs)) == len(outputs)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.float32(1.0), np.float64(1.0)),
        (np.zeros(2, "int32"), np.zeros((2, 1), "int32")),
        (np.int64(1), np.bool_(True)),
    ],
)
def test_constants_that_only_look_alike_are_not_merged(a: Any, b: Any) -> None:
    merged = MergeDuplicates()(gf.Graph([gf.constant(a), gf.constant(b)]))
    assert merged.outputs[0] is not merged.outputs[1]


def test_not_a_number_equals_itself_here() -> None:
    merged = MergeDuplicates()(gf.Graph([gf.constant(np.nan), gf.constant(np.nan)]))
    assert merged.outputs[0] is merged.outputs[1]


def test_equal_nodes_with_other_attributes_stay_apart() -> None:
    x = _x()
    graph = gf.Graph([gf.sum(x, axis=0), gf.sum(x, axis=1), x.astype("float64"), x.astype("int32")])
    assert len(set(MergeDuplicates()(graph).outputs)) == 4


# Transposes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flip_a", [0, 1, 2])
@pytest.mark.parametrize("flip_b", [0, 1])
def test_transposes_become_flags_of_the_matmul(flip_a: int, flip_b: int) -> None:
    a, b = _x(), gf.placeholder("float32", (3, 3), name="b")
    left, right = a, b
    for _ in range(flip_a):
        left = gf.matrix_transpose(left)
    for _ in range(flip_b):
        right = gf.matrix_transpose(right)
    product = gf.matmul(left, right)
    graph = optimize(gf.Graph([product]))
    (node,) = graph.of_op("matmul")
    assert not graph.of_op("permute_dims")
    assert (node.attrs["transpose_a"], node.attrs["transpose_b"]) == (flip_a == 1, flip_b == 1)
    assert graph.names[node] == "matmul"
    values = np.random.default_rng(0).normal(size=(2, 3, 3)).astype("float32")
    feeds = {a: values[0], b: values[1]}
    assert np.allclose(evaluate(graph.outputs, feeds)[0], evaluate([product], feeds)[0])


def test_a_permutation_that_moves_batches_is_no_transpose() -> None:
    x = gf.placeholder("float32", (2, 2, 2), name="x")
    graph = FoldTransposes()(gf.Graph([gf.matmul(gf.permute_dims(x, (1, 0, 2)), x)]))
    assert len(graph.of_op("permute_dims")) == 1


def test_a_transpose_that_others_read_too_stays() -> None:
    x = _x()
    t = gf.matrix_transpose(x)
    graph = FoldTransposes()(gf.Graph([t @ x, t]))
    assert len(graph.of_op("permute_dims")) == 1
    assert graph.of_op("matmul")[0].inputs[0].node.op.name == "placeholder"


# All together, on random graphs ---------------------------------------------------------------

UNARY = ["exp", "tanh", "negative", "square", "flip", "sum0", "reshape", "relu"]
BINARY = ["add", "subtract", "multiply", "maximum", "matmul"]


@st.composite
def _graphs(draw: st.DrawFn) -> tuple[gf.Tensor, gf.Tensor, list[gf.Tensor]]:
    """A placeholder, a variable, and outputs of a graph over them, constants and each other.

    It holds no transposes into a matmul: their folding may change bits, once for all placements.
    """
    x, v = _x(), gf.variable(np.eye(3, dtype="float32"), name="v")
    with gf.random.seed(1):
        noise = gf.random.uniform((3, 3))
    tensors = [x, v, noise, gf.constant(np.full((3, 3), 0.5, "float32")), gf.zeros((3, 3))]
    for _ in range(draw(st.integers(1, 14))):
        pick = st.sampled_from(tensors)
        name = draw(st.sampled_from(UNARY + BINARY))
        a = draw(pick)
        if name == "sum0":
            tensors.append(gf.broadcast_to(gf.sum(a, axis=0, keepdims=True), (3, 3)))
        elif name == "reshape":
            tensors.append(gf.reshape(gf.reshape(a, (9,)), (3, 3)))
        elif name == "relu":
            tensors.append(gf.nn.relu(a))
        elif name in UNARY:
            tensors.append(getattr(gf, name)(a))
        else:
            tensors.append(getattr(gf, name)(a, draw(pick)))
    outputs = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=4))
    return x, v, outputs


def _bits(values: list[Array]) -> list[bytes]:
    return [v.tobytes() for v in values]


@settings(max_examples=150)
@given(_graphs())
def test_an_optimised_graph_gives_the_same_bits(
    made: tuple[gf.Tensor, gf.Tensor, list[gf.Tensor]],
) -> None:
    x, _, outputs = made
    source = gf.Graph([*outputs, x])
    feeds = {x: np.random.default_rng(5).normal(size=(3, 3)).astype("float32")}
    wanted = _bits(evaluate(source.outputs, feeds, step=2))
    graph = source
    for each in default_passes():
        graph = each(graph).verify()
        assert _bits(evaluate(graph.outputs, feeds, step=2)) == wanted
    assert len(graph) <= len(source)
    assert [t.spec for t in graph.outputs] == [t.spec for t in source.outputs]
    assert set(graph.names.values()) <= set(source.names.values())
    with gf.Session() as s:
        s.run(x, feeds), s.run(x, feeds)  # the third step draws as `step=2` above
        assert _bits(s.run([*outputs, x], feeds)) == wanted


@settings(max_examples=50)
@given(_graphs())
def test_optimising_twice_changes_nothing_more(
    made: tuple[gf.Tensor, gf.Tensor, list[gf.Tensor]],
) -> None:
    once = optimize(gf.Graph(made[2]))
    assert str(optimize(once)) == str(once)


def test_what_is_optimised_is_the_same_in_every_process() -> None:
    def build() -> gf.Graph:
        with gf.random.seed(0):
            x = _x()
            w = gf.variable(gf.init.glorot((3, 3)), name="w")
            loss = gf.mean(gf.square(x @ w - gf.random.normal((3, 3))))
            return optimize(gf.Graph([loss, gf.optim.Adam().minimize(loss)]))

    assert str(build()) == str(build())
