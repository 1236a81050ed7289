"""Threads of linear models: what two gain, and how variants of the literature compare.

    python benchmarks/models/linear_threads.py [--threads 2] [--rounds 5] [--quick] [--output FILE]

First, fits of the largest problems of `linear_models.py` on one and on several threads to the same
relative gap. Then passes of an SVM whose threads share one vector of weights: without locks
("wild"), by atomic additions, with a lock on each weight (PASSCoDe, ICML 2015), and with
predictions computed from all dual variables (AsySCD), beside the repeatable solver's. Gaps are
those of weights computed again; the "drift" is how far the shared ones were from them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import racing_loops
from linear_models import epsilon_like, webspam_like
from peers import arguments, write

from graphflow.linear import losses
from graphflow.linear.fit_history import FitHistory, FitMonitor
from graphflow.linear.loops import row_passes
from graphflow.linear.problem import LinearProblem, certify
from graphflow.linear.solve import solve
from graphflow.linear.solvers.dual_ascent.threaded_ascent import ascend_on_threads
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import Pool

GOAL = 1.6
Row = dict[str, Any]


def fits(threads: int, rounds: int, scale: int) -> list[Row]:
    """Seconds of fits on one thread over those on several."""
    tables = {
        "webspam-like": webspam_like(20_000 // scale, 50_000 // scale, 1_200_000 // scale),
        "epsilon-like": epsilon_like(10_000 // scale, 400),
    }
    found = []
    for kind, (x, y) in tables.items():
        for name, loss, solvers in (
            ("SVM", losses.hinge, ("sdca",)),
            ("logistic", losses.logistic, ("sdca",)),
            ("ridge", losses.squared, ("auto",)),
        ):
            l2 = 1e-4 * len(y) if name == "ridge" else 1.0
            problem = LinearProblem(x, y, np.ones(len(y)), loss, 0.0, l2)
            for solver in solvers:
                found.append(
                    _compare(f"{name}, {kind}, {solver}", problem, solver, threads, rounds)
                )
    return found


def _compare(title: str, problem: LinearProblem, solver: str, threads: int, rounds: int) -> Row:
    seconds: dict[int, list[float]] = {1: [], threads: []}
    passes = {}
    for turn in range(rounds + 1):
        for count, times in seconds.items():
            start = time.perf_counter()
            model = solve(problem, solver, 1e-6, 1000, FitHistory(), threads=count)
            if turn:
                times.append(time.perf_counter() - start)
            passes[count] = round(model.certificate.passes, 1)
    one, many = (median(times) for times in seconds.values())
    noise = (max(seconds[threads]) - min(seconds[threads])) / many
    print(
        f"  {title:<34} {one * 1e3:7.1f} ms -> {many * 1e3:7.1f} ms: {one / many:.2f} x "
        f"(goal {GOAL}; noise {noise:.0%}; passes {passes[1]} -> {passes[threads]})",
        flush=True,
    )
    return {"title": title, "seconds": [one, many], "ratio": one / many, "passes": passes}


def variants(threads: int, scale: int) -> list[Row]:
    """Milliseconds and gaps of passes of each variant."""
    x, y = webspam_like(4000 // scale, 10_000 // scale, 240_000 // scale)
    x.sort_indices()
    problem = LinearProblem(x, y, np.ones(len(y)), losses.hinge, 0.0, 1.0)
    n, d = x.shape
    squares = np.asarray(x.multiply(x).sum(axis=1)).ravel()
    table = (x.data, x.indices, x.indptr)
    locks, scratch = np.zeros(d, np.int64), np.zeros((threads, d))
    wild, atomic = native(row_passes, "sparse_rows"), native(racing_loops, "atomic_rows")
    locked, recomputed = (native(racing_loops, f"{s}_rows") for s in ("locked", "recomputing"))
    rest = (squares, problem.y, problem.c)
    code, beta, w = losses.hinge.code, np.zeros(n), np.zeros(d + 1)
    runs: dict[str, tuple[int, Callable[[int, Any], Any]]] = {
        "wild": (20, lambda k, o: wild(o, *table, d, *rest, code, 0.0, 1.0, 0.0, beta, w)),
        "atomic": (20, lambda k, o: atomic(o, *table, *rest, code, 1.0, beta, w)),
        "lock": (20, lambda k, o: locked(o, *table, *rest, code, 1.0, beta, w, locks)),
        "AsySCD": (2, lambda k, o: recomputed(o, *table, *rest, code, 1.0, beta, scratch[k])),
    }
    found = []
    with closing(Pool(threads)) as pool:
        for name, (passes, visit) in runs.items():
            beta[:], w[:] = 0.0, 0.0
            random, seconds = np.random.default_rng(0), []
            for _ in range(passes):
                orders = np.array_split(random.permutation(n), threads)
                start = time.perf_counter()
                pool.run(lambda k, v=visit, o=orders: v(k, o[k]), threads)
                seconds.append(time.perf_counter() - start)
            exact = problem.correlate(beta)
            drift = 0.0 if name == "AsySCD" else float(np.abs(exact - w[:d]).max())
            gap = certify(problem, exact, 0.0, beta, v=exact).relative_gap
            found.append({"title": name, "ms": median(seconds) * 1e3, "gap": gap, "drift": drift,
                          "passes": passes})  # fmt: skip
        monitor = FitMonitor(problem, 0.0, 20, FitHistory())
        start = time.perf_counter()
        ascend_on_threads(problem, monitor, pool)
        assert monitor.best is not None
        found.append({
            "title": "repeatable, with certificates", "drift": 0.0, "passes": monitor.passes,
            "ms": (time.perf_counter() - start) / monitor.passes * 1e3,
            "gap": monitor.best.certificate.relative_gap,
        })  # fmt: skip
    for row in found:
        print(f"  {row['title']:<30} {row['ms']:9.3f} ms a pass, gap {row['gap']:.1e} after "
              f"{row['passes']:.0f}, drift {row['drift']:.1e}", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads beside one")
    parser.add_argument("--quick", action="store_true", help="tables of a tenth of the size")
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    scale = 10 if options.quick else 1
    print(f"Fits to a relative gap of 1e-6 on 1 and {options.threads} threads")
    results = fits(options.threads, options.rounds, scale)
    print(f"\nPasses of an SVM, {options.threads} threads")
    results += variants(options.threads, scale)
    write("linear_threads", results, options.output)


if __name__ == "__main__":
    main()
