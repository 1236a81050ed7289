"""The course of a fit: its limits, its certificates over time, its best model so far."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.progress import show_stage
from graphflow.linear.losses import Floats
from graphflow.linear.problem import Certificate, LinearProblem, certify


@dataclass(frozen=True)
class CertifiedModel:
    """Coefficients and an intercept, with their certificate.

    With several classes, both have one more axis, of classes.
    """

    w: Floats
    b: Any
    certificate: Certificate


@dataclass
class FitHistory:
    """The certificates of a fit, in order of time.

    Attributes:
        solver: the name of the solver.
        certificates: one for each time that a certificate was computed.
        best: the certified model with the least objective; None before the first one.
        local_steps: the steps of a round, of a fit on several workers; None of others.
        plan: the `gf.Plan` of such a round.
        loads: rows or columns that went to the accelerator up to each certificate, of solver
            "duhl".
    """

    solver: str = ""
    certificates: list[Certificate] = field(default_factory=list)
    best: CertifiedModel | None = None
    local_steps: int | None = None
    plan: Any = None
    loads: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each certificate since the start."""
        return [each.seconds for each in self.certificates]

    @property
    def gaps(self) -> list[float]:
        """The relative gap of each certificate that has one."""
        return [gap for each in self.certificates if (gap := each.relative_gap) is not None]

    def plot(self, path: str | None = None, others: Sequence[FitHistory] = ()) -> str:
        """Return an SVG picture of the relative gap over seconds.

        Args:
            path: a file to write it to, too.
            others: histories of other fits, drawn beside this one.
        """
        from graphflow.linear.gap_plot import draw_gaps

        picture = draw_gaps([(each.solver, each.certificates) for each in (self, *others)])
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(picture)
        return picture


class FitMonitor:
    """Certifies models while a solver works, and says when it may stop.

    Args:
        problem: the problem.
        tol: the relative gap that is enough.
        max_passes: passes over the data after which the solver stops in any case.
        history: where certificates are noted.

    Attributes:
        passes: passes over the data so far, which solvers count.
        most_passes: passes after which the solver stops in any case.
    """

    def __init__(
        self, problem: LinearProblem, tol: float, max_passes: float, history: FitHistory
    ) -> None:
        self.problem = problem
        self.tol = tol
        self.history = history
        self.passes = 0.0
        self.most_passes = max_passes
        self._start = time.perf_counter()
        self._highest_dual: float | None = None

    @property
    def best(self) -> CertifiedModel | None:
        """The certified model with the least objective; None before the first one."""
        return self.history.best

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def is_exhausted(self) -> bool:
        """True if the passes are used up."""
        return self.passes >= self.most_passes

    @property
    def is_satisfied(self) -> bool:
        """True if the gap of the best model is small enough."""
        gap = None if self.best is None else self.best.certificate.relative_gap
        return gap is not None and gap <= self.tol

    @property
    def is_stalled(self) -> bool:
        """True if the last certificate is no better than the one before it."""
        last = self.history.certificates[-2:]
        return len(last) == 2 and last[1].gap is not None and last[1].gap >= (last[0].gap or 0.0)

    def passes_left(self, most: int) -> float:
        """Return after how many passes the gap would be small enough, if it went on falling as it
        did between the last two certificates; between 2 and `most`."""
        known = [c for c in self.history.certificates[-2:] if c.relative_gap]
        if len(known) < 2:
            return 2.0
        (before, now), (gap_before, gap) = known, (c.relative_gap or 1.0 for c in known)
        passes = now.passes - before.passes
        if gap >= gap_before or passes <= 0.0:
            return float(most)
        rate = math.log(gap_before / gap) / passes
        return min(max(1.2 * math.log(gap / self.tol) / rate if self.tol else most, 2.0), most)

    def accept(self, w: Floats, b: float, beta: Floats | None = None, **known: Any) -> bool:
        """Note a model with its certificate; return True if it is good enough.

        The highest dual so far bounds every objective, so it is combined with the newest model.

        Args:
            w, b: the model; copied.
            beta: dual variables; None: those of the loss's slopes.
            known: further arguments of `certify`.
        """
        seconds = self.seconds
        found = certify(self.problem, w, b, beta, passes=self.passes, seconds=seconds, **known)
        return self.take(found, w, b)

    def take(self, found: Certificate, w: Floats, b: float) -> bool:
        """Note a model whose certificate is known; return True if it is good enough.

        Args:
            found: the certificate.
            w, b: the model; copied.
        """
        if found.dual is not None:
            highest = found.dual if self._highest_dual is None else self._highest_dual
            self._highest_dual = highest = max(highest, found.dual)
            gap = max(found.primal - highest, 0.0)
            found = replace(found, dual=highest, gap=gap)
        self.history.certificates.append(found)
        best = self.history.best
        if best is None or found.primal <= best.certificate.primal:
            best = CertifiedModel(w.copy(), float(b), found)
        elif found.dual is not None:
            primal = best.certificate.primal
            gap = max(primal - found.dual, 0.0)
            best = CertifiedModel(best.w, best.b, replace(found, primal=primal, gap=gap))
        self.history.best = best
        gap_now = best.certificate.relative_gap
        show_stage(f"gap {gap_now:.1e}, passes" if gap_now else "passes", round(self.passes))
        return self.is_satisfied


def zero_model(problem: LinearProblem, history: FitHistory) -> CertifiedModel:
    """Return the model whose coefficients are 0, and note its certificate, without a pass."""
    size = problem.columns + bool(problem.bias)
    w, none = np.zeros(size), np.zeros(problem.rows)
    found = certify(problem, w, 0.0, none, predictions=none, v=w)
    history.certificates.append(found)
    history.best = CertifiedModel(w, 0.0, found)
    return history.best


__all__ = ["CertifiedModel", "FitHistory", "FitMonitor", "zero_model"]
