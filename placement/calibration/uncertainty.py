"""Uncertainty of predicted seconds: an 80 % interval around each.

The error of a prediction is ln(actual / predicted). It is taken as normal around 0 with a standard
deviation σ. So the interval of a node is seconds · exp(± 1.28 σ): times are wrong by factors, and
none becomes negative.

    σ² = s² + c² · (1 - w · n / (1 + n))

    c   what calibration alone leaves open, found on sizes that it did not fit (`held_out.py`); for
        nodes that were not observed themselves at least how far it was off for observed ones
    s   scatter of the n latest observations of such nodes in traced steps, by their quartiles:
        one step on a busy machine must not widen the interval
    w   1 for nodes of the same bucket; less, the more different the observed nodes are

Without observations σ is c. One observation counts as much as calibration does, many replace it.

Busy neighbours slow a node down by as much as products or by as much as passes over memory. If that
was not observed, the interval of the slowdown is as wide as these are apart. All nodes share its
error.

A link that was measured before may have become faster or slower by the factor `ALIKE` without being
measured again, so ln(ALIKE) is the 80 % interval of a link without observations. Overheads of steps
consist of messages, and have the same c.

Whole steps teach how far predictions are off for reasons that no node shows: `step_deviation` of
the corrections. All nodes and transfers of a step share this error.

Errors add up to that of a step: those with one source are the same error, so their seconds are
added. Those with different sources are independent, so the squares are added. The source of a
node's error is its bucket, if such nodes were observed; else the observed nodes that are most like
it; else calibration's model of its op class. The error of a difference of two steps is that of the
seconds in which they differ, source by source. So errors that both steps share cancel.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Op
from graphflow.placement.calibration.held_out import ALL
from graphflow.placement.calibration.link_cache import ALIKE
from graphflow.placement.calibration.roofline import op_class

QUANTILE = 1.2816
"""Standard deviations to either side that hold 80 % of a normal variable."""
LINK_DEVIATION = math.log(ALIKE) / QUANTILE
"""Standard deviation of the error of a link, or of a step's overhead, that was only calibrated."""
WIDEST = 1e3
"""Factor between a prediction and an end of its interval at most: beyond, nothing is known."""
_QUARTILES = 1.349
"""Standard deviations between the quartiles of a normal variable."""


def calibration_deviation(speeds: Mapping[str, Any], op: Op) -> float | None:
    """Return the standard deviation of what calibration alone predicts of an op.

    Args:
        speeds: Of the device, see `profile_file.Profile`. None is returned if they have no scatter:
            they were described, or measured by an earlier version.
    """
    scatter = speeds.get("scatter")
    if not scatter:
        return None
    entry = speeds["ops"].get(op.name)
    if entry is not None and "scatter" in entry:
        return float(entry["scatter"])
    measured, unmeasured = scatter.get(op_class(op), scatter[ALL])
    return float(unmeasured if entry is None else measured)


def observed_deviation(ratios: Sequence[float], prior: float, weight: float = 1.0) -> float:
    """Return the standard deviation that observations leave; see the module.

    Args:
        ratios: Observed ratios, measured to predicted.
        prior: The standard deviation without them.
        weight: From 0 (they tell nothing about the node) to 1.
    """
    count = len(ratios)
    left = 1.0 - weight * count / (1.0 + count)
    return math.sqrt(log_scatter(ratios) ** 2 + prior**2 * left)


def overhead_deviation(
    overhead: float, predicted: float, shares: Sequence[float], weight: float
) -> float:
    """Return the standard deviation of a step's overhead, in seconds.

    Args:
        predicted: Seconds of the step's nodes and transfers.
        shares: Observed overheads, in parts of these.
        weight: As in `observed_deviation`.
    """
    scatter = 0.0
    if len(shares) > 1:
        low, high = np.quantile(shares, (0.25, 0.75))
        scatter = float(high - low) / _QUARTILES * predicted
    left = 1.0 - weight * len(shares) / (1.0 + len(shares))
    return math.hypot(scatter, overhead * LINK_DEVIATION * math.sqrt(left))


def log_scatter(ratios: Sequence[float]) -> float:
    """Return the standard deviation of logarithms, by their quartiles; 0 for fewer than two."""
    if len(ratios) < 2:
        return 0.0
    low, high = np.quantile(np.log(ratios), (0.25, 0.75))
    return float(high - low) / _QUARTILES


@dataclass(frozen=True)
class PredictedStep:
    """A predicted duration, and what may be wrong about it.

    Args:
        seconds: Of a step.
        errors: One standard deviation in seconds, by source. Sources are independent.
    """

    seconds: float
    errors: Mapping[Hashable, float]

    @property
    def interval(self) -> tuple[float, float]:
        """Return the least and the most seconds of the 80 % interval."""
        return interval(self.seconds, _norm(self.errors) / self.seconds if self.seconds else 0.0)

    @property
    def margin(self) -> float:
        """Return half of the interval's width in seconds."""
        low, high = self.interval
        return (high - low) / 2

    def margin_to(self, other: PredictedStep) -> float:
        """Return the seconds by which the two steps must differ for that not to be chance."""
        apart = {
            source: self.errors.get(source, 0.0) - other.errors.get(source, 0.0)
            for source in {**self.errors, **other.errors}
        }
        return QUANTILE * _norm(apart)


def interval(seconds: float, deviation: float) -> tuple[float, float]:
    """Return the 80 % interval of predicted seconds."""
    factor = math.exp(min(QUANTILE * deviation, math.log(WIDEST)))
    return seconds / factor, seconds * factor


def _norm(errors: Mapping[Hashable, float]) -> float:
    return math.sqrt(math.fsum(error * error for error in errors.values()))
