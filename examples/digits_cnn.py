"""Train a small convolutional network on real digits by gf.fit, and draw its curve.

    pip install '.[demo]'
    python examples/digits_cnn.py
    python examples/digits_cnn.py --epochs 4 --workers 2 --out /tmp/digits

The 1,797 images of 8 x 8 pixels come with scikit-learn. The program writes them to .npy files,
which workers read themselves if there are any. Training stops early when the test accuracy is no
longer better, and the best weights are put back. It writes digits_cnn.svg and checkpoints to --out;
a second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from command_line import check_folder, positive_int, run_program, save_curve

import graphflow as gf
from graphflow import nn


class Network(nn.Layer):
    """Two convolutions, one pooling layer and a linear layer: images to logits of ten classes."""

    def __init__(self) -> None:
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, name="conv1"), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, name="conv2"), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10, name="head"),
        )  # fmt: skip

    def __call__(self, images: gf.Tensor) -> gf.Tensor:
        return self.layers(images / 16.0)


def write_digits(folder: Path) -> gf.data.Dataset:
    """Return the digits as a dataset of two files in a folder."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    files = {"images": folder / "images.npy", "labels": folder / "labels.npy"}
    if not all(file.exists() for file in files.values()):
        np.save(files["images"], digits.images[:, None].astype("float32"))
        np.save(files["labels"], digits.target.astype("int64"))
    return gf.data.npy(**files)


def main() -> None:
    options = parse_arguments()
    data = write_digits(options.out).shuffle(seed=0).batch(options.batch)
    train_data, test_data = data.split(0.8)
    with gf.random.seed(0):
        images = gf.placeholder("float32", (None, 1, 8, 8), name="images")
        labels = gf.placeholder("int64", (None,), name="labels")
        logits = Network()(images)
    loss = nn.cross_entropy(logits, labels, reduction="mean")
    strategy = gf.parallel.Data(options.workers) if options.workers > 1 else None
    train = gf.optim.Adam(2e-3).minimize(loss, strategy=strategy)
    begun = time.perf_counter()
    history = gf.fit(
        train, train_data.on_workers(), loss=loss, epochs=options.epochs, validate=test_data,
        metrics={"accuracy": gf.metrics.accuracy(logits, labels)},
        callbacks=[gf.training.EarlyStopping("accuracy", mode="max", patience=3)],
        checkpoint=options.out / "checkpoints",
        cluster=gf.Cluster.local(options.workers) if options.workers > 1 else None,
    )  # fmt: skip
    history.session.close()
    if not history.epochs:
        print(f"{options.epochs} epochs were trained before; remove {options.out} to begin anew")
        return
    print(
        f"{len(history.losses)} steps in {time.perf_counter() - begun:.1f} s, from step "
        f"{history.first_step}; test accuracy {max(history.values('accuracy')):.1%}; "
        f"{history.stopped or 'all epochs'}"
    )
    save_curve(history, options.out / "digits_cnn.svg")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=positive_int, default=12, metavar="N")
    parser.add_argument("--batch", type=positive_int, default=64, metavar="ROWS")
    parser.add_argument("--workers", type=positive_int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("digits_cnn"), metavar="FOLDER")
    options = parser.parse_args()
    if options.batch > 1000:
        parser.error(f"--batch {options.batch}: there are 1,438 images to train on")
    check_folder(parser, "--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main)
