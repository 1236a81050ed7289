"""An accelerator with less memory than the table: DuHL beside cyclic and random choices.

    python benchmarks/models/little_memory.py [--capacities 0.1 0.2 0.5] [--quick] [--output FILE]

For lassos (by columns) and a support vector machine (by rows): rounds, loads of columns or rows,
and seconds until the relative gap is 1e-2, 1e-4 and 1e-6. A choice that needs more than `ROUNDS`
rounds is given up. Also: megabytes a second of svmlight text, ours beside scikit-learn's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from linear_models import dense_regression, sparse_regression, webspam_like
from peers import arguments, write

GAPS = (1e-2, 1e-4, 1e-6)
CHOICES = ("gap", "cyclic", "random")
ROUNDS = 200
PASSES = 10


@dataclass
class Case:
    """A problem and what its coordinates are."""

    title: str
    coordinates: str
    problem: Any


def lasso(title: str, x: Any, y: np.ndarray, share: float) -> Case:
    from graphflow.linear import losses
    from graphflow.linear.problem import LinearProblem

    c = np.full(len(y), 1 / len(y))
    l1 = share * float(np.abs(x.T @ (c * y)).max())
    return Case(title, "columns", LinearProblem(x, y, c, losses.squared, l1))


def machine(title: str, x: Any, y: np.ndarray) -> Case:
    from graphflow.linear import losses
    from graphflow.linear.problem import LinearProblem

    return Case(title, "rows", LinearProblem(x, y, np.ones(len(y)), losses.hinge, 0.0, 1.0))


def cases(quick: bool) -> list[Case]:
    size = 4 if quick else 1
    sparse = sparse_regression(10_000 // size, 20_000 // size)
    dense = dense_regression(2_000 // size, 4_000 // size)
    return [
        lasso("lasso .05·max, sparse", *sparse, 0.05),
        lasso("lasso .1·max, dense", *dense, 0.1),
        machine("SVM, webspam-like", *webspam_like(10_000 // size, 20_000, 600_000 // size)),
    ]


def run(case: Case, capacity: float, choice: str) -> list[dict[str, Any] | None]:
    """What it took to each gap; None where the rounds did not suffice."""
    from graphflow.linear.fit_history import FitHistory
    from graphflow.linear.solve import solve
    from graphflow.linear.solvers.coordinate_descent.duhl import Duhl

    history = FitHistory()
    solve(
        case.problem, Duhl(capacity, choice, PASSES), GAPS[-1],  # type: ignore[arg-type]
        ROUNDS * capacity * PASSES, history,
    )  # fmt: skip
    found: list[dict[str, Any] | None] = []
    for gap in GAPS:
        rounds = next((k for k, each in enumerate(history.gaps) if each <= gap), None)
        found.append(
            None if rounds is None else
            {"rounds": rounds, "loads": history.loads[rounds], "seconds": history.seconds[rounds]}
        )  # fmt: skip
    return found


def measure(case: Case, capacities: list[float]) -> list[dict[str, Any]]:
    """Print and return the figures of a case."""
    results = []
    print(
        f"\n{case.title}: {case.problem.rows:,} x {case.problem.columns:,}; "
        f"loads of {case.coordinates}"
    )
    print(
        f"{'capacity':>10} {'choice':<8}"
        + "".join(f"{f'rounds, loads, s to {gap:g}':>28}" for gap in GAPS)
    )
    for capacity in capacities:
        for choice in CHOICES:
            found = run(case, capacity, choice)
            told = [
                f"{each['rounds']:>6} {each['loads']:>10,} {each['seconds']:>9.3f}" if each else "–"
                for each in found
            ]
            print(
                f"{capacity:>10.0%} {choice:<8}" + "".join(f"{text:>28}" for text in told),
                flush=True,
            )
            results.append({"title": case.title, "capacity": capacity, "choice": choice,
                            "to": dict(zip(map(str, GAPS), found, strict=True))})  # fmt: skip
    return results


def measure_reading(quick: bool) -> dict[str, Any]:
    """Megabytes a second of svmlight text as a matrix."""
    from sklearn.datasets import dump_svmlight_file, load_svmlight_file

    import graphflow as gf

    rows = 2_000 if quick else 20_000
    x, y = webspam_like(rows, 50_000, 60 * rows)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "train.svm")
        dump_svmlight_file(x, y, path)
        size = Path(path).stat().st_size / 1e6
        readers = {"graphflow": lambda: gf.linear.open(path).load(),
                   "scikit-learn": lambda: load_svmlight_file(path)}  # fmt: skip
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for turn in range(6):
            for name, read in readers.items():
                start = time.perf_counter()
                read()
                if turn:
                    rates[name].append(size / (time.perf_counter() - start))
    medians = {name: median(each) for name, each in rates.items()}
    print(
        f"\nsvmlight, {size:.0f} MB: " + ", ".join(f"{n} {r:.0f} MB/s" for n, r in medians.items())
    )
    return {"title": "svmlight", "megabytes_per_second": medians}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.1, 0.2, 0.5])
    parser.add_argument("--quick", action="store_true", help="tables of a quarter of the size")
    options = parser.parse_args()
    results: list[dict[str, Any]] = [measure_reading(options.quick)]
    for case in cases(options.quick):
        results += measure(case, options.capacities)
    write("little_memory", results, options.output)


if __name__ == "__main__":
    main()
