"""Train an ensemble of four wide towers on real digits, placed over two workers by the cost model.

No node is pinned. The model is planned for one worker and for two, and both train in turns. The
script prints predicted and measured times, and the accuracy on held-out digits. It writes plan.html
and trace.json.

    pip install '.[demo]'
    python examples/digits_towers.py [--towers 4] [--width 1024] [--batch 128] [--epochs 24]

Both files go to the folder --out, by default the current one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from command_line import check_folder, positive_int, run_program
from rich.console import Console
from rich.progress import track
from rich.table import Table

import graphflow as gf

CLASSES, PIXELS = 10, 64
TURN = 6  # steps that a session runs before the other one
Feed = dict[gf.Tensor, np.ndarray]


class Towers:
    """The averaged logits of several two-layer towers, each with its own weights."""

    def __init__(self, towers: int, width: int, seed: int = 0) -> None:
        with gf.random.seed(seed):
            self.images = gf.placeholder("float32", (None, PIXELS), name="images")
            self.labels = gf.placeholder("int64", (None,), name="labels")
            first, *others = (self._tower(i, width) for i in range(towers))
            self.logits = sum(others, first) / float(towers)
            self.loss = gf.mean(gf.nn.cross_entropy(self.logits, self.labels))
            self.train = gf.optim.SGD(0.5, momentum=0.9).minimize(self.loss)
            hits = gf.argmax(self.logits, axis=-1) == self.labels
            self.accuracy = gf.mean(hits.astype("float32"))

    def _tower(self, number: int, width: int) -> gf.Tensor:
        with gf.name_scope(f"tower{number}"):
            hidden = gf.nn.relu(self._dense(self.images, PIXELS, width, "1"))
            hidden = gf.nn.relu(self._dense(hidden, width, width, "2"))
            return self._dense(hidden, width, CLASSES, "3")

    def _dense(self, x: gf.Tensor, inputs: int, outputs: int, name: str) -> gf.Tensor:
        weight = gf.variable(gf.init.glorot((inputs, outputs)), name=f"weight{name}")
        bias = gf.variable(gf.init.zeros((outputs,)), name=f"bias{name}")
        return x @ weight + bias

    def feed(self, images: np.ndarray, labels: np.ndarray) -> Feed:
        return {self.images: images, self.labels: labels}


def main() -> None:
    options, console = parse_arguments(), Console()
    images, test_images, labels, test_labels = split_digits()
    if options.batch > len(images):
        raise SystemExit(f"--batch {options.batch}: there are {len(images)} images to train on")
    model = Towers(options.towers, options.width)
    step = [model.loss, model.train]
    feeds = list(batches(model, images, labels, options.batch, options.epochs))
    with (
        gf.Session(gf.Cluster.local(workers=1, threads=1)) as one,
        gf.Session(gf.Cluster.local(workers=2, threads=1)) as two,
    ):
        with console.status("planning for one worker and for two"):
            shapes = {placeholder: array.shape for placeholder, array in feeds[0].items()}
            for session in (one, two):
                session.compile([step, model.accuracy], shapes)
        loss, measured = train_in_turns([one, two], step, feeds)
        accuracy = float(two.run(model.accuracy, model.feed(test_images, test_labels)))
        weights = gf.Graph(model.loss).variables
        same = all(np.array_equal(*(s.get(w.outputs[0]) for s in (one, two))) for w in weights)

        options.out.mkdir(parents=True, exist_ok=True)
        with two.trace(options.out / "trace.json"):
            for feed in feeds[:20]:
                two.run(step, feed)
        plans = [one.plan(step), two.plan(step)]  # with the measurements of the traced steps
        plans[1].save(options.out / "plan.html")

    report_times(console, plans, measured)
    for tower in range(options.towers):
        home = plans[1].placement[f"tower{tower}/weight2"]
        console.print(f"Tower {tower} was placed on {home}.")
    verdict = "bit-equal" if same else "DIFFERENT"
    console.print(f"The weights trained on one and on two workers are {verdict}.")
    console.print(f"Loss {loss:.4f}, held-out accuracy [bold]{accuracy:.2%}[/bold].")
    console.print(f"Wrote {options.out / 'plan.html'} (open it in a browser)")
    console.print(f"  and {options.out / 'trace.json'} (open it at ui.perfetto.dev).")
    if accuracy < 0.96:
        raise SystemExit(f"held-out accuracy {accuracy:.2%} is below the expected 96 %")


def split_digits() -> list[np.ndarray]:
    """Return images and labels of scikit-learn's 1,797 digits; a fifth is held out for tests."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    scaled = (images / 16.0).astype("float32")
    return train_test_split(scaled, labels, test_size=0.2, random_state=0, stratify=labels)


def batches(
    model: Towers, images: np.ndarray, labels: np.ndarray, size: int, epochs: int
) -> Iterator[Feed]:
    """Yield feeds for some epochs, shuffled anew in each."""
    random = np.random.default_rng(0)
    for _ in range(epochs):
        order = random.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield model.feed(images[rows], labels[rows])


def train_in_turns(
    sessions: list[gf.Session], step: list[gf.Tensor], feeds: list[Feed]
) -> tuple[float, list[float]]:
    """Train each session on all feeds; return the last loss, and the median step time of each.

    A turn is several steps. Workers still apply a step's updates while the next one begins, so the
    first step of a turn competes with the updates of the other session.
    """
    seconds: list[list[float]] = [[] for _ in sessions]
    turns = [feeds[start : start + TURN] for start in range(0, len(feeds), TURN)]
    for turn in track(turns, description="training, by turns"):
        for session, taken in zip(sessions, seconds, strict=True):
            for feed in turn:
                start = time.perf_counter()
                loss, _ = session.run(step, feed)
                taken.append(time.perf_counter() - start)
    warm = len(feeds) // 4  # leave out steps with cold caches
    return float(loss), [median(taken[warm:]) for taken in seconds]


def report_times(console: Console, plans: list[gf.Plan], measured: list[float]) -> None:
    table = Table(title="Step time", title_justify="left")
    for column in ("workers", "predicted", "measured", "measured / predicted"):
        table.add_column(column, justify="right")
    for workers, (plan, seconds) in enumerate(zip(plans, measured, strict=True), start=1):
        times = (f"{plan.makespan * 1e3:.1f} ms", f"{seconds * 1e3:.1f} ms")
        table.add_row(str(workers), *times, f"{seconds / plan.makespan:.2f}")
    console.print(table)
    predicted = plans[0].makespan / plans[1].makespan
    gain = measured[0] / measured[1]
    verdict = "a gain" if gain > 1.02 else "no gain here"
    console.print(
        f"Two workers against one: predicted {predicted:.2f} times as fast, "
        f"measured {gain:.2f} times: {verdict}."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("towers", 4), ("width", 1024), ("batch", 128), ("epochs", 24)):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{default}")
    parser.add_argument(
        "--out", type=Path, default=Path("."), help="folder for plan.html and trace.json"
    )
    options = parser.parse_args()
    check_folder(parser, "--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main)
