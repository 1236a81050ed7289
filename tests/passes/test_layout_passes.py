"""Passes that spare copies: transposes become flags, padded parts are joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.passes import FoldTransposes, JoinPads, optimize

Tensor = gf.Tensor
_TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "matrix_transpose": gf.matrix_transpose,
    "permute_dims": lambda x: gf.permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)),
    "swapaxes": lambda x: gf.swapaxes(x, -1, -2),
    "moveaxis": lambda x: gf.moveaxis(x, -1, -2),
    "thrice": lambda x: x.T.T.T,
}


def _ops(graph: gf.Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def _check_optimized(
    outputs: list[Tensor], feeds: dict[Tensor, Any], exactly: bool = True
) -> list[str]:
    """The ops of the optimised graph, which computes what the given one does."""
    graph = optimize(gf.Graph(outputs))
    assert not {t.node for t in feeds} - set(graph.placeholders)
    before, after = evaluate(outputs, feeds), evaluate(list(graph.outputs), feeds)
    for a, b in zip(before, after, strict=True):
        (np.testing.assert_array_equal if exactly else np.testing.assert_allclose)(b, a)
    return _ops(graph)


def _fed(*shapes: tuple[int, ...]) -> dict[Tensor, Any]:
    random = np.random.default_rng(0)
    return {
        gf.placeholder("float32", shape): random.normal(size=shape).astype("float32")
        for shape in shapes
    }


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("how", _TRANSPOSES)
def test_every_way_to_write_a_transpose_is_a_flag(how: str, batch: tuple[int, ...]) -> None:
    turn = _TRANSPOSES[how]
    feeds = _fed((*batch, 5, 4), (*batch, 5, 6), (*batch, 6, 5))
    a, b, c = feeds
    for left, right in ((a, b), (c, a), (a, c)):
        y = gf.matmul(turn(left) if left is a else left, turn(right) if right is c else right)
        assert "permute_dims" not in _check_optimized([y], {left: feeds[left], right: feeds[right]})


@pytest.mark.parametrize("how", ["T", "swapaxes"])
def test_gradients_of_products_of_transposes_copy_nothing(how: str) -> None:
    feeds = _fed((5, 4), (5, 6), (8, 6))
    a, b, c = feeds
    turn = _TRANSPOSES[how]
    loss = gf.sum(gf.tanh(gf.tanh(turn(a) @ b) @ turn(c)))
    gradients = gf.gradients(loss, [a, b, c])
    assert "permute_dims" not in _check_optimized(gradients, feeds)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk->ik", ((4, 5), (5, 6))),
        ("ji,jk->ik", ((5, 4), (5, 6))),
        ("ij,kj->ik", ((4, 5), (6, 5))),
        ("ji,kj->ik", ((5, 4), (6, 5))),
        ("ij,jk->ki", ((4, 5), (5, 6))),
        ("bij,bjk->bik", ((3, 4, 5), (3, 5, 6))),
        ("bij,bkj->bik", ((3, 4, 5), (3, 6, 5))),
        ("bji,bjk->bki", ((3, 5, 4), (3, 5, 6))),
        ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
        ("btc,cd->btd", ((2, 3, 4), (4, 5))),
        ("btc,btd->cd", ((2, 3, 4), (2, 3, 5))),
    ],
)
def test_einsum_and_its_gradients_copy_nothing(
    subscripts: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    feeds = _fed(*shapes)
    y = gf.einsum(subscripts, *feeds)
    gradients = gf.gradients(gf.sum(gf.tanh(y)), list(feeds))
    assert "permute_dims" not in _check_optimized([y, *gradients], feeds)


def test_a_product_that_is_only_wanted_transposed_is_computed_so() -> None:
    feeds = _fed((3, 5, 4), (3, 4, 6))
    a, b = feeds
    assert "permute_dims" not in _check_optimized([gf.tanh(gf.matmul(a, b).mT)], feeds)
    y = gf.matmul(a, b)
    assert "permute_dims" in _check_optimized([y, y.mT], feeds)


def test_two_permutations_are_one_and_undo_each_other() -> None:
    feeds = _fed((2, 3, 4))
    (x,) = feeds
    twice = gf.permute_dims(gf.permute_dims(x, (1, 2, 0)), (1, 0, 2))
    assert _check_optimized([twice + 1], feeds).count("permute_dims") == 1
    back = gf.permute_dims(gf.permute_dims(x, (1, 2, 0)), (2, 0, 1))
    assert "permute_dims" not in _check_optimized([back + 1], feeds)


@pytest.mark.parametrize(
    ("shape", "axes", "copies"),
    [((4, 1, 5), (1, 0, 2), 0), ((1, 4, 5), (1, 2, 0), 0), ((4, 3, 1), (1, 0, 2), 1)],
)
def test_a_permutation_of_axes_of_size_one_is_a_reshape(
    shape: tuple[int, ...], axes: tuple[int, ...], copies: int
) -> None:
    feeds = _fed(shape)
    (x,) = feeds
    assert _check_optimized([gf.permute_dims(x, axes) + 1], feeds).count("permute_dims") == copies


def test_attention_with_one_head_copies_nothing() -> None:
    feeds = _fed((2, 5, 4))
    (x,) = feeds
    heads = gf.permute_dims(gf.reshape(x, (2, 5, 1, 4)), (0, 2, 1, 3))
    scores = gf.nn.softmax(heads @ heads.mT, axis=-1)
    seen = gf.reshape(gf.permute_dims(scores @ heads, (0, 2, 1, 3)), (2, 5, 4))
    assert "permute_dims" not in _check_optimized([seen], feeds)


# Pads -------------------------------------------------------------------------------------------


def test_the_gradient_of_a_split_is_a_concatenation() -> None:
    feeds = _fed((2, 9, 3))
    (x,) = feeds
    a, b, c = gf.split(x, 3, axis=1)
    (gradient,) = gf.gradients(gf.sum(gf.tanh(a) * 2 + gf.sin(c) * b), [x])
    ops = _check_optimized([gradient], feeds)
    assert "concat" in ops
    assert "pad" not in ops


def test_parts_of_other_sizes_join_in_order() -> None:
    feeds = _fed((2, 2), (2, 5), (2, 3))
    a, b, c = feeds
    total = gf.pad(b, ((0, 0), (3, 2))) + gf.pad(c, ((0, 0), (0, 7))) + gf.pad(a, ((0, 0), (8, 0)))
    graph = JoinPads()(gf.Graph([total]))
    assert _ops(graph).count("concat") == 1
    np.testing.assert_array_equal(evaluate(list(graph.outputs), feeds)[0],
                                  np.concatenate([feeds[c], feeds[b], feeds[a]], 1))  # fmt: skip


@pytest.mark.parametrize(
    "total",
    [
        lambda a, b: gf.pad(a, ((0, 0), (0, 3))) + gf.pad(b, ((0, 0), (1, 2))),
        lambda a, b: gf.pad(a, ((0, 0), (0, 5))) + gf.pad(b, ((0, 0), (5, 0))),
        lambda a, b: gf.pad(a, ((0, 0), (0, 2)), value=1) + gf.pad(b, ((0, 0), (2, 0))),
        lambda a, b: gf.pad(a, ((0, 2), (0, 0))) + gf.pad(b, ((0, 2), (0, 0))),
        lambda a, b: gf.pad(a, ((0, 0), (0, 2))) + gf.concat([a, b], 1),
        lambda a, b: gf.pad(a, ((0, 2), (0, 2))) + gf.pad(b, ((2, 0), (2, 0))),
    ],
    ids=["overlap", "gap", "of ones", "same place", "no pad", "two axes"],
)
def test_other_sums_stay(total: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = gf.placeholder("float32", (3, 2)), gf.placeholder("float32", (3, 2))
    graph = gf.Graph([total(a, b)])
    assert _ops(JoinPads()(graph)) == _ops(graph)


def test_symbolic_sizes_are_left_alone_where_they_are_not_known() -> None:
    x = gf.placeholder("float32", (None, 4))
    a, b = x[:, :1], x[:, 1:]
    (gradient,) = gf.gradients(gf.sum(gf.tanh(a) * 2) + gf.sum(gf.tanh(b)), [x])
    assert "concat" in _ops(JoinPads()(gf.Graph([gradient])))
    y = gf.permute_dims(gf.permute_dims(x, (1, 0)), (1, 0))
    assert _ops(FoldTransposes()(gf.Graph([y]))) == ["placeholder"]
