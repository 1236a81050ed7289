"""Draws of further distributions, made of uniform numbers. Public in `gf.random`.

They are computed in float64 and rounded to their dtype, so that tails are not coarse.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, error_location, next_stream
from graphflow.ir.spec import Dim, Shape, normalize_shape, product
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.host_calls.debug import check
from graphflow.ops.ordering.search import searchsorted
from graphflow.ops.ordering.sort import top_k
from graphflow.ops.pointwise.arithmetic import add, floor, negative
from graphflow.ops.pointwise.comparison import greater, greater_equal, less
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import clip, maximum
from graphflow.ops.pointwise.special import erfinv
from graphflow.ops.pointwise.transcendental import exp, log
from graphflow.ops.randomness.draw_arguments import (
    bounds_in,
    float_dtype,
    require_bound,
    require_finite,
    require_scale,
)
from graphflow.ops.randomness.probabilities import bernoulli_probabilities
from graphflow.ops.randomness.random_ops import integers_op, uniform_op
from graphflow.ops.reductions.cumulative import cumsum
from graphflow.ops.reductions.extrema import argmax
from graphflow.ops.reductions.reduce import sum as reduce_sum
from graphflow.ops.reductions.softmax import softmax
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.shape import expand_dims, reshape, squeeze
from graphflow.ops.tensors.take import take_op
from graphflow.ops.tensors.take_along_axis import take_along_axis

_FARTHEST = 8.0
"""Standard deviations beyond which a normal number is as rare as a float64 can tell from never."""
_CANDIDATES = 12
"""Candidates for a gamma number, each of which is accepted with a chance of 0.95 or more."""
_LARGEST_MEAN = 10**6
_TAIL = 6.0
"""Standard deviations from which on too few float64 numbers tell the values apart."""


@checks_argument_names(ArgumentError)
def exponential(
    shape: Any = (), scale: float = 1.0, dtype: Any = "float32", name: str | None = None
) -> Tensor:
    """Draw exponential numbers of mean `scale`, 1 / rate, anew in each step.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: scale is not a finite number, or is negative.
    """
    with error_location("random.exponential"):
        scale = require_scale("scale", scale)
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
    return astype(_standard_exponential(sizes) * scale, wanted, name=name)


@checks_argument_names(ArgumentError)
def gumbel(
    shape: Any = (), loc: float = 0.0, scale: float = 1.0, dtype: Any = "float32",
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw Gumbel numbers, anew in each step: loc - scale·log of an exponential number.

    Their mean is loc + 0.577·scale. All are finite.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: loc and scale are not finite numbers, or scale is negative.
    """
    with error_location("random.gumbel"):
        loc, scale = require_finite("loc", loc), require_scale("scale", scale)
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
    drawn = log(_standard_exponential(sizes)) * -scale + loc
    return astype(drawn, wanted, name=name)


@checks_argument_names(ArgumentError)
def truncated_normal(
    shape: Any = (), mean: float = 0.0, std: float = 1.0, low: float | None = None,
    high: float | None = None, dtype: Any = "float32", name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw normal numbers that are within [low, high], anew in each step.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        mean, std: of the normal distribution before it is cut.
        low, high: numbers, also infinite ones; default: mean - 2·std and mean + 2·std.
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: mean and std are not finite numbers, std <= 0, low >= high, the interval is
            more than 6·std from the mean, or holds no value of the dtype.
    """
    with error_location("random.truncated_normal"):
        mean, std = require_finite("mean", mean), require_finite("std", std)
        if std <= 0:
            raise ArgumentError(f"std must be above 0, got {std}")
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
        low = mean - 2 * std if low is None else require_bound("low", low)
        high = mean + 2 * std if high is None else require_bound("high", high)
        if low >= high:
            raise ArgumentError(f"low {low} is not below high {high}")
        a, b = (min(max((x - mean) / std, -_FARTHEST), _FARTHEST) for x in (low, high))
        if max(a, -b) > _TAIL:
            raise ArgumentError(
                f"the interval from {low} to {high} is {max(a, -b):.3g} or more standard "
                f"deviations from the mean, which float64 cannot draw well; the most is {_TAIL:g}"
            )
        least, most = bounds_in(low, high, wanted)
    first, last = (math.erf(x / math.sqrt(2.0)) for x in (a, b))
    drawn = erfinv(_uniform(sizes, first, last)) * (std * math.sqrt(2.0)) + mean
    return clip(astype(clip(drawn, low, high), wanted), least, most, name=name)


@checks_argument_names(ArgumentError)
def gamma(
    shape: Any = (), alpha: float = 1.0, scale: float = 1.0, dtype: Any = "float32",
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw gamma numbers of shape parameter `alpha` and mean alpha·scale, anew in each step.

    Each is the first of twelve candidates that is accepted; that none is has a chance below 1e-15.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: alpha is not a finite number above 0, or scale not one from 0 on.

    Source: Marsaglia & Tsang, ACM TOMS 26(3), 2000.
    """
    with error_location("random.gamma"):
        alpha, scale = _require_above_zero("alpha", alpha), require_scale("scale", scale)
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
    return astype(_standard_gamma(sizes, alpha) * scale, wanted, name=name)


@checks_argument_names(ArgumentError)
def beta(
    shape: Any = (), a: float = 1.0, b: float = 1.0, dtype: Any = "float32",
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw beta numbers, in [0, 1] with mean a / (a + b), anew in each step.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        a, b: the parameters of the distribution.
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: a or b is not a finite number above 0.
    """
    with error_location("random.beta"):
        a, b = _require_above_zero("a", a), _require_above_zero("b", b)
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
    return astype(_dirichlet_shares((*sizes, 2), np.array([a, b]))[..., 0], wanted, name=name)


def _require_above_zero(what: str, value: Any) -> float:
    number = require_finite(what, value)
    if number <= 0:
        raise ArgumentError(f"{what} must be above 0, got {number:g}")
    return number


def _standard_gamma(sizes: Shape, alpha: float) -> Tensor:
    """Draw gamma numbers of scale 1, as float64."""
    grown = alpha if alpha >= 1 else alpha + 1  # smaller ones are made of larger ones
    drawn = _gamma_from_one(sizes, grown)
    if alpha < 1:
        drawn = drawn * exp(log(_uniform(sizes, 0.0, 1.0)) * (1 / alpha))
    return drawn


def _gamma_from_one(sizes: Shape, alpha: Any) -> Tensor:
    """Draw gamma numbers of scale 1 for parameters from 1 on: a number, or an array (…)."""
    d = alpha - 1 / 3
    rows = (_CANDIDATES, *sizes)
    z = erfinv(_uniform(rows, -1.0, 1.0)) * math.sqrt(2.0)
    v = maximum((z * (1 / np.sqrt(9 * d)) + 1.0) ** 3, 0.0)
    accepted = less(log(_uniform(rows, 0.0, 1.0)), z * z * 0.5 + (log(v) - v + 1.0) * d)
    first = expand_dims(argmax(astype(accepted, "int64"), axis=0), 0)
    drawn: Tensor = squeeze(take_along_axis(v, first, axis=0), 0) * d
    return drawn


@checks_argument_names(ArgumentError)
def dirichlet(
    alpha: Any, shape: Any = (), dtype: Any = "float32", name: str | None = None
) -> Tensor:
    """Draw Dirichlet vectors: shares above 0 whose sum is 1, anew in each step.

    Number i has the mean alpha[i] / sum(alpha).

    Args:
        alpha: k finite numbers above 0, one for each share.
        shape: how many vectors: ints, or sizes of other tensors (`x.shape`).
        dtype: a float dtype.

    Returns:
        A tensor (…shape, k). Where alphas are small, shares below the least float are 0.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: alpha is no list of numbers, is empty, or holds one that is not above 0.
    """
    with error_location("random.dirichlet"):
        listed = isinstance(alpha, list | tuple | np.ndarray) and getattr(alpha, "ndim", 1) == 1
        if not listed or not len(alpha):
            raise ArgumentError(f"alpha is a list of one or more numbers, not {alpha!r:.80}")
        alphas = np.array([_require_above_zero("alpha", each) for each in alpha])
        sizes, wanted = (*normalize_shape(shape), len(alphas)), float_dtype(dtype)
    return astype(_dirichlet_shares(sizes, alphas), wanted, name=name)


def _dirichlet_shares(sizes: Shape, alphas: np.ndarray[Any, Any]) -> Tensor:
    """Draw shares of gamma numbers along the last axis, as float64."""
    grown = _gamma_from_one(sizes, np.where(alphas < 1, alphas + 1, alphas))
    # in logarithms, since all gamma numbers of small alphas may round to 0
    rates = np.where(alphas < 1, 1 / np.maximum(alphas, 1e-300), 0.0)
    logs = log(grown) - _standard_exponential(sizes) * rates
    return softmax(logs, axis=-1)


@checks_argument_names(ArgumentError)
def poisson(shape: Any = (), lam: float = 1.0, name: str | None = None) -> Tensor:
    """Draw Poisson numbers of mean `lam`, int64, anew in each step.

    Each is found for one uniform number in a table of at most 20·√lam + 80 probabilities, a
    constant of the graph.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).

    Raises:
        ArgumentError: lam is not a number in [0, 10⁶]. Beyond, rounded normal numbers are close:
            the skewness is below 0.001.
    """
    with error_location("random.poisson"):
        mean, sizes = require_scale("lam", lam), normalize_shape(shape)
        if mean > _LARGEST_MEAN:
            raise ArgumentError(
                f"lam is at most {_LARGEST_MEAN:,}, got {mean:g}; round gf.random.normal(shape, "
                "lam, lam**0.5)"
            )
    least, sums = _poisson_sums(mean)
    # the table ends with infinity, since rounding may leave its last sum below a uniform number
    found = searchsorted(as_tensor(sums), _uniform(sizes, 0.0, 1.0), side="right")
    drawn: Tensor = add(found, least, name=name)
    return drawn


@checks_argument_names(ArgumentError)
def choice(
    x: Any, shape: Any = (), replace: bool = True, p: Any = None, axis: int = 0,
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw slices of x along an axis, or integers below x, anew in each step.

    Args:
        x: a tensor; or a number n for the int64 integers below n: an int, or the size of another
            tensor (`x.shape[0]`).
        shape: how many: ints, or sizes of other tensors.
        replace: whether a slice may come several times. If not, the order is random, too; it takes
            the slices with the largest of n random numbers.
        p: floats in [0, 1], one for each slice: how probable it is, relative to the others;
            default: all alike. Without replacement the rest is drawn from by the same p.
        axis: of the slices, if x is a tensor.

    Returns:
        A tensor of the shape of x, with `shape` in place of the axis.

    Raises:
        ArgumentError: x is a scalar tensor, is empty, or has fewer slices than are drawn without
            replacement.
        ShapeError: axis is outside x, or p has another shape than (n,).
        DTypeError: p is not float.
        OpError: from the step: p has numbers outside [0, 1], or fewer above 0 than it takes.
    """
    with error_location("random.choice"):
        if not isinstance(replace, bool | np.bool_):
            raise ArgumentError(f"replace is True or False, not {replace!r}")
        counted = isinstance(x, int | np.integer | Dim) and not isinstance(x, bool)
        source = arange(normalize_shape(x)[0], dtype="int64") if counted else as_tensor(x)
        if not source.ndim:
            raise ArgumentError("a scalar has no slices to choose; give an int, or a tensor")
        at = normalize_axis(axis, source.ndim)
        n, sizes = source.shape[at], normalize_shape(shape)
        count = product(sizes)
        _require_enough(n, count, bool(replace))
        weights = None if p is None else _weights(p, n, 1 if replace else count)
    places = _with_replacement(n, sizes, weights) if replace else _without(n, count, weights)
    chosen: Tensor = take_op(source, reshape(places, sizes), axis=at, name=name)
    return chosen


def _with_replacement(n: Any, sizes: Shape, weights: Tensor | None) -> Tensor:
    """Return indices below n by the inverse of the distribution function."""
    drawn = _uniform(sizes, 0.0, 1.0)
    if weights is None:
        return astype(floor(drawn * as_tensor(n, "float64")), "int64")
    # numbers below 1 times the last sum are below it: no slice of probability 0 is found
    sums = cumsum(weights)
    return searchsorted(sums, drawn * sums[-1], side="right")


def _without(n: Any, count: Any, weights: Tensor | None) -> Tensor:
    """Return the places of the largest of n random keys.

    Source: Efraimidis & Spirakis, Weighted random sampling with a reservoir, 2006.
    """
    if weights is None:
        keys = integers_op(
            shape=(n,), dtype="int64", low=-(2**63), last=2**63 - 1, stream=next_stream()
        )
        return top_k(keys, count)[1]
    return top_k(log(weights) - log(_standard_exponential((n,))), count)[1]


def _require_enough(n: Any, count: Any, replace: bool) -> None:
    """Refuse draws from nothing, and more draws without replacement than there are slices."""
    if n == 0:
        raise ArgumentError("there is nothing to choose from: the axis is empty")
    if not replace and isinstance(n, int) and isinstance(count, int) and count > n:
        raise ArgumentError(
            f"{count} of {n} cannot be drawn without replacement; draw fewer, or replace=True"
        )


def _poisson_sums(mean: float) -> tuple[int, np.ndarray[Any, Any]]:
    """Return the least number of a table, and the sums of the probabilities up to each number."""
    if mean == 0:
        return 0, np.array([math.inf])
    width, mode = 20 + 10 * math.ceil(math.sqrt(mean)), math.floor(mean)
    below = np.arange(mode, max(mode - width, 0), -1, dtype="float64")
    above = np.arange(mode + 1, mode + width + 20, dtype="float64")
    # relative to the mode's: P(k) / P(k - 1) = mean / k
    left, right = np.cumprod(below / mean)[::-1], np.cumprod(mean / above)
    sums = np.cumsum(np.concatenate([left, [1.0], right]))
    sums /= sums[-1]
    sums[-1] = math.inf
    return mode - len(below), sums


def _weights(p: Any, n: Any, least: Any) -> Tensor:
    """Return p in float64, checked in the step; `least` of the numbers must be above 0."""
    given = as_tensor(p)
    require_kind(given.spec, "float")
    have = given.shape[0] if given.ndim == 1 else -1
    if have == -1 or (isinstance(have, int) and isinstance(n, int) and have != n):
        raise ShapeError(f"p must be one number for each of {n} slices, got {given.spec}")
    # the reshape refuses another size that a step finds
    weights = reshape(astype(bernoulli_probabilities(given), "float64"), (n,))
    positive = reduce_sum(astype(greater(weights, 0.0), "int64"))
    enough = greater_equal(positive, as_tensor(least, "int64"))
    return check(weights, enough, "random.choice: fewer numbers of p are above 0 than are drawn")


def _uniform(sizes: Shape, low: float, high: float) -> Tensor:
    """Return float64 numbers uniform on [low, high)."""
    result: Tensor = uniform_op(
        shape=sizes, dtype="float64", low=low, high=high, stream=next_stream()
    )
    return result


def _standard_exponential(sizes: Shape) -> Tensor:
    """Return exponential numbers of mean 1 in float64: above 0 and finite."""
    drawn: Tensor = negative(log(_uniform(sizes, 2.0**-54, 1.0)))
    return drawn


__all__ = [
    "beta", "choice", "dirichlet", "exponential", "gamma", "gumbel", "poisson", "truncated_normal",
]  # fmt: skip
