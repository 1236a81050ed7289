"""Linear models beside scikit-learn, celer and skglm, all to the same distance from the optimum.

    python benchmarks/models/linear_models.py [--threads 1] [--rounds 5] [--quick] [--output FILE]

Tables are drawn like those of the literature: "webspam-like" (log-normal counts, columns by Zipf's
law, unit rows), "epsilon-like" (dense Gaussian, unit rows). Each contender runs with the largest
tolerance of a ladder at which its model's objective is within 1e-6 of the least one that anybody
reaches, by this script's own objective. Our certificates must bound that least objective.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, pinned, report, write

GOAL = 0.7
DISTANCE = 1e-6
LADDER = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10)
Fit = Callable[[float], np.ndarray]
"""A tolerance to coefficients."""


@dataclass
class Problem:
    """A problem, its objective, and who solves it."""

    title: str
    objective: Callable[[np.ndarray], float]
    fits: dict[str, Fit]
    goal: float = GOAL


# Tables -------------------------------------------------------------------------------------------


def webspam_like(rows: int, columns: int, entries: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Positive counts, columns by Zipf's law, rows of length 1; labels from a noisy linear rule."""
    from scipy import sparse

    random = np.random.default_rng(seed)
    shares = (np.arange(columns) + 10.0) ** -1.1
    row = np.repeat(np.arange(rows), entries // rows)
    column = random.choice(columns, size=len(row), p=shares / shares.sum())
    x = sparse.csr_matrix((np.exp(random.normal(size=len(row))), (row, column)), (rows, columns))
    lengths = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    x = (sparse.diags(1 / lengths) @ x).tocsr()
    return x, _labels(x @ random.normal(size=columns), random)


def epsilon_like(rows: int, columns: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Gaussian rows of length 1."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, columns))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, _labels(x @ random.normal(size=columns), random)


def _labels(scores: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.where(scores + 0.3 * scores.std() * random.normal(size=len(scores)) > 0, 1.0, -1.0)


def sparse_regression(rows: int, columns: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """A random sparse table of which 100 columns matter."""
    from scipy import sparse

    random = np.random.default_rng(seed)
    x = sparse.random(rows, columns, density=0.005, format="csc", random_state=seed)
    return x, _targets(x, random)


def dense_regression(rows: int, columns: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """A Gaussian table of which 100 columns matter."""
    random = np.random.default_rng(seed)
    x = np.asfortranarray(random.normal(size=(rows, columns)))
    return x, _targets(x, random)


def _targets(x: Any, random: np.random.Generator) -> np.ndarray:
    w = np.zeros(x.shape[1])
    used = random.choice(len(w), size=min(100, len(w) // 4), replace=False)
    w[used] = random.normal(size=len(used))
    y = x @ w
    return np.asarray(y + 0.3 * y.std() * random.normal(size=len(y)))


# Contenders ---------------------------------------------------------------------------------------


def fit_of(make: Callable[[float], Any], x: Any, y: np.ndarray) -> Fit:
    """The fit of an estimator that `make` gives for a tolerance."""

    def fit(tol: float) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(make(tol).fit(x, y).coef_, np.float64).ravel()

    return fit


def peers_of(**makers: Callable[[], Callable[[float], Any]]) -> dict[str, Callable[[float], Any]]:
    """Contenders whose library is there."""
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error} (pip install celer skglm)")
    return found


def svm(kind: str, x: Any, y: np.ndarray) -> Problem:
    from sklearn.svm import LinearSVC

    import graphflow as gf

    more: dict[str, Any] = {"loss": "hinge", "fit_intercept": False}
    return Problem(
        f"SVM, {kind}",
        lambda w: float(np.maximum(0, 1 - y * (x @ w)).sum() + w @ w / 2),
        {
            "graphflow": fit_of(lambda t: gf.linear.LinearSVC(tol=t, **more), x, y),
            "LinearSVC": fit_of(
                lambda t: LinearSVC(tol=t, dual=True, max_iter=100_000, **more), x, y
            ),
        },
    )


def ridge(kind: str, x: Any, y: np.ndarray) -> Problem:
    from sklearn.linear_model import Ridge

    import graphflow as gf

    alpha = 1e-4 * len(y)
    solvers = ("sparse_cg", "lsqr") + (() if hasattr(x, "indptr") else ("cholesky",))
    fits = {
        solver: fit_of(lambda t, s=solver: Ridge(alpha, solver=s, tol=t, fit_intercept=False), x, y)
        for solver in solvers
    }
    ours = fit_of(lambda t: gf.linear.Ridge(alpha, tol=t, fit_intercept=False), x, y)
    return Problem(
        f"ridge, {kind}",
        lambda w: float(((x @ w - y) ** 2).sum() + alpha * w @ w),
        {"graphflow": ours, **fits},
    )


def lasso(kind: str, x: Any, y: np.ndarray) -> Problem:
    import graphflow as gf

    alpha = 0.01 * float(np.abs(x.T @ y).max()) / len(y)
    makers = peers_of(
        sklearn=lambda: _import("sklearn.linear_model", "Lasso"),
        celer=lambda: _import("celer", "Lasso"),
        skglm=lambda: _import("skglm", "Lasso"),
    )
    fits = {
        name: fit_of(lambda t, m=make: m(alpha, tol=t, fit_intercept=False), x, y)
        for name, make in makers.items()
    }
    ours = fit_of(lambda t: gf.linear.Lasso(alpha, tol=t, fit_intercept=False), x, y)
    return Problem(
        f"lasso, {kind}",
        lambda w: float(((x @ w - y) ** 2).sum() / (2 * len(y)) + alpha * np.abs(w).sum()),
        {"graphflow": ours, **fits},
    )


def logistic(kind: str, x: Any, y: np.ndarray) -> Problem:
    from sklearn.linear_model import LogisticRegression

    import graphflow as gf

    newton = "newton-cholesky" if isinstance(x, np.ndarray) else "newton-cg"
    solvers = ("lbfgs", "liblinear", newton)
    fits = {
        solver: fit_of(
            lambda t, s=solver: LogisticRegression(
                solver=s, tol=t, fit_intercept=False, max_iter=10_000, dual=s == "liblinear"
            ),
            x,
            y,
        )
        for solver in solvers
    }
    ours = fit_of(lambda t: gf.linear.LogisticRegression(tol=t, fit_intercept=False), x, y)
    return Problem(
        f"logistic, {kind}",
        lambda w: float(np.logaddexp(0, -y * (x @ w)).sum() + w @ w / 2),
        {"graphflow": ours, **fits},
    )


def _import(module: str, name: str) -> Any:
    from importlib import import_module

    return getattr(import_module(module), name)


def problems(quick: bool) -> Iterator[Problem]:
    scale = 10 if quick else 1
    spam = webspam_like(20_000 // scale, 50_000 // scale, 1_200_000 // scale)
    dense = epsilon_like(10_000 // scale, 400)
    yield svm("webspam-like", *spam)
    yield svm("epsilon-like", *dense)
    yield ridge("webspam-like", *spam)
    yield ridge("epsilon-like", *dense)
    yield lasso("sparse 10k x 30k", *sparse_regression(10_000 // scale, 30_000 // scale))
    yield lasso("dense 4k x 1k", *dense_regression(4000 // scale, 1000 // scale))
    yield logistic("webspam-like", *spam)
    yield logistic("epsilon-like", *dense)


# Measuring ----------------------------------------------------------------------------------------


def choose_tolerances(problem: Problem) -> dict[str, Callable[[], np.ndarray]]:
    """For each contender, the fit with the largest tolerance that comes close enough."""
    tight = {name: fit(1e-10) for name, fit in problem.fits.items()}
    least = min(map(problem.objective, tight.values()))
    chosen: dict[str, Callable[[], np.ndarray]] = {}
    for name, fit in problem.fits.items():
        for tol in LADDER:
            off = (problem.objective(fit(tol)) - least) / abs(least)
            if off <= DISTANCE:
                chosen[name] = lambda fit=fit, tol=tol: fit(tol)
                print(f"  {name}: tol {tol:g}, {off:.1e} above the least objective", flush=True)
                break
        else:
            print(f"  {name} is left out: {off:.1e} above the least objective at best")
    return chosen


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    print(f"\n{problem.title}")
    fits = choose_tolerances(problem)
    seconds: dict[str, list[float]] = {name: [] for name in fits}
    for _ in range(rounds):
        for name, fit in fits.items():
            start = time.perf_counter()
            fit()
            seconds[name].append(time.perf_counter() - start)
    found = report(problem.title, seconds, goal=problem.goal)
    ours = seconds["graphflow"]
    print(f"  noise of ours: {(max(ours) - min(ours)) / median(ours):.0%}")
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    parser.add_argument("--quick", action="store_true", help="tables of a tenth of the size")
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    pinned(options.threads)
    results = [measure(problem, options.rounds) for problem in problems(options.quick)]
    write("linear_models", results, options.output)


if __name__ == "__main__":
    main()
