"""Metrics of numbers: means of errors and of losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor
from graphflow.metrics.metric import Array, Metric, ratio, weigh


@checks_argument_names(ArgumentError)
def mean(values: Any, *, weights: Any = None) -> Metric:
    """Return the mean of values, such as the losses of examples.

    A loss that is reduced already counts once a batch: give the losses of examples, without
    `reduction`, for a mean over examples.

    Args:
        values: real numbers of any shape.
        weights: of the shape of the values, or of their first axes; 0 leaves padding out.
    """
    (each,), share = weigh("mean", (as_tensor(values),), weights)
    return _mean_of(each, share)


@checks_argument_names(ArgumentError)
def perplexity(losses: Any, *, weights: Any = None) -> Metric:
    """Return e to the mean loss of tokens, from `gf.nn.cross_entropy(logits, tokens)`.

    Arguments as of `mean`.
    """
    (each,), share = weigh("perplexity", (as_tensor(losses),), weights)
    return Metric(_mean_of(each, share).parts, lambda t: np.exp(ratio(t[0], t[1], np.nan)))


@checks_argument_names(ArgumentError)
def mse(outputs: Any, targets: Any, *, weights: Any = None) -> Metric:
    """Return the mean squared error.

    Args:
        outputs, targets: real numbers of one shape.
        weights: as of `mean`.
    """
    (found, wanted), share = weigh("mse", (as_tensor(outputs), as_tensor(targets)), weights)
    return _mean_of(FUNCTIONS["square"](found - wanted), share)


@checks_argument_names(ArgumentError)
def mae(outputs: Any, targets: Any, *, weights: Any = None) -> Metric:
    """Return the mean absolute error.

    Arguments as of `mse`.
    """
    (found, wanted), share = weigh("mae", (as_tensor(outputs), as_tensor(targets)), weights)
    return _mean_of(FUNCTIONS["abs"](found - wanted), share)


@checks_argument_names(ArgumentError)
def r2(outputs: Any, targets: Any, *, weights: Any = None) -> Metric:
    """Return the share of the targets' variance that the outputs explain.

    1 is the best. The mean of the targets as only output gives 0. Targets that are all the same
    give 1 if they are met, else 0.

    Arguments as of `mse`. All elements count as one target.
    """
    (found, wanted), share = weigh("r2", (as_tensor(outputs), as_tensor(targets)), weights)
    sums, square = FUNCTIONS["sum"], FUNCTIONS["square"]
    count = sums(share)
    middle = sums(share * wanted) / FUNCTIONS["where"](count > 0.0, count, 1.0)
    spread = sums(share * square(wanted - middle))
    parts = [sums(share * square(found - wanted)), spread, count, middle]

    def finish(totals: Sequence[Array]) -> Array:
        """Squares around 0 would cancel where the mean is large, so each batch has its own."""
        errors, within, counts, middles = totals
        whole = ratio((counts * middles).sum(), counts.sum())
        variance = within.sum() + (counts * (middles - whole) ** 2).sum()
        missed = errors.sum()
        return np.where(missed == 0, 1.0, 1.0 - ratio(missed, variance, 1.0))

    return Metric([FUNCTIONS["reshape"](part, (1,)) for part in parts], finish, joins=True)


def _mean_of(values: Tensor, weights: Tensor) -> Metric:
    sums = FUNCTIONS["sum"]
    # what has no weight does not count, not even as infinity or NaN
    kept = FUNCTIONS["where"](FUNCTIONS["equal"](weights, 0.0), 0.0, values)
    return Metric((sums(kept * weights), sums(weights)), lambda t: ratio(t[0], t[1], np.nan))
