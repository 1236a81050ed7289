"""Small models, and steps of training with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np

import graphflow as gf

Feeds = Callable[[np.random.Generator, int], dict[gf.Tensor, Any]]


class Model:
    """What a session runs, and how its placeholders are fed."""

    def __init__(
        self, fetches: Sequence[Any], variables: Sequence[gf.Tensor], feeds: Feeds
    ) -> None:
        self.fetches = list(fetches)
        self.variables = list(variables)
        self.feeds = feeds

    def train(
        self, cluster: Any = None, steps: int = 3, batch: int = 7
    ) -> tuple[list[float], list[Any]]:
        """Losses of some steps, and the variables after them."""
        random = np.random.default_rng(1)
        with gf.Session(cluster) as session:
            losses = [
                float(session.run(self.fetches, self.feeds(random, batch))[0]) for _ in range(steps)
            ]
            return losses, [session.get(v) for v in self.variables]


def mlp(strategy: Any = None, dtype: str = "float64", optimizer: Any = None) -> Model:
    random = np.random.default_rng(0)
    x = gf.placeholder(dtype, (None, 6), name="x")
    t = gf.placeholder(dtype, (None, 3), name="t")
    w1 = gf.variable(random.normal(size=(6, 8)).astype(dtype), name="w1")
    b1 = gf.variable(np.zeros(8, dtype), name="b1")
    w2 = gf.variable(random.normal(size=(8, 3)).astype(dtype), name="w2")
    loss = gf.mean((gf.nn.relu(x @ w1 + b1) @ w2 - t) ** 2.0)
    train = (optimizer or gf.optim.Adam(0.1)).minimize(loss, strategy=strategy)

    def feeds(random: np.random.Generator, batch: int) -> dict[gf.Tensor, Any]:
        return {
            x: random.normal(size=(batch, 6)).astype(dtype),
            t: random.normal(size=(batch, 3)).astype(dtype),
        }

    return Model([loss, train], [w1, b1, w2], feeds)


def cnn(
    strategy: Any = None,
    shape: tuple[int, ...] = (4, 3, 12, 10),
    kernel: int = 3,
    stride: int = 1,
    norm: bool = True,
    pool: Any = gf.nn.max_pool,
) -> Model:
    random = np.random.default_rng(0)
    x = gf.placeholder("float64", shape, name="images")
    y = gf.placeholder("int64", shape[:1], name="labels")

    def weights(*size: int, name: str) -> gf.Tensor:
        return gf.variable(random.normal(size=size) * 0.2, name=name)

    w1 = weights(4, shape[1], kernel, kernel, name="w1")
    w2 = weights(6, 4, kernel, kernel, name="w2")
    w3 = weights(6, 5, name="w3")
    variables, updates = [w1, w2, w3], []
    h = gf.nn.conv(x, w1, padding="same" if stride == 1 else kernel // 2, stride=stride)
    if norm:
        mean = gf.variable(np.zeros(4), name="mean", trainable=False)
        variance = gf.variable(np.ones(4), name="variance", trainable=False)
        h, new_mean, new_variance = gf.nn.batch_norm(h, None, None, mean, variance, training=True)
        updates = [gf.assign(mean, new_mean), gf.assign(variance, new_variance)]
        variables += [mean, variance]
    h = gf.nn.relu(h)
    if pool is not None:
        h = pool(h, 2)
    h = gf.mean(gf.nn.relu(gf.nn.conv(h, w2, padding="same")), axis=(2, 3))
    loss = gf.mean(gf.nn.cross_entropy(h @ w3, y))
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss, strategy=strategy)

    def feeds(random: np.random.Generator, batch: int) -> dict[gf.Tensor, Any]:
        return {x: random.normal(size=shape), y: random.integers(0, 5, shape[:1])}

    return Model([loss, train, *updates], variables, feeds)


def gpt(strategy: Any = None, dropout: float = 0.0, batch: int = 4) -> Model:
    gf.random.seed(3)
    random = np.random.default_rng(0)
    ids = gf.placeholder("int64", (batch, 8), name="ids")
    targets = gf.placeholder("int64", (batch, 8), name="targets")
    table = gf.variable(random.normal(size=(12, 16)), name="embedding")
    places = gf.variable(random.normal(size=(8, 16)) * 0.1, name="places")
    head = gf.variable(random.normal(size=(16, 12)) * 0.3, name="head")
    h = gf.nn.embedding(ids, table) + places
    with gf.nn.training() if dropout else nullcontext():
        for i in range(2):
            block = gf.nn.TransformerBlock(
                16, 2, dtype="float64", dropout=dropout, name=f"block{i}"
            )
            h = block(h, causal=True)
    loss = gf.mean(gf.nn.cross_entropy(gf.nn.layer_norm(h) @ head, targets))
    train = gf.optim.Adam(1e-2).minimize(loss, strategy=strategy)

    def feeds(random: np.random.Generator, _: int) -> dict[gf.Tensor, Any]:
        return {t: random.integers(0, 12, (batch, 8)) for t in (ids, targets)}

    return Model([loss, train], [table, places, head], feeds)


@cache
def train_on_one_device(model: Callable[..., Model], steps: int = 3, **options: Any) -> Any:
    """What `train` gives on one device: many strategies are compared with it."""
    return model(None, **options).train(steps=steps)


def difference(a: tuple[list[float], list[Any]], b: tuple[list[float], list[Any]]) -> float:
    """The largest difference between losses, and between variables."""
    losses = max(abs(x - y) for x, y in zip(a[0], b[0], strict=True))
    return max(losses, *(float(np.abs(x - y).max()) for x, y in zip(a[1], b[1], strict=True)))
