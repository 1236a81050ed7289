"""The training of the tests of recovery: a file of its own, for scripts that load nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphflow as gf


class Model:
    """Adam and dropout over several workers, an evaluation of its own, and a rate that is set."""

    def __init__(self, workers: int, pinned: bool = True) -> None:
        with gf.random.seed(7):
            self.x = gf.placeholder("float32", (None, 3), name="x")
            self.rate = gf.variable(1.0, name="rate", trainable=False)
            h = self.x
            for layer in range(4):
                with gf.device(f"/worker:{layer % workers}" if pinned else "cpu"):
                    w = gf.variable(gf.init.glorot((3, 3)), name=f"w{layer}")
                    h = gf.nn.dropout(gf.tanh(h @ w), 0.2)
            self.loss = gf.mean(gf.square(h * self.rate - gf.random.normal((3,))))
            self.train = gf.optim.Adam(0.05).minimize(self.loss)
            self.evaluate = gf.sum(gf.abs(h))

    def feed(self, number: int) -> dict[gf.Tensor, Any]:
        values = np.random.default_rng(number).normal(size=(4 + number % 3, 3))
        return {self.x: values.astype("float32")}
