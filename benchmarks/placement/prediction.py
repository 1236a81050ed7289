"""Predicted and measured step times, on one local worker and on two: a few models, or random ones.

    python benchmarks/placement/prediction.py [--rounds 12] [--output results/prediction.json]
    python benchmarks/placement/prediction.py --random 40 --seed 7 [--only 3 12] [--list]

The machine is calibrated in the same run, into a folder of its own. Each model is predicted twice:
by calibration alone, and after a traced block of steps has refined it (`s.replan()`, which may
move nodes, so that each prediction stands beside a measurement of the placement it is for). Both
sessions and a fixed loop of numpy run by turns; how much that loop scatters is the noise floor.

`--random N` draws N models from a seed (benchmarks/random_models), about 8 s each. The same seed
and index give the same model on every machine. The summary states errors beyond the noise of each
model's own steps (half of their interquartile range), against the goals. What traces of one model
teach is forgotten before the next. The exit status is 1 if a model failed.

Regret is the time as placed on two workers over that of the best alternative in the same run: one
worker, layers dealt out in turn, the plan of the placer `auto`, or (with `--search`) the strategy
that `gf.parallel.auto` finds. `--slow` and `--link-mbit` start
two workers by address, of which one is slow, or between which the link is. The slow one is stopped
and continued every two milliseconds; the link needs Linux's network namespaces.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

import graphflow as gf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, interleaved, write

from benchmarks.lib.constrained_workers import CannotConstrain, constrained_pair
from benchmarks.lib.random_predictions import measure_models, report
from benchmarks.lib.worker_pairs import ListedWorkers, LocalWorkers
from benchmarks.random_models import draw

Model = tuple[list[Any], dict[gf.Tensor, np.ndarray]]
RANDOM = np.random.default_rng(0)
TRACED = 8  # steps


def weight(*shape: int) -> gf.Tensor:
    scale = np.sqrt(2 / np.prod(shape[1:] if len(shape) > 2 else shape[:1]))
    return gf.variable((RANDOM.normal(size=shape) * scale).astype("float32"))


def bias(size: int) -> gf.Tensor:
    return gf.variable(np.zeros(size, "float32"))


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype("float32")


def trained(loss: gf.Tensor, feeds: dict[gf.Tensor, np.ndarray], optimizer: Any = None) -> Model:
    optimizer = optimizer or gf.optim.SGD(0.01, momentum=0.9)
    return [loss, optimizer.minimize(loss)], feeds


def mlp(batch: int) -> Model:
    sizes = (784, 512, 256, 10)
    x = h = gf.placeholder("float32", (None, sizes[0]))
    y = gf.placeholder("int64", (None,))
    for n, m in pairwise(sizes):
        h = h @ weight(n, m) + bias(m)
        h = gf.nn.relu(h) if m != sizes[-1] else h
    loss = gf.mean(gf.nn.cross_entropy(h, y))
    return trained(loss, {x: floats(batch, sizes[0]), y: RANDOM.integers(0, 10, batch)})


def towers(count: int = 4, width: int = 1024, batch: int = 128) -> Model:
    x = gf.placeholder("float32", (None, 64))
    y = gf.placeholder("int64", (None,))
    logits = []
    for _ in range(count):
        h = gf.nn.relu(x @ weight(64, width) + bias(width))
        h = gf.nn.relu(h @ weight(width, width) + bias(width))
        logits.append(h @ weight(width, 10) + bias(10))
    loss = gf.mean(gf.nn.cross_entropy(sum(logits[1:], logits[0]) / float(count), y))
    return trained(loss, {x: floats(batch, 64), y: RANDOM.integers(0, 10, batch)})


def convnet(batch: int = 32) -> Model:
    x = gf.placeholder("float32", (None, 3, 32, 32))
    y = gf.placeholder("int64", (None,))
    h = x
    for n, m in pairwise((3, 32, 64, 64)):
        h = gf.nn.relu(gf.nn.conv(h, weight(m, n, 3, 3), bias(m), padding=1))
        h = gf.nn.max_pool(h, 2)
    logits = gf.reshape(h, (-1, 64 * 16)) @ weight(64 * 16, 10) + bias(10)
    loss = gf.mean(gf.nn.cross_entropy(logits, y))
    return trained(loss, {x: floats(batch, 3, 32, 32), y: RANDOM.integers(0, 10, batch)})


def gpt(batch: int = 8, time: int = 64, width: int = 128, heads: int = 4, layers: int = 2) -> Model:
    ids = gf.placeholder("int64", (batch, time))
    targets = gf.placeholder("int64", (batch, time))
    vocabulary = 256
    h = gf.nn.embedding(ids, weight(vocabulary, width)) + weight(time, width)

    def heads_of(x: gf.Tensor) -> gf.Tensor:
        return gf.permute_dims(gf.reshape(x, (batch, time, heads, width // heads)), (0, 2, 1, 3))

    for _ in range(layers):
        n = gf.nn.layer_norm(h, gf.variable(np.ones(width, "float32")), bias(width))
        q, k, v = (heads_of(n @ weight(width, width)) for _ in range(3))
        seen = gf.permute_dims(gf.nn.attention(q, k, v, causal=True), (0, 2, 1, 3))
        h = h + gf.reshape(seen, (batch, time, width)) @ weight(width, width)
        n = gf.nn.layer_norm(h, gf.variable(np.ones(width, "float32")), bias(width))
        h = h + gf.nn.gelu(n @ weight(width, 4 * width)) @ weight(4 * width, width)
    loss = gf.mean(gf.nn.cross_entropy(h @ weight(width, vocabulary), targets))
    feeds = {t: RANDOM.integers(0, vocabulary, (batch, time)) for t in (ids, targets)}
    return trained(loss, feeds, gf.optim.Adam(1e-3))


def lstm(batch: int = 32, time: int = 32, width: int = 128) -> Model:
    x = gf.placeholder("float32", (time, batch, width))
    wx, wh, b = weight(width, 4 * width), weight(width, 4 * width), bias(4 * width)

    def cell(state: Any, row: gf.Tensor) -> Any:
        h, c = state
        i, f, g, o = gf.split(row @ wx + h @ wh + b, 4, axis=-1)
        c = gf.nn.sigmoid(f) * c + gf.nn.sigmoid(i) * gf.tanh(g)
        h = gf.nn.sigmoid(o) * gf.tanh(c)
        return (h, c), h

    start = gf.zeros((batch, width))
    _, hidden = gf.scan(cell, (start, start), x)
    return trained(gf.mean(gf.square(hidden)), {x: floats(time, batch, width)})


MODELS: dict[str, Callable[[], Model]] = {
    "MLP, batch 16": lambda: mlp(16),
    "MLP, batch 128": lambda: mlp(128),
    "digits towers": towers,
    "convnet": convnet,
    "small GPT": gpt,
    "LSTM by scan": lstm,
}


def floor() -> Callable[[], object]:
    """A loop of about a millisecond that never changes."""
    a, out = floats(256, 256), np.empty((256, 256), "float32")

    def loop() -> None:
        for _ in range(4):
            np.matmul(a, a, out=out)
            np.tanh(out, out=out)

    return loop


def predicted_and_measured(name: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of a model: for one worker and two, before and after it was refined by traces."""
    fetches, feeds = MODELS[name]()
    rows = []
    with (
        gf.Session(gf.Cluster.local(workers=1, threads=1)) as one,
        gf.Session(gf.Cluster.local(workers=2, threads=1)) as two,
    ):
        sessions = {1: one, 2: two}
        for session in sessions.values():
            session.run(fetches, feeds)
        for refined in (False, True):
            predicted = {}
            for workers, session in sessions.items():
                if refined:
                    with session.trace():
                        for _ in range(TRACED):
                            session.run(fetches, feeds)
                    session.replan()
                predicted[workers] = session.plan(fetches)
            steps: dict[str, Callable[[], object]] = {
                str(workers): lambda s=s: s.run(fetches, feeds) for workers, s in sessions.items()
            }
            seconds = interleaved({**steps, "floor": floor()}, rounds, each=3)
            low, _, high = quantiles(seconds["floor"], n=4)
            for workers, plan in predicted.items():
                took = median(seconds[str(workers)])
                rows.append(
                    {
                        "model": name,
                        "workers": workers,
                        "refined": refined,
                        "used": len({n.device for n in plan.nodes if n.finish > n.start}),
                        "predicted": plan.makespan,
                        "overhead": plan.overhead,
                        "measured": took,
                        "ratio": plan.makespan / took,
                        "noise": (high - low) / median(seconds["floor"]),
                    }
                )
    return rows


def show(row: dict[str, Any]) -> str:
    by = "after traces" if row["refined"] else "calibration"
    return (
        f"{row['model']:<16} {row['workers']:>2} {row['used']:>4} {by:<12} "
        f"{row['predicted'] * 1e3:9.3f} ms {row['measured'] * 1e3:9.3f} ms "
        f"{row['ratio']:6.2f} {100 * row['noise']:6.0f} %"
    )


def random_models(chosen: argparse.Namespace) -> int:
    """Predict and measure random models; return the exit status."""
    models = [draw(chosen.seed, index) for index in chosen.only or range(chosen.random)]
    if chosen.list:
        for model in models:
            print(f"{model.index:3} {model}")
        return 0
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as files:
        os.environ["GRAPHFLOW_CACHE"] = folder
        workers = ListedWorkers(chosen.workers, Path(files)) if chosen.workers else LocalWorkers()
        done = measure_models(models, chosen.rounds, Path(folder), workers, chosen.search)
    report(done)
    rows = [row.as_json() for row in (*done.predictions, *done.regrets)]
    write("prediction-random", rows, chosen.output)
    return 1 if done.failed else 0


def constrained_models(chosen: argparse.Namespace) -> int:
    """Run random models in a process beside two constrained workers; return its exit status."""
    given = ["--random", chosen.random, "--seed", chosen.seed, "--rounds", chosen.rounds]
    given += ["--only", *chosen.only] if chosen.only else []
    given += ["--output", chosen.output] if chosen.output else []
    given += ["--search"] if chosen.search else []
    if chosen.slow:
        print(f"the second worker has {chosen.slow:.0%} of a core")
    if chosen.link_mbit:
        print(f"the link between the two workers carries {chosen.link_mbit:g} Mbit/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with constrained_pair(chosen.slow, chosen.link_mbit, Path(folder)) as pair:
                command = [*pair.enter, sys.executable, __file__, *map(str, given)]
                command += ["--workers", *pair.addresses]
                return subprocess.run(command, env=pair.environment, check=False).returncode
        except CannotConstrain as error:
            print(error)
            return 2


def fixed_models(chosen: argparse.Namespace) -> None:
    """Predict and measure the models of this file."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAPHFLOW_CACHE"] = folder  # calibrated now, not before
        print("model       workers used by             predicted     measured  ratio  noise")
        for name in chosen.models:
            for row in predicted_and_measured(name, chosen.rounds):
                rows.append(row)
                print(show(row), flush=True)
    for refined in (False, True):
        off = [abs(row["ratio"] - 1) for row in rows if row["refined"] is refined]
        told = "after traces" if refined else "by calibration"
        print(
            f"{told}: {100 * median(off):.0f} % off in the median, {100 * max(off):.0f} % at most"
        )
    write("prediction", rows, chosen.output)


def main() -> None:
    options = arguments("predicted and measured steps")
    options.description, options.epilog = __doc__.split("\n")[0], __doc__.split("\n\n", 2)[2]
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.set_defaults(rounds=12)
    options.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS),
                         help="of the fixed models, these")  # fmt: skip
    options.add_argument("--random", type=int, default=0, metavar="N", help="draw N models instead")
    options.add_argument("--seed", type=int, default=0, help="of the random models; default: 0")
    options.add_argument("--only", type=int, nargs="+", metavar="I",
                         help="of the random models, those of these indices")  # fmt: skip
    options.add_argument("--list", action="store_true",
                         help="describe the random models without running them")  # fmt: skip
    options.add_argument("--search", action="store_true",
                         help="compare with the best strategy of gf.parallel.auto, too; "
                         "some 10 s a model")  # fmt: skip
    options.add_argument("--slow", type=float, metavar="SHARE",
                         help="the second worker gets this share of a core")  # fmt: skip
    options.add_argument("--link-mbit", type=float, metavar="RATE",
                         help="the link between the two workers carries RATE Mbit/s")  # fmt: skip
    options.add_argument("--workers", nargs=2, metavar="ADDRESS",
                         help="measure random models on these two running workers")  # fmt: skip
    chosen = options.parse_args()
    if chosen.random < 0 or chosen.seed < 0 or min(chosen.only or [0]) < 0:
        options.error("--random, --seed and --only take numbers from 0 on")
    if chosen.slow is not None and not 0.05 <= chosen.slow <= 1:
        options.error("--slow takes a share from 0.05 to 1")
    if chosen.link_mbit is not None and chosen.link_mbit < 1:
        options.error("--link-mbit takes a rate from 1 on")
    is_random = bool(chosen.random or chosen.only)
    needing = ("slow", "link_mbit", "workers", "list", "search")
    if not is_random and any(getattr(chosen, name) for name in needing):
        options.error("--slow, --link-mbit, --workers, --search and --list need --random or --only")
    if is_random and (chosen.slow or chosen.link_mbit) and not chosen.list:
        sys.exit(constrained_models(chosen))
    if is_random:
        sys.exit(random_models(chosen))
    fixed_models(chosen)


if __name__ == "__main__":
    main()
