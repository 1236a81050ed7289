"""Linear algebra against torch: values and gradients, real and complex.

Vectors of decompositions have signs and phases of LAPACK's choice, so what is compared does not
depend on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Tensor

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

OURS, THEIRS = gf.linalg, torch.linalg
SIZES = st.integers(1, 4)
BATCHES = st.sampled_from([(), (2,), (2, 1)])
COMPLEX = st.booleans()
SEEDS = st.integers(0, 99)
INF = float("inf")


def draw_matrices(seed: int, shape: tuple[int, ...], is_complex: bool) -> Any:
    rng = np.random.default_rng(seed)
    x: Any = rng.normal(size=shape)
    return x + 1j * rng.normal(size=shape) if is_complex else x


def draw_regular_matrices(seed: int, shape: tuple[int, ...], is_complex: bool) -> Any:
    """Matrices with a spectrum that is well separated and away from 0."""
    x = draw_matrices(seed, shape, is_complex)
    diagonal = range(min(shape[-2:]))
    x[..., diagonal, diagonal] += [8.0 * (i + 1) for i in diagonal]
    return x


def adjoint(x: Any) -> Any:
    return gf.conj(x).mT if isinstance(x, Tensor) else x.mH


def product(a: Any, b: Any) -> Any:
    return gf.matmul(a, b) if isinstance(a, Tensor) else a @ b


def size(x: Any) -> Any:
    return gf.abs(x) if isinstance(x, Tensor) else x.abs()


def first_space(vectors: Any) -> Any:
    """The projection on the first column."""
    return product(vectors[..., :1], adjoint(vectors[..., :1]))


def positive(x: Any) -> Any:
    return product(x, adjoint(x))


def _cond(x: Any) -> Any:
    """torch's own changes an inverse in place that its gradient needs."""
    return THEIRS.matrix_norm(x) * THEIRS.matrix_norm(THEIRS.inv(x))


# name -> (ours, theirs) of square matrices
SQUARE: dict[str, tuple[Any, Any]] = {
    "inv": (OURS.inv, THEIRS.inv),
    "det": (OURS.det, THEIRS.det),
    "slogdet": (OURS.slogdet, THEIRS.slogdet),
    "matrix_power 3": (lambda x: OURS.matrix_power(x, 3), lambda x: THEIRS.matrix_power(x, 3)),
    "matrix_power -2": (lambda x: OURS.matrix_power(x, -2), lambda x: THEIRS.matrix_power(x, -2)),
    "cholesky": (
        lambda x: OURS.cholesky(positive(x)),
        lambda x: THEIRS.cholesky(positive(x)),
    ),
    "upper cholesky": (
        lambda x: OURS.cholesky(positive(x), upper=True),
        lambda x: THEIRS.cholesky(positive(x), upper=True),
    ),
    "eigvalsh": (
        lambda x: OURS.eigvalsh(x + adjoint(x)),
        lambda x: THEIRS.eigvalsh(x + adjoint(x)),
    ),
    "eigh": (
        lambda x: _eigh(OURS, x),
        lambda x: _eigh(THEIRS, x),
    ),
    "cond": (OURS.cond, THEIRS.cond),
    "cond fro": (lambda x: OURS.cond(x, "fro"), _cond),
}


def _eigh(of: Any, x: Any) -> list[Any]:
    values, vectors = of.eigh(x + adjoint(x))
    return [values, first_space(vectors), size(vectors)]


@pytest.mark.parametrize("name", SQUARE)
@given(SIZES, BATCHES, COMPLEX, SEEDS)
@settings(max_examples=10)
def test_square_matrices(
    name: str, n: int, batch: tuple[int, ...], is_complex: bool, seed: int
) -> None:
    ours, theirs = SQUARE[name]
    agree(
        ours,
        theirs,
        [draw_regular_matrices(seed, (*batch, n, n), is_complex)],
        rtol=1e-7,
        atol=1e-8,
    )


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("is_complex", [False, True])
def test_general_eigenvalues_in_the_order_of_their_size(n: int, is_complex: bool) -> None:
    x = draw_regular_matrices(0, (n, n), is_complex)
    order = np.argsort(-np.abs(np.linalg.eigvals(x)))

    def both(values: Any, vectors: Any, take: Any) -> list[Any]:
        return [take(values), size(take(vectors))]

    theirs_order = torch.argsort(-torch.linalg.eigvals(torch.tensor(x)).abs())
    agree(
        lambda x: both(*OURS.eig(x), lambda t: gf.take(t, order, -1)),
        lambda x: both(*THEIRS.eig(x), lambda t: t.index_select(-1, theirs_order)),
        [x],
    )


# name -> (ours, theirs) of matrices of any shape
ANY: dict[str, tuple[Any, Any]] = {
    "svdvals": (OURS.svdvals, THEIRS.svdvals),
    "svd": (lambda x: _svd(OURS, x), lambda x: _svd(THEIRS, x)),
    "qr": (
        lambda x: list(map(size, OURS.qr(x))),
        lambda x: list(map(size, THEIRS.qr(x))),
    ),
    "pinv": (OURS.pinv, THEIRS.pinv),
    **{
        f"matrix_norm {ord}": (
            lambda x, ord=ord: OURS.matrix_norm(x, ord=ord),
            lambda x, ord=ord: THEIRS.matrix_norm(x, ord),
        )
        for ord in ("fro", "nuc", 1, -1, 2, -2, INF, -INF)
    },
    **{
        f"vector_norm {ord}": (
            lambda x, ord=ord: OURS.vector_norm(x, axis=-1, ord=ord),
            lambda x, ord=ord: THEIRS.vector_norm(x, ord, -1),
        )
        for ord in (2, 1, INF, -INF, 3, 1.5, -1)
    },
}


def _svd(of: Any, x: Any) -> list[Any]:
    u, s, vh = of.svd(x, full_matrices=False)
    return [s, size(u), size(vh), product(u, vh), first_space(u)]


@pytest.mark.parametrize("name", ANY)
@given(SIZES, SIZES, BATCHES, COMPLEX, SEEDS)
@settings(max_examples=10)
def test_matrices_of_any_shape(
    name: str, m: int, n: int, batch: tuple[int, ...], is_complex: bool, seed: int
) -> None:
    ours, theirs = ANY[name]
    agree(
        ours,
        theirs,
        [draw_regular_matrices(seed, (*batch, m, n), is_complex)],
        rtol=1e-7,
        atol=1e-8,
    )


@given(SIZES, SIZES, BATCHES, COMPLEX, SEEDS, st.booleans(), st.booleans())
@settings(max_examples=30)
def test_systems(
    n: int, k: int, batch: tuple[int, ...], is_complex: bool, seed: int, lower: bool, unit: bool
) -> None:
    a, b = (
        draw_regular_matrices(seed, (*batch, n, n), is_complex),
        draw_matrices(seed + 1, (n, k), is_complex),
    )
    # of a (2, n, n) and b (2, n) torch would solve for vectors
    agree(OURS.solve, lambda a, b: THEIRS.solve(a, b.expand(*batch, n, k)), [a, b])
    a = (np.tril if lower else np.triu)(a)
    a = a / 8 if unit else a
    agree(
        lambda a, b: OURS.triangular_solve(a, b, lower=lower, unit_diagonal=unit),
        lambda a, b: THEIRS.solve_triangular(
            a, b.expand(*batch, n, k), upper=not lower, unitriangular=unit
        ),
        [a, b],
    )


@given(SIZES, SIZES, SIZES, BATCHES, SEEDS)
@settings(max_examples=20)
def test_least_squares(m: int, n: int, k: int, batch: tuple[int, ...], seed: int) -> None:
    a, b = (
        draw_regular_matrices(seed, (*batch, m, n), False),
        draw_matrices(seed + 1, (*batch, m, k), False),
    )
    agree(OURS.lstsq, lambda a, b: THEIRS.lstsq(a, b).solution, [a, b], rtol=1e-7, atol=1e-8)


@given(COMPLEX, SEEDS)
@settings(max_examples=10)
def test_products(is_complex: bool, seed: int) -> None:
    shapes = [(2, 3), (3, 4), (4, 1)]
    arrays = [draw_matrices(seed + i, shape, is_complex) for i, shape in enumerate(shapes)]
    agree(lambda *x: OURS.multi_dot(x), lambda *x: THEIRS.multi_dot(x), arrays)
    vectors = [draw_matrices(seed, (2, 3), is_complex), draw_matrices(seed + 1, (1, 3), is_complex)]
    agree(OURS.cross, THEIRS.cross, vectors)
    agree(OURS.vecdot, THEIRS.vecdot, vectors)


# Where derivatives do not exist -----------------------------------------------------------------


def both_slopes(ours: Any, theirs: Any, x: Any) -> tuple[Any, Any]:
    p, t = gf.placeholder(x.dtype, x.shape), torch.tensor(x, requires_grad=True)
    (value,) = evaluate(gf.gradients(ours(p), [p]), {p: x})
    # With a graph of the gradient: without one, some versions of torch take the determinant of a
    # singular matrix from its LU form, and its gradient is 0 where the cofactors are not.
    (slope,) = torch.autograd.grad(theirs(t), t, create_graph=True, allow_unused=True)
    return value, np.zeros_like(x) if slope is None else slope.detach().numpy()


@pytest.mark.parametrize("ord", [0, 1, 2, 1.5, 3, INF])
@pytest.mark.parametrize("x", [np.zeros(3), np.array([0.0, 2.0, -2.0])], ids=str)
def test_norms_at_zero_and_at_ties(ord: float, x: Any) -> None:
    ours, theirs = both_slopes(
        lambda p: OURS.vector_norm(p, ord=ord), lambda t: THEIRS.vector_norm(t, ord), x
    )
    np.testing.assert_allclose(ours, theirs)


def test_the_standard_deviation_of_a_constant() -> None:
    ours, theirs = both_slopes(gf.std, lambda t: t.std(correction=0), np.ones(3))
    np.testing.assert_array_equal(ours, theirs)


def test_determinants_of_singular_matrices() -> None:
    x = np.array([[1.0, 2, 3], [2, 4, 6], [0, 1, 5]])
    ours, theirs = both_slopes(OURS.det, THEIRS.det, x)
    np.testing.assert_allclose(ours, [[14, -10, 2], [-7, 5, -1], [0, 0, 0]], atol=1e-12)
    np.testing.assert_allclose(ours, theirs, atol=1e-12)
