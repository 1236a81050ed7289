"""Schedules: rates that follow the number of steps taken, as values of the graph.

    gf.optim.Adam(gf.optim.schedules.cosine(1e-3, 10_000)).minimize(loss)

`minimize` gives the schedule a variable that counts steps. It is saved in checkpoints with the
rest, so a training that goes on has the rate at which it stopped. A step that `LossScaling` leaves
out is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names, require_count
from graphflow.base.argument_kinds import is_number
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, user_location
from graphflow.optim.state_variables import state_variable


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class RateSchedule:
    """A rate as a function of the number of steps taken.

    Args:
        rate: function of that number, a float64 scalar tensor from 0, that returns the rate of the
            next step, a scalar tensor or a number.
    """

    rate: Callable[[Tensor], Any]

    def __call__(self, step: Tensor | int) -> Tensor:
        """Return the rate after so many steps, a float64 scalar."""
        return _as_rate(self.rate(_as_rate(step)))

    def rate_at(self, step: int) -> float:
        """Return the rate after so many steps as a number, to look at it."""
        return float(evaluate([self(step)])[0])

    def begin(self) -> tuple[Tensor, list[Tensor]]:
        """Return the rate of a step, and the updates of the variables that it follows."""
        taken = state_variable("schedule/steps", init.zeros((), "int64"))
        return self(taken), [assign(taken, taken + 1)]


def _as_rate(value: Any) -> Tensor:
    given = value if isinstance(value, Tensor) else as_tensor(np.float64(value))
    tensor: Tensor = FUNCTIONS["astype"](given, "float64")
    return tensor


@checks_argument_names(ArgumentError)
def constant(rate: float) -> RateSchedule:
    """Return a schedule that always gives one rate; after `warmup`, for example."""
    value = _number("constant", "rate", rate)
    return RateSchedule(lambda step: value)


@checks_argument_names(ArgumentError)
def linear(start: float, end: float, steps: int) -> RateSchedule:
    """Return a schedule that goes from one rate to another in equal parts over `steps` steps."""
    first, last = _number("linear", "start", start), _number("linear", "end", end)
    count = require_count("linear", "steps", steps)
    return RateSchedule(lambda step: first + (last - first) * _share(step, count))


@checks_argument_names(ArgumentError)
def cosine(start: float, steps: int, end: float = 0.0) -> RateSchedule:
    """Return a schedule that falls from one rate to another along half a cosine.

    Source: Loshchilov & Hutter, "SGDR", ICLR 2017, without restarts.
    """
    first, last = _number("cosine", "start", start), _number("cosine", "end", end)
    count = require_count("cosine", "steps", steps)
    return RateSchedule(lambda step: last + (first - last) * _half_cosine(_share(step, count)))


@checks_argument_names(ArgumentError)
def exponential(start: float, decay: float, steps: int = 1) -> RateSchedule:
    """Return a schedule that is multiplied by `decay` over each `steps` steps, little by little."""
    first = _number("exponential", "start", start)
    factor = _number("exponential", "decay", decay)
    count = require_count("exponential", "steps", steps)
    return RateSchedule(lambda step: first * factor ** (step / float(count)))


@checks_argument_names(ArgumentError)
def inverse_sqrt(peak: float, warmup: int) -> RateSchedule:
    """Return a schedule that rises to `peak` over `warmup` steps and then falls as 1/√step.

    Source: Vaswani et al., "Attention is all you need", 2017.
    """
    most, count = (
        _number("inverse_sqrt", "peak", peak),
        float(require_count("inverse_sqrt", "steps", warmup)),
    )

    def rate(step: Tensor) -> Tensor:
        number = step + 1.0
        rising, falling = number / count, FUNCTIONS["sqrt"](count / number)
        least: Tensor = most * FUNCTIONS["minimum"](rising, falling)
        return least

    return RateSchedule(rate)


@checks_argument_names(ArgumentError)
def piecewise(rates: Mapping[int, float]) -> RateSchedule:
    """Return a schedule of constant pieces.

    Args:
        rates: the rate from a step on, by that step: {0: 0.1, 30_000: 0.01}. It begins at 0.
    """
    at = f"piecewise at {user_location()}"
    if not isinstance(rates, Mapping) or 0 not in rates:
        raise ArgumentError(
            f"{at}: rates must be a dict from step to rate that begins at 0, not {rates!r}"
        )
    for begin in rates:
        if isinstance(begin, bool) or not isinstance(begin, int | np.integer) or begin < 0:
            raise ArgumentError(f"{at}: a piece must begin at an int from 0, not {begin!r}")
    pieces = [(int(b), _number("piecewise", "a rate", r)) for b, r in sorted(rates.items())]

    def rate(step: Tensor) -> Any:
        value = _as_rate(pieces[0][1])
        for begin, now in pieces[1:]:
            value = FUNCTIONS["where"](step >= float(begin), now, value)
        return value

    return RateSchedule(rate)


@checks_argument_names(ArgumentError)
def warmup(rate: float | RateSchedule, steps: int, start: float = 0.0) -> RateSchedule:
    """Return a schedule that rises from `start` to a rate over `steps` steps, and then follows it.

    Args:
        rate: a number, or a schedule, which begins at its own step 0 after the rise.
    """
    after = rate if isinstance(rate, RateSchedule) else constant(rate)
    if isinstance(after, Plateau):
        raise ArgumentError(
            f"warmup at {user_location()}: a plateau follows its metric from the first step on; "
            "give it as the rate itself"
        )
    first, count = _number("warmup", "start", start), require_count("warmup", "steps", steps)

    def value(step: Tensor) -> Tensor:
        then = after(FUNCTIONS["maximum"](step - float(count), 0.0))
        risen: Tensor = first + (then - first) * _share(step, count)
        return risen

    return RateSchedule(value)


@checks_argument_names(ArgumentError)
def one_cycle(
    peak: float, steps: int, rise: float = 0.3, start: float | None = None, end: float | None = None
) -> RateSchedule:
    """Return a schedule that rises to `peak` and falls to nearly 0, each along half a cosine.

    Args:
        steps: number of all steps.
        rise: the share of steps in which it rises, above 0 and below 1.
        start: first rate; default: peak/25.
        end: last rate; default: start/10,000.

    Source: Smith & Topin, "Super-convergence", 2018, in the form that torch's OneCycleLR uses.
    """
    most, count = _number("one_cycle", "peak", peak), require_count("one_cycle", "steps", steps)
    first = most / 25 if start is None else _number("one_cycle", "start", start)
    last = first / 1e4 if end is None else _number("one_cycle", "end", end)
    if not 0 < _number("one_cycle", "rise", rise) < 1:
        raise ArgumentError(
            f"one_cycle at {user_location()}: rise must be a share between 0 and 1, not {rise!r}"
        )
    top = max(rise * count - 1, 1e-9)
    rest = max(count - 1 - top, 1e-9)

    def rate(step: Tensor) -> Tensor:
        least, greatest = FUNCTIONS["minimum"], FUNCTIONS["maximum"]
        up = first + (most - first) * (1.0 - _half_cosine(least(step / top, 1.0)))
        fallen = least(greatest((step - top) / rest, 0.0), 1.0)
        down = last + (most - last) * _half_cosine(fallen)
        value: Tensor = FUNCTIONS["where"](step <= top, up, down)
        return value

    return RateSchedule(rate)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Plateau(RateSchedule):
    """A rate that falls when a metric no longer does.

    The metric is averaged over `every` steps. If `patience` such means in a row and one more are
    not below (1 − threshold) times the least so far, the rate is multiplied by `factor`.

    Args:
        start: first rate.
        metric: a scalar of the graph, such as the loss; smaller is better.
        factor: above 0 and below 1.
        patience: an int from 0.
        threshold: relative improvement that counts.
        least: least rate.
        every: number of steps that a mean is over, such as the steps of an epoch.

    Source: torch's ReduceLROnPlateau.
    """

    rate: Any = None
    start: float = 0.0
    metric: Tensor | None = None
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    least: float = 0.0
    every: int = 1

    def __call__(self, step: Tensor | int) -> Tensor:
        raise ArgumentError(
            f"Plateau at {user_location()}: its rate follows a metric, and not the number of steps"
        )

    def begin(self) -> tuple[Tensor, list[Tensor]]:
        where, both = FUNCTIONS["where"], FUNCTIONS["logical_and"]
        rate, best, total = (
            state_variable(f"plateau/{name}", init.full((), value, "float64"))
            for name, value in (("rate", self.start), ("best", math.inf), ("sum", 0.0))
        )
        seen, bad = (
            state_variable(f"plateau/{name}", init.zeros((), "int64")) for name in ("seen", "bad")
        )
        summed = total + _as_rate(self.metric)
        ends = seen + 1 >= self.every
        mean = summed / float(self.every)
        better = mean < best * (1.0 - self.threshold)
        worse = where(better, 0, bad + 1)
        falls = both(ends, worse > self.patience)
        lower = FUNCTIONS["maximum"](rate * self.factor, self.least)
        return rate, [
            assign(rate, where(falls, lower, rate)),
            assign(best, where(both(ends, better), mean, best)),
            assign(total, where(ends, 0.0, summed)),
            assign(seen, where(ends, 0, seen + 1)),
            assign(bad, where(falls, 0, where(ends, worse, bad))),
        ]


@checks_argument_names(ArgumentError)
def plateau(
    start: float, metric: Tensor, factor: float = 0.1, patience: int = 10,
    threshold: float = 1e-4, least: float = 0.0, every: int = 1,
) -> Plateau:  # fmt: skip
    """Return a schedule that multiplies the rate by `factor` when a metric no longer falls.

    Arguments: see `Plateau`.
    """
    at = f"plateau at {user_location()}"
    if not isinstance(metric, Tensor) or metric.ndim:
        raise ArgumentError(f"{at}: metric must be a scalar of the graph, not {metric!r}")
    if not 0 < _number("plateau", "factor", factor) < 1:
        raise ArgumentError(f"{at}: factor must be above 0 and below 1, not {factor!r}")
    return Plateau(
        None, _number("plateau", "start", start), metric, float(factor),
        require_count("plateau", "patience", patience, 0),
        _number("plateau", "threshold", threshold),
        _number("plateau", "least", least), require_count("plateau", "every", every, 1),
    )  # fmt: skip


def _share(step: Tensor, steps: int) -> Tensor:
    """Return the share of steps that were taken, at most 1."""
    share: Tensor = FUNCTIONS["minimum"](step / float(steps), 1.0)
    return share


def _half_cosine(share: Tensor) -> Tensor:
    """Return a value that falls from 1 to 0 while the share rises from 0 to 1."""
    value: Tensor = 0.5 * (1.0 + FUNCTIONS["cos"](share * math.pi))
    return value


def _number(what: str, name: str, value: object) -> float:
    if not is_number(value):
        raise ArgumentError(f"{what} at {user_location()}: {name} must be a number, not {value!r}")
    number = float(value)
    if not 0 <= number < math.inf:
        raise ArgumentError(f"{what} at {user_location()}: {name} must be from 0, not {value!r}")
    return number


__all__ = [
    "Plateau", "RateSchedule", "constant", "cosine", "exponential", "inverse_sqrt", "linear",
    "one_cycle", "piecewise", "plateau", "warmup",
]  # fmt: skip
