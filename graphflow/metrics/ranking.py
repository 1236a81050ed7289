"""The area under the curve of true over false positives: how well scores rank two classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, as_tensor
from graphflow.metrics.metric import Array, Metric, ratio, weigh


@checks_argument_names(ArgumentError)
def auc(scores: Any, labels: Any, *, weights: Any = None) -> Metric:
    """Return the probability that an example of class 1 scores higher than one of class 0.

    Equal scores count half. It is exact: the scores of all batches are kept, 24 bytes an example.

    Args:
        scores: real numbers (…).
        labels: 0 and 1, or bools, of that shape.
        weights: of the examples.

    Returns:
        A metric from 0 to 1; NaN if one of the classes has no example.
    """
    (each, wanted), share = weigh("auc", (as_tensor(scores), as_tensor(labels)), weights)
    where = FUNCTIONS["where"]
    real = wanted > 0.0
    return Metric((each, where(real, share, 0.0), where(real, 0.0, share)), _area, joins=True)


def _area(totals: Sequence[Array]) -> Array:
    scores, positive, negative = totals
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) != 0)
    if not len(starts):
        return np.asarray(np.nan)
    above, below = (np.add.reduceat(each[order], starts) for each in (positive, negative))
    lower = np.cumsum(below) - below / 2
    return ratio((above * lower).sum(), positive.sum() * negative.sum(), np.nan)
