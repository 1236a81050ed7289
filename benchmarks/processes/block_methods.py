"""Block proximal gradient over a slow link: seconds and bytes until a lasso is solved.

    python benchmarks/processes/block_methods.py [--link-mbit 10] [--output FILE]

A lasso of 200 examples and 8,000 columns, its examples halved over two workers of one thread each.
Contenders: proximal gradient on all columns at once, then 20 blocks, with a delay, and with the
filter besides. Each runs until the objective is within 1e-9 of scikit-learn's, or for 8 seconds.
The bytes are those of the turns, without those that measured the curvature. For each, the run that
the plan predicts stands beside the median of those measured.

With `--link-mbit`, the two workers are in network namespaces, and the cable between them carries so
much; without, they talk over loopback.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sklearn.linear_model import Lasso

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.constrained_workers import CannotConstrain, constrained_pair
from benchmarks.lib.peers import arguments, write
from benchmarks.lib.worker_pairs import ListedWorkers, LocalWorkers, Workers

EXAMPLES, COLUMNS, USED, BLOCKS = 200, 8_000, 12, 20
CONTENDERS: dict[str, dict[str, Any]] = {
    "all columns": {"blocks": 1},
    "blocks": {"blocks": BLOCKS},
    "blocks, delay 4": {"blocks": BLOCKS, "delay": 4},
    "blocks, filter": {"blocks": BLOCKS, "kkt": 0.0},
    "blocks, delay 4, filter": {"blocks": BLOCKS, "delay": 4, "kkt": 0.0},
}
PRECISION = 1e-9
MOST_SECONDS = 8.0


class Problem:
    """A lasso, and the least value of its objective."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.features = random.normal(size=(EXAMPLES, COLUMNS))
        truth = np.zeros(COLUMNS)
        truth[random.choice(COLUMNS, USED, replace=False)] = random.normal(size=USED)
        self.targets = self.features @ truth + 0.1 * random.normal(size=EXAMPLES)
        self.strength = 0.3 * float(abs(self.features.T @ self.targets).max())
        solver = Lasso(self.strength / EXAMPLES, fit_intercept=False, tol=1e-12, max_iter=10_000)
        self.least = self.objective(solver.fit(self.features, self.targets).coef_)

    def objective(self, weights: Any) -> float:
        """Return the value that is to be made small."""
        used = np.flatnonzero(weights)
        error = self.features[:, used] @ weights[used] - self.targets
        return float(0.5 * error @ error + self.strength * abs(weights).sum())


def solve(problem: Problem, options: dict[str, Any], workers: Workers) -> dict[str, Any]:
    """Return how long a contender takes, and what it sends."""
    import graphflow as gf

    x = gf.variable(problem.features, name="features", trainable=False)
    y = gf.variable(problem.targets, name="targets", trainable=False)
    w = gf.variable(np.zeros(COLUMNS), name="w")
    loss = 0.5 * gf.sum(gf.square(x @ w - y))
    rows = gf.parallel.Shard({"rows": 2}, {"features": ("rows",), "targets": ("rows",)})
    penalty = gf.linear.L1(problem.strength)
    strategy = gf.parallel.BlockProximal(penalty=penalty, **options) * rows
    train = gf.optim.SGD(1.0).minimize(loss, strategy=strategy)
    seconds: list[float] = []
    with workers.session(2) as s:
        s.run(train)  # places it, and measures the curvature
        s.run(train)
        predicted = s.plan(train).makespan
        while sum(seconds) < MOST_SECONDS:
            start = time.perf_counter()
            s.run(train)
            seconds.append(time.perf_counter() - start)
            excess = problem.objective(s.get(w)) / problem.least - 1
            if excess < PRECISION:
                break
        progress = strategy.progress(s, w)
    return {
        "seconds": sum(seconds), "passes": progress.passes, "excess": excess,
        "run_seconds": median(seconds), "predicted": predicted, "sent": progress.sent,
        "bytes": round(progress.passes * progress.sent * COLUMNS * 8 * 2),
    }  # fmt: skip


def contest(workers: Workers, title: str) -> dict[str, Any]:
    """Run all contenders, and print a table."""
    problem = Problem()
    columns = "seconds   excess  passes       MB  ms a run, predicted"
    print(f"\n{title}\n  {'contender':<24}  {columns}")
    found = {}
    for name, options in CONTENDERS.items():
        each = found[name] = solve(problem, options, workers)
        ratio = each["predicted"] / each["run_seconds"]
        print(
            f"  {name:<24} {each['seconds']:8.2f}  {each['excess']:7.0e}  {each['passes']:6.0f}  "
            f"{each['bytes'] / 1e6:7.2f}  {each['run_seconds'] * 1e3:8.1f}  ×{ratio:.2f}",
            flush=True,
        )
    return {"title": title, "contenders": found}


def over_link(options: argparse.Namespace) -> int:
    """Run this benchmark beside two workers in network namespaces; return its exit status."""
    given = ["--mbit", f"{options.link_mbit:g}"]
    given += ["--output", str(options.output)] if options.output else []
    with tempfile.TemporaryDirectory() as folder:
        try:
            with constrained_pair(None, options.link_mbit, Path(folder)) as pair:
                command = [*pair.enter, sys.executable, __file__, *given, "--workers"]
                command += [*pair.addresses]
                return subprocess.run(command, env=pair.environment, check=False).returncode
        except CannotConstrain as error:
            print(error)
            return 2


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--link-mbit", type=float, help="rate of the link between the workers")
    parser.add_argument("--workers", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--mbit", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.link_mbit:
        raise SystemExit(over_link(options))
    title = "two workers over " + (f"{options.mbit} Mbit/s" if options.mbit else "loopback")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAPHFLOW_CACHE"] = folder  # calibrated now, not before
        workers: Workers = LocalWorkers()
        if options.workers:
            workers = ListedWorkers(options.workers, Path(folder))
        write("block_methods", [contest(workers, title)], options.output)


if __name__ == "__main__":
    main()
