"""Train one model over a slow link: with an exchange in every step, and with one in many.

    python examples/slow_link.py                      # two workers, 100 Mbit/s between them
    python examples/slow_link.py --mbit 20 --steps 128 --period 32 --out /tmp/slow
    python examples/slow_link.py --loopback           # without a slow link

Two workers run in network namespaces, and the cable between them is throttled (Linux, as root or
with user namespaces). Both train the same network on the same examples, once by gf.parallel.Data
and once by gf.parallel.LocalSGD. The program prints seconds and bytes a step, as predicted before
training and as measured, and writes slow_link.svg: the loss over seconds of both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf

EXAMPLES, FEATURES, HIDDEN, CLASSES, BATCH, RATE = 4096, 784, 256, 10, 128, 0.05
COLOURS = {"Data": "#c0392b", "LocalSGD": "#2060c0"}


class NoNamespaces(Exception):
    """This machine makes no network namespaces; the message says why."""


# Training -----------------------------------------------------------------------------------------


class Trainer:
    """A classifier of what a random network classifies. The examples lie with each worker."""

    def __init__(self, strategy: Any) -> None:
        random = np.random.default_rng(0)
        x = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
        y = np.argmax(x @ random.normal(size=(FEATURES, CLASSES)), axis=1)
        self.rows = gf.placeholder("int64", ("batch",), name="rows")
        examples = gf.variable(x, name="examples", trainable=False)
        labels = gf.variable(y, name="labels", trainable=False)
        w1, w2 = (
            gf.variable((random.normal(size=size) / size[0] ** 0.5).astype("float32"), name=name)
            for name, size in (("w1", (FEATURES, HIDDEN)), ("w2", (HIDDEN, CLASSES)))
        )
        scores = gf.nn.relu(gf.take(examples, self.rows, axis=0) @ w1) @ w2
        loss = gf.mean(gf.nn.cross_entropy(scores, gf.take(labels, self.rows, axis=0)))
        self.fetches = [loss, gf.optim.SGD(RATE).minimize(loss, strategy=strategy)]
        self.strategy = strategy

    def feeds(self, step: int, count: int) -> dict[gf.Tensor, np.ndarray]:
        """Return the numbers of the examples of some steps, a batch for each."""
        first = step * BATCH
        return {self.rows: np.arange(first, first + count * BATCH) * 7 % EXAMPLES}


@dataclass(frozen=True)
class Curve:
    """A training.

    Attributes:
        seconds: since its begin, after each block of steps.
        losses: means of these blocks.
        predicted: seconds of a step, as planned before training.
        steps: in all.
        sent: bytes a step between the workers.
    """

    seconds: list[float]
    losses: list[float]
    predicted: float
    steps: int
    sent: float

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return self.seconds[-1] / self.steps


def train(strategy: Any, window: int, period: int, steps: int, cluster: Path | None) -> Curve:
    """Train some steps, `window` of them in a run, after a first period that is not timed."""
    trainer = Trainer(strategy)
    with gf.Session(cluster or gf.Cluster.local(2, threads=1)) as session:
        for step in range(0, period, window):
            session.run(trainer.fetches, trainer.feeds(step, window))
        predicted = session.plan(trainer.fetches).makespan / window
        seconds, losses, block = [], [], []
        start = time.perf_counter()
        for step in range(period, period + steps, window):
            block.append(float(session.run(trainer.fetches, trainer.feeds(step, window))[0]))
            if len(block) * window >= period:
                seconds.append(time.perf_counter() - start)
                losses.append(float(np.mean(block)))
                block = []
        sent = strategy.report(trainer.fetches, session.cluster).bytes / window
    return Curve(seconds, losses, predicted, steps, sent)


def compare(period: int, steps: int, cluster: Path | None) -> dict[str, Curve]:
    """Train by both strategies, and print what a step takes."""
    found = {}
    for name, strategy, window in (
        ("Data", gf.parallel.Data(2), 1),
        ("LocalSGD", gf.parallel.LocalSGD(2, period=period, window=period), period),
    ):
        curve = found[name] = train(strategy, window, period, steps, cluster)
        print(
            f"{name:>8}: {curve.predicted * 1e3:6.2f} ms a step predicted, "
            f"{curve.measured * 1e3:6.2f} measured, {curve.sent:>9,.0f} bytes a step; "
            f"{steps} steps in {curve.seconds[-1]:5.2f} s, loss {curve.losses[-1]:.3f}",
            flush=True,
        )
    return found


# Picture ------------------------------------------------------------------------------------------


def draw(curves: dict[str, Curve], title: str) -> str:
    """Return an SVG: losses over seconds, measured (lines) and predicted (dashed)."""
    left, right, top, bottom = 64, 700, 56, 320
    times = [t for c in curves.values() for t in (*c.seconds, *predicted_seconds(c))]
    low, high = log10(min(times)), log10(max(times))
    highest = max(max(c.losses) for c in curves.values()) * 1.05

    def point(second: float, loss: float) -> str:
        x = left + (right - left) * (log10(second) - low) / max(high - low, 1e-9)
        return f"{x:.1f},{bottom - (bottom - top) * loss / highest:.1f}"

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="400" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="760" height="400" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15">{title}</text>',
        f'<text x="{left}" y="44">loss</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{right}" y="{bottom + 40}" text-anchor="end">seconds of training</text>',
        f'<text x="{left - 8}" y="{bottom + 4}" text-anchor="end">0</text>',
        f'<text x="{left - 8}" y="{top + 8}" text-anchor="end">{highest:.2f}</text>',
    ]
    for exponent in range(-3, 4):
        for step in (1, 2, 5):
            second = step * 10.0**exponent
            if low <= log10(second) <= high:
                x = point(second, 0).partition(",")[0]
                lines += [
                    f'<path d="M{x} {top}V{bottom}" stroke="#e4e4e4"/>',
                    f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{second:g}</text>',
                ]
    for i, (name, curve) in enumerate(curves.items()):
        colour, y = COLOURS[name], 372 + 18 * i
        for seconds, dash in ((curve.seconds, ""), (predicted_seconds(curve), "5 4")):
            points = " ".join(map(point, seconds, curve.losses))
            lines.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-dasharray="{dash}"/>'
            )
        lines.append(
            f'<text x="{left}" y="{y}" fill="{colour}">{name}: {curve.measured * 1e3:.2f} ms a '
            f"step (line), {curve.predicted * 1e3:.2f} predicted (dashed), {curve.sent:,.0f} bytes"
            "</text>"
        )
    return "\n".join([*lines, "</svg>\n"])


def predicted_seconds(curve: Curve) -> list[float]:
    """Return when the blocks of a curve would have ended by prediction."""
    each = curve.steps / len(curve.seconds)
    return [(i + 1) * each * curve.predicted for i in range(len(curve.seconds))]


# Two hosts on this machine ------------------------------------------------------------------------


@contextmanager
def linked_namespaces(mbit: int) -> Iterator[list[Sequence[str]]]:
    """Make two network namespaces with a throttled cable, and yield how commands enter each.

    Raises:
        NoNamespaces: this machine makes none.
    """
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        raise NoNamespaces(f"{', '.join(missing)} is not installed")
    is_root = os.geteuid() == 0
    with ExitStack() as stack:
        outer = hold_namespace(stack, [], [] if is_root else ["--map-root-user"])
        user = [] if is_root else ["--user", "--preserve-credentials"]
        enter = [["nsenter", "--target", str(outer), *user, "--net"]]
        second = hold_namespace(stack, [] if is_root else enter[0], [])
        enter.append(["nsenter", "--target", str(second), *user, "--net"])
        run_in(enter[0], "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "cable")
        run_in(enter[0], "ip", "link", "set", "cable", "netns", str(second))
        run_in(enter[1], "ip", "link", "set", "cable", "name", "eth0")
        rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
        for number, words in enumerate(enter, start=1):
            run_in(words, "ip", "addr", "add", f"10.232.0.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run_in(words, "ip", "link", "set", device, "up")
            run_in(words, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        yield [*enter]


def hold_namespace(stack: ExitStack, enter: Sequence[str], options: Sequence[str]) -> int:
    """Start a process in a network namespace of its own, and return its number.

    Raises:
        NoNamespaces: it cannot be made.
    """
    holder = subprocess.Popen(
        [*enter, "unshare", "--net", *options, "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(holder.communicate)
    stack.callback(holder.kill)
    assert holder.stdout is not None and holder.stderr is not None
    if holder.stdout.readline() != "ready\n":
        raise NoNamespaces(holder.stderr.read().strip())
    return holder.pid


def run_in(enter: Sequence[str], *command: str) -> None:
    """Run a command in a namespace.

    Raises:
        NoNamespaces: it fails.
    """
    done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def start_worker(enter: Sequence[str], number: int, folder: Path) -> Iterator[str]:
    """Start a worker in a namespace, and yield its address."""
    process = subprocess.Popen(
        [*enter, sys.executable, "-m", "graphflow", "worker", "--listen",
         f"tcp://10.232.0.{number}:7001", "--threads", "1", "--insecure", "--log-level", "error"],
        env=environment(folder / str(number)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it listens
        yield f"tcp://10.232.0.{number}:7001"
    finally:
        process.terminate()
        process.communicate()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process of another host: shared memory would bypass the link."""
    return {**os.environ, "GRAPHFLOW_SHARED_MEMORY": "off", "GRAPHFLOW_CACHE": str(folder)}


def run_over_link(options: argparse.Namespace) -> int:
    """Run this program beside two workers with a slow link, and return its status."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        places = stack.enter_context(linked_namespaces(options.mbit))
        workers = [
            stack.enter_context(start_worker(enter, number, folder))
            for number, enter in enumerate(places, start=1)
        ]
        listed = "".join(f'[[workers]]\naddress = "{address}"\n' for address in workers)
        cluster = folder / "cluster.toml"
        cluster.write_text(f"insecure = true\n[defaults]\nthreads = 1\n{listed}")
        command = [*places[0], sys.executable, __file__, *sys.argv[1:], "--cluster", str(cluster)]
        return subprocess.run(command, env=environment(folder / "client"), check=False).returncode


# The program --------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, told in (
        ("mbit", 100, "Mbit/s of the link"),
        ("steps", 480, "steps of each training"),
        ("period", 16, "steps between two exchanges of LocalSGD"),
    ):
        told += f"; default: {default}"
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=told)
    parser.add_argument("--loopback", action="store_true", help="local workers, no slow link")
    parser.add_argument(
        "--out", type=Path, default=Path("slow_link"), help="folder; default: slow_link/"
    )
    parser.add_argument("--cluster", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps % options.period or options.steps < 2 * options.period:
        parser.error(
            f"--steps {options.steps} --period {options.period}: steps are a multiple of the "
            "period, twice as many at least"
        )
    check_folder(parser, "--out", options.out)
    return options


def main() -> None:
    options = parse_arguments()
    if options.cluster is None and not options.loopback:
        try:
            status = run_over_link(options)
        except NoNamespaces as error:
            print(f"no slow link can be made here ({error}); --loopback trains without one")
            return
        raise SystemExit(status)
    link = "loopback" if options.loopback else f"{options.mbit} Mbit/s"
    print(f"two workers over {link}, {options.steps} steps, batch {BATCH}", flush=True)
    curves = compare(options.period, options.steps, options.cluster)
    data, local = curves.values()
    print(f"LocalSGD takes {data.measured / local.measured:.1f} times fewer seconds a step")
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "slow_link.svg"
    place.write_text(draw(curves, f"One network, two workers over {link}"), encoding="utf-8")
    print(f"wrote {place}")


if __name__ == "__main__":
    run_program(main)
