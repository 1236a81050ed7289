"""Random tensors. Public as `gf.random`.

Each node draws from a stream of its own, anew in each step. The numbers depend on the seed, on the
stream (given when the node is built), on the step and on the element's index, but not on where or
in which order nodes run.
"""

from __future__ import annotations

from contextvars import Token
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, DTypeError
from graphflow.ir.name_hints import missing_attribute_error
from graphflow.ir.op import (
    NameScope,
    RandomStreams,
    Tensor,
    as_tensor,
    current_scope,
    error_location,
    next_stream,
)
from graphflow.ir.spec import Dim, Shape, as_dtype, kind, normalize_shape
from graphflow.ops.base.shape_rules import normalize_axis, require_int, require_kind
from graphflow.ops.ordering.sort import argsort_op
from graphflow.ops.pointwise.arithmetic import negative
from graphflow.ops.pointwise.comparison import less
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.transcendental import log
from graphflow.ops.randomness.distributions import (
    beta,
    choice,
    dirichlet,
    exponential,
    gamma,
    gumbel,
    poisson,
    truncated_normal,
)
from graphflow.ops.randomness.draw_arguments import float_dtype, require_finite
from graphflow.ops.randomness.probabilities import bernoulli_probabilities, categorical_logits
from graphflow.ops.randomness.random_ops import bernoulli_op, integers_op, normal_op, uniform_op
from graphflow.ops.reductions.extrema import argmax
from graphflow.ops.tensors.take import take_op


class SeedScope:
    """The result of `seed`. As a context manager it restores the earlier streams at its end."""

    def __init__(self, token: Token[NameScope]) -> None:
        self._token = token

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        current_scope.reset(self._token)


@checks_argument_names(ArgumentError)
def seed(value: int) -> SeedScope:
    """Set the seed; random nodes and initializers built from here on count their streams from 0.

    As a statement it holds until the next `seed` (inside a name scope: until its end). As a block,
    `with gf.random.seed(0):`, it holds until the block ends.

    Raises:
        ArgumentError: value is not an int in [0, 2**64).
    """
    with error_location("random.seed"):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not 0 <= value < 2**64:
            raise ArgumentError(f"a seed must be an int in [0, 2**64), got {value!r}")
    return SeedScope(
        current_scope.set(current_scope.get()._replace(streams=RandomStreams(int(value))))
    )


@checks_argument_names(ArgumentError)
def uniform(
    shape: Any = (), low: float = 0.0, high: float = 1.0, dtype: Any = "float32",
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw numbers uniform on [low, high), anew in each step.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: low and high are not finite numbers, or low > high.
    """
    with error_location("random.uniform"):
        low, high = require_finite("low", low), require_finite("high", high)
        if low > high:
            raise ArgumentError(f"low {low} is above high {high}")
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
    result: Tensor = uniform_op(
        shape=sizes, dtype=wanted, low=low, high=high, stream=next_stream(), name=name
    )
    return result


@checks_argument_names(ArgumentError)
def normal(
    shape: Any = (), mean: float = 0.0, std: float = 1.0, dtype: Any = "float32",
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw normal numbers of the given mean and standard deviation, anew in each step.

    Args:
        shape: ints, or sizes of other tensors (`x.shape`).
        dtype: a float dtype.

    Raises:
        DTypeError: dtype is not float.
        ArgumentError: mean and std are not finite numbers, or std < 0.
    """
    with error_location("random.normal"):
        mean, std = require_finite("mean", mean), require_finite("std", std)
        if std < 0:
            raise ArgumentError(f"std is not negative, got {std}")
        sizes, wanted = normalize_shape(shape), float_dtype(dtype)
    result: Tensor = normal_op(
        shape=sizes, dtype=wanted, mean=mean, std=std, stream=next_stream(), name=name
    )
    return result


@checks_argument_names(ArgumentError)
def bernoulli(p: Any, shape: Any = None, name: str | None = None) -> Tensor:
    """Draw bools that are True with probability p, anew in each step.

    Args:
        p: a number in [0, 1], or a float tensor of probabilities. A tensor's element outside [0,
            1], or NaN, is an OpError in the step.
        shape: ints, or sizes of other tensors; default: that of p.

    Raises:
        DTypeError: p is a tensor of another kind.
        ArgumentError: p is a number outside [0, 1].
    """
    with error_location("random.bernoulli"):
        if isinstance(p, Tensor):
            require_kind(p.spec, "float")
            sizes = p.shape if shape is None else normalize_shape(shape)
        else:
            p = require_finite("p", p)
            if not 0 <= p <= 1:
                raise ArgumentError(f"p must be a probability in [0, 1], got {p}")
            sizes = () if shape is None else normalize_shape(shape)
    if isinstance(p, Tensor):
        result: Tensor = less(uniform(sizes, dtype=p.dtype), bernoulli_probabilities(p), name=name)
        return result
    return keep_mask(sizes, p, name)


@checks_argument_names(ArgumentError)
def randint(
    low: int, high: int | None = None, shape: Any = (), dtype: Any = "int64",
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw integers in [low, high) with equal probabilities, anew in each step.

    64 random bits select one, so no two probabilities differ by more than 2**-64.

    Args:
        high: if None, the range is [0, low), as in numpy.
        shape: ints, or sizes of other tensors (`x.shape`).
        dtype: an int dtype.

    Raises:
        DTypeError: dtype is no integer.
        ArgumentError: low and high are not ints, low >= high, or the dtype cannot hold them.
    """
    with error_location("random.randint"):
        first, end = (0, low) if high is None else (low, high)
        first, end = _require_bound("low", first), _require_bound("high", end)
        if first >= end:
            raise ArgumentError(f"low {first} is not below high {end}, which is left out")
        wanted = as_dtype(dtype)
        if kind(wanted) != "int":
            raise DTypeError(f"random integers must be int8 to uint64, got {wanted}")
        held = np.iinfo(wanted)
        if first < held.min or end - 1 > held.max:
            raise ArgumentError(
                f"{wanted} holds {held.min} to {held.max}, not {first} to {end - 1}; give another "
                "dtype"
            )
        sizes = normalize_shape(shape)
    result: Tensor = integers_op(
        shape=sizes, dtype=wanted.name, low=first, last=end - 1, stream=next_stream(), name=name
    )
    return result


@checks_argument_names(ArgumentError)
def permutation(x: Any, axis: int = 0, name: str | None = None) -> Tensor:
    """Permute the slices of x along an axis, or the integers below x, anew in each step.

    Every order has the same probability. It sorts 64-bit random integers: O(n log n).

    Args:
        x: a tensor; or a number n for the int64 integers below n: an int, or the size of another
            tensor (`x.shape[0]`).

    Raises:
        ArgumentError: x is a scalar tensor or a negative number.
        ShapeError: axis is outside x.
    """
    with error_location("random.permutation"):
        count = isinstance(x, int | np.integer | Dim) and not isinstance(x, bool)
        source = None if count else as_tensor(x)
        if source is not None and not source.ndim:
            raise ArgumentError("a scalar has no slices to permute; give an int, or a tensor")
        at = 0 if source is None else normalize_axis(axis, source.ndim)
        size = normalize_shape(x) if source is None else (source.shape[at],)
    keys = randint(-(2**63), 2**63, size)
    order: Tensor = argsort_op(
        keys, axis=0, descending=False, name=name if source is None else None
    )
    return order if source is None else take_op(source, order, axis=at, name=name)


@checks_argument_names(ArgumentError)
def categorical(logits: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Draw int64 indices along an axis with probabilities softmax(logits), anew in each step.

    It takes the largest of the logits plus Gumbel noise, in float64, so that ties are practically
    impossible.

    Args:
        logits: floats. A logit of -inf is never drawn. Logits with NaN or inf, or only -inf, along
            the axis are an OpError in the step.

    Returns:
        int64, of the shape of the logits without the axis.

    Raises:
        DTypeError: the logits are not float.
        ShapeError: axis is outside the logits.

    Source: Gumbel, Statistical theory of extreme values, 1954.
    """
    with error_location("random.categorical"):
        given = as_tensor(logits)
        require_kind(given.spec, "float")
        at = normalize_axis(axis, given.ndim)
    noise = log(negative(log(uniform(given.shape, dtype="float64"))))
    checked = categorical_logits(given, axis=at)
    result: Tensor = argmax(astype(checked, "float64") - noise, axis=at, name=name)
    return result


def keep_mask(shape: Shape, probability: float, name: str | None = None) -> Tensor:
    """Draw bools that are True with a probability, from a stream of their own, for dropout."""
    result: Tensor = bernoulli_op(
        shape=shape, probability=probability, stream=next_stream(), name=name
    )
    return result


def _require_bound(what: str, value: Any) -> int:
    if isinstance(value, Tensor):
        raise ArgumentError(
            f"{what} must be an int, got {value!r}; for bounds in a tensor, scale gf.random.uniform"
        )
    return require_int(what, value)


def __getattr__(name: str) -> NoReturn:
    raise missing_attribute_error(__name__, name)


__all__ = [
    "bernoulli", "beta", "categorical", "choice", "dirichlet", "exponential", "gamma", "gumbel",
    "normal", "permutation", "poisson", "randint", "seed", "truncated_normal", "uniform",
]  # fmt: skip
