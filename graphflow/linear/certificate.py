"""The duality gap: a proof of how far a linear model is from the best one.

    primal  P(w) = Σ s_i φ(x_i·w; y_i) + g(w)
    dual    D(u) = −Σ s_i φ*(u_i; y_i) − g*(−Σ s_i u_i x_i)

D(u) ≤ P(v) for any duals u and weights v. So P(w) − D(u) bounds the distance of w from the optimum.
Both are computed here from the features, in float64, whatever a solver keeps beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location
from graphflow.linear.losses import Array, Loss
from graphflow.linear.penalties import L1, L1L2, L2, Bounds, GroupL1, Penalty

CHUNK = 1 << 22
"""Elements of dense features that are converted to float64 at a time."""
_SCALINGS = 60
"""Steps of the search for the best multiple of infeasible duals."""


class Certificate(NamedTuple):
    """A bound on the distance from the optimum.

    Attributes:
        primal: the objective of the weights.
        dual: a lower bound of all objectives.
        gap: primal − dual.
        relative: the gap over the larger size of both; 0 if both are 0.
    """

    primal: float
    dual: float

    @property
    def gap(self) -> float:
        """The primal minus the dual objective."""
        return self.primal - self.dual

    @property
    def relative(self) -> float:
        """The gap over the larger size of both objectives; 0 if both are 0."""
        size = max(abs(self.primal), abs(self.dual))
        return self.gap / size if size else 0.0


def certify(
    loss: Loss,
    penalty: Penalty,
    features: Any,
    targets: Array,
    weights: Array,
    duals: Array | None = None,
    sample_weights: Array | float = 1.0,
) -> Certificate:
    """Return a bound on how far weights are from the best ones.

    Args:
        loss, penalty: φ and g.
        features: (rows, columns), dense or of scipy.sparse. It is read by chunks, not copied.
        targets: (rows,).
        weights: (columns,).
        duals: (rows,), a solver's; default: the slopes of the loss at the predictions. Duals that
            are infeasible are replaced by feasible ones.
        sample_weights: s, (rows,) or one number.

    Raises:
        ArgumentError: shapes differ; a number is NaN or infinite; the penalty has no dual, as L2 of
            strength 0.
    """
    y, w = (np.asarray(a, np.float64) for a in (targets, weights))
    s = np.broadcast_to(np.asarray(sample_weights, np.float64), y.shape)
    _check(features, y, w, s)
    predictions = multiply(features, w)
    primal = float(s @ loss.value(predictions, y)) + penalty_value(penalty, w)
    u = loss.slope(predictions, y) if duals is None else np.asarray(duals, np.float64)
    if u.shape != y.shape:
        raise ArgumentError(
            f"certify at {user_location()}: duals must have the shape {y.shape}, not {u.shape}"
        )
    if not np.isfinite(primal) or not np.isfinite(u).all():
        raise ArgumentError(
            f"certify at {user_location()}: the objective is {primal}, so there is no gap; "
            "features, targets and weights must be finite, and weights within the penalty's bounds"
        )
    u = loss.nearest_feasible(u, y)
    moved = multiply_transposed(features, s * u)
    return Certificate(primal, _best_dual(loss, penalty, y, s, u, moved))


def _best_dual(loss: Loss, penalty: Penalty, y: Array, s: Array, u: Array, moved: Array) -> float:
    """Return the largest dual objective among feasible multiples t·u, with t from 0 to 1 or, where
    the conjugates are finite, as large as the penalty allows.

    Args:
        moved: the features' transpose times s·u.
    """
    limit = _largest_multiple(penalty, moved)

    def dual(t: float) -> float:
        conjugates = loss.conjugate(t * u, y)
        if not np.isfinite(conjugates).all():
            return -np.inf
        return -float(s @ conjugates) - penalty_conjugate(penalty, -t * moved)

    low, high = 0.0, min(limit, 1.0)
    best = max(dual(high), dual(0.0))
    if limit >= 1.0:
        return best
    ratio = (5**0.5 - 1) / 2
    for _ in range(_SCALINGS):  # the dual is concave in t
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        a, b = dual(first), dual(second)
        best = max(best, a, b)
        low, high = (first, high) if a < b else (low, second)
    return best


def _largest_multiple(penalty: Penalty, moved: Array) -> float:
    """Return the largest t for which g*(−t·moved) is finite.

    Raises:
        ArgumentError: only 0 is.
    """
    if isinstance(penalty, L1) or (isinstance(penalty, L1L2) and not penalty.l2):
        limit = penalty.strength if isinstance(penalty, L1) else penalty.l1
        size = float(abs(moved).max(initial=0.0))
    elif isinstance(penalty, GroupL1):
        limit, size = penalty.strength, float(abs(moved).max(initial=0.0))
    else:
        limit, size = _strength(penalty), 0.0
    if not limit:
        raise ArgumentError(
            f"certify at {user_location()}: {penalty!r} has no dual, since nothing bounds the "
            "weights; give a strength above 0, or a solver without a certificate"
        )
    return np.inf if size <= limit else limit / size


def _strength(penalty: Penalty) -> float:
    """Return a number that is 0 if a penalty leaves weights unbounded."""
    match penalty:
        case L2():
            return penalty.strength
        case Bounds():
            return float(np.isfinite(penalty.low) and np.isfinite(penalty.high))
    return 1.0


def penalty_value(penalty: Penalty, w: Array) -> float:
    """Return g(w).

    Raises:
        ArgumentError: the penalty is none of those with a certificate.
    """
    match penalty:
        case L1() | GroupL1():
            return penalty.strength * float(abs(w).sum())
        case L2():
            return penalty.strength / 2 * float(w @ w)
        case L1L2():
            return penalty.l1 * float(abs(w).sum()) + penalty.l2 / 2 * float(w @ w)
        case Bounds():
            return 0.0 if np.all((penalty.low <= w) & (w <= penalty.high)) else np.inf
    raise _unknown(penalty)


def penalty_conjugate(penalty: Penalty, v: Array) -> float:
    """Return g*(v) = max_w (v·w − g(w)), for a v at which it is finite.

    Raises:
        ArgumentError: the penalty is none of those with a certificate.
    """
    match penalty:
        case L1() | GroupL1():
            return 0.0
        case L2():
            return float(v @ v) / (2 * penalty.strength)
        case L1L2():
            beyond = np.maximum(abs(v) - penalty.l1, 0.0)
            return float(beyond @ beyond) / (2 * penalty.l2) if penalty.l2 else 0.0
        case Bounds():
            return float(np.maximum(v * penalty.low, v * penalty.high).sum())
    raise _unknown(penalty)


def _unknown(penalty: Penalty) -> ArgumentError:
    return ArgumentError(
        f"certify at {user_location()}: the conjugate of {penalty!r} is not known; give a penalty "
        "of gf.linear's"
    )


# Features -----------------------------------------------------------------------------------------


def multiply(features: Any, w: Array) -> Array:
    """Return features @ w in float64."""
    if not isinstance(features, np.ndarray):
        return np.asarray(features.astype(np.float64, copy=False) @ w)
    found = np.empty(features.shape[0])
    for rows in _chunks(features):
        found[rows] = features[rows].astype(np.float64, copy=False) @ w
    return found


def multiply_transposed(features: Any, u: Array) -> Array:
    """Return featuresᵀ @ u in float64."""
    if not isinstance(features, np.ndarray):
        return np.asarray(features.T.astype(np.float64, copy=False) @ u)
    found = np.zeros(features.shape[1])
    for rows in _chunks(features):
        found += u[rows] @ features[rows].astype(np.float64, copy=False)
    return found


def _chunks(features: Array) -> Iterator[slice]:
    """Yield slices of rows that are converted at a time."""
    step = max(1, CHUNK // max(features.shape[1], 1))
    for start in range(0, features.shape[0], step):
        yield slice(start, start + step)


def _check(features: Any, y: Array, w: Array, s: Array) -> None:
    """Check that shapes fit and numbers are finite.

    Raises:
        ArgumentError: they do not, or are not.
    """
    shape = tuple(getattr(features, "shape", ()))
    if y.ndim != 1 or w.ndim != 1 or shape != (len(y), len(w)):
        raise ArgumentError(
            f"certify at {user_location()}: features must be (rows, columns), with a target for "
            f"each row and a weight for each column, not {shape}, {y.shape} and {w.shape}"
        )
    for name, array in (("targets", y), ("weights", w), ("sample_weights", s)):
        if not np.isfinite(array).all():
            place = int(np.flatnonzero(~np.isfinite(array))[0])
            raise ArgumentError(
                f"certify at {user_location()}: {name} must be finite, and {name}[{place}] is "
                f"{array[place]}"
            )
    if (s < 0).any():
        raise ArgumentError(
            f"certify at {user_location()}: sample_weights must be no less than 0, and the least "
            f"is {s.min()}"
        )


__all__ = ["Certificate", "certify", "multiply", "multiply_transposed"]
