"""matmul: numpy's values, and the same bits for any number of threads and any placement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import DTypeError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS as G
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import Dim, spec
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.matrices.blas_blocks import choose_blocks
from graphflow.placement import Cluster
from graphflow.sessions.session import Session

MATMUL = REGISTRY["matmul"]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float64", "int32"])
@pytest.mark.parametrize(
    "a, b",
    [
        ((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (4,)),
        ((4,), (2, 4, 5)), ((3, 0), (0, 5)), ((0, 4), (4, 5)),
    ],
)  # fmt: skip
def test_matmul_is_numpys(a: tuple, b: tuple, dtype: str) -> None:
    x, y = (RNG.integers(-5, 6, shape).astype(dtype) for shape in (a, b))
    result = G["matmul"](x, y)
    assert result.shape == (x @ y).shape
    np.testing.assert_array_equal(evaluate([result])[0], x @ y)


@given(st.booleans(), st.booleans(), st.booleans())
def test_flags_transpose_the_last_two_axes(ta: bool, tb: bool, batched: bool) -> None:
    front = (2,) if batched else ()
    a, b = RNG.standard_normal((*front, 3, 4)), RNG.standard_normal((*front, 4, 5))
    left = a.swapaxes(-1, -2).copy() if ta else a
    right = b.swapaxes(-1, -2).copy() if tb else b
    (value,) = evaluate([G["matmul"](left, right, transpose_a=ta, transpose_b=tb)])
    np.testing.assert_allclose(value, a @ b)


def test_a_batch_times_one_matrix_is_one_product() -> None:
    x, w = placeholder("float32", ("n", 7, 4)), placeholder("float32", (4, 5))
    y = x @ w
    assert y.shape == (Dim.symbol("n"), 7, 5)
    (node,) = Graph(y).of_op("matmul")
    assert node.specs[0].shape == (7 * Dim.symbol("n"), 5)


LARGE = [
    ((128, 784), (784, 512)), ((784, 128), (128, 512)), ((600, 600), (600, 600)),
    ((6, 200, 200), (6, 200, 200)), ((5, 1, 200, 200), (3, 200, 200)), ((2000, 8000), (8000, 1)),
]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("a, b", LARGE)
@pytest.mark.parametrize("ta, tb", [(False, False), (True, False), (False, True)])
def test_any_number_of_threads_gives_the_same_bits(
    a: Any, b: Any, ta: bool, tb: bool, dtype: str
) -> None:
    x, y = RNG.standard_normal(a).astype(dtype), RNG.standard_normal(b).astype(dtype)
    attrs = {"transpose_a": ta, "transpose_b": tb}
    x = x.swapaxes(-1, -2).copy() if ta else x
    y = y.swapaxes(-1, -2).copy() if tb else y
    with threadpool_limits(1):
        (alone,) = MATMUL.run(np, [x, y], attrs)
        np.testing.assert_allclose(
            alone,
            (x.swapaxes(-1, -2) if ta else x) @ (y.swapaxes(-1, -2) if tb else y),
            rtol=1e-3,
            atol=1e-3,
        )
        for threads in (1, 2, 3):
            pool = Pool(threads)
            out = np.full_like(alone, np.nan)
            with use_pool(pool):
                MATMUL.into(np, out, x, y, **attrs)
            pool.close()
            assert out.tobytes() == alone.tobytes()


@pytest.mark.parametrize("shape", [(8, 300), (33, 64), (700, 784)])
@pytest.mark.parametrize("attrs", [{"transpose_a": True}, {"transpose_b": True}], ids=str)
def test_a_product_with_itself_has_the_bits_of_a_product_with_its_copy(
    shape: tuple, attrs: dict
) -> None:
    x = RNG.standard_normal(shape).astype("float32")
    (itself,), (copy,) = MATMUL.run(np, [x, x], attrs), MATMUL.run(np, [x, x.copy()], attrs)
    assert itself.tobytes() == copy.tobytes()


BY_KERNEL = [
    ((16, 784), (784, 512), False, False),
    ((16, 512), (784, 512), False, True),
    ((200, 64), (200, 30), True, False),
    ((6, 7), (7, 5), False, False),
    ((8, 40, 30), (8, 30, 40), True, True),
    ((3, 1, 9, 20), (4, 20, 11), False, False),
    ((1024, 256), (1024, 512), True, False),  # packed, a long way from row to row
]
BY_BLAS = [
    ((1000, 100), (100, 2), False, False),  # narrow
    ((1024, 1024), (1024, 1024), False, False),  # large
    ((1280, 512), (1280, 512), True, False),  # a long way from row to row
    ((2, 1, 2, 3, 4), (1, 3, 1, 4, 5), False, False),  # batches that no two loops walk
]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("a", "b", "ta", "tb"), [*BY_KERNEL, *BY_BLAS], ids=str)
def test_a_kernel_by_itself_in_a_program_or_on_threads_gives_the_same_bits(
    a: tuple[int, ...],
    b: tuple[int, ...],
    ta: bool,
    tb: bool,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
    x, y = (RNG.normal(size=shape).astype(dtype) for shape in (a, b))
    left, right = (placeholder(dtype, shape) for shape in (a, b))
    product = G["matmul"](left, right, transpose_a=ta, transpose_b=tb)
    (alone,) = evaluate([product], {left: x, right: y})
    if vector_width() >= 8:
        spec_a, spec_b = left.spec, right.spec
        by_kernel = MATMUL.native(spec_a, spec_b, transpose_a=ta, transpose_b=tb) is not None  # type: ignore[misc]
        assert by_kernel == ((a, b, ta, tb) in BY_KERNEL)
    for threads in (1, 2):
        with Session(Cluster.here(threads=threads)) as session:
            np.testing.assert_array_equal(session.run(product, {left: x, right: y}), alone)
    exact = (x.swapaxes(-1, -2) if ta else x) @ (y.swapaxes(-1, -2) if tb else y)
    np.testing.assert_allclose(alone, exact, rtol=0, atol=1e-3 if dtype == "float32" else 1e-11)


def test_a_row_has_the_bits_that_it_has_in_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
    x, w = RNG.normal(size=(128, 96)).astype("f4"), RNG.normal(size=(96, 70)).astype("f4")
    (whole,) = MATMUL.run(np, [x, w], {})
    (part,) = MATMUL.run(np, [x[5:21], w], {})
    if vector_width() >= 8:
        np.testing.assert_array_equal(part, whole[5:21])
    np.testing.assert_allclose(part, whole[5:21], rtol=1e-4, atol=1e-4)


def test_without_generated_kernels_products_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    x, y = RNG.normal(size=(20, 30)), RNG.normal(size=(30, 40))
    assert MATMUL.native is not None
    assert MATMUL.native(spec("float64", (20, 30)), spec("float64", (30, 40))) is None
    (out,) = MATMUL.run(np, [x, y], {})
    np.testing.assert_array_equal(out, x @ y)


def test_a_long_sum_of_products_has_the_same_bits_for_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    x, y = RNG.normal(size=(20_001, 40)), RNG.normal(size=(20_001, 50))
    assert choose_blocks((), 40, len(x), 50) == (2, 2)
    found = []
    for threads in (1, 3):
        with use_pool(Pool(threads)):
            found += MATMUL.run(np, [x, y], {"transpose_a": True})
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], x.T @ y, rtol=0, atol=1e-10)


def test_products_are_split_along_their_longest_side_into_blocks_of_at_least_32() -> None:
    assert choose_blocks((), 64, 64, 64) == (0, 1)
    assert choose_blocks((), 128, 784, 512) == (1, 2)
    assert choose_blocks((), 784, 128, 512) == (0, 2)
    assert choose_blocks((), 1024, 1024, 1024) == (0, 8)
    assert choose_blocks((), 40, 100_000, 40) == (2, 2)
    assert choose_blocks((1,), 40, 100_000, 40) == (1, 1)
    assert choose_blocks((8,), 256, 256, 256) == (0, 2)
    assert choose_blocks((2, 64), 256, 256, 256) == (1, 8)


def test_outer_vecdot_trace_and_triangles_are_numpys() -> None:
    a, b = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 4))
    values = evaluate(
        [
            G["outer"](a[0], b[1]),
            G["vecdot"](a, b),
            G["vecdot"](a, b, axis=0),
            G["trace"](a[:, :3]),
            G["diagonal"](a[:, :3]),
            G["tril"](a, k=1),
            G["triu"](a, k=-1),
        ]
    )
    wanted = [
        np.outer(a[0], b[1]), (a * b).sum(1), (a * b).sum(0), np.trace(a[:, :3]),
        np.diagonal(a[:, :3]), np.tril(a, 1), np.triu(a, -1),
    ]  # fmt: skip
    for value, want in zip(values, wanted, strict=True):
        np.testing.assert_allclose(value, want)


def test_costs_count_two_flops_a_multiplication() -> None:
    x, y = placeholder("float32", ("n", 3)), placeholder("float32", (3, 5))
    assert MATMUL.cost is not None
    assert MATMUL.cost(x.spec, y.spec).flops == 30 * Dim.symbol("n")


@pytest.mark.parametrize(
    "a, b, error, words",
    [
        ((2, 3), (4, 5), ShapeError, r"\(2, 3\) @ \(4, 5\) \(3 != 4\)"),
        ((2, 2, 3), (3, 3, 5), ShapeError, "do not broadcast"),
        ((), (3,), ShapeError, "scalars"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(a: Any, b: Any, error: type, words: str) -> None:
    x, y = placeholder("float32", a), placeholder("float32", b)
    with pytest.raises(error, match=rf"matmul at .*test_matmul\.py:\d+.*{words}"):
        x @ y


def test_bools_and_mixed_kinds_do_not_multiply() -> None:
    with pytest.raises(DTypeError, match="matmul"):
        G["matmul"](np.ones((2, 2), bool), np.ones((2, 2), bool))
    with pytest.raises(DTypeError, match="astype"):
        G["matmul"](np.ones((2, 2), "int32"), np.ones((2, 2), "float32"))
