"""The scatter of calibration: how far its predictions are off on sizes that it did not fit.

    speeds ─with_scatter→ speeds with {op class: [σ of measured ops, σ of unmeasured ops]}

Calibration times an op on two sizes and predicts all others. So each op is timed once more, on a
third of the larger size and on twice as much, and compared with the prediction. The scatter
is a standard deviation of the logarithm of measured / predicted. It contains the noise of the
timings, and the error of the model.

The second number answers for ops that calibration could not measure: they get the median rate of
their class. It is found by leaving out the rate of each op in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from time import thread_time
from typing import Any

import numpy as np

from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.ir.op import REGISTRY, Op
from graphflow.placement.calibration import measure
from graphflow.placement.calibration.measure import (
    LONG,
    KernelTimer,
    ScaledSample,
    make_scaler,
    scale_sample,
)
from graphflow.placement.calibration.roofline import Rates, op_class

LEAST_SCATTER = 0.01
"""No prediction is better than the clock."""
FEW = 3
"""Ratios below which a class has the scatter of all classes together."""
ALL = "all"
"""The class of all ops."""
_NORMAL = 0.6745
"""Median of the absolute value of a normal variable with a standard deviation of 1."""


def add_cpu_scatter(speeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the speeds of a CPU with their scatter."""
    with one_blas_thread(), np.errstate(all="ignore"):
        return with_scatter(KernelTimer("cpu", np, lambda: None, thread_time), speeds)


def with_scatter(clock: KernelTimer, speeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return speeds with their scatter: of each op that was tried, and by op class.

    An op's own errors are few. So that of its class counts as one more of them.

    Args:
        speeds: What calibration measured with this clock.
    """
    own: dict[str, list[float]] = {}
    classes: dict[str, tuple[list[float], list[float]]] = {}
    for op, case, seconds in _held_out_times(clock, speeds):
        others = {name: entry for name, entry in speeds["ops"].items() if name != op.name}
        measured, unmeasured = (
            math.log(seconds / _predict(known, op, case))
            for known in (speeds, {**speeds, "ops": others})
        )
        own.setdefault(op.name, []).append(measured)
        for kind in (op_class(op), ALL):
            pair = classes.setdefault(kind, ([], []))
            pair[0].append(measured)
            pair[1].append(unmeasured)
    if len(own) < FEW:
        return dict(speeds)
    scatter = {
        kind: [error_deviation(errors) for errors in pair]
        for kind, pair in sorted(classes.items())
        if len(pair[0]) >= FEW
    }
    ops = {name: dict(entry) for name, entry in speeds["ops"].items()}
    for name, errors in own.items():
        of_class = scatter.get(op_class(REGISTRY[name]), scatter[ALL])[0]
        ops[name]["scatter"] = math.sqrt(fmean([of_class**2, *(e * e for e in errors)]))
    return {**speeds, "ops": ops, "scatter": scatter}


def is_scatter(speeds: Mapping[str, Any]) -> bool:
    """Return True if speeds have a valid scatter, or none."""
    classes = speeds.get("scatter", {ALL: [1, 1]})
    own = [entry.get("scatter", 1) for entry in speeds["ops"].values() if isinstance(entry, dict)]
    if not isinstance(classes, dict) or ALL not in classes:
        return False
    pairs = list(classes.values())
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    numbers = [*own, *(each for pair in pairs for each in pair)]
    return all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers)


def _held_out_times(
    clock: KernelTimer, speeds: Mapping[str, Any]
) -> Iterator[tuple[Op, ScaledSample, float]]:
    """Yield measured ops on sizes that are new to calibration, with their seconds."""
    for name in speeds["ops"]:
        op = REGISTRY[name]
        fitted = scale_sample(op, make_scaler(measure.SIDE))
        for side in (measure.SIDE // 3, measure.SIDE * 2):
            case = scale_sample(op, make_scaler(side))
            if op.alias or case is None or fitted is None or case.amount == fitted.amount:
                continue
            if not 0 < _predict(speeds, op, case) < LONG:
                continue
            call = clock.call(op, case)
            if call is not None:
                yield op, case, clock.seconds(call, 3)


def _predict(speeds: Mapping[str, Any], op: Op, case: ScaledSample) -> float:
    """Return the seconds that calibration predicts."""
    return Rates(speeds).seconds(op, case.inputs, case.outputs, case.attrs)


def error_deviation(errors: Sequence[float]) -> float:
    """Return the standard deviation of errors around 0, from their median size."""
    return max(median(map(abs, errors)) / _NORMAL, LEAST_SCATTER)
