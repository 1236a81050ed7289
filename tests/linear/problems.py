"""Random linear problems for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from graphflow.linear import losses
from graphflow.linear.losses import Loss
from graphflow.linear.problem import LinearProblem

LOSSES = [
    losses.squared,
    losses.logistic,
    losses.hinge,
    losses.squared_hinge,
    losses.huber(0.7),
    losses.epsilon_insensitive(0.2),
    losses.squared_epsilon_insensitive(0.1),
]
SMOOTH = [loss for loss in LOSSES if loss.slope is not None]


def random_problem(
    seed: int, loss: Loss, *, l1: float = 0.0, l2: float = 0.0, has_intercept: bool = False,
    is_sparse: bool = False, bias: float = 0.0, rows: int = 0, columns: int = 0,
) -> LinearProblem:  # fmt: skip
    """Return a problem with random sizes, weights, scales of columns, and a column of zeros."""
    random = np.random.default_rng(seed)
    n = rows or int(random.integers(5, 60))
    d = columns or int(random.integers(1, 25))
    x: Any = random.normal(size=(n, d)) * 10.0 ** random.uniform(-0.5, 0.5, size=d)
    x[:, 0] += 3.0
    if d > 2:
        x[:, 1] = 0.0
        x[:, 2] = x[:, 0]  # twice the same
    x[random.random((n, d)) < 0.5] = 0.0
    f = x @ random.normal(size=d) + random.normal(size=n) + 1.0
    y = np.where(f > np.median(f), 1.0, -1.0) if loss.classifies else f
    if is_sparse:
        x = sp.csr_matrix(x)
    return LinearProblem(x, y, random.uniform(0.2, 2.0, size=n), loss, l1, l2, has_intercept, bias)
