"""Windows of a parameter server on eight workers with injected delays, beside their predictions.

    python benchmarks/processes/windows.py [--part table|slow|loss] [--draws 3] [--output FILE]

Each turn sleeps, and one in ten sleeps five times as long; with `--part slow`, one worker also
takes twice as long for each turn. The delays are those of `gf.parallel.Jitter`, so the plan
predicts the very window that runs. A trace of windows without jitter teaches what turns take.

`--part loss` trains least squares to the same loss with each consistency, with jitter and with a
slow worker, and writes the loss over seconds as a picture.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import graphflow as gf
from benchmarks.lib.delays import pass_back, wait
from benchmarks.lib.peers import write
from graphflow.parallel import Jitter, ParameterServer

WORKERS, WINDOW, TURN = 8, 32, 0.02
SHARE, FACTOR = 0.1, 5.0
FEATURES, ROWS = 50, 16
TABLE: dict[str, dict[str, Any]] = {
    **{f"ssp {s}": {"consistency": "ssp", "staleness": s} for s in (0, 1, 3, 7, 15)},
    "bsp": {"consistency": "bsp"},
    "bsp 6": {"consistency": "bsp", "aggregate": WORKERS - 2},
    "async": {"consistency": "async"},
    "pool": {"consistency": "pool"},
}
SLOW = ("ssp 3", "bsp", "async", "pool")
WITHIN = 0.15
COLOURS = ("#5c6877", "#c0504d", "#d98e04", "#2f6fb8")
LOSS_WINDOW, LOSS_TURN, RATE, GOAL = 4, 0.01, 0.1, 1e-2
"""Of the training: turns of a window, seconds of a turn, the rate of synchronous training, and the
loss at which a run ends."""
SPREAD = 0.3
"""The scale of the last feature; that of the first is 1."""


class Training(NamedTuple):
    """Least squares on delayed workers: its placeholders, and what a window fetches."""

    x: Any
    y: Any
    delay: Any
    slow: Any
    fetches: list[Any]


def training(strategy: ParameterServer, rate: float, name: str) -> Training:
    """Build a training step whose turns take as long as they are fed."""
    x = gf.placeholder("float64", ("B", FEATURES), name="x")
    y = gf.placeholder("float64", ("B",), name="y")
    delay = gf.placeholder("float64", ("B",), name="delay")
    slow = gf.placeholder("int64", (), name="slow")
    w = gf.variable(np.zeros(FEATURES), name=f"w_{name}")
    # the delay reads the weights: else a turn would begin with it before they come
    spec = gf.spec("float64", y.shape)
    late = gf.host_call(wait, x @ w, delay, slow, spec=spec, vjp=pass_back, pure=True)
    loss = gf.mean((late - y) ** 2.0)
    return Training(x, y, delay, slow, [loss, gf.optim.SGD(rate).minimize(loss, strategy=strategy)])


def feeds(step: Training, scale: Any, turn: float, slow: int, draw: int) -> dict[Any, Any]:
    """Return the feeds of a window: examples, and the delay of each micro-batch.

    Args:
        scale: factors of turns, as `Jitter.scales` gives them.
    """
    random = np.random.default_rng(draw)
    factors = np.ravel(np.transpose(scale))  # micro-batch m is turn m // W of worker m % W
    scales = np.geomspace(1.0, SPREAD, FEATURES)
    x = random.normal(size=(factors.size * ROWS, FEATURES)) * scales
    truth = np.random.default_rng(0).normal(size=FEATURES)
    return {
        step.x: x,
        step.y: x @ truth,
        step.delay: np.repeat(factors * turn, ROWS),
        step.slow: slow,
    }


@contextmanager
def session(cluster: gf.Cluster) -> Iterator[gf.Session]:
    with gf.Session(cluster, trial=False, ops=["benchmarks.lib.delays"]) as opened:
        yield opened


def seconds_of(run: gf.Session, step: Training, fed: Mapping[Any, Any]) -> float:
    start = time.perf_counter()
    run.run(step.fetches, fed)
    return time.perf_counter() - start


# The table of windows ---------------------------------------------------------------------------


def measure(names: Sequence[str], draws: int, is_slow: bool) -> list[dict[str, Any]]:
    """Run and predict windows; return a row for each consistency."""
    cluster = gf.Cluster.local(WORKERS + 1, threads=1)
    rows = []
    print(f"{'':8}  measured  predicted  (of a turn; mean of {draws} windows)")
    for number, name in enumerate(names, 1):
        strategy = ParameterServer(workers=WORKERS, window=WINDOW, **TABLE[name])
        step = training(strategy, RATE / WORKERS, name.replace(" ", "_"))
        slow = os.getpid() * 100 + number if is_slow else 0
        level = np.ones((WORKERS, WINDOW))
        fed = feeds(step, level, TURN, slow, 0)
        shapes = {step.x: fed[step.x].shape, step.y: fed[step.y].shape}
        shapes[step.delay] = fed[step.delay].shape
        found: list[tuple[float, float]] = []
        with session(cluster) as run:
            seconds_of(run, step, feeds(step, level, TURN / 10, slow, 0))
            with run.trace():
                seconds_of(run, step, fed)
            for draw in range(draws):
                jitter = Jitter(SHARE, FACTOR, draws=1, seed=draw)
                plan = gf.plan(step.fetches, cluster, shapes, jitter=jitter)
                scale = drawn(strategy, jitter)
                took = seconds_of(run, step, feeds(step, scale, TURN, slow, draw))
                found.append((took / (WINDOW * TURN), plan.makespan / (WINDOW * TURN)))
        measured, predicted = (mean(each) for each in zip(*found, strict=True))
        off = predicted / measured - 1
        print(f"{name:8}  {measured:8.2f}  {predicted:9.2f}  {off:+6.1%}", flush=True)
        rows.append(
            {
                "title": f"{name}{', one worker twice as slow' if is_slow else ''}",
                "measured": measured,
                "predicted": predicted,
                "windows": found,
                "goal": WITHIN,
                "reached": abs(off) <= WITHIN,
            }
        )
    return rows


def drawn(strategy: ParameterServer, jitter: Jitter) -> Any:
    """Return the factors that a plan with this jitter draws, in the order of micro-batches."""
    pooled = strategy.consistency == "pool"
    shape = (WORKERS * WINDOW,) if pooled else (WORKERS, WINDOW)
    return next(jitter.factors(shape))


# Time to the same loss ----------------------------------------------------------------------------


def losses(is_slow: bool, number: int, limit: float) -> dict[str, list[tuple[float, float]]]:
    """Train with each consistency; return (seconds, loss) of each window."""
    cluster = gf.Cluster.local(WORKERS + 1, threads=1)
    found: dict[str, list[tuple[float, float]]] = {}
    for name in ("bsp", "ssp 3", "async", "pool"):
        strategy = ParameterServer(workers=WORKERS, window=LOSS_WINDOW, **TABLE[name])
        rate = RATE if name in ("bsp", "pool") else RATE / WORKERS
        step = training(strategy, rate, f"loss_{name.replace(' ', '_')}")
        slow = os.getpid() * 100 + number if is_slow else 0
        number += 1
        jitter = Jitter(SHARE, FACTOR, draws=1000, seed=1)
        scales = jitter.factors((WORKERS, LOSS_WINDOW))
        curve: list[tuple[float, float]] = []
        with session(cluster) as run:
            passed = 0.0
            while passed < limit and (not curve or curve[-1][1] > GOAL):
                fed = feeds(step, next(scales), LOSS_TURN, slow, len(curve))
                begun = time.perf_counter()
                loss, _ = run.run(step.fetches, fed)
                # the first window compiles, and takes no time here
                passed += time.perf_counter() - begun if curve else 0.0
                curve.append((passed, float(loss)))
        reached = curve[-1][0] if curve[-1][1] <= GOAL else float("nan")
        print(f"  {name:6} {len(curve):4} windows, loss {GOAL:g} after {reached:.2f} s", flush=True)
        found[name] = curve
    return found


def picture(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """Draw the loss over seconds as SVG: a panel for each title, a line for each consistency."""
    wide, tall, left, top = 460.0, 250.0, 60.0, 34.0
    colours = dict(zip(("bsp", "ssp 3", "async", "pool"), COLOURS, strict=True))
    every = [point for panel in curves.values() for curve in panel.values() for point in curve]
    longest = max(seconds for seconds, _ in every)
    low, high = (np.log10(f(loss for _, loss in every)) for f in (min, max))
    parts = []
    for i, (title, panel) in enumerate(curves.items()):
        x0 = left + i * (wide + left)
        parts.append(f'<text x="{x0}" y="20" font-weight="600">{title}</text>')
        parts.append(
            f'<rect x="{x0}" y="{top}" width="{wide}" height="{tall}" fill="none" stroke="#888"/>'
        )
        for decade in range(int(np.ceil(low)), int(np.floor(high)) + 1):
            y = top + tall * (high - decade) / (high - low)
            parts.append(
                f'<line x1="{x0}" x2="{x0 + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'
            )
        for mark in range(0, int(longest) + 1, max(1, int(longest) // 6)):
            x = x0 + wide * mark / longest
            parts.append(
                f'<text x="{x:.1f}" y="{top + tall + 16}" text-anchor="middle">{mark} s</text>'
            )
        for row, (name, curve) in enumerate(panel.items()):
            seconds, values = np.transpose(curve)
            xs = x0 + wide * seconds / longest
            ys = top + tall * (high - np.log10(values)) / (high - low)
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colours[name]}" '
                'stroke-width="2"/>'
                f'<text x="{x0 + wide - 60}" y="{top + 20 + 17 * row}" fill="{colours[name]}">'
                f"{name}</text>"
            )
    width, height = len(curves) * (wide + left) + 16, top + tall + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--part", choices=("table", "slow", "loss"), default="table")
    parser.add_argument("--only", nargs="*", help="rows of the table")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--limit", type=float, default=8.0, help="seconds of a training")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("loss_over_seconds.svg"))
    options = parser.parse_args()
    if options.part != "loss":
        is_slow = options.part == "slow"
        names = options.only or (SLOW if is_slow else tuple(TABLE))
        write(f"windows_{options.part}", measure(names, options.draws, is_slow), options.output)
        return
    curves = {}
    for number, title in enumerate(("jitter", "jitter, one worker at half speed")):
        print(title)
        curves[title] = losses(bool(number), 50, options.limit)
    options.plot.write_text(picture(curves), encoding="utf-8")
    results = [
        {"title": f"{name}, {title}", "curve": curve}
        for title, panel in curves.items()
        for name, curve in panel.items()
    ]
    write("windows_loss", results, options.output)


if __name__ == "__main__":
    main()
