"""Linear problems that block methods solve, beside solvers that know nothing of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.linear_model import Lasso

import graphflow as gf

Array = np.ndarray[Any, Any]


class LassoProblem:
    """½‖Xw − y‖² + strength·‖w‖₁, and its least value by scikit-learn.

    Args:
        examples, columns: the shape of the features.
        alike: the number of columns that share a common factor.
        share: the share of that factor in the variance of each.
        strength: the strength, relative to the one that keeps all weights at 0.
        seed: of the generator.
    """

    def __init__(
        self, examples: int, columns: int, alike: int = 1, share: float = 0.0,
        strength: float = 0.1, seed: int = 0,
    ) -> None:  # fmt: skip
        random = np.random.default_rng(seed)
        common = np.repeat(random.normal(size=(examples, columns // alike)), alike, axis=1)
        own = random.normal(size=(examples, columns))
        self.features = np.sqrt(share) * common + np.sqrt(1 - share) * own
        truth = np.zeros(columns)
        chosen = random.choice(columns, max(columns // 60, 3), replace=False)
        truth[chosen] = random.normal(size=len(chosen))
        self.targets = self.features @ truth + 0.1 * random.normal(size=examples)
        self.strength = strength * float(abs(self.features.T @ self.targets).max())

    def objective(self, weights: Array) -> float:
        """The value that is to be made small."""
        error = self.features @ weights - self.targets
        return float(0.5 * error @ error + self.strength * abs(weights).sum())

    def find_least_value(self) -> float:
        """The least value, by scikit-learn's coordinate descent."""
        solver = Lasso(
            self.strength / len(self.targets), fit_intercept=False, tol=1e-15, max_iter=100_000
        )
        return self.objective(solver.fit(self.features, self.targets).coef_)

    def excess(self, weights: Array, least: float) -> float:
        """The relative distance of the objective from its least value."""
        return abs(self.objective(weights) - least) / least


class Model:
    """The graph of a lasso problem, with features that are fed."""

    def __init__(self, problem: LassoProblem, strategy: Any, rate: float = 1.0) -> None:
        columns = problem.features.shape[1]
        x = gf.placeholder("float64", ("n", columns), name="x")
        y = gf.placeholder("float64", ("n",), name="y")
        self.weights = gf.variable(np.zeros(columns), name="w")
        self.loss = 0.5 * gf.sum(gf.square(x @ self.weights - y))
        self.strategy = strategy
        self.train = gf.optim.SGD(rate).minimize(self.loss, strategy=strategy)
        self.feeds = {x: problem.features, y: problem.targets}

    def state(self, name: str) -> gf.Tensor:
        """A variable of the method."""
        variable: gf.Tensor = self.strategy._states[self.weights.node].variables[name]
        return variable

    def run(self, runs: int, cluster: gf.Cluster | None = None) -> Array:
        """The weights after some runs."""
        with gf.Session(cluster) as s:
            for _ in range(runs):
                s.run(self.train, self.feeds)
            return np.asarray(s.get(self.weights))
