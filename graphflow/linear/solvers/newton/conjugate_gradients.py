"""Newton's steps by conjugate gradients, with a factorised matrix where they are slow.

    slope → conjugate gradients ─ few are left ──────────────────────────────→ step
                   └─ the rest would take longer than a factorisation: it
                      becomes the preconditioner of this and later steps

Times are estimates by the table's shape, so that a fit repeats bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.newton.hessian import DenseHessian, Hessian, Solve, SparseHessian

Goal = Callable[[float], float]
"""What a step gains, as far as it is known, to the size of slope that may be left."""

_WINDOW = 4
"""Products over which the rate of the residual is measured, at least."""
_CHEAP = 8.0
"""Products that a factorisation may cost to be made at once, if the loss is squared."""
_STEPS_LEFT = 2.0
"""Newton's steps that a factor is likely to serve, if the loss is not squared."""


class StepFinder:
    """Finds Newton's steps.

    Args:
        problem: the problem.
        may_factorize: False for conjugate gradients alone.
        is_exact: True for products of float64.

    Attributes:
        hessian: the second derivatives.
        passes: over the data so far.
    """

    def __init__(self, problem: LinearProblem, may_factorize: bool, is_exact: bool = False) -> None:
        self.problem, self.passes = problem, 2.0
        self.hessian = Hessian(problem)  # of a table on disk
        if not problem.is_sparse:
            self.hessian = DenseHessian(problem, is_exact)
        elif hasattr(problem.x, "indptr"):
            self.hessian = SparseHessian(problem)
        self._may_factorize = may_factorize and math.isfinite(self.hessian.factor_ns)
        self._is_squared = problem.loss.name == "squared"
        self._factor: Solve | None = None
        self._size = math.inf

    def find(self, slope: Floats, h: Floats, goal: Goal) -> Floats:
        """Return a step, along which the objective falls.

        Args:
            slope: the negative gradient.
            h: the second derivatives of the rows' losses.
            goal: how small the slope should become.
        """
        hessian = self.hessian
        if not self._is_squared or not len(hessian.h):
            hessian.set_weights(h)
            self.passes += 1.0
        size, before = float(np.linalg.norm(slope)), self._size
        self._size = size
        is_cheap = hessian.factor_ns <= _CHEAP * hessian.product_ns
        if self._is_squared and self._may_factorize and is_cheap and size < 0.1 * before:
            self._factor = self._factor or hessian.factorize()
            self.passes += 1.0
            return self._factor(slope)
        run = _Run(slope)
        is_new = self._is_squared and self._factor is not None
        allowance = math.inf
        while True:
            if self._may_factorize and not is_new:
                shared = 1.0 if self._is_squared else _STEPS_LEFT
                allowance = hessian.factor_ns / (shared * hessian.product_ns)
            solve = self._factor or _divide_by(hessian.diagonal())
            taken = run.steps
            is_done = run.advance(hessian, solve, goal, allowance)
            self.passes += 2.0 * (run.steps - taken)
            if is_done:
                return run.p
            self._factor, is_new, allowance = hessian.factorize(), True, math.inf
            self.passes += 1.0


class _Run:
    """A solution by conjugate gradients under way.

    Attributes:
        p: the solution so far.
        steps: the products that it took.
    """

    def __init__(self, slope: Floats) -> None:
        self.p, self.steps = np.zeros_like(slope), 0
        self._rest, self._gained = slope.copy(), 0.0

    def advance(self, hessian: Hessian, solve: Solve, goal: Goal, allowance: float) -> bool:
        """Return True when the goal is reached, or no better solution is found.

        Return False as soon as more than `allowance` products seem to be left.
        """
        rest, sizes = self._rest, [float(np.linalg.norm(self._rest))]
        turned = solve(rest)
        way, rho = turned, float(rest @ turned)
        most = min(10 * len(rest), 1000)
        for taken in range(most):
            wanted = goal(self._gained)
            if sizes[-1] <= wanted or rho <= 0.0:
                return True
            if taken >= _WINDOW and _steps_left(sizes, wanted) > allowance:
                self._rest = rest
                return False
            image = hessian.apply(way)
            self.steps += 1
            curved = float(way @ image)
            if not curved > 0.0:
                return True
            length = rho / curved
            self.p = self.p + length * way
            self._gained += 0.5 * length * rho
            rest = rest - length * image
            sizes.append(float(np.linalg.norm(rest)))
            turned = solve(rest)
            rho, before = float(rest @ turned), rho
            way = turned + (rho / before) * way
        return True


def _steps_left(sizes: list[float], wanted: float) -> float:
    """Return how many steps are left if residuals fall as they did in the last half of them."""
    if wanted <= 0.0:
        return math.inf
    window = max(_WINDOW, len(sizes) // 2)  # residuals may rise for some steps
    rate = math.log(sizes[-1 - window] / sizes[-1]) / window
    return math.log(sizes[-1] / wanted) / rate if rate > 0.0 else math.inf


def _divide_by(diagonal: Floats) -> Solve:
    inverse = 1.0 / np.where(diagonal > 0.0, diagonal, 1.0)
    return lambda slope: np.asarray(slope * inverse)


__all__ = ["Goal", "StepFinder"]
