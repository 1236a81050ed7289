"""Structures of fetches, and sizes from the shapes of feeds."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import FeedError, FetchError, PlanError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.pytree import bind, depends_on_placeholder, flatten, placeholders_behind
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor
from graphflow.ir.spec import Dim
from graphflow.transforms.reverse_mode import gradients

Pair = namedtuple("Pair", "loss train")


def _tensor(name: str = "t") -> Tensor:
    return placeholder("float32", (), name=name)


def test_a_single_tensor_comes_back_alone() -> None:
    x = _tensor()
    tensors, rebuild = flatten(x)
    assert [t is x for t in tensors] == [True]
    assert rebuild([7]) == 7


def test_named_tuples_dicts_and_lists_keep_their_types_and_keys() -> None:
    a, b, c = (_tensor(n) for n in "abc")
    tensors, rebuild = flatten({"m": Pair(a, [b]), 3: (c, a)})
    assert [t.name for t in tensors] == ["a", "b", "c", "a"]
    built = rebuild([1, 2, 3, 4])
    assert built == {"m": Pair(1, [2]), 3: (3, 4)}
    assert isinstance(built["m"], Pair)


@given(
    st.recursive(
        st.integers(),
        lambda nest: (
            st.lists(nest, max_size=3)
            | st.dictionaries(st.text(max_size=2), nest, max_size=3)
            | st.tuples(nest, nest)
        ),
        max_leaves=12,
    )
)
def test_flattening_and_rebuilding_any_nest_gives_it_back(nest: object) -> None:
    leaves: dict[Tensor, int] = {}

    def plant_placeholders(item: object) -> object:
        if isinstance(item, list):
            return [plant_placeholders(i) for i in item]
        if isinstance(item, tuple):
            return tuple(plant_placeholders(i) for i in item)
        if isinstance(item, dict):
            return {k: plant_placeholders(v) for k, v in item.items()}
        leaf = _tensor()
        leaves[leaf] = item  # type: ignore[assignment]
        return leaf

    tensors, rebuild = flatten(plant_placeholders(nest))
    assert rebuild([leaves[t] for t in tensors]) == nest


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("loss", "not its name"),
        (None, "None"),
        (np.zeros(3), "array"),
        (3.5, "float 3.5"),
        (REGISTRY["add"], "call it"),
        ({1, 2}, "set"),
    ],
)
def test_anything_else_is_a_fetch_error_that_says_where(wrong: object, told: str) -> None:
    with pytest.raises(FetchError, match=r"fetches\['a'\]\[1\]") as caught:
        flatten({"a": [_tensor(), wrong]})
    assert told in str(caught.value)


def test_rebuilding_from_another_number_of_values_is_an_error() -> None:
    _, rebuild = flatten([_tensor(), _tensor()])
    with pytest.raises(FetchError, match="1 values for 2"):
        rebuild([1])


def _matrix_graph() -> tuple[Tensor, Tensor, Graph]:
    x = placeholder("float32", ("n", 4), name="x")
    y = placeholder("float32", ("n",), name="y")
    return x, y, Graph([x + 1, y])


def test_symbols_get_their_sizes_from_placeholders() -> None:
    x, y, graph = _matrix_graph()
    assert bind(graph, {x.node: (7, 4), y.node: (7,)}) == {"n": 7}


def test_two_placeholders_that_disagree_on_a_name_are_both_named() -> None:
    x, y, graph = _matrix_graph()
    with pytest.raises(FeedError, match=r"'y'.*'n' is 8 here, but 7 in placeholder 'x'"):
        bind(graph, {x.node: (7, 4), y.node: (8,)})


@pytest.mark.parametrize(
    ("shape", "told"),
    [((7,), "rank 2, not 1"), ((7, 5), "axis 1 must be 4, not 5"), ((-1, 4), "negative")],
)
def test_a_wrong_shape_names_placeholder_line_and_both_shapes(
    shape: tuple[int, ...], told: str
) -> None:
    x, y, graph = _matrix_graph()
    with pytest.raises(FeedError, match=r"'x' \(made at .*test_pytree.py:\d+\)") as caught:
        bind(graph, {x.node: shape, y.node: (7,)})
    assert told in str(caught.value)
    assert "(n, 4)" in str(caught.value)


def test_a_graph_that_only_counts_a_size_concerns_the_placeholder_that_has_it() -> None:
    x, y, _ = _matrix_graph()
    (count,) = x.shape[:1]
    graph = Graph(FUNCTIONS["full"]((), count))
    assert depends_on_placeholder(graph, x.node) and depends_on_placeholder(graph, y.node)
    assert not depends_on_placeholder(graph, _tensor().node)


def test_a_missing_placeholder_raises_the_error_asked_for() -> None:
    x, _, graph = _matrix_graph()
    with pytest.raises(PlanError, match=r"'y'.*missing"):
        bind(graph, {x.node: (7, 4)}, error=PlanError)


def test_a_shape_for_something_else_than_a_placeholder_is_refused() -> None:
    x, y, graph = _matrix_graph()
    with pytest.raises(FeedError, match="is a add, no placeholder"):
        bind(graph, {x.node: (7, 4), y.node: (7,), (x + 1).node: (7, 4)})


def test_sizes_that_an_op_equated_must_agree_and_the_op_is_named() -> None:
    a = placeholder("float32", (None,), name="a")
    b = placeholder("float32", (None,), name="b")
    graph = Graph([a + b])
    bind(graph, {a.node: (5,), b.node: (5,)})
    with pytest.raises(FeedError, match=r"add 'add' \(made at .*test_pytree") as caught:
        bind(graph, {a.node: (5,), b.node: (6,)})
    assert "5 and 6" in str(caught.value)
    assert "'a'" in str(caught.value) and "'b'" in str(caught.value)


def test_a_multiple_of_a_symbol_is_solved_and_checked() -> None:
    n = Dim.symbol("n")
    a = placeholder("float32", (2 * n + 1,), name="a")
    graph = Graph([a])
    assert bind(graph, {a.node: (7,)}) == {"n": 3}
    b = placeholder("float32", ("n",), name="b")
    with pytest.raises(FeedError, match=r"2\*n = 8, not 7|= 9, not 7"):
        bind(Graph([a, b]), {a.node: (7,), b.node: (4,)})


def test_a_negative_size_is_an_error_of_the_node_that_has_it() -> None:
    n = Dim.symbol("n")
    a = placeholder("float32", ("n",), name="a")
    shorter = REGISTRY["placeholder"](shape=(n - 3,), dtype="float32", name="shorter")
    with pytest.raises(FeedError):
        bind(Graph([a, shorter]), {a.node: (2,), shorter.node: (0,)})
    full = FUNCTIONS["full"]((n - 3,), 1.0, dtype="float32")
    with pytest.raises(FeedError, match=r"fill.*= -1"):
        bind(Graph([a + 0.0, full]), {a.node: (2,)})


def test_a_size_of_a_placeholder_that_is_not_read_is_taken_from_it() -> None:
    n = Dim.symbol("n")
    a = placeholder("float32", ("n",), name="a")
    full = FUNCTIONS["full"]((n,), 1.0, dtype="float32")
    assert bind(Graph([full]), {a.node: (2,)}) == {"n": 2}
    with pytest.raises(FeedError, match="'n' is unknown"):
        bind(Graph([full]), {})


def test_a_size_that_only_an_attribute_holds_must_be_known_too() -> None:
    rows, columns = (FUNCTIONS["arange"](3) for _ in range(2))
    place = FUNCTIONS["ravel_multi_index"]((rows, columns), ("n", 3))
    with pytest.raises(FeedError, match=r"made at .*test_pytree\.py.*a size n that no given"):
        bind(Graph([place]), {})


def test_a_derivative_is_derived_from_all_that_its_function_reads() -> None:
    x, other = placeholder("float32", (3,), name="x"), placeholder("float32", (3,), name="other")
    w = placeholder("float32", (3,), name="w")
    loss = FUNCTIONS["sum"](w * 2.0) + FUNCTIONS["sum"](x)
    (slope,) = gradients(loss, [w])
    assert Graph([slope]).placeholders == ()
    assert placeholders_behind(Graph([slope])) == {x.node, w.node}
    (nothing,) = gradients(loss, [other])
    assert placeholders_behind(Graph([nothing])) == {x.node, w.node}
    assert placeholders_behind(Graph([x + 1.0])) == {x.node}
