"""Reading and writing at places along several axes, against loops over numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, OpError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.sparse.scatter_rows import REDUCTIONS, combine_rows

A = np.random.default_rng(0).standard_normal((4, 5, 6))
COMBINE = {
    "none": lambda a, b: b,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
}


def value(x: Any) -> Any:
    return evaluate([x])[0]


def _indices(shape: tuple[int, ...], limits: tuple[int, ...], seed: int) -> Any:
    """Vectors of indices (…, len(limits)), negative ones among them."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(-n, n, shape) for n in limits], -1)


@given(st.integers(1, 3), st.sampled_from([(), (7,), (2, 3)]), st.integers(0, 99))
def test_gather_nd_reads_what_the_vectors_name(k: int, shape: Any, seed: int) -> None:
    i = _indices(shape, A.shape[:k], seed)
    wanted = A[tuple(np.moveaxis(i, -1, 0))]
    np.testing.assert_array_equal(value(gf.gather_nd(A, i)), wanted)


@given(st.integers(0, 2), st.sampled_from([(), (7,), (2, 3)]), st.integers(0, 99))
def test_batch_axes_go_together(k: int, shape: Any, seed: int) -> None:
    i = np.stack([_indices(shape, A.shape[1 : 1 + k], seed + b) for b in range(4)]) if k else (
        np.zeros((4, *shape, 0), int)
    )  # fmt: skip
    wanted = np.stack([A[b][tuple(np.moveaxis(i[b], -1, 0))] if k else
                       np.broadcast_to(A[b], (*shape, *A[b].shape)) for b in range(4)])  # fmt: skip
    np.testing.assert_array_equal(value(gf.gather_nd(A, i, batch_dims=1)), wanted)


@given(st.integers(1, 3), st.integers(0, 8), st.sampled_from(REDUCTIONS), st.integers(0, 99))
def test_scatter_nd_combines_in_order(k: int, count: int, reduction: str, seed: int) -> None:
    i = _indices((count,), A.shape[:k], seed)
    updates = np.random.default_rng(seed).standard_normal((count, *A.shape[k:]))
    wanted = A.copy()
    for place, update in zip(i, updates, strict=True):
        wanted[tuple(place)] = COMBINE[reduction](wanted[tuple(place)], update)
    have = value(gf.scatter_nd(A, i, updates, reduction))
    assert have.tobytes() == wanted.tobytes()


@given(st.integers(0, 2), st.sampled_from(REDUCTIONS), st.integers(0, 99), st.integers(0, 7))
def test_scatter_writes_elements_along_an_axis(
    axis: int, reduction: str, seed: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(count if i == axis else rng.integers(0, n + 1) for i, n in enumerate(A.shape))
    i = rng.integers(-A.shape[axis], A.shape[axis], shape)
    updates = rng.standard_normal(shape)
    wanted = A.copy()
    for place in np.ndindex(*shape):
        to = (*place[:axis], i[place], *place[axis + 1 :])
        wanted[to] = COMBINE[reduction](wanted[to], updates[place])
    have = value(gf.scatter(A, i, updates, axis, reduction))
    assert have.tobytes() == wanted.tobytes()
    read = value(gf.gather(A, i, axis))
    for place in np.ndindex(*shape):
        assert read[place] == A[(*place[:axis], i[place], *place[axis + 1 :])]


@pytest.mark.parametrize("width", [1, 3, 700])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint64", "complex64", "bool"])
def test_rows_of_any_width_and_dtype_are_combined_in_order(
    width: int, reduction: str, dtype: str
) -> None:
    if (dtype == "bool" and reduction != "none") or (
        dtype == "complex64" and reduction in ("min", "max")
    ):
        return
    rng = np.random.default_rng(3)
    out, updates = (rng.integers(0, 3, (n, width)).astype(dtype) for n in (6, 40))
    rows = rng.integers(0, 6, 40)
    wanted = out.astype("float32") if dtype == "float16" else out.copy()
    with np.errstate(all="ignore"):
        for row, update in zip(rows, updates, strict=True):
            wanted[row] = COMBINE[reduction](wanted[row], update.astype(wanted.dtype))
        combine_rows(np, out, rows, updates, reduction)
    assert out.tobytes() == wanted.astype(dtype).tobytes()


def test_put_along_axis_is_numpys() -> None:
    i = np.random.default_rng(1).permuted(np.tile(np.arange(6), (4, 5, 1)), axis=2)[..., :2]
    wanted = A.copy()
    np.put_along_axis(wanted, i, 7.0, 2)
    np.testing.assert_array_equal(value(gf.put_along_axis(A, i, 7.0)), wanted)
    wanted = A.copy()
    np.put_along_axis(wanted, i[:1, :1], A[:, :, :2], 2)
    np.testing.assert_array_equal(value(gf.put_along_axis(A, i[:1, :1], A[:, :, :2], 2)), wanted)


def test_index_add_is_scatter_add() -> None:
    x = np.zeros((3, 2))
    assert value(gf.index_add(x, [0, -1, 0], np.ones((3, 2)))).tolist() == [[2, 2], [0, 0], [1, 1]]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_duplicates(reduction: str) -> None:
    x = gf.constant(np.array([2.0, 3.0]))
    u = gf.constant(np.array([3.0, 5.0, 3.0]))
    y = gf.scatter(x, [1, 0, 1], u, 0, reduction)
    by_x, by_u = evaluate(gf.gradients(gf.sum(y * np.array([10.0, 1.0])), [x, u]))
    wanted = {
        "none": ([0, 0], [0, 10, 1]),
        "add": ([10, 1], [1, 10, 1]),
        "mul": ([50, 9], [9, 20, 9]),
        "min": ([10, 1 / 3], [1 / 3, 0, 1 / 3]),
        "max": ([0, 1 / 3], [1 / 3, 10, 1 / 3]),
    }[reduction]
    np.testing.assert_allclose(by_x, wanted[0])
    np.testing.assert_allclose(by_u, wanted[1])


def test_a_factor_of_zero_has_the_product_of_the_others_as_gradient() -> None:
    x = gf.constant(np.array([2.0, 3.0, 1.0]))
    u = gf.constant(np.array([0.0, 5.0, 0.0, 0.0, 4.0]))
    y = gf.scatter(x, [0, 0, 1, 1, 2], u, 0, "mul")
    (by_u,) = evaluate(gf.gradients(gf.sum(y), [u]))
    assert by_u.tolist() == [10, 0, 0, 0, 1]


def test_sizes_may_be_unknown_and_the_session_agrees() -> None:
    x, i = gf.placeholder("float64", ("n", 5, 6)), gf.placeholder("int64", ("n", 3, 1))
    u = gf.placeholder("float64", ("n", 3, 6))
    y = gf.scatter_nd(x, i, u, "add", batch_dims=1)
    assert y.shape == x.shape and gf.gather_nd(x, i, 1).shape == u.shape
    fed = {x: A, i: _indices((4, 3), (5,), 0), u: A[:, :3]}
    with gf.Session() as session:
        assert session.run(y, fed).tobytes() == evaluate([y], fed)[0].tobytes()


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda i: gf.gather_nd(A, i), "index 5 is outside axis 1 of size 5"),
        (lambda i: gf.scatter_nd(A, i, A[:1, 0]), "index 5 is outside axis 1 of size 5"),
        (lambda i: gf.scatter(A[0, 0], i[0], A[0, 0, :2] * 0, 0), None),
        (lambda i: gf.scatter(A[0, :4, 0], i[0], A[0, 0, :2], 0), "index 5 .* axis 0 of size 4"),
        (lambda i: gf.gather(A[:, :2], i[:, :, None] + [[[0]]], 1), "index 5 is outside axis 1"),
        (lambda i: gf.gather(A[:1], gf.concat([i, i])[:, :, None] * 0, 1), "2 indices .* axis 0"),
    ],
)  # fmt: skip
def test_an_index_outside_names_itself_the_axis_its_size_and_the_line(
    build: Any, words: str | None
) -> None:
    i = gf.placeholder("int64", (None, 2))
    y = build(i)
    with gf.Session() as session:
        if words is None:
            assert session.run(y, {i: [[0, 5]]}).shape == (6,)
            return
        with pytest.raises(OpError, match=rf"test_scatter\.py:\d+.*{words}"):
            session.run(y, {i: [[0, 5]]})


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.gather_nd(A, [[0, 0, 0, 0]]), ShapeError, "4 axes"),
        (lambda: gf.gather_nd(A, 1), ShapeError, "last axis"),
        (lambda: gf.gather_nd(A, [[0.5]]), DTypeError, "int"),
        (lambda: gf.gather_nd(A, [[0]], batch_dims=1), ShapeError, "4"),
        (lambda: gf.gather_nd(A, [[0]], batch_dims=-1), ArgumentError, "batch_dims"),
        (lambda: gf.scatter_nd(A, [[0]], A[:2]), ShapeError, "updates are"),
        (lambda: gf.scatter_nd(A, [[0]], A[:1].astype("f")), DTypeError, "float32"),
        (lambda: gf.scatter_nd(A, [[0]], A[:1], "sub"), ArgumentError, "none, add, mul, min, max"),
        (lambda: gf.scatter(A, [[[0] * 7]], [[[0.0] * 7]], 1), ShapeError, "more indices than"),
        (lambda: gf.scatter(A, [0], [0.0], 0), ShapeError, "ranks differ"),
        (lambda: gf.scatter(A > 0, A > 0, A > 0), DTypeError, "int"),
        (lambda: gf.scatter(A > 0, (A > 0).astype(int), A > 0, 0, "add"), DTypeError, "bool"),
        (lambda: gf.put_along_axis(A, [0], 1.0), ShapeError, "ranks differ"),
        (lambda: gf.ravel_multi_index([[0]], (2, 3)), ShapeError, "1 tensors of indices for 2"),
        (lambda: gf.ravel_multi_index([], ()), ArgumentError, "rank 0"),
        (lambda: gf.ravel_multi_index(3, (2,)), ArgumentError, "list"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_scatter\.py:\d+.*{words}"):
        call()
