"""A metric: sums over a batch as tensors, and what follows from their totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, user_location
from graphflow.ir.spec import equate, kind, show_shape

Array = np.ndarray[Any, Any]


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Metric:
    """A metric of batches.

    A metric of your own: `Metric((gf.sum(x), count), lambda totals: totals[0] / totals[1])`.

    Args:
        parts: tensors of a batch. Those of batches are added up.
        finish: function of the totals, arrays of float64, that returns the metric.
        joins: the parts of batches are joined along their first axis instead, for metrics that
            compare all examples with each other.
    """

    parts: Sequence[Tensor]
    finish: Callable[[Sequence[Array]], Any]
    joins: bool = False

    def __post_init__(self) -> None:
        listed = isinstance(self.parts, list | tuple) and bool(self.parts)
        if not listed or not all(isinstance(part, Tensor) for part in self.parts):
            raise ArgumentError(
                f"Metric at {user_location()}: parts must be a list of tensors, not {self.parts!r}"
            )
        object.__setattr__(self, "parts", tuple(self.parts))

    def add(self, totals: Sequence[Array] | None, values: Sequence[Any]) -> list[Array]:
        """Return the totals with the values of the parts in one more batch.

        Args:
            totals: of the batches so far; None: there were none.
            values: of `parts`, as a session returns them.
        """
        arrays = [np.asarray(v, "float64") for v in values]
        if totals is None:
            return arrays
        if self.joins:
            return [np.concatenate(pair) for pair in zip(totals, arrays, strict=True)]
        return [a + b for a, b in zip(totals, arrays, strict=True)]

    def compute(self, totals: Sequence[Array]) -> Any:
        """Return the metric of totals: a float, or an array where there is one for each class."""
        found = self.finish(totals)
        return float(found) if np.ndim(found) == 0 else np.asarray(found)


@checks_argument_names(ArgumentError)
def evaluate(
    session: Any, metrics: Mapping[str, Metric], batches: Iterable[Mapping[Any, Any]]
) -> dict[str, Any]:
    """Return metrics over batches.

    Args:
        session: an open `gf.Session`.
        metrics: by name.
        batches: the feeds of each batch; the batches may differ in size.

    Returns:
        The metrics by name.

    Raises:
        ArgumentError: there is no batch, or a value is no metric.
    """
    at = f"evaluate at {user_location()}"
    if not isinstance(metrics, Mapping) or not metrics:
        raise ArgumentError(f'{at}: metrics must be a dict such as {{"loss": …}}, not {metrics!r}')
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise ArgumentError(
                f"{at}: {name!r} must be a metric, such as gf.metrics.mean(loss), not {metric!r}"
            )
    totals: dict[str, list[Array] | None] = dict.fromkeys(metrics)
    for feeds in batches:
        values = session.run({name: list(metric.parts) for name, metric in metrics.items()}, feeds)
        for name, metric in metrics.items():
            totals[name] = metric.add(totals[name], values[name])
    found = {}
    for name, metric in metrics.items():
        total = totals[name]
        if total is None:
            raise ArgumentError(f"{at}: there was no batch; an iterator can be used once only")
        found[name] = metric.compute(total)
    return found


class Weighed(NamedTuple):
    """Values and weights of examples, flat and float64."""

    values: tuple[Tensor, ...]
    weights: Tensor


def weigh(what: str, values: Sequence[Tensor], weights: Any) -> Weighed:
    """Return values of one shape as float64 lists, with the weight of each.

    Args:
        weights: of the shape of the values, or of their first axes; None: 1.

    Raises:
        ShapeError: the shapes differ.
        DTypeError: complex values.
    """
    first = values[0]
    for value in values:
        text = (
            f"{what} at {user_location()}: predictions and labels differ in shape: "
            f"{show_shape(first.shape)} and {show_shape(value.shape)}"
        )
        if value.ndim != first.ndim:
            raise ShapeError(text)
        for a, b in zip(first.shape, value.shape, strict=True):
            equate(a, b, text)
        if kind(value.dtype) == "complex":
            raise DTypeError(f"{what} at {user_location()}: {value!r} is complex")
    ones = FUNCTIONS["ones_like"](first)
    if weights is not None:
        given = as_tensor(weights)
        text = (
            f"{what} at {user_location()}: weights {show_shape(given.shape)} must have the first "
            f"axes of the examples {show_shape(first.shape)}"
        )
        if given.ndim > first.ndim:
            raise ShapeError(text)
        for a, b in zip(first.shape, given.shape, strict=False):
            equate(a, b, text)
        wide = FUNCTIONS["reshape"](given, (*given.shape, *(1,) * (first.ndim - given.ndim)))
        ones = flatten(ones) * flatten(FUNCTIONS["broadcast_to"](wide, first.shape))
    return Weighed(tuple(flatten(value) for value in values), flatten(ones))


def flatten(x: Tensor) -> Tensor:
    """Return all elements as a list of float64."""
    flat: Tensor = FUNCTIONS["reshape"](FUNCTIONS["astype"](x, "float64"), (x.size,))
    return flat


def ratio(numerator: Array, denominator: Array, otherwise: float = 0.0) -> Array:
    """Return a quotient, and `otherwise` where the denominator is 0."""
    below = np.asarray(denominator, "float64")
    zero = below == 0
    return np.where(zero, otherwise, np.asarray(numerator) / np.where(zero, 1.0, below))
