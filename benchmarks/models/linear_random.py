"""Smooth linear models and kernel machines beside scikit-learn, on problems drawn from a seed.

    python benchmarks/models/linear_random.py [--kind ridge ...] [--random 8] [--seed 1] [--list]

Each problem has its own shape, scales and correlations of columns, penalty, noise, precision, and
with or without an intercept. A contender runs with the largest tolerance of a ladder at which its
objective is within 1e-6 of a certified bound of the least one (kernel machines: with the tolerance
1e-3 of both libraries). One thread.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, pinned, write

KINDS = ("ridge", "logistic", "sparse-logistic", "svc")
GOAL = 0.7
DISTANCE = 1e-6
LADDER = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
MOST_SECONDS = 3.0
"""A contender that needs longer for one fit is left out."""


@dataclass
class Drawn:
    """A problem: a description, a table, targets, and factories of estimators by tolerance."""

    title: str
    x: Any
    y: np.ndarray
    objective: Callable[[np.ndarray, float], float] | None
    makers: dict[str, Callable[[float], Any]]


def dense_table(random: np.random.Generator) -> tuple[np.ndarray, str]:
    """A table with correlated columns of several scales."""
    n = int(10 ** random.uniform(3.0, 4.4))
    d = int(10 ** random.uniform(1.3, 3.1))
    d = min(d, 6_000_000 // n)
    spread = float(random.choice([0.0, 0.0, 0.3, 0.7]))
    decay = float(random.choice([0.0, 0.0, 0.5, 1.0]))
    x = random.normal(size=(n, d))
    if decay:  # a spectrum that falls by a power law, in directions that mix all columns
        turned, _ = np.linalg.qr(random.normal(size=(d, d)))
        x = (x * (1.0 + np.arange(d)) ** -decay) @ turned
        x *= np.sqrt(n / (x * x).sum() * d)
    x *= 10.0 ** random.uniform(-spread, spread, size=d)
    dtype = np.float32 if random.random() < 0.25 else np.float64
    x = np.ascontiguousarray(x, dtype)
    name = " float32" if dtype == np.float32 else ""
    return x, f"{n} x {d}{name}, spread {spread:g}, decay {decay:g}"


def sparse_table(random: np.random.Generator) -> tuple[Any, str]:
    """Positive counts with columns by Zipf's law, or one-hot fields; rows of length 1."""
    from scipy import sparse

    n = int(10 ** random.uniform(3.3, 4.5))
    d = int(10 ** random.uniform(3.0, 4.8))
    entries = int(random.integers(10, 80))
    law = float(random.uniform(0.6, 1.4))
    shares = (np.arange(d) + 10.0) ** -law
    row = np.repeat(np.arange(n), entries)
    column = random.choice(d, size=len(row), p=shares / shares.sum())
    is_binary = random.random() < 0.4
    values = np.ones(len(row)) if is_binary else np.exp(random.normal(size=len(row)))
    x = sparse.csr_matrix((values, (row, column)), (n, d))
    lengths = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    x = (sparse.diags(1 / lengths) @ x).tocsr()
    kind = "binary" if is_binary else "counts"
    return x, f"{n} x {d}, {x.nnz} entries, {kind}, law {law:.1f}"


def scores(x: Any, random: np.random.Generator, noise: float) -> np.ndarray:
    """Noisy predictions of a random linear rule."""
    exact = np.asarray(x @ random.normal(size=x.shape[1]), np.float64)
    return np.asarray(exact + noise * exact.std() * random.normal(size=len(exact)))


def ridge(random: np.random.Generator) -> Drawn:
    from sklearn.linear_model import Ridge

    import graphflow as gf

    x, title = dense_table(random)
    y = scores(x, random, float(random.choice([0.1, 1.0])))
    alpha = float(10 ** random.uniform(-4, 0)) * len(y) * float((x[:100] ** 2).mean())
    more: dict[str, Any] = {"fit_intercept": bool(random.random() < 0.5)}
    makers: dict[str, Any] = {
        "graphflow": lambda tol: gf.linear.Ridge(alpha, tol=tol, **more),
        **{
            name: lambda tol, s=name: Ridge(alpha, solver=s, tol=tol, max_iter=20_000, **more)
            for name in ("sparse_cg", "lsqr", "cholesky")
        },
    }
    return Drawn(
        f"ridge {title}, alpha {alpha:.2g}, {more}", x, y,
        lambda w, b: float(((x @ w + b - y) ** 2).sum() + alpha * w @ w), makers,
    )  # fmt: skip


def logistic(random: np.random.Generator, is_sparse: bool = False) -> Drawn:
    from sklearn.linear_model import LogisticRegression

    import graphflow as gf

    x, title = (sparse_table if is_sparse else dense_table)(random)
    raw = scores(x, random, float(random.choice([0.1, 0.5, 2.0])))
    y = np.where(raw > np.quantile(raw, random.uniform(0.2, 0.8)), 1.0, -1.0)
    factor = float(10 ** (random.uniform(-1, 1.5) if is_sparse else random.uniform(-3, 0.5)))
    more: dict[str, Any] = {"C": factor, "fit_intercept": bool(random.random() < 0.5)}
    names = ["lbfgs", "newton-cg"] + ([] if is_sparse else ["newton-cholesky"])
    makers: dict[str, Any] = {
        "graphflow": lambda tol: gf.linear.LogisticRegression(tol=tol, **more),
        **{
            name: lambda tol, s=name: LogisticRegression(solver=s, tol=tol, max_iter=20_000, **more)
            for name in names
        },
    }
    if not more["fit_intercept"]:
        makers["liblinear"] = lambda tol: LogisticRegression(
            solver="liblinear", tol=tol, dual=is_sparse, max_iter=20_000, **more
        )
    return Drawn(
        f"logistic {title}, {more}", x, y,
        lambda w, b: float(factor * np.logaddexp(0, -y * (x @ w + b)).sum() + w @ w / 2), makers,
    )  # fmt: skip


def svc(random: np.random.Generator) -> Drawn:
    from sklearn.svm import SVC

    import graphflow as gf

    n, d = int(10 ** random.uniform(2.7, 3.6)), int(random.integers(2, 60))
    x = random.normal(size=(n, d))
    curved = np.sin(x[:, 0] * 2) + (x[:, 1:] ** 2).mean(axis=1) + x @ random.normal(size=d) / d
    raw = curved + float(random.choice([0.0, 0.3, 1.0])) * curved.std() * random.normal(size=n)
    y = np.where(raw > np.median(raw), 1, -1)
    more = {
        "C": float(10 ** random.uniform(-1, 1)),
        "kernel": str(random.choice(["rbf", "rbf", "poly", "linear"])),
    }
    return Drawn(
        f"SVC {n} x {d}, {more}", x, y, None,
        {"graphflow": lambda tol: gf.linear.SVC(tol=tol, **more),
         "libsvm": lambda tol: SVC(tol=tol, **more)},
    )  # fmt: skip


def draw(kind: str, seed: int) -> Drawn:
    """The problem of a kind and a seed."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    if kind == "ridge":
        return ridge(random)
    return svc(random) if kind == "svc" else logistic(random, kind == "sparse-logistic")


def fitted(problem: Drawn, name: str, tol: float) -> tuple[float, Any]:
    """The seconds of a fit, and the estimator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator = problem.makers[name](tol)
        start = time.perf_counter()
        estimator.fit(problem.x, problem.y)
        return time.perf_counter() - start, estimator


def choose_tolerances(problem: Drawn) -> dict[str, float]:
    """For each contender the largest tolerance that is accurate enough."""
    if problem.objective is None:
        for name in problem.makers:
            fitted(problem, name, 1e-3)
        return dict.fromkeys(problem.makers, 1e-3)
    _, best = fitted(problem, "graphflow", 1e-9)
    certificate = best.certificate_
    scale = problem.objective(best.coef_.ravel(), float(np.ravel(best.intercept_)[0]))
    least = certificate.dual / certificate.primal * scale
    chosen = {}
    for name in problem.makers:
        for tol in LADDER if name != "graphflow" else LADDER[5:]:
            seconds, model = fitted(problem, name, tol)
            b = float(np.ravel(model.intercept_)[0])
            off = problem.objective(model.coef_.ravel().astype(np.float64), b) / least - 1.0
            if off <= DISTANCE:
                chosen[name] = tol
                break
            if seconds > MOST_SECONDS:
                break
    return chosen


def measure(problem: Drawn, rounds: int) -> dict[str, Any] | None:
    """Print and return the medians of the contenders, ours beside the best."""
    tolerances = choose_tolerances(problem)
    seconds: dict[str, list[float]] = {name: [] for name in tolerances}
    solver = ""
    for _ in range(rounds):
        for name, tol in tolerances.items():
            took, model = fitted(problem, name, tol)
            seconds[name].append(took)
            if name == "graphflow":
                solver = getattr(model, "solver_", "smo")
    medians = {name: median(times) for name, times in seconds.items()}
    ours = medians.pop("graphflow", None)
    if ours is None or not medians:
        print(f"{problem.title}: no pair to compare ({', '.join(tolerances)})")
        return None
    best = min(medians, key=medians.__getitem__)
    ratio = ours / medians[best]
    others = ", ".join(f"{k} {v * 1e3:.1f}" for k, v in sorted(medians.items()))
    print(f"{ratio:5.2f}  {problem.title}: {ours * 1e3:.1f} ms by {solver}; {others}", flush=True)
    return {
        "title": problem.title, "goal": GOAL, "best_peer": best, "ratio_to_best": ratio,
        "graphflow": ours, **medians,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--random", type=int, default=6, help="problems of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the first problem")
    parser.add_argument("--list", action="store_true", help="only describe the problems")
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    pinned(1)
    results = []
    for kind in options.kind:
        found = []
        for seed in range(options.seed, options.seed + options.random):
            problem = draw(kind, seed)
            if options.list:
                print(problem.title)
                continue
            found.append(measure(problem, options.rounds))
        ratios = [each["ratio_to_best"] for each in found if each]
        if ratios:
            mean, worst = geometric_mean(ratios), max(ratios)
            print(f"{kind}: geometric mean {mean:.2f}, worst {worst:.2f}\n", flush=True)
        results += [each for each in found if each]
    if not options.list:
        write("linear_random", results, options.output)


if __name__ == "__main__":
    main()
