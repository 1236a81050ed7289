"""Products of a matrix with its own transpose: found in graphs, right, and of the same bits for any
number of threads and workers."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.ops.matrices.gram import uses_syrk
from graphflow.passes import optimize

CASES = [
    ((5, 3), True), ((3000, 70), True), ((30_000, 40), True), ((40, 900), True), ((700, 700), True),
    ((5, 3), False), ((60, 2000), False), ((40, 20_000), False), ((900, 150), False),
]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("shape, columns", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_with_its_transpose(shape: tuple[int, int], dtype: str, columns: bool) -> None:
    given = np.random.default_rng(0).normal(size=shape).astype(dtype)
    x = gf.placeholder(dtype, (None, None))
    product = x.T @ x if columns else x @ x.T
    assert [node.op.name for node in optimize(gf.Graph([product])).nodes][-1] == "gram"

    def compute_product(threads: int = 1) -> list[np.ndarray]:
        with gf.Session(gf.Cluster.here(threads=threads), trial=False) as s:
            return [s.run(product, {x: given})]

    (found,) = compute_product()
    wide = given.astype("float64")
    want = wide.T @ wide if columns else wide @ wide.T
    scale = np.abs(want).max()
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(found / scale, want / scale, rtol=0, atol=tolerance)
    k, n = shape if columns else shape[::-1]
    if uses_syrk(n, k, dtype):
        np.testing.assert_array_equal(found, found.T)
    np.testing.assert_array_equal(compute_product(2)[0], found)


def test_what_is_no_product_with_its_transpose_stays_one() -> None:
    x, y = (gf.placeholder("float32", (5000, 80)) for _ in range(2))
    whole = gf.placeholder("int32", (None, None))
    cube = gf.placeholder("float32", (3, 500, 80))
    small = gf.placeholder("float32", (50, 8))
    square = gf.placeholder("float32", (900, 900))
    for product in (x.T @ y, whole.T @ whole, gf.matrix_transpose(cube) @ cube, small.T @ small,
                    square @ square, square.T @ square.T):  # fmt: skip
        names = [node.op.name for node in optimize(gf.Graph([product])).nodes]
        assert "matmul" in names and "gram" not in names


def test_gradients_and_placement() -> None:
    """Least squares by its normal equations, on one device and on two workers."""
    rng = np.random.default_rng(1)
    held, wanted = rng.normal(size=(4000, 64)), rng.normal(size=(64, 64))
    want = 2 * held @ ((product := held.T @ held - wanted) + product.T)
    found = []
    for places, cluster in (
        (("/worker:0", "/worker:0"), gf.Cluster.here(threads=1)),
        (("/worker:0", "/worker:1"), gf.Cluster.local(workers=2, threads=1)),
    ):
        with gf.device(places[0]):
            x = gf.variable(held, name="x")
            transposed = x.T
        with gf.device(places[1]):
            loss = gf.sum((transposed @ x - wanted) ** 2)
        (slope,) = gf.gradients(loss, [x])
        with gf.Session(cluster, trial=False) as s:
            found.append(s.run([loss, slope]))
    for alone, together in zip(*found, strict=True):
        np.testing.assert_array_equal(alone, together)
    np.testing.assert_allclose(found[0][1], want, rtol=1e-9, atol=1e-6)
