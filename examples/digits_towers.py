"""Train an ensemble of four wide towers on real digits, placed over two workers by the cost model.

No node is pinned. The model is planned for one worker and for two; both run, side by side and in
turns, and the script says what was predicted, what was measured, and how well the ensemble reads
digits that it has not seen. It writes plan.html and trace.json.

    python examples/digits_towers.py [--towers 4] [--width 1024] [--batch 128] [--epochs 24]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import graphflow as gf

CLASSES, PIXELS = 10, 64


class Towers:
    """The averaged logits of several two-layer towers, each with weights of its own."""

    def __init__(self, towers: int, width: int, seed: int = 0) -> None:
        with gf.random.seed(seed):
            self.images = gf.placeholder("float32", (None, PIXELS), name="images")
            self.labels = gf.placeholder("int64", (None,), name="labels")
            logits = [self._tower(i, width) for i in range(towers)]
            total = logits[0]
            for each in logits[1:]:
                total = total + each
            self.logits = total / float(towers)
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


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The 1,797 images of scikit-learn's digits: a fifth of each class is held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    scaled = (images / 16.0).astype("float32")
    return tuple(train_test_split(scaled, labels, test_size=0.2, random_state=0, stratify=labels))


def main() -> None:
    options = arguments()
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    train_x, test_x, train_y, test_y = digits()
    model = Towers(options.towers, options.width)
    shapes = {model.images: (options.batch, PIXELS), model.labels: (options.batch,)}
    step = [model.loss, model.train]

    sessions = {
        workers: gf.Session(gf.Cluster.local(workers=workers, threads=1)) for workers in (1, 2)
    }
    try:
        for workers, session in sessions.items():
            with console.status(f"planning for {workers} worker(s)"):
                session.compile([step, model.accuracy], shapes)
        feeds = batches(model, train_x, train_y, options.batch, options.epochs)
        seconds = {workers: [] for workers in sessions}
        for feed in track(list(feeds), description="training, by turns", console=console):
            for workers, session in sessions.items():
                start = time.perf_counter()
                losses = session.run(step, feed)
                seconds[workers].append(time.perf_counter() - start)
        final = float(losses[0])
        accuracy = sessions[2].run(model.accuracy, {model.images: test_x, model.labels: test_y})
        same = all(
            np.array_equal(sessions[1].get(w), sessions[2].get(w)) for w in trained(model.loss)
        )
        plans, measured = {}, {}
        for workers, session in sessions.items():
            trace_path = options.out / "trace.json" if workers == 2 else None
            with session.trace(trace_path):
                for feed in batches(model, train_x, train_y, options.batch, 2):
                    session.run(step, feed)
            plans[workers] = session.plan(step)
            measured[workers] = statistics.median(seconds[workers][len(seconds[workers]) // 4 :])
        plans[2].save(options.out / "plan.html")
    finally:
        for session in sessions.values():
            session.close()
    report(console, plans, measured, final, float(accuracy), same, options.out)
    if accuracy < 0.96:
        raise SystemExit(f"held-out accuracy {accuracy:.2%} is below the 96 % that is expected")


def batches(model, images, labels, size, epochs):
    """Feeds for some epochs, shuffled anew in each."""
    random = np.random.default_rng(0)
    for _ in range(epochs):
        order = random.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield {model.images: images[rows], model.labels: labels[rows]}


def trained(loss: gf.Tensor) -> list[gf.Tensor]:
    """The variables that a loss depends on."""
    return [node.outputs[0] for node in gf.Graph(loss).variables]


def report(console, plans, measured, loss, accuracy, same, out: Path) -> None:
    table = Table(title="Step time", title_justify="left")
    for column in ("workers", "predicted", "measured", "measured / predicted"):
        table.add_column(column, justify="right")
    for workers, plan in plans.items():
        ratio = measured[workers] / plan.makespan
        table.add_row(
            str(workers),
            f"{plan.makespan * 1e3:.1f} ms",
            f"{measured[workers] * 1e3:.1f} ms",
            f"{ratio:.2f}",
        )
    console.print(table)
    predicted_gain = plans[1].makespan / plans[2].makespan
    gain = measured[1] / measured[2]
    verdict = "a gain" if gain > 1.02 else "no gain here"
    console.print(
        f"Two workers against one: predicted {predicted_gain:.2f} times as fast, "
        f"measured {gain:.2f} times: {verdict}."
    )
    per_device: dict[str, set[str]] = {}
    for name, device in plans[2].placement.items():
        scope = next((part for part in name.split("/") if part.startswith("tower")), None)
        if scope and "weight" in name:
            per_device.setdefault(device, set()).add(scope)
    for device, towers in sorted(per_device.items()):
        console.print(f"{device} holds the weights of {', '.join(sorted(towers))}")
    verdict = "bit-equal" if same else "DIFFERENT"
    console.print(f"The weights trained on one and on two workers are {verdict}.")
    console.print(f"Loss {loss:.4f}, held-out accuracy [bold]{accuracy:.2%}[/bold].")
    console.print(f"Wrote {out / 'plan.html'} (open it in a browser)")
    console.print(f"  and {out / 'trace.json'} (open it at ui.perfetto.dev).")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--towers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the two files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
