"""What the cost of a round does to the best number of local steps (CoCoA, two workers).

    python benchmarks/processes/frameworks.py [--part tradeoff frameworks] [--plot FILE]

A logistic regression of sparse rows is fitted until its relative gap is 1e-3.

- tradeoff: every round is made to cost 0.1, 1, 10 and 100 ms more. For each, seconds over H, with
  the H that `local_steps="auto"` takes. Its goal is at most 1.1 times the best of the sweep.
- frameworks: the same rounds by ours, as Ray tasks (if Ray is installed) and by a pool of processes
  that pickles. For each, what a round of one step costs, and the H with which it is fastest.

Seconds are those of rounds and certificates, or of rounds alone for frameworks; starting workers
and sending rows do not count. Between two certificates the gap is taken to fall evenly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scipy.sparse import csr_matrix

import graphflow as gf
from benchmarks.lib.line_plot import draw_lines
from benchmarks.lib.peers import arguments, write
from benchmarks.lib.round_contenders import Contender, PoolRounds, RayRounds, seconds_to_gap
from graphflow.ir.op import REGISTRY
from graphflow.linear import losses
from graphflow.linear.cocoa.cluster_fit import RoundLoop
from graphflow.linear.cocoa.local_steps import LocalSteps
from graphflow.linear.cocoa.rounds import Rounds
from graphflow.linear.cocoa.table_parts import cut_table
from graphflow.linear.fit_history import FitHistory, FitMonitor
from graphflow.linear.problem import LinearProblem, certify

WORKERS = 2
ROWS, COLUMNS, ENTRIES = 60_000, 5_000, 40
PENALTY = 4.0
"""C of the regression."""
GAP = 1e-3
DELAYS = (1e-4, 1e-3, 1e-2, 1e-1)
LIMIT = 6.0
"""Seconds of rounds after which a number of steps counts as too slow."""
DEVICES = [f"/worker:{k}/cpu:0" for k in range(WORKERS)]


def make_problem(seed: int = 0) -> LinearProblem:
    """Return a logistic regression whose rows have log-normal entries in Zipf columns."""
    random = np.random.default_rng(seed)
    chance = (np.arange(COLUMNS) + 10.0) ** -1.1
    places = random.choice(COLUMNS, size=(ROWS, ENTRIES), p=chance / chance.sum())
    values = np.exp(random.normal(size=(ROWS, ENTRIES)))
    offsets = np.arange(0, ROWS * ENTRIES + 1, ENTRIES)
    x = csr_matrix((values.ravel(), places.ravel(), offsets), shape=(ROWS, COLUMNS))
    x.sum_duplicates()
    x.data /= np.repeat(np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel()), np.diff(x.indptr))
    f = x @ random.normal(size=COLUMNS) + 0.3 * random.normal(size=ROWS)
    y = np.where(f > np.median(f), 1.0, -1.0)
    return LinearProblem(x, y, np.full(ROWS, PENALTY), losses.logistic, 0.0, 1.0)


class DelayedSession:
    """A session whose steps begin after a pause, as if an exchange took so much longer."""

    def __init__(self, session: gf.Session, delay: float) -> None:
        self._session, self._delay = session, delay
        self.warmup, self.plan = session.warmup, session.plan

    def run(self, fetches: Any, feeds: Any = None) -> Any:
        """Run a step after the pause."""
        if self._delay >= 2e-3:
            time.sleep(self._delay)
        else:
            end = time.perf_counter() + self._delay
            while time.perf_counter() < end:
                pass
        return self._session.run(fetches, feeds)


class OurRounds:
    """Our rounds on two worker processes."""

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem
        self.session = gf.Session(gf.Cluster.local(workers=WORKERS, threads=1), trial=False)
        self.rounds = Rounds(problem, cut_table(problem.x, "rows", DEVICES), "rows")
        self._owns = [has["own"] for has in self.rounds.vectors]
        self.session.run([self.rounds.start, self.rounds.certificate])
        self._reset = REGISTRY["group"](*(
            gf.assign(has[name], np.array(has[name].node.attrs["initial"]))
            for has in self.rounds.vectors for name in ("own", "position", "shared")
        ))  # fmt: skip

    def reset(self) -> None:
        """Forget what was learnt."""
        self.session.run(self._reset)

    def round(self, steps: int) -> None:
        """Run a round."""
        self.session.run(self.rounds.round, {self.rounds.steps: np.zeros((steps, 0), "float32")})

    def dual_variables(self) -> list[Any]:
        """Return those of each worker's rows."""
        return list(self.session.run(self._owns))

    def close(self) -> None:
        """End the workers."""
        self.session.close()

    def fit(self, steps: int | str, delay: float) -> tuple[float, int]:
        """Return the seconds until the gap is small enough, and H at the end."""
        self.reset()
        history = FitHistory()
        monitor = FitMonitor(self.problem, GAP, 1e9, history)
        choice = LocalSteps(steps, ROWS // WORKERS)
        session: Any = DelayedSession(self.session, delay)
        loop = RoundLoop(session, self.rounds, choice, monitor)
        loop.limit = LIMIT
        loop.run()
        seconds, gaps = history.seconds, history.gaps
        if gaps[-1] > GAP:
            return float("inf"), choice.steps
        share = np.log(gaps[-2] / GAP) / np.log(gaps[-2] / gaps[-1])
        return seconds[-2] + share * (seconds[-1] - seconds[-2]) - seconds[0], choice.steps


def measure_tradeoff(delays: Sequence[float], plot: Path | None, repeats: int) -> dict[str, Any]:
    """Sweep H for each cost of a round, and compare what "auto" does."""
    ours = OurRounds(make_problem())
    part = ROWS // WORKERS
    sweep = [part // 64, part // 32, part // 16, part // 8, part // 4, part // 2, part, 2 * part]
    lines, marks, found = {}, {}, []
    try:
        ours.fit(part, 0.0)
        for delay in delays:
            name = f"{delay * 1e3:g} ms more"
            timed: dict[int, float] = {}
            for h in reversed(sweep):
                timed[h] = median(ours.fit(h, delay)[0] for _ in range(repeats))
                if timed[h] > 3 * min(timed.values()) and h < part // 2:
                    break  # fewer steps are slower still
            runs = sorted(ours.fit("auto", delay) for _ in range(repeats))
            seconds, steps = runs[len(runs) // 2]
            best = min(timed, key=timed.__getitem__)
            ratio = seconds / timed[best]
            shown = "  ".join(f"{h}: {s:.2f}" for h, s in timed.items())
            print(f"  {name:<14} {shown}\n{'':>17}best H {best}: {timed[best]:.2f} s; auto H "
                  f"{steps}: {seconds:.2f} s, ×{ratio:.2f}", flush=True)  # fmt: skip
            lines[name] = [(h, s) for h, s in timed.items() if np.isfinite(s)]
            marks[name] = (steps, seconds)
            found.append({"delay": delay, "seconds": timed, "auto": [steps, seconds],
                          "ratio": ratio})  # fmt: skip
    finally:
        ours.close()
    if plot is not None:
        title = "Seconds to a gap of 1e-3 over local steps a round"
        plot.write_text(draw_lines(title, "local steps a round (H); a ring: taken by \"auto\"",
                                   "seconds", lines, marks))  # fmt: skip
    worst = max(each["ratio"] for each in found)
    return {"title": "auto H to the best of a sweep, worst cost of a round", "rounds": found,
            "best_peer": "best H", "ratio_to_best": worst, "goal": 1.1}  # fmt: skip


def measure_frameworks() -> dict[str, Any]:
    """Measure a round of one step, and the best H, of each framework."""
    problem = make_problem()
    ours = OurRounds(problem)
    attrs = {"axis": "rows", "loss": problem.loss.code, "parameter": 0.0, "l1": 0.0, "l2": 1.0,
             "sigma": float(WORKERS), "bias": 0.0, "is_positive": False}  # fmt: skip
    parts = [
        (part.pick(problem.y), part.pick(problem.c), part.weighted_squares(np.ones(COLUMNS)),
         own.data, own.indices, own.indptr)
        for part in ours.rounds.parts for own in [part.rows]
    ]  # fmt: skip

    def gap_of(owns: Sequence[Any]) -> float:
        beta = np.empty(ROWS)
        for k, own in enumerate(owns):
            beta[k::WORKERS] = own
        gap = certify(problem, problem.correlate(beta), 0.0, beta).relative_gap
        assert gap is not None
        return gap / GAP

    makers: dict[str, Any] = {
        "graphflow": lambda: ours,
        "process pool": lambda: PoolRounds(parts, attrs, COLUMNS + 1),
    }
    if find_spec("ray") is not None:
        makers["Ray tasks"] = lambda: RayRounds(parts, attrs, COLUMNS + 1)
    found = {}
    for name, make in makers.items():
        made: Contender = make()
        try:
            found[name] = _measure_contender(name, made, gap_of)
        finally:
            made.close()
    overheads = {name: each["round"] for name, each in found.items()}
    best = min((n for n in found if n != "graphflow"), key=overheads.__getitem__)
    ratio = overheads["graphflow"] / overheads[best]
    return {"title": "a round of one step", "frameworks": found, "best_peer": best,
            "ratio_to_best": ratio, "goal": 0.5}  # fmt: skip


def _measure_contender(name: str, made: Contender, gap_of: Any) -> dict[str, Any]:
    """Return what a round of one step costs, and the seconds for some numbers of steps."""
    seconds = []
    for _ in range(40):
        start = time.perf_counter()
        made.round(1)
        seconds.append(time.perf_counter() - start)
    part, timed = ROWS // WORKERS, {}
    for steps in (part // 32, part // 16, part // 8, part // 4, part // 2, part):
        made.reset()
        timed[steps] = seconds_to_gap(made, gap_of, steps, max(1, part // (2 * steps)), LIMIT)
    best = min(timed, key=timed.__getitem__)
    shown = "  ".join(f"{h}: {s:.2f}" for h, s in timed.items())
    cost = median(seconds[10:])
    print(f"  {name:<14} a round costs {cost * 1e3:.2f} ms; {shown}; best H {best}: "
          f"{timed[best]:.2f} s", flush=True)  # fmt: skip
    return {"round": cost, "seconds": timed, "best": best}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--part", nargs="*", default=["tradeoff", "frameworks"])
    parser.add_argument("--plot", type=Path, help="an SVG file for the plot of the trade-off")
    parser.add_argument("--delays", nargs="*", type=float, default=DELAYS, help="in seconds")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each H; the median counts")
    options = parser.parse_args()
    results = []
    if "tradeoff" in options.part:
        results.append(measure_tradeoff(options.delays, options.plot, options.repeats))
    if "frameworks" in options.part:
        results.append(measure_frameworks())
    write("frameworks", results, options.output)


if __name__ == "__main__":
    main()
