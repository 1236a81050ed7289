"""Train a recommender whose tables lie on several workers; no process holds a table whole.

    python examples/recommender.py
    python examples/recommender.py --workers 3 --users 1000000 --items 200000 --out /tmp/recommender

Ratings are generated: users and items follow Zipf's law, and a rating is the product of hidden
factors, with noise. The model is a factorisation: a row for each user and each item, and two dense
layers on their products (two towers). The tables are divided over the workers by

    gf.parallel.Data(workers, tables=["*_rows"])

and the model stays as it is. The program prints what travels in a step, the memory of each process
beside the size of the tables, and the loss. It writes recommender.svg.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf

Array = np.ndarray[Any, Any]
MIB = 1 << 20
WIDTH = 64
BATCH = 4096
HIDDEN = 4
NOISE = 0.1


class Ratings:
    """Ratings of items by users, drawn when they are asked for.

    Args:
        users, items: their numbers; the most frequent one is 0.
    """

    def __init__(self, users: int, items: int) -> None:
        self._random = np.random.default_rng(0)
        self._chances = [_zipf_sums(users), _zipf_sums(items)]
        shape = (users + items, HIDDEN)
        factors = self._random.normal(size=shape).astype("float32") / HIDDEN**0.25
        self._users, self._items = factors[:users], factors[users:]

    def draw(self) -> tuple[Array, Array, Array]:
        """Return users, items and ratings of a batch."""
        users, items = (np.searchsorted(sums, self._random.random(BATCH)) for sums in self._chances)
        ratings = (self._users[users] * self._items[items]).sum(1)
        return users, items, ratings + self._random.normal(size=BATCH).astype("float32") * NOISE


def _zipf_sums(count: int) -> Array:
    """Return the running sums of chances by Zipf's law with exponent 1.05."""
    chances = 1 / np.arange(1, count + 1) ** 1.05
    sums: Array = np.cumsum(chances / chances.sum())
    sums[-1] = 1.0
    return sums


class Recommender:
    """The model, and its step of training."""

    def __init__(self, users: int, items: int, workers: int) -> None:
        self.users = gf.placeholder("int64", ("batch",), name="users")
        self.items = gf.placeholder("int64", ("batch",), name="items")
        self.ratings = gf.placeholder("float32", ("batch",), name="ratings")
        self.tables = [
            gf.variable(gf.init.normal((count, WIDTH), std=0.3), name=f"{name}_rows")
            for name, count in (("user", users), ("item", items))
        ]
        user, item = (
            gf.nn.embedding(ids, table)
            for ids, table in zip((self.users, self.items), self.tables, strict=True)
        )
        first = gf.variable(gf.init.glorot((WIDTH, 16)), name="first")
        second = gf.variable(gf.init.zeros((16,)), name="second")
        product = user * item
        score = gf.mean(product, axis=1) * 8 + gf.nn.relu(product @ first) @ second
        self.loss = gf.mean((score - self.ratings) ** 2)
        self.strategy = gf.parallel.Data(workers, tables=["*_rows"])
        self.train = gf.optim.RowwiseAdagrad(0.3).minimize(self.loss, strategy=self.strategy)

    def feeds(self, batch: tuple[Array, Array, Array]) -> dict[gf.Tensor, Array]:
        return dict(zip((self.users, self.items, self.ratings), batch, strict=True))

    @property
    def table_bytes(self) -> int:
        """Bytes of both tables."""
        return sum(WIDTH * 4 * int(table.shape[0]) for table in self.tables)


# Memory -------------------------------------------------------------------------------------------


def read_peaks(count: int) -> dict[str, int]:
    """Return the most memory that the client and `count` workers have used, in bytes; {} where the
    system does not tell."""
    if not Path("/proc/self/status").exists():
        return {}
    found = {"client": _peak(os.getpid())}
    largest = sorted(map(_peak, _descendants(os.getpid())), reverse=True)
    found |= {f"worker {i}": peak for i, peak in enumerate(largest[:count])}
    return found


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _peak(pid: int) -> int:
    return int(_status(pid).get("VmHWM", "0 kB").split()[0]) * 1024


def _descendants(pid: int) -> list[int]:
    every = {int(each.name) for each in Path("/proc").glob("[0-9]*")}
    parents = {each: int(_status(each).get("PPid", "0")) for each in every}
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        own = [each for each, of in parents.items() if of == parent]
        found += own
        waiting += own
    return found


# Picture ------------------------------------------------------------------------------------------


def draw(losses: Sequence[float], peaks: dict[str, int], tables: int) -> str:
    """Return an SVG: the loss over the steps, and the memory of each process beside the tables."""
    top, bottom, left, right = 40, 260, 60, 360
    smooth = np.convolve(losses, np.ones(10) / 10, "valid") if len(losses) > 10 else losses
    highest = max(smooth)
    points = " ".join(
        f"{left + (right - left) * i / max(1, len(smooth) - 1):.1f},"
        f"{bottom - (bottom - top) * value / highest:.1f}"
        for i, value in enumerate(smooth)
    )
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="820" height="320" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="820" height="320" fill="white"/>',
        f'<text x="{left}" y="24">mean squared error (noise {NOISE**2:.2f})</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<polyline points="{points}" fill="none" stroke="#2060c0" stroke-width="2"/>',
        f'<text x="{left - 8}" y="{top + 4}" text-anchor="end">{highest:.2f}</text>',
        f'<text x="{left - 8}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{len(losses)} steps</text>',
        '<text x="440" y="24">memory, MiB</text>',
    ]
    bars = {"both tables": tables, **peaks}
    longest = max(bars.values())
    for i, (name, size) in enumerate(bars.items()):
        y, length = 44 + 30 * i, 220 * size / longest
        colour = "#c08020" if name == "both tables" else "#2060c0"
        lines += [
            f'<text x="530" y="{y + 14}" text-anchor="end">{name}</text>',
            f'<rect x="540" y="{y}" width="{length:.1f}" height="20" fill="{colour}"/>',
            f'<text x="{545 + length:.1f}" y="{y + 14}">{size / MIB:.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def run(options: argparse.Namespace) -> None:
    model = Recommender(options.users, options.items, options.workers)
    ratings = Ratings(options.users, options.items)
    cluster = gf.Cluster.local(options.workers)
    print(model.strategy.report([model.loss, model.train], cluster))
    losses: list[float] = []
    with gf.Session(cluster) as s:
        s.run([model.loss, model.train], model.feeds(ratings.draw()))
        with s.trace() as trace:
            s.run([model.loss, model.train], model.feeds(ratings.draw()))
        moved = sum(e.bytes * e.count for e in trace.edges if "client" not in e.source + e.target)
        start = time.perf_counter()
        for step in range(options.steps):
            losses.append(float(s.run([model.loss, model.train], model.feeds(ratings.draw()))[0]))
            if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
                print(f"step {step:5d}: loss {losses[-1]:.4f}", flush=True)
        seconds = (time.perf_counter() - start) / options.steps
        peaks = read_peaks(options.workers)
        users = np.arange(3)
        rows = s.run(gf.take(model.tables[0], model.users, 0), {model.users: users})
    print(f"{seconds * 1e3:.1f} ms a step; {moved / 1e6:.2f} MB travelled in the traced one")
    print(f"both tables: {model.table_bytes / MIB:.0f} MiB")
    for name, size in peaks.items():
        print(f"  {name}: {size / MIB:.0f} MiB at most")
    print(f"rows of users 0, 1 and 2 begin with {np.round(rows[:, 0].astype(float), 3).tolist()}")
    place = options.out / "recommender.svg"
    place.write_text(draw(losses, peaks, model.table_bytes), encoding="utf-8")
    print(f"wrote {place}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, told in (
        ("workers", 2, "worker processes"),
        ("users", 1_500_000, "rows of the first table"),
        ("items", 500_000, "rows of the second table"),
        ("steps", 300, "steps of training"),
    ):
        told += f"; default: {default}"
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=told)
    parser.add_argument(
        "--out", type=Path, default=Path("recommended"), help="folder; default: recommended/"
    )
    options = parser.parse_args()
    if min(options.users, options.items) < options.workers:
        parser.error(
            f"--users {options.users} --items {options.items}: each of the {options.workers} "
            "workers has at least one row of each table"
        )
    check_folder(parser, "--out", options.out)
    return options


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    run(options)


if __name__ == "__main__":
    run_program(main)
