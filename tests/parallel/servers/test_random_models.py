"""Random models, optimisers and numbers of servers, workers and turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel import Data, ParameterServer
from tests.parallel.models import Model
from tests.parallel.servers.windows import difference, feeds_of, parts_of, train

OPTIMIZERS: list[Any] = [
    gf.optim.SGD(0.05),
    gf.optim.SGD(0.05, momentum=0.9, weight_decay=0.01),
    gf.optim.Adam(0.01),
    gf.optim.AdamW(0.01),
    gf.optim.RMSProp(0.01, momentum=0.5),
    gf.optim.Adagrad(0.1),
]


def random_model(seed: int, strategy: Any) -> Model:
    """Layers of random sizes, with or without moments, an embedding and an average of weights."""
    random = np.random.default_rng(seed)
    width = int(random.integers(2, 7))
    x = gf.placeholder("float64", ("B", width), name="x")
    ids = gf.placeholder("int64", ("B", 2), name="ids")
    variables: list[Any] = []
    updates: list[Any] = []

    def weights(*shape: int) -> gf.Tensor:
        variables.append(gf.variable(random.normal(size=shape) * 0.5, name=f"w{len(variables)}"))
        made: gf.Tensor = variables[-1]
        return made

    h = x
    if looks_up := bool(random.integers(2)):
        h = h + gf.sum(gf.nn.embedding(ids, weights(9, width)), 1)
    for _ in range(int(random.integers(1, 4))):
        size = int(random.integers(1, 9))
        h = h @ weights(int(h.shape[1]), size) + weights(size)
        if random.integers(2):
            moment = gf.variable(np.zeros(size), name=f"m{len(variables)}", trainable=False)
            new = 0.9 * moment + 0.1 * gf.mean(gf.stop_gradient(h), 0)
            updates.append(gf.assign(moment, new))
            h = h - moment
            variables.append(moment)
        h = gf.tanh(h)
    if random.integers(2):
        average = gf.variable(np.zeros(variables[0].shape), name="average", trainable=False)
        updates.append(gf.assign(average, 0.5 * average + 0.5 * variables[0]))
        variables.append(average)
    loss = gf.mean((gf.sum(h, 1) - gf.sum(x, 1)) ** 2.0)
    optimizer = OPTIMIZERS[int(random.integers(len(OPTIMIZERS)))]
    step = optimizer.minimize(loss, strategy=strategy)

    def feeds(random: np.random.Generator, rows: int) -> dict[gf.Tensor, Any]:
        fed = {x: random.normal(size=(rows, width)), ids: random.integers(0, 9, (rows, 2))}
        return fed if looks_up else {x: fed[x]}

    return Model([loss, step, *updates], variables, feeds)


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 2)) for seed in range(40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_of_a_random_model_are_data_parallelism(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    servers, workers, turns = (int(random.integers(1, most)) for most in (3, 5, 5))
    rows = workers * turns * int(random.integers(1, 4))
    served = random_model(seed, ParameterServer(servers, "bsp", window=turns, workers=workers))
    data = random_model(seed, Data(workers, synchronised=False))
    found = train(served, feeds_of(served, 2, rows, seed))
    parts = [part for feeds in feeds_of(data, 2, rows, seed) for part in parts_of(feeds, turns)]
    wanted = train(data, parts)
    assert difference(found.values, wanted.values) < 1e-12
    np.testing.assert_allclose(np.mean(found.losses), np.mean(wanted.losses), rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_has_the_same_bits_in_the_same_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled and interpreted kernels may differ in bits; both follow the order."""
    random = np.random.default_rng(2000 + seed)
    servers, workers, turns = (int(random.integers(1, most)) for most in (3, 4, 4))
    kind = ["async", "pool", "ssp"][seed % 3]
    bound = {"staleness": int(random.integers(0, 3))} if kind == "ssp" else {}
    strategy = ParameterServer(servers, kind, window=turns, workers=workers, **bound)
    model = random_model(seed, strategy)
    windows = feeds_of(model, 2, workers * turns * 2, seed)
    first = train(model, windows)
    again = [{**f, strategy.order: h.order} for f, h in zip(windows, first.history, strict=True)]
    second = train(model, again)
    assert second.losses == first.losses
    assert difference(first.values, second.values) == 0
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    plain = train(model, again)
    assert difference(first.values, plain.values) < 1e-9
