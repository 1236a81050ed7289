"""check_filter: run a filter on random tensors, and say what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import takewhile
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, GraphflowError
from graphflow.frontend.builders import assign, make_variable, placeholder
from graphflow.init import Initializer
from graphflow.ir.op import REGISTRY, Tensor, as_tensor, user_location
from graphflow.ir.spec import TensorSpec, as_dtype
from graphflow.parallel.compression.exchange import Sites, exchange_sums
from graphflow.parallel.compression.filter import Array, Filter
from graphflow.parallel.compression.traffic import Traffic, first_state, traffic_of
from graphflow.parallel.mesh.count_arguments import as_count
from graphflow.sessions.session import Session

BIAS = 1e-3
"""The bias of a filter without feedback that passes as rounding, as a share of the tensor."""
DEVIATIONS = 4.0
"""How many standard errors a mean may be off."""
MOST_REPLICAS, MOST_ROUNDS = 64, 10_000
"""Bounds of what a check runs in one process."""
AGAIN = 3
"""The rounds that are run a second time, and must give the same bits."""


@dataclass(frozen=True)
class FilterCheck:
    """The result of `check_filter` for a filter that passed. Print it.

    Attributes:
        rule: the filter.
        spec: the shape and dtype of the tensors.
        replicas: their number.
        traffic: the bytes that a replica receives in an exchange, filtered and plain.
        lost: with feedback, the mean share of a tensor's squared norm that an exchange leaves for
            the next; without, the mean squared error of an exchange as a share of it.
    """

    rule: Filter
    spec: TensorSpec
    replicas: int
    traffic: Traffic
    lost: float

    @property
    def ratio(self) -> float:
        """The bytes with the filter, as a share of those without."""
        return self.traffic.filtered / self.traffic.plain

    def __str__(self) -> str:
        rest = "left for the next exchange" if self.rule.feedback else "mean squared error"
        return (
            f"{self.rule!r} on {self.spec}, {self.replicas} replicas: each receives "
            f"{round(self.traffic.filtered):,} bytes in place of {round(self.traffic.plain):,} "
            f"({self.ratio:.2%}); {rest}: {self.lost:.3g} of the squared norm"
        )


class _Round(NamedTuple):
    """One exchange: what was fed, the total at each replica, and the residuals after it."""

    fed: Array
    totals: list[Array]
    residuals: list[Array]


@checks_arguments(ArgumentError)
def check_filter(
    rule: Filter,
    shape: Sequence[int] = (64, 32),
    dtype: Any = "float32",
    replicas: int = 2,
    rounds: int = 100,
) -> FilterCheck:
    """Check that a filter keeps what an exchange of gradients relies on.

    These must hold: what was sent and what is kept add up to what was given, in each exchange and
    over all rounds; all replicas get the same bits; the same state and step give the same bits
    again; parts have static sizes and fewer bytes than the tensor; zeros and constants give finite
    numbers. With feedback, an exchange sends at least a part of what it is given. Without feedback,
    the mean over exchanges is the tensor itself.

    Args:
        rule: the filter.
        shape, dtype: of the tensors that are exchanged.
        replicas: the number of replicas, from 2 to 64.
        rounds: the number of exchanges, from 2 to 10,000.

    Raises:
        ArgumentError: one of these does not hold. The message lists all that do not, with numbers.
    """
    where = f"check_filter at {user_location()}"
    if not isinstance(rule, Filter):
        raise ArgumentError(f"{where}: a filter must be a gf.parallel.Filter, not {rule!r}")
    spec = TensorSpec(tuple(shape), as_dtype(dtype))
    for name, given, most in (
        ("replicas", replicas, MOST_REPLICAS),
        ("rounds", rounds, MOST_ROUNDS),
    ):
        count = as_count(given, 2)
        if count is None or count > most:
            raise ArgumentError(f"{where}: {name} must be an int from 2 to {most:,}, not {given!r}")
    if not rule.applies(spec):
        raise ArgumentError(f"{where}: {rule!r} does not apply to {spec}; give another shape")
    try:
        traffic = traffic_of(rule, spec, replicas)
        trial = _Trial(rule, spec, replicas)
    except GraphflowError as error:
        raise ArgumentError(f"{where}: {error}") from error
    problems, lost = _find_problems(trial, rounds)
    if not traffic.saves:
        problems.append(
            f"it saves nothing: a replica receives {round(traffic.filtered):,} bytes with it and "
            f"{round(traffic.plain):,} without"
        )
    if problems:
        listed = "".join(f"\n  {each}" for each in problems)
        raise ArgumentError(f"{where}: {rule!r} on {spec}, {replicas} replicas:{listed}")
    return FilterCheck(rule, spec, replicas, traffic, lost)


class _Trial:
    """A graph that exchanges one tensor of each replica, on one device.

    Args:
        rule, spec, replicas: see `check_filter`.
    """

    def __init__(self, rule: Filter, spec: TensorSpec, replicas: int) -> None:
        self.rule, self.spec, self.replicas = rule, spec, replicas
        self._fed: list[Tensor] = [placeholder(spec.dtype, spec.shape) for _ in range(replicas)]
        states = [self._variables() for _ in range(replicas)]
        sites = Sites(
            lambda rank: nullcontext(), nullcontext, lambda kind, made: None, lambda every, to: None
        )
        values = [[self._value()] * replicas] if rule.reads_value else None
        (made,) = exchange_sums(rule, [self._fed], [states], sites, (0, 0), values=values)
        updates = [
            assign(old, new)
            for state, one in zip(states, made, strict=True)
            for old, new in zip(state, one.state, strict=True)
        ]
        kept = [one.state[0] for one in made] if rule.feedback else []
        self._fetches = [*(one.total for one in made), *kept, REGISTRY["group"](*updates)]

    def _value(self) -> Tensor:
        """Return the value of the variable whose changes are exchanged: random, and nowhere 0."""
        drawn = np.random.default_rng(1).standard_normal(tuple(map(int, self.spec.shape)))
        return as_tensor(drawn.astype(self.spec.dtype))

    def _variables(self) -> tuple[Tensor, ...]:
        """Return new variables for the state of one replica."""
        return tuple(
            make_variable(each if isinstance(each, Initializer) else np.asarray(each), None, False)
            for each in first_state(self.rule, self.spec)
        )

    def run(self, given: Sequence[Array]) -> list[_Round]:
        """Exchange arrays of shape (replicas, …), one after the other, from the first state on."""
        found = []
        with Session(trial=False) as session:
            for fed in given:
                got = session.run(self._fetches, dict(zip(self._fed, fed, strict=True)))
                count = self.replicas
                found.append(_Round(fed, got[:count], got[count:-1]))
        return found


def _find_problems(trial: _Trial, rounds: int) -> tuple[list[str], float]:
    """Return descriptions of what is wrong with a filter, and the share that an exchange loses."""
    random = np.random.default_rng(0)
    shape = (trial.replicas, *map(int, trial.spec.shape))
    same = random.standard_normal(shape)
    feedback = trial.rule.feedback
    given = [
        (same + feedback * random.standard_normal(shape)).astype(trial.spec.dtype)
        for _ in range(rounds)
    ]
    found = trial.run(given)
    problems = _compare_bits(found, trial.run(given[:AGAIN]))
    for name, value in (("zeros", 0.0), ("a constant", 3.0)):
        (special,) = trial.run([np.full(shape, value, trial.spec.dtype)])
        if not _is_finite(special):
            problems.append(f"{name} give numbers that are not finite; does a scale divide by 0?")
    finite = list(takewhile(_is_finite, found))
    if len(finite) < len(found):
        problems.append(f"the sums are not finite from exchange {len(finite) + 1} on")
    if len(finite) < 2:
        return problems, 0.0
    wrong, lost = _measure_residuals(finite) if feedback else _measure_bias(finite)
    return problems + wrong, lost


def _compare_bits(found: Sequence[_Round], again: Sequence[_Round]) -> list[str]:
    """Return what is wrong if replicas differ, or if rounds that are run again do."""
    problems = []
    if any(
        not np.array_equal(one.totals[0], t, equal_nan=True)
        for one in found
        for t in one.totals[1:]
    ):
        problems.append("replicas get different sums; decode must depend on the parts only")
    pairs = zip(again, found, strict=False)
    if any(
        not np.array_equal(a, b, equal_nan=True)
        for new, old in pairs
        for a, b in zip([*new.totals, *new.residuals], [*old.totals, *old.residuals], strict=True)
    ):
        problems.append(
            "the same tensors give other bits when they are exchanged again; draw random numbers "
            "by gf.random, which follow from the step"
        )
    return problems


def _is_finite(one: _Round) -> bool:
    return all(bool(np.isfinite(array).all()) for array in [*one.totals, *one.residuals])


def _measure_residuals(found: Sequence[_Round]) -> tuple[list[str], float]:
    """Check a filter with feedback; return what is wrong, and the mean share that is kept."""
    problems, shares = [], []
    before = np.zeros_like(found[0].fed, "float64")
    sent, total = np.zeros(before.shape[1:]), np.zeros(before.shape[1:])
    size = off = 0.0
    for one in found:
        given, after = one.fed + before, np.array(one.residuals, "float64")
        shares.append(float((after**2).sum() / max((given**2).sum(), 1e-300)))
        sent += one.totals[0]
        total += one.fed.sum(0, dtype="float64")
        size = max(size, float(np.abs(given).sum(0).max()))
        off = max(off, float(np.abs(sent + after.sum(0) - total).max()))
        before = after
    allowed = len(found) * 8 * np.finfo(found[0].totals[0].dtype).eps * size
    if off > allowed:
        problems.append(
            f"what was sent and what is kept differ from what was given by up to {off:.3g} after "
            f"{len(found)} exchanges; the total must be the sum of what each replica sent"
        )
    lost = float(np.mean(shares))
    if lost > 1 - 1e-6:
        problems.append(
            f"an exchange keeps {lost:.3g} of the squared norm that it is given, so with feedback "
            "the residual grows without bound; send a part of the tensor as it is and do not "
            "rescale it, or leave out feedback"
        )
    return problems, lost


def _measure_bias(found: Sequence[_Round]) -> tuple[list[str], float]:
    """Check a filter without feedback; return what is wrong, and the mean squared error of an
    exchange as a share of the squared norm."""
    totals = np.array([one.totals[0] for one in found], "float64")
    wanted = found[0].fed.sum(0, dtype="float64")
    norm = sqrt(float((wanted**2).sum()))
    bias = sqrt(float(((totals.mean(0) - wanted) ** 2).sum())) / norm
    deviation = sqrt(float(totals.var(0, ddof=1).sum()) / len(found)) / norm
    lost = float(((totals - wanted) ** 2).sum() / len(found)) / norm**2
    if bias <= DEVIATIONS * deviation + BIAS:
        return [], lost
    return [
        f"without feedback the mean of {len(found)} exchanges must be the tensor, but it is off by "
        f"{bias:.3g} of its norm, where chance explains {deviation:.3g}; round at random, or set "
        "feedback = True"
    ], lost


__all__ = ["FilterCheck", "check_filter"]
