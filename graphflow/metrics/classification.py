"""Metrics of classes: from counts of right and wrong predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, user_location
from graphflow.ir.spec import kind
from graphflow.metrics.metric import Array, Metric, ratio, weigh

AVERAGES = ("binary", "macro", "micro", "weighted", "none")


@checks_argument_names(ArgumentError)
def accuracy(
    outputs: Any, labels: Any, *, weights: Any = None, threshold: float | None = None
) -> Metric:
    """Return the share of examples whose class is predicted.

    Args:
        outputs: floats (…, classes), of which the largest is the prediction; predicted classes,
            ints (…); or floats (…), where classes are 0 and 1.
        labels: ints or bools (…).
        weights: of the examples.
        threshold: least float that predicts class 1; default: more than 0.5.

    Raises:
        ShapeError: outputs and labels do not belong together.
        DTypeError: labels are floats.
    """
    predicted, wanted = _classes("accuracy", outputs, labels, threshold)
    (found, right), share = weigh("accuracy", (predicted, wanted), weights)
    hits = FUNCTIONS["astype"](FUNCTIONS["equal"](found, right), "float64")
    sums = FUNCTIONS["sum"]
    return Metric((sums(hits * share), sums(share)), lambda t: ratio(t[0], t[1], np.nan))


@checks_argument_names(ArgumentError)
def top_k(outputs: Any, labels: Any, k: int, *, weights: Any = None) -> Metric:
    """Return the share of examples whose class is among the k largest outputs.

    A class that is as large as others counts if fewer than k are larger.

    Args:
        outputs: floats (…, classes).
        labels: ints (…).
    """
    at = f"top_k at {user_location()}"
    scores, wanted = as_tensor(outputs), as_tensor(labels)
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ArgumentError(f"{at}: k must be an int from 1, not {k!r}")
    if scores.ndim != wanted.ndim + 1 or kind(wanted.dtype) != "int":
        raise ShapeError(f"{at}: outputs must be (…, classes) and labels ints (…)")
    own = FUNCTIONS["take_along_axis"](scores, FUNCTIONS["expand_dims"](wanted, -1), -1)
    above = FUNCTIONS["sum"](FUNCTIONS["astype"](scores > own, "float64"), -1)
    (hits,), share = weigh("top_k", (FUNCTIONS["astype"](above < k, "float64"),), weights)
    sums = FUNCTIONS["sum"]
    return Metric((sums(hits * share), sums(share)), lambda t: ratio(t[0], t[1], np.nan))


@checks_argument_names(ArgumentError)
def confusion_matrix(
    outputs: Any, labels: Any, classes: int, *, weights: Any = None,
    threshold: float | None = None,
) -> Metric:  # fmt: skip
    """Return the number of examples of each class (row) that were predicted as each (column).

    Args:
        outputs, labels, weights, threshold: as of `accuracy`.
        classes: number of classes.
    """
    counts = _confusion("confusion_matrix", outputs, labels, classes, weights, threshold)
    return Metric((counts,), lambda totals: totals[0])


@checks_argument_names(ArgumentError)
def precision(
    outputs: Any, labels: Any, classes: int = 2, *, average: str = "binary", weights: Any = None,
    threshold: float | None = None,
) -> Metric:  # fmt: skip
    """Return the share of predictions of a class that are right; 0 where there are none.

    Args:
        outputs, labels, weights, threshold: as of `accuracy`.
        classes: number of classes.
        average: "binary": of class 1; "macro": the mean over classes; "weighted": by their numbers
            of examples; "micro": over all predictions; "none": an array, one for each class.
    """
    return _score("precision", lambda right, found, real: ratio(right, found), outputs, labels,
                  classes, average, weights, threshold)  # fmt: skip


@checks_argument_names(ArgumentError)
def recall(
    outputs: Any, labels: Any, classes: int = 2, *, average: str = "binary", weights: Any = None,
    threshold: float | None = None,
) -> Metric:  # fmt: skip
    """Return the share of a class's examples that were found; 0 where there are none.

    Arguments as of `precision`.
    """
    return _score("recall", lambda right, found, real: ratio(right, real), outputs, labels,
                  classes, average, weights, threshold)  # fmt: skip


@checks_argument_names(ArgumentError)
def f1(
    outputs: Any, labels: Any, classes: int = 2, *, average: str = "binary", weights: Any = None,
    threshold: float | None = None,
) -> Metric:  # fmt: skip
    """Return the harmonic mean of precision and recall.

    Arguments as of `precision`.
    """
    return _score("f1", lambda right, found, real: ratio(2 * right, found + real), outputs, labels,
                  classes, average, weights, threshold)  # fmt: skip


Rate = Callable[[Array, Array, Array], Array]
"""(right predictions, predictions, examples) of each class -> the score of each class."""


def _score(
    what: str, rate: Rate, outputs: Any, labels: Any, classes: int, average: str, weights: Any,
    threshold: float | None,
) -> Metric:  # fmt: skip
    if not isinstance(average, str) or average not in AVERAGES:
        raise ArgumentError(
            f"{what} at {user_location()}: average must be one of {', '.join(AVERAGES)}, not "
            f"{average!r}"
        )
    counts = _confusion(what, outputs, labels, classes, weights, threshold)
    if average == "binary" and classes != 2:
        raise ArgumentError(
            f'{what} at {user_location()}: average="binary" is for 2 classes; of {classes!r}, take '
            '"macro", "micro", "weighted" or "none"'
        )

    def finish(totals: Sequence[Array]) -> Array:
        table = totals[0]
        right, found, real = np.diagonal(table), table.sum(0), table.sum(1)
        if average == "micro":
            return rate(right.sum(), found.sum(), real.sum())
        each = rate(right, found, real)
        if average == "binary":
            return np.asarray(each[1])
        if average == "none":
            return each
        if average == "weighted":
            return ratio((each * real).sum(), real.sum())
        seen = found + real > 0  # a class that nobody has and nobody predicts does not count
        return ratio(each[seen].sum(), np.asarray(seen.sum()))

    return Metric((counts,), finish)


def _confusion(
    what: str, outputs: Any, labels: Any, classes: int, weights: Any, threshold: float | None
) -> Tensor:
    """Return the weights of examples by label and prediction, (classes, classes)."""
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise ArgumentError(
            f"{what} at {user_location()}: classes must be an int from 2, not {classes!r}"
        )
    predicted, wanted = _classes(what, outputs, labels, threshold)
    _, share = weigh(what, (predicted, wanted), weights)
    one_hot, flat = FUNCTIONS["one_hot"], FUNCTIONS["reshape"]
    columns = _in_float64(one_hot(flat(predicted, (predicted.size,)), classes))
    rows = _in_float64(one_hot(flat(wanted, (wanted.size,)), classes))
    counts: Tensor = FUNCTIONS["matrix_transpose"](rows) @ (columns * share[:, None])
    return counts


def _in_float64(x: Tensor) -> Tensor:
    """Return a table of classes in float64."""
    wide: Tensor = FUNCTIONS["astype"](x, "float64")
    return wide


def _classes(
    what: str, outputs: Any, labels: Any, threshold: float | None
) -> tuple[Tensor, Tensor]:
    """Return predicted and real classes, ints of one shape."""
    at = f"{what} at {user_location()}"
    given, wanted = as_tensor(outputs), as_tensor(labels)
    if kind(wanted.dtype) not in ("int", "bool"):
        raise DTypeError(f"{at}: labels must be ints or bools, not {wanted.dtype}")
    if given.ndim == wanted.ndim + 1:
        if threshold is not None:
            raise ArgumentError(f"{at}: threshold is for outputs of the shape of the labels")
        found = FUNCTIONS["argmax"](given, -1)
    elif given.ndim != wanted.ndim:
        raise ShapeError(
            f"{at}: outputs must be (…, classes) or (…) for labels (…), not {given.shape} for "
            f"{wanted.shape}"
        )
    elif kind(given.dtype) == "float":
        found = given > 0.5 if threshold is None else given >= float(threshold)
    else:
        found = given
    as_int = FUNCTIONS["astype"]
    return as_int(found, "int64"), as_int(wanted, "int64")
