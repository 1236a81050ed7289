"""Draws made of uniform numbers: their distributions, placement, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, GraphflowError, OpError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.randomness.distributions import _poisson_sums

COUNT = (20_000,)
DRAWS: dict[str, tuple[Any, Any]] = {
    "exponential": (lambda d: gf.random.exponential(COUNT, 2.5, d), stats.expon(scale=2.5)),
    "gumbel": (lambda d: gf.random.gumbel(COUNT, 1.0, 2.0, d), stats.gumbel_r(1.0, 2.0)),
    "gamma": (lambda d: gf.random.gamma(COUNT, 2.5, 2.0, d), stats.gamma(2.5, scale=2.0)),
    "gamma below 1": (lambda d: gf.random.gamma(COUNT, 0.3, dtype=d), stats.gamma(0.3)),
    "beta": (lambda d: gf.random.beta(COUNT, 0.5, 2.0, d), stats.beta(0.5, 2.0)),
    "beta below 1": (lambda d: gf.random.beta(COUNT, 0.3, 0.7, d), stats.beta(0.3, 0.7)),
    "a share": (
        lambda d: gf.random.dirichlet([0.5, 2.0, 1.5], COUNT, d)[..., 1],
        stats.beta(2.0, 2.0),
    ),
    "two sigma": (
        lambda d: gf.random.truncated_normal(COUNT, 1.0, 0.5, dtype=d),
        stats.truncnorm(-2, 2, 1.0, 0.5),
    ),
    "one side": (
        lambda d: gf.random.truncated_normal(COUNT, 1.0, 2.0, 2.0, np.inf, d),
        stats.truncnorm(0.5, np.inf, 1.0, 2.0),
    ),
    "tail": (
        lambda d: gf.random.truncated_normal(COUNT, low=-np.inf, high=-5.0, dtype=d),
        stats.truncnorm(-np.inf, -5.0),
    ),
    "wide": (
        lambda d: gf.random.truncated_normal(COUNT, low=-np.inf, high=1e30, dtype=d),
        stats.norm(),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_their_distribution(name: str, dtype: str) -> None:
    make, wanted = DRAWS[name]
    with gf.random.seed(5):
        drawn = make(dtype)
    (value,) = evaluate([drawn])
    assert value.dtype == dtype and value.shape == COUNT and np.isfinite(value).all()
    assert stats.kstest(value.astype("float64"), wanted.cdf).pvalue > 0.001


@pytest.mark.parametrize("alpha", [[2.0], [1e-3] * 3, [1e-310, 1e-305], [1e6, 1.0, 1e-2]])
def test_dirichlet_shares_add_up_to_one_also_where_gamma_numbers_are_zero(alpha: Any) -> None:
    draws = [gf.random.dirichlet(alpha, (50, 4)), gf.random.dirichlet(np.array(alpha), (0,))]
    shares, none = evaluate(draws)
    assert shares.shape == (50, 4, len(alpha)) and none.shape == (0, len(alpha))
    np.testing.assert_allclose(shares.sum(-1), 1.0, rtol=1e-6)
    assert (shares >= 0).all()


def test_small_beta_numbers_are_zeros_and_ones() -> None:
    (value,) = evaluate([gf.random.beta(COUNT, 1e-3, 1e-3)])
    assert np.isfinite(value).all() and abs(value.mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    "alpha",
    [
        3.0,
        [],
        [1.0, 0.0],
        [1.0, -2.0],
        ["a"],
        [[1.0]],
        [np.nan],
        [[1.0], [2.0, 3.0]],
        gf.ones((2,)),
    ],
    ids=repr,
)
def test_dirichlet_takes_a_list_of_numbers_above_zero(alpha: Any) -> None:
    with pytest.raises(ArgumentError, match=r"random.dirichlet at .*test_distributions.*alpha"):
        gf.random.dirichlet(alpha)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_truncated_numbers_are_within_bounds_that_the_dtype_cannot_hold(dtype: str) -> None:
    (value,) = evaluate([gf.random.truncated_normal(COUNT, low=0.1, high=1.1, dtype=dtype)])
    exact = value.astype("float64")
    assert 0.1 <= exact.min() < 0.11 and 1.08 < exact.max() <= 1.1


def test_gumbel_and_exponential_numbers_of_the_least_and_largest_uniform_are_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphflow.ops.randomness import philox

    drawn = [gf.random.exponential((2,), dtype="float64"), gf.random.gumbel((2,), dtype="float64")]
    monkeypatch.setattr(philox, "uniform", lambda *a, **k: np.array([0.0, 1 - 2.0**-53]))
    exponential, gumbel = evaluate(drawn)
    assert np.isfinite(exponential).all() and (exponential > 0).all()
    assert np.isfinite(gumbel).all()


@pytest.mark.parametrize("mean", [0.0, 1e-9, 0.3, 4.0, 77.5, 1e4, 1e6])
def test_poisson_numbers_come_as_often_as_their_probabilities(mean: float) -> None:
    with gf.random.seed(6):
        drawn = gf.random.poisson(COUNT, mean)
    (value,) = evaluate([drawn])
    assert value.dtype == np.int64 and value.min() >= 0
    if mean < 1e-3:
        assert not value.any()
        return
    wanted = stats.poisson(mean)
    edges = np.unique(wanted.ppf(np.linspace(0.02, 0.98, 25)))
    shares = np.diff(wanted.cdf(edges), prepend=0.0, append=1.0)
    found = np.bincount(np.searchsorted(edges, value), minlength=len(shares))
    assert stats.chisquare(found, shares * COUNT[0]).pvalue > 0.001


@pytest.mark.parametrize("mean", [0.3, 4.0, 77.5, 1e6])
def test_the_table_of_poisson_probabilities_leaves_no_tail_out(mean: float) -> None:
    least, sums = _poisson_sums(mean)
    numbers = np.arange(least, least + len(sums) - 1)
    np.testing.assert_allclose(sums[:-1], stats.poisson(mean).cdf(numbers), rtol=1e-6, atol=1e-15)
    assert least == 0 or sums[0] < 1e-16
    assert stats.poisson(mean).sf(numbers[-1]) < 1e-16


def test_choices_with_replacement_come_as_often_as_their_probabilities() -> None:
    shares = np.array([0.1, 0.0, 0.5, 0.4, 0.0])
    with gf.random.seed(6):
        alike = gf.random.choice(5, COUNT)
        chosen = gf.random.choice(5, COUNT, p=shares)
        relative = gf.random.choice(5, COUNT, p=gf.constant((shares / 2).astype("float32")))
    values = evaluate([alike, chosen, relative])
    assert all(v.dtype == np.int64 for v in values)
    for value, wanted in zip(values, ([0.2] * 5, shares, shares), strict=True):
        often, positive = np.bincount(value, minlength=5), np.asarray(wanted) > 0
        assert not often[~positive].any()
        expected = np.asarray(wanted)[positive] * COUNT[0]
        assert stats.chisquare(often[positive], expected).pvalue > 0.001


def test_choices_without_replacement_are_drawn_one_after_the_other() -> None:
    """Pairs come with probability p_i·p_j / (1 - p_i), as in numpy."""
    p = np.array([0.5, 0.3, 0.2, 0.0])
    rows = gf.constant(np.zeros(6000))
    with gf.random.seed(7):
        pairs = gf.vmap(lambda r: gf.random.choice(4, 2, False, p) + gf.astype(r, "int64"))(rows)
        orders = gf.vmap(lambda r: gf.random.choice(3, 3, False) + gf.astype(r, "int64"))(rows)
    drawn, all_three = evaluate([pairs, orders])
    found = np.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16).reshape(4, 4)
    wanted = p[:, None] * p / (1 - p[:, None]) * (1 - np.eye(4))
    assert not found[wanted == 0].any()
    assert stats.chisquare(found[wanted > 0], 6000 * wanted[wanted > 0]).pvalue > 0.001
    counts = np.unique(all_three, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > 0.001


def test_slices_of_a_tensor_are_chosen_along_an_axis_of_any_size() -> None:
    x, p = gf.placeholder("float32", (None, 3)), gf.placeholder("float32", (None,))
    value, weights = np.arange(15, dtype="float32").reshape(5, 3), np.ones(5, "float32") / 5
    rows = gf.random.choice(x, (4, 2))
    columns = gf.random.choice(x, 2, replace=False, axis=1)
    ids = gf.random.choice(x.shape[0], x.shape[0], replace=False, p=p)
    one = gf.random.choice(x)
    given = {x: value, p: weights}
    got_rows, got_columns, got_ids, got_one = evaluate([rows, columns, ids, one], given)
    assert got_rows.shape == (4, 2, 3) and got_columns.shape == (5, 2) and got_one.shape == (3,)
    assert {tuple(row) for row in got_rows.reshape(-1, 3)} <= {tuple(row) for row in value}
    assert len(set(got_columns[0])) == 2 and set(got_columns[0]) <= {0, 1, 2}
    assert sorted(got_ids) == list(range(5))
    with pytest.raises(GraphflowError):
        evaluate([ids], {x: value, p: weights[:4]})


def test_draws_are_the_same_on_any_device_and_anew_in_each_step() -> None:
    def draws() -> list[gf.Tensor]:
        return [
            gf.random.exponential((300,)), gf.random.gumbel((300,)),
            gf.random.truncated_normal((300,)), gf.random.poisson((300,), 4.0),
            gf.random.choice(100, 300),
            gf.random.choice(100, 20, False, p=np.full(100, 0.01)),
        ]  # fmt: skip

    with gf.random.seed(8), gf.device("cpu:0"):
        first = draws()
    with gf.random.seed(8), gf.device("cpu:1"):
        second = draws()
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        one, other = s.run([first, second])
        later = s.run(first)
    for a, b, c in zip(one, other, later, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [
        (ArgumentError, lambda: gf.random.exponential((2,), -1), "must not be negative"),
        (ArgumentError, lambda: gf.random.gumbel((2,), np.inf), "finite number"),
        (DTypeError, lambda: gf.random.gumbel((2,), dtype="int32"), "float32"),
        (ArgumentError, lambda: gf.random.truncated_normal((2,), std=0), "above 0"),
        (ArgumentError, lambda: gf.random.truncated_normal((2,), low=3), "is not below high"),
        (ArgumentError, lambda: gf.random.truncated_normal((2,), low=7, high=9), "7 or more"),
        (
            ArgumentError,
            lambda: gf.random.truncated_normal((2,), low=1.0001, high=1.0002, dtype="float16"),
            "no float16 is between",
        ),
        (ArgumentError, lambda: gf.random.poisson((2,), -1), "must not be negative"),
        (ArgumentError, lambda: gf.random.poisson((2,), 1e7), "at most 1,000,000"),
        (ArgumentError, lambda: gf.random.choice(0), "nothing to choose"),
        (ArgumentError, lambda: gf.random.choice(3, 4, replace=False), "4 of 3"),
        (ArgumentError, lambda: gf.random.choice(gf.constant(1.0)), "no slices"),
        (ArgumentError, lambda: gf.random.choice(3, replace=2), "True or False"),
        (ShapeError, lambda: gf.random.choice(3, p=[0.5, 0.5]), "each of 3 slices"),
        (DTypeError, lambda: gf.random.choice(2, p=[1, 0]), "float"),
    ],
)
def test_wrong_arguments_are_refused_with_the_line(
    error: type[Exception], make: Any, message: str
) -> None:
    with pytest.raises(error, match=rf"random\.\w+ at .*test_distributions\.py.*{message}"):
        make()


@pytest.mark.parametrize(
    ("p", "replace", "message"),
    [
        ([0.5, np.nan, 0.5], True, "not in"), ([1.5, 0.0, 0.0], True, "not in"),
        ([0.0, 0.0, 0.0], True, "fewer numbers of p"), ([1.0, 0.0, 0.0], False, "fewer numbers"),
    ],
)  # fmt: skip
def test_probabilities_that_a_step_finds_wrong_are_refused(
    p: list[float], replace: bool, message: str
) -> None:
    fed = gf.placeholder("float32", (3,))
    drawn = gf.random.choice(3, 2, replace, fed)
    with gf.Session() as s, pytest.raises(OpError, match=message):
        s.run(drawn, {fed: p})


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_parameters_of_gamma_and_beta_are_above_zero(value: float) -> None:
    with pytest.raises(ArgumentError, match="alpha"):
        gf.random.gamma((), value)
    with pytest.raises(ArgumentError, match="b must be"):
        gf.random.beta((), 1.0, value)
