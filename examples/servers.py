"""Predict clicks with parameter servers, one of whose workers is slow.

    python examples/servers.py
    python examples/servers.py --windows 20 --workers 4 --servers 2 --out /tmp/servers

Examples are generated like those of advertising logs: each has an id in each of several fields,
which follow Zipf's law, and a click with a chance that hidden weights decide. The model has a row
for each id and two dense layers. Servers keep the rows, in ranges, and the layers:

    gf.parallel.ParameterServer(servers, consistency, tables=["*"], filters=...)

Each turn of a worker takes some milliseconds, and one worker takes three times as long. The program
trains with "bsp", where all workers wait for it, and with "pool", where it takes fewer turns. It
prints predicted and measured seconds of a window, how stale pushes were, and the bytes that the
filters left. It writes servers.svg (loss over seconds) and plan.html.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from command_line import check_folder, positive_int, run_program
from slow_turns import take_time

import graphflow as gf

Array = np.ndarray[Any, Any]
FIELDS, IDS, WIDTH, ROWS = 8, 20_000, 16, 256
TURNS = 8
SECONDS = 0.02
COLOURS = {"bsp": "#c0504d", "pool": "#2f6fb8"}


class Clicks:
    """Examples with the ids of each field, and clicks; drawn when they are asked for."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        chances = 1 / np.arange(1, IDS + 1) ** 1.05
        self._sums = np.cumsum(chances / chances.sum())
        self._weights = self._random.normal(size=(FIELDS, IDS)) * 0.7

    def draw(self, count: int) -> tuple[Array, Array]:
        """Return ids, (count, fields), and clicks, (count,)."""
        ids = np.searchsorted(self._sums, self._random.random((count, FIELDS))).clip(0, IDS - 1)
        score = self._weights[np.arange(FIELDS), ids].sum(axis=1) - 1.0
        clicks = self._random.random(count) < 1 / (1 + np.exp(-score))
        return ids + np.arange(FIELDS) * IDS, clicks.astype("float32")


class ClickModel:
    """The model, its strategy, and its step of training."""

    def __init__(self, consistency: str, servers: int, workers: int) -> None:
        self.pushes = TURNS * workers
        self.ids = gf.placeholder("int64", ("B", FIELDS), name="ids")
        self.clicks = gf.placeholder("float32", ("B",), name="clicks")
        self.seconds = gf.placeholder("float32", ("B",), name="seconds")
        self.run_number = gf.placeholder("int64", (), name="run")
        rows = gf.variable(gf.init.normal((FIELDS * IDS, WIDTH), std=0.1), name="rows")
        first = gf.variable(gf.init.glorot((FIELDS * WIDTH, 64)), name="first")
        second = gf.variable(gf.init.glorot((64, 1)), name="second")
        ids = gf.host_call(
            take_time, self.ids, self.seconds, self.run_number, spec=self.ids.spec, pure=True
        )
        read = gf.reshape(gf.nn.embedding(self.ids, rows), (-1, FIELDS * WIDTH))
        # The turn ends when its time is over.
        waited = gf.astype(gf.sum(ids * 0), "float32")
        score = gf.reshape(gf.nn.relu(read @ first) @ second, (-1,)) + waited
        self.loss = gf.mean(gf.nn.binary_cross_entropy_with_logits(score, self.clicks))
        self.strategy = gf.parallel.ParameterServer(
            servers=servers,
            consistency=consistency,  # type: ignore[arg-type]
            workers=workers,
            window=TURNS,
            tables=["rows"],
            filters={"push": [gf.parallel.FixedPoint(8)]},
        )
        self.train = gf.optim.Adagrad(0.05).minimize(self.loss, strategy=self.strategy)

    def feeds(self, batch: tuple[Array, Array], seconds: float, run: int) -> dict[Any, Any]:
        """Return the feeds of a window whose turns take some seconds."""
        ids, clicks = batch
        delays = np.full(len(ids), seconds, "float32")
        return {self.ids: ids, self.clicks: clicks, self.seconds: delays, self.run_number: run}


class Curve(NamedTuple):
    """A training: seconds and loss at each window, the prediction of one, and how it went."""

    seconds: list[float]
    losses: list[float]
    predicted: float
    stale: Counter[int]
    turns: tuple[int, ...]
    plan: gf.Plan


def train(consistency: str, servers: int, workers: int, windows: int) -> Curve:
    """Train with one slow worker, and report windows as they end."""
    model, clicks = ClickModel(consistency, servers, workers), Clicks()
    rows = model.pushes * ROWS
    fetches = [model.loss, model.train]
    cluster = gf.Cluster.local(servers + workers, threads=1)
    run = os.getpid() * 10 + list(COLOURS).index(consistency) + 1
    seconds, losses, stale = [0.0], [], Counter[int]()
    turns = np.zeros(workers, np.int64)
    with gf.Session(cluster, ops=["slow_turns"], trial=False) as s:
        s.run(fetches, model.feeds(clicks.draw(rows), 0.0, 0))  # compiles
        with s.trace():
            s.run(fetches, model.feeds(clicks.draw(rows), SECONDS, run))
        shapes = {model.ids: (rows, FIELDS), model.clicks: (rows,), model.seconds: (rows,)}
        plan = gf.plan(fetches, cluster, shapes)
        for _ in range(windows):
            fed = model.feeds(clicks.draw(rows), SECONDS, run)
            begun = time.perf_counter()
            losses.append(float(s.run(fetches, fed)[0]))
            seconds.append(seconds[-1] + time.perf_counter() - begun)
            record = s.history()[-1]
            stale.update(record.histogram)
            turns += np.array(record.turns + (0,) * (workers - len(record.turns)))
    Path(tempfile.gettempdir(), f"graphflow-slow-turns-{run}").unlink(missing_ok=True)
    if consistency == "pool":
        print(model.strategy.report(fetches, cluster))
    return Curve(seconds[1:], losses, plan.makespan, stale, tuple(map(int, turns)), plan)


# Picture ------------------------------------------------------------------------------------------


def draw(curves: dict[str, Curve]) -> str:
    """Return an SVG: the loss over seconds of each training, and the staleness of its pushes."""
    left, right, top, bottom = 64, 460, 50, 300
    longest = max(curve.seconds[-1] for curve in curves.values())
    losses = [loss for curve in curves.values() for loss in curve.losses]
    low, high = min(losses) * 0.98, max(losses) * 1.02
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="370" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="760" height="370" fill="white"/>',
        f'<text x="{left}" y="26" font-size="15">One worker of three times the seconds</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{left - 8}" y="{top + 8}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{left - 8}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{longest:.1f} s of training</text>',
        '<text x="510" y="46">pushes by staleness</text>',
    ]
    for row, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[name]
        points = " ".join(
            f"{left + (right - left) * at / longest:.1f},"
            f"{bottom - (bottom - top) * (loss - low) / (high - low):.1f}"
            for at, loss in zip(curve.seconds, curve.losses, strict=True)
        )
        each = curve.seconds[-1] / len(curve.seconds)
        told = f"{name}: {each * 1e3:.0f} ms a window, {curve.predicted * 1e3:.0f} predicted"
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{left}" y="{338 + 18 * row}" fill="{colour}">{told}</text>',
        ]
        total = sum(curve.stale.values())
        for at in range(6):
            share = sum(n for s, n in curve.stale.items() if min(s, 5) == at) / total
            x, y = 510 + 36 * at + 16 * row, bottom - 200 * share
            lines.append(
                f'<rect x="{x}" y="{y:.1f}" width="14" height="{bottom - y:.1f}" fill="{colour}"/>'
            )
    lines += [
        f'<text x="{525 + 36 * at}" y="{bottom + 16}" text-anchor="middle">{mark}</text>'
        for at, mark in enumerate(("0", "1", "2", "3", "4", "≥5"))
    ]
    return "\n".join([*lines, "</svg>\n"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, told in (
        ("servers", 2, "servers"),
        ("workers", 3, "workers, the slow one among them"),
        ("windows", 12, f"windows of {TURNS} turns of each worker"),
    ):
        parser.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{told}; default: {default}"
        )
    parser.add_argument(
        "--out", type=Path, default=Path("servers"), help="folder; default: servers/"
    )
    options = parser.parse_args()
    if options.workers < 2:
        parser.error("--workers 1: a slow worker needs another one beside it")
    check_folder(parser, "--out", options.out)
    return options


def main() -> None:
    options = parse_arguments()
    curves: dict[str, Curve] = {}
    for name in COLOURS:
        curve = curves[name] = train(name, options.servers, options.workers, options.windows)
        each = curve.seconds[-1] / options.windows
        stale = ", ".join(f"{n} of {s}" for s, n in sorted(curve.stale.items()))
        print(
            f"{name:>4}: {each * 1e3:5.0f} ms a window, {curve.predicted * 1e3:5.0f} predicted; "
            f"loss {curve.losses[-1]:.3f} after {curve.seconds[-1]:.1f} s; turns by worker "
            f"{curve.turns}; pushes by staleness: {stale}",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "servers.svg"
    place.write_text(draw(curves), encoding="utf-8")
    plan = curves["pool"].plan.save(options.out / "plan.html")
    print(f"wrote {place} and {plan}")


if __name__ == "__main__":
    run_program(main)
