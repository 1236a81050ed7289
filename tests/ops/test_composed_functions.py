"""Functions that are compositions of ops: against numpy and scipy, slopes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.special import softmax

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, GraphflowError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

RANDOM = np.random.default_rng(0)
A, B = RANDOM.normal(0, 2, (2, 3, 4))
WIDE = np.array([-800.0, 3.0, 700.0, 699.0, -np.inf, 720.0])
IDS = np.array([2, 0, 2])


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


@pytest.mark.parametrize("order", [1, 2, 3.5, np.inf])
def test_normalized_vectors_have_norm_1_and_zeros_stay(order: float) -> None:
    have = value(nn.normalize(A, 0, order))
    np.testing.assert_allclose(have, A / np.linalg.norm(A, order, 0, keepdims=True), rtol=1e-12)
    assert not value(nn.normalize(A * 0, ord=order)).any()


@pytest.mark.parametrize(
    ("order", "name"), [(2, "euclidean"), (1, "cityblock"), (np.inf, "chebyshev")]
)
def test_distances_of_all_pairs_are_scipys(order: float, name: str) -> None:
    near = np.concatenate([B, A[:1] + 1e-9])
    np.testing.assert_allclose(value(nn.cdist(A, near, order)), cdist(A, near, name), rtol=1e-12)
    batches = value(nn.cdist(np.stack([A, B]), A, order))
    np.testing.assert_allclose(batches[1], cdist(B, A, name), rtol=1e-12)


def test_the_slope_of_no_distance_is_0() -> None:
    x = gf.placeholder("float64", A.shape)
    (slope,) = evaluate(gf.gradients(nn.cdist(x, x), [x]), {x: np.ones(A.shape)})
    assert not slope.any()


@pytest.mark.parametrize("axis", [0, -1])
def test_gumbel_softmax_draws_classes_as_softmax_says(axis: int) -> None:
    logits = np.log([0.5, 0.3, 0.2])
    many = np.moveaxis(np.broadcast_to(logits, (20_000, 3)), -1, axis)
    x = gf.placeholder("float64", many.shape)
    with gf.random.seed(3):
        soft, hard = (nn.gumbel_softmax(x, 0.5, hard, axis) for hard in (False, True))
    slope = gf.gradients(
        hard, [x], np.moveaxis(np.broadcast_to([1.0, 0, 0], (20_000, 3)), -1, axis)
    )
    drawn, chosen, by = evaluate([soft, hard, *slope], {x: many})
    np.testing.assert_allclose(drawn.sum(axis), 1, rtol=1e-12)
    for each in (np.moveaxis(drawn, axis, -1).argmax(-1), np.moveaxis(chosen, axis, -1).argmax(-1)):
        np.testing.assert_allclose(np.bincount(each) / 20_000, [0.5, 0.3, 0.2], atol=0.015)
    assert set(np.unique(chosen)) == {0, 1} and (chosen.sum(axis) == 1).all()
    assert np.abs(by).max() > 0.1 and np.abs(by.sum(axis)).max() < 1e-12  # a softmax's slope


def test_gumbel_softmax_at_a_high_temperature_is_even() -> None:
    np.testing.assert_allclose(value(nn.gumbel_softmax(A, 1e6)), 0.25, atol=1e-4)
    assert softmax(A, -1).std() > 0.1


def test_a_running_logsumexp_is_accurate_at_any_size() -> None:
    want = np.logaddexp.accumulate(WIDE)
    np.testing.assert_allclose(value(gf.logcumsumexp(WIDE)), want, rtol=1e-14)
    np.testing.assert_allclose(value(gf.logcumsumexp(A, 0)), np.logaddexp.accumulate(A, 0))
    start = np.array([-np.inf, -np.inf, -1000.0, 1.0, np.inf, 0.0])
    assert value(gf.logcumsumexp(start)).tolist() == [-np.inf, -np.inf, -1000, 1, np.inf, np.inf]
    have = value(gf.logcumsumexp(np.array([1.0, np.nan, 2.0])))
    assert have[0] == 1 and np.isnan(have[1:]).all()
    x = gf.placeholder("float64", (None,))
    (slope,) = evaluate(gf.gradients(gf.logcumsumexp(x), [x]), {x: WIDE})
    parts = [np.exp(WIDE[: i + 1] - want[i]) for i in range(6)]
    np.testing.assert_allclose(slope, sum(np.pad(p, (0, 6 - p.size)) for p in parts), rtol=1e-12)


@pytest.mark.parametrize("offset", [-5, -1, 0, 2])
@pytest.mark.parametrize("x", [A, A[0], A[0] > 0, np.arange(0)])
def test_diag_is_numpys(offset: int, x: np.ndarray) -> None:
    have = value(gf.diag(x, offset))
    assert have.dtype == x.dtype and have.tolist() == np.diag(x, offset).tolist()


def test_diag_of_an_unknown_size() -> None:
    x = gf.placeholder("float64", ("n",))
    (have,) = evaluate([gf.diag(x)], {x: A[0]})
    assert have.tolist() == np.diag(A[0]).tolist()


@pytest.mark.parametrize("offset", [-2, 0, 1])
def test_diag_embed_sets_the_diagonals_of_many_matrices(offset: int) -> None:
    have = value(gf.diag_embed(A, offset))
    assert have.tolist() == [np.diag(row, offset).tolist() for row in A]
    ints = value(gf.diag_embed(IDS.astype("int8")))
    assert ints.dtype == np.int8 and ints.tolist() == np.diag(IDS).tolist()


@pytest.mark.parametrize("upper", [False, True])
def test_a_cholesky_factor_solves_its_system(upper: bool) -> None:
    matrix = A @ A.T + np.eye(3)
    factor = np.linalg.cholesky(matrix)
    factor = np.triu(factor.T) if upper else factor
    for b in (B, B[:, 0]):
        have = value(gf.linalg.cholesky_solve(b, factor, upper=upper))
        np.testing.assert_allclose(have, np.linalg.solve(matrix, b), rtol=1e-10)


def test_a_reversed_running_sum_goes_from_the_end() -> None:
    x = gf.placeholder("float64", A.shape)
    y = gf.cumsum(x, 1, reverse=True)
    have, slope = evaluate([y, *gf.gradients(y, [x])], {x: A})
    np.testing.assert_allclose(have, np.cumsum(A[:, ::-1], 1)[:, ::-1], rtol=1e-12)
    assert slope.tolist() == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize(
    ("x", "values"),
    [
        (np.arange(12).reshape(3, 4), [[3, 5], [5, 99]]),
        (np.array([1.0, np.nan, np.inf, -0.0]), np.array([0.0, np.nan, np.inf])),
        (np.arange(3), np.arange(0)),
        (np.array(3, "uint8"), np.array([3], "uint8")),
    ],
    ids=["ints", "floats", "none", "a scalar"],
)
def test_isin_is_numpys(x: np.ndarray, values: Any) -> None:
    assert value(gf.isin(x, values)).tolist() == np.isin(x, values).tolist()


def test_segments_are_summed_and_their_slope_is_that_of_the_sum() -> None:
    x = gf.placeholder("float64", ("n", 4))
    y = gf.segment_sum(x, IDS, 4)
    (slope,) = gf.gradients(y, [x], np.arange(16.0).reshape(4, 4))
    have, back = evaluate([y, slope], {x: A})
    np.testing.assert_allclose(have, [A[1], A[1] * 0, A[0] + A[2], A[1] * 0], rtol=1e-14)
    assert back.tolist() == np.arange(16.0).reshape(4, 4)[IDS].tolist()
    both = value(gf.segment_sum(np.ones((2, 3), "int32"), np.array([[0, 1, 1], [1, 1, 0]]), 2))
    assert both.tolist() == [2, 4] and both.dtype == np.int32
    with pytest.raises(IndexError, match="4"):
        value(gf.segment_sum(A, IDS + 2, 4))


def test_masked_fill_keeps_shape_dtype_and_gradient() -> None:
    x = gf.placeholder("float32", (3, 4))
    mask = np.array([True, False, False, True])
    y = gf.masked_fill(x, mask, -np.inf)
    have, slope = evaluate([y, *gf.gradients(y, [x])], {x: A.astype("f")})
    assert have.dtype == np.float32
    assert have.tolist() == np.where(mask, -np.inf, A.astype("f")).tolist()
    assert slope.tolist() == np.broadcast_to(~mask, (3, 4)).tolist()
    assert value(gf.masked_fill(np.array([1, 2], "int8"), [True, False], 7)).tolist() == [7, 2]


def test_logdet_is_the_log_of_the_determinant() -> None:
    near = np.eye(3) + 0.1 * A[:, :3]
    x = gf.placeholder("float64", (3, 3))
    y = gf.linalg.logdet(x)
    have, slope = evaluate([y, *gf.gradients(y, [x])], {x: near})
    assert have == pytest.approx(np.log(np.linalg.det(near)), rel=1e-12)
    np.testing.assert_allclose(slope, np.linalg.inv(near).T, rtol=1e-12)
    cases = value(
        gf.linalg.logdet(np.stack([np.diag([1.0, -2]), np.zeros((2, 2)), np.eye(2) * 1e300]))
    )
    assert np.isnan(cases[0]) and cases[1] == -np.inf
    assert cases[2] == pytest.approx(600 * np.log(10))


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (nn.normalize, [A]),
        (lambda a, b: nn.cdist(a, b, 3), [A, B]),
        (lambda x: gf.logcumsumexp(x, 1), [A]),
        (lambda x: gf.diag(x, 1), [A[0]]),
        (lambda x: gf.diag_embed(x, -1), [A]),
        (gf.linalg.cholesky_solve, [B, A[:, :3] + 5 * np.eye(3)]),
    ],
    ids=["normalize", "cdist", "logcumsumexp", "diag", "diag_embed", "cholesky_solve"],
)
def test_slopes_are_those_of_differences(f: Any, arrays: list[np.ndarray]) -> None:
    xs = [gf.placeholder("float64", a.shape) for a in arrays]
    total = gf.sum(gf.sin(f(*xs)))
    feeds = dict(zip(xs, arrays, strict=True))
    for x, a, slope in zip(xs, arrays, evaluate(gf.gradients(total, xs), feeds), strict=True):
        along = np.random.default_rng(1).normal(size=a.shape)
        ends = [evaluate([total], feeds | {x: a + h * along})[0] for h in (1e-6, -1e-6)]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((slope * along).sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("mistake", "error", "told"),
    [
        (lambda: nn.normalize(A, epsilon=0), ArgumentError, "normalize at .*epsilon"),
        (lambda: nn.normalize(A, 5), ShapeError, "5"),
        (lambda: nn.cdist(A, B[:, :3]), ShapeError, r"\(3, 4\) and \(3, 3\)"),
        (lambda: nn.cdist(A[0], B), ShapeError, r"cdist at .*\(…, m, d\)"),
        (lambda: nn.cdist([[1]], [[2]]), DTypeError, "float"),
        (lambda: nn.gumbel_softmax(A, 0), ArgumentError, "temperature must be a positive"),
        (lambda: nn.gumbel_softmax(IDS), DTypeError, "float"),
        (lambda: gf.logcumsumexp(A), ArgumentError, "give the axis"),
        (lambda: gf.logcumsumexp(IDS), DTypeError, "float"),
        (lambda: gf.diag(A[None]), ShapeError, "a vector or a matrix"),
        (lambda: gf.diag(A, 0.5), ArgumentError, "offset"),
        (lambda: gf.diag_embed(1.0), ShapeError, "expected vectors"),
        (lambda: gf.cumsum(A, 0, reverse=1), ArgumentError, "cumsum at .*reverse"),
        (lambda: gf.linalg.cholesky_solve(A, A), ShapeError, "square"),
        (lambda: gf.isin(A, IDS), DTypeError, "isin"),
        (lambda: gf.isin(A > 0, A > 0), DTypeError, "bool"),
        (lambda: gf.segment_sum(A, A[:, 0], 3), DTypeError, "int"),
        (lambda: gf.segment_sum(A, IDS[:2], 3), ShapeError, r"segment_sum at .*ids \(2,\)"),
        (lambda: gf.segment_sum(A, IDS, -1), GraphflowError, "-1"),
        (lambda: gf.masked_fill(A[0], A > 0, 0.0), ShapeError, r"\(3, 4\).*\(4,\)"),
        (lambda: gf.masked_fill(A, A, 0.0), DTypeError, "must be bool"),
        (lambda: gf.masked_fill(IDS, IDS > 0, 0.5), DTypeError, "masked_fill"),
        (lambda: gf.linalg.logdet(A), ShapeError, "square"),
        (lambda: gf.linalg.logdet(np.eye(2) * 1j), DTypeError, "float"),
    ],
)  # fmt: skip
def test_mistakes_are_told(mistake: Callable[[], Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        mistake()
