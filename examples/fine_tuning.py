"""Train a small network on the digits 0 to 4, save its weights, and fine-tune it on 5 to 9.

The second network takes the body of the first from a file with torch's names, keeps it fixed, and
trains a new head on a few images. A third one learns from the same images alone. The script prints
the accuracy of both on held-out digits, and draws fine_tuning.svg.

    pip install '.[demo]'
    python examples/fine_tuning.py [--images 20] [--epochs 10] [--out DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from command_line import check_folder, positive_int, run_program
from digits_towers import split_digits

import graphflow as gf
from graphflow import nn

BATCH = 10
Data = gf.data.Dataset


class Network(nn.Layer):
    """A body of two convolutions, and a head for five classes."""

    def __init__(self, seed: int) -> None:
        with gf.random.seed(seed):
            with gf.name_scope("body"):
                self.body = nn.Sequential(
                    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.relu,
                    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.relu,
                    nn.AdaptiveAvgPool(2), nn.Flatten(),
                )  # fmt: skip
            self.head = nn.Linear(128, 5, name="head")

    def __call__(self, x: gf.Tensor) -> gf.Tensor:
        return self.head(self.body(x))


def train(
    network: Network, session: gf.Session, data: Data, test: Data, epochs: int, frozen: bool = False
) -> gf.training.TrainingHistory:
    """Train a network, or its head alone, and return the course with the accuracy of each epoch."""
    x = gf.placeholder("float32", (None, 1, 8, 8), name="x")
    y = gf.placeholder("int64", (None,), name="y")
    rule, updates = gf.optim.Adam(3e-2 if frozen else 3e-3), []
    if frozen:  # outside of a training block, norms go by the moments that were loaded
        rule, logits = gf.optim.Groups({"body/*": None}, rule), network(x)
    else:
        with nn.training() as updates:
            logits = network(x)
    loss = nn.cross_entropy(logits, y, reduction="mean")
    return gf.fit(
        [rule.minimize(loss), *updates], data, loss=loss, epochs=epochs, session=session,
        metrics={"accuracy": gf.metrics.accuracy(network(x), y)}, validate=test, progress=False,
    )  # fmt: skip


def select(images: np.ndarray, labels: np.ndarray, digits: range, most: int | None = None) -> Data:
    """Return batches of some digits as pictures, with classes from 0."""
    rows = np.flatnonzero(np.isin(labels, digits))[:most]
    x, y = images[rows].reshape(-1, 1, 8, 8), labels[rows] - digits.start
    return gf.data.arrays(x=x, y=y).shuffle(seed=0).batch(BATCH)


def main() -> None:
    options = parse_arguments()
    images, test_images, labels, test_labels = split_digits()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "digits.safetensors"

    with gf.Session() as session:
        first, low = Network(seed=1), range(5)
        data, test = select(images, labels, low), select(test_images, test_labels, low)
        history = train(first, session, data, test, epochs=8)
        print(first.summary((None, 1, 8, 8), batch=BATCH))
        print(f"digits 0 to 4: accuracy {history.values('accuracy')[-1]:.1%}")
        first.save(session, path, names="torch")

    high, most = range(5, 10), options.images
    data, test = select(images, labels, high, most), select(test_images, test_labels, high)
    courses = {}
    for name in ("from the start", "fine-tuned"):
        with gf.Session() as session:
            network = Network(seed=2)
            tuned = name == "fine-tuned"
            if tuned:
                # The file has the old head, too: the body takes its own weights.
                loaded = network.body.load(
                    session, path, names="torch", rename={"body.": ""}, strict=False
                )
                print(loaded)
            courses[name] = train(network, session, data, test, options.epochs, frozen=tuned)
    for name, course in courses.items():
        print(f"digits 5 to 9 from {most} images, {name}: {course.values('accuracy')[-1]:.1%}")
    history = courses["fine-tuned"]
    for row, value in zip(
        history.epochs, courses["from the start"].values("accuracy"), strict=True
    ):
        row["from the start"] = value
    history.plot(options.out / "fine_tuning.svg")
    print(f"Wrote {path} and {options.out / 'fine_tuning.svg'}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("images", 20), ("epochs", 10)):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{default}")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder for the results")
    options = parser.parse_args()
    check_folder(parser, "--out", options.out)
    if options.images < BATCH:
        parser.error(f"--images {options.images}: a batch has {BATCH}")
    return options


if __name__ == "__main__":
    run_program(main)
