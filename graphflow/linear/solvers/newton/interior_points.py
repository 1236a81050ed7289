"""Interior points: Newton's method on a barrier, for losses with kinks and an l2 penalty.

A hinge is c · max(0, t - s f) of a prediction f, and the insensitive loss is two hinges. With
slacks z - ξ = s f - t for each hinge, the conditions of the least objective are

    l2 w = Xᵀ Σ s a,    a z = 0,    g ξ = 0,    a + g = c,    a, g, z, ξ ≥ 0

The products a z and g ξ are kept positive and driven to 0 together. A step factorises XᵀDX + l2 I
once. Some twenty to forty steps are enough, however the columns are scaled; coordinate methods may
take thousands of passes.

Source: Mehrotra, SIAM J. Optimization 2, 1992; Ferris and Munson, SIAM J. Optimization 13, 2002.
"""

from __future__ import annotations

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.losses import HINGE, Floats
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.linear.solvers.newton.hessian import DenseHessian, Hessian, Solve, SparseHessian

STEPS, STEP_NS = 16, 4e5
"""The steps that a fit is likely to take, and what a step takes beside its factorisation."""
_PASSES = 7.0
"""The passes over the data of a step."""
_SHARE = 0.995
"""The share of the way to the next bound that a step goes at most."""
_SHORTEST = 1e-6
"""Steps of a lesser share gain nothing: rounding errors are too large for more."""


def fit_ns(problem: LinearProblem) -> float:
    """Return about how long a fit takes, in nanoseconds; infinite if factors are too large."""
    return STEPS * (_make_hessian(problem).factor_ns + STEP_NS)


def follow_barrier(problem: LinearProblem, monitor: FitMonitor) -> None:
    """Solve a problem with a hinge or insensitive loss, an l2 penalty and no free intercept.

    Args:
        problem: the problem; a bias is a column of its table.
        monitor: is given certified models.
    """
    hessian, state = _make_hessian(problem), _State(problem)
    while True:
        beta = state.beta()
        f, v = problem.predict(state.w, 0.0), problem.correlate(beta)
        if monitor.accept(state.w, 0.0, beta, predictions=f, v=v) or monitor.is_exhausted:
            return
        hessian.set_weights(state.weights().sum(axis=0))
        monitor.passes += _PASSES
        solve = hessian.factorize()

        def solve_twice(slope: Floats, solve: Solve = solve) -> Floats:
            """Return a step with the digits that the factors' rounding errors took."""
            p = solve(slope)
            return p + solve(slope - hessian.apply(p))

        if state.step(solve_twice, f, v) < _SHORTEST:
            return


def _make_hessian(problem: LinearProblem) -> Hessian:
    if problem.is_sparse:
        return SparseHessian(problem)
    return DenseHessian(problem, is_exact=True)


class _State:
    """Coefficients, and for each hinge its multipliers and slacks, (hinges, rows) each.

    Attributes:
        w: the coefficients.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem
        y, epsilon = problem.y, problem.loss.parameter
        if problem.loss.code == HINGE:
            self._s, self._t = y[None], np.ones((1, len(y)))
        else:
            ones = np.ones_like(y)
            self._s, self._t = np.stack([ones, -ones]), np.stack([y - epsilon, -y - epsilon])
        self.w = np.zeros(problem.columns)
        self._c = np.broadcast_to(problem.c, self._s.shape)
        self._a, self._g = 0.5 * self._c, 0.5 * self._c
        room = max(float(np.abs(self._t).mean()), 1e-300)
        self._xi, self._z = np.maximum(self._t, 0.0) + room, np.maximum(-self._t, 0.0) + room

    def beta(self) -> Floats:
        """Return the dual variables."""
        a = np.minimum(self._a, self._c)  # rounding errors must not make them infeasible
        return np.asarray((self._s * a).sum(axis=0))

    def weights(self) -> Floats:
        """Return the weight of each hinge in the matrix of a step."""
        return np.asarray(1.0 / (self._z / self._a + self._xi / self._g))

    def step(self, solve: Solve, f: Floats, v: Floats) -> float:
        """Go a step, and return its length as a share of the whole one.

        Args:
            solve: of the matrix with `weights`.
            f, v: X @ w and Xᵀβ.
        """
        a, g, z, xi = self._a, self._g, self._z, self._xi
        off = z - xi - self._s * f + self._t
        slope = v - self._problem.l2 * self.w
        products = a * z, g * xi

        def find(first: Floats, second: Floats) -> tuple[Floats, ...]:
            """Return changes of w, a, z and ξ that change a z and g ξ by so much."""
            d = self.weights()
            wanted = first / a - second / g + off
            pull = multiply(self._problem.x.T, np.asarray((self._s * d * wanted).sum(axis=0)))
            dw = solve(slope + pull)
            da = d * (wanted - self._s * multiply(self._problem.x, dw))
            return dw, da, (first - z * da) / a, (second + xi * da) / g

        def longest(da: Floats, dz: Floats, dxi: Floats) -> float:
            ends = [
                float((-have[change < 0] / change[change < 0]).min(initial=np.inf))
                for have, change in ((a, da), (g, -da), (z, dz), (xi, dxi))
            ]
            return min(ends)

        _, da, dz, dxi = find(-products[0], -products[1])
        length = min(1.0, longest(da, dz, dxi))
        mean = float((products[0] + products[1]).mean())
        left = (a + length * da) * (z + length * dz) + (g - length * da) * (xi + length * dxi)
        aim = 0.5 * mean * max(float(left.mean()) / mean, 0.0) ** 3
        dw, da, dz, dxi = find(aim - products[0] - da * dz, aim - products[1] + da * dxi)
        length = min(1.0, _SHARE * longest(da, dz, dxi))
        self.w = self.w + length * dw
        self._a, self._g = a + length * da, g - length * da
        self._z, self._xi = z + length * dz, xi + length * dxi
        return length


__all__ = ["fit_ns", "follow_barrier"]
