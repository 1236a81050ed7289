"""DelayCompensated, against its formula by hand, and against the inner optimiser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.optim import SGD, Adam, DelayCompensated
from graphflow.parallel import Data, ParameterServer
from tests.parallel.models import mlp
from tests.parallel.servers.windows import difference, feeds_of, train

SIZE = 5


def squares(optimizer: Any, strategy: Any) -> tuple[Any, Any, Any]:
    """The rows, a step and the weights of a regression of one row a micro-batch."""
    x = gf.placeholder("float64", ("B", SIZE), name="x")
    w = gf.variable(np.linspace(-1.0, 1.0, SIZE), name="w")
    loss = gf.mean(gf.sum((x - w) * (x - w) * 0.5, 1))
    return x, optimizer.minimize(loss, strategy=strategy), w


def by_hand(rows: Any, order: Any, numbers: Any, aggregate: int, lam: float) -> Any:
    """The weights after a window: one backup for each worker."""
    w = np.linspace(-1.0, 1.0, SIZE)
    backups = dict.fromkeys(set(order.tolist()), w)
    pushed: list[Any] = []
    for k, m in zip(order.tolist(), numbers.tolist(), strict=True):
        g = backups[k] - rows[m]
        pushed.append(g + lam * g * g * (w - backups[k]))
        if len(pushed) == aggregate:
            w = w - 0.05 * np.mean(pushed, 0)
            pushed = []
        backups[k] = w
    return w


@pytest.mark.parametrize(("consistency", "aggregate"), [("async", 1), ("async", 3), ("pool", 2)])
@pytest.mark.parametrize("lam", [0.04, 2.0])
def test_a_late_gradient_is_corrected_by_what_its_own_worker_missed(
    consistency: Any, aggregate: int, lam: float
) -> None:
    random = np.random.default_rng(aggregate)
    strategy = ParameterServer(consistency=consistency, window=4, workers=3, aggregate=aggregate)
    x, step, w = squares(DelayCompensated(SGD(0.05), lam), strategy)
    rows = random.normal(size=(12, SIZE))
    for _ in range(4):
        order = random.permutation(np.repeat(np.arange(3), 4))
        if consistency == "pool":  # the last micro-batches are dealt, one to each worker
            order[-3:] = random.permutation(3)
        with gf.Session() as s:
            s.run(step, {x: rows, strategy.order: order[None].astype("int32")})
            (came,) = s.history()
            found = s.get(w)
        numbers = came.micro_batches[0]
        wanted = by_hand(rows, order, numbers, aggregate, lam)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
        plain = by_hand(rows, order, numbers, aggregate, 0.0)
        assert np.abs(found - plain).max() > 1e-4  # the correction is no trifle


@pytest.mark.parametrize("inner", [SGD(0.05, momentum=0.9), Adam(0.01)], ids=repr)
@pytest.mark.parametrize(
    ("strategy", "lam"),
    [
        (lambda: None, 0.3),
        (lambda: Data(2), 0.3),
        (lambda: ParameterServer(2, "async", window=3, workers=2), 0.0),
        (lambda: ParameterServer(1, "bsp", window=3, workers=2), 0.3),  # nothing is late
        (lambda: ParameterServer(1, "async", window=3, workers=1), 0.3),
    ],
)
def test_without_delay_or_lam_it_is_the_inner_optimiser(
    inner: Any, strategy: Any, lam: float
) -> None:
    plain = mlp(strategy(), optimizer=inner)
    late = mlp(strategy(), optimizer=DelayCompensated(inner, lam))
    wanted, found = (train(model, feeds_of(model, 2, 12)) for model in (plain, late))
    assert difference(found.values, wanted.values) == 0
    assert found.losses == wanted.losses


def test_clipping_sees_corrected_gradients() -> None:
    """All pushes of the window are clipped, so each moves the weights by 0.05 · 0.001."""
    x = gf.placeholder("float64", ("B", SIZE), name="x")
    w = gf.variable(np.linspace(-1.0, 1.0, SIZE), name="w")
    strategy = ParameterServer(consistency="async", window=1, workers=3)
    train = DelayCompensated(SGD(0.05), 0.5).minimize(
        gf.mean(gf.sum((x - w) * (x - w) * 0.5, 1)),
        transform=lambda g: gf.optim.clip_by_global_norm(g, 1e-3)[0],
        strategy=strategy,
    )
    with gf.Session() as s:
        s.run(train, {x: np.full((3, SIZE), 9.0)})
        moved = np.linalg.norm(s.get(w) - np.linspace(-1.0, 1.0, SIZE))
    assert moved == pytest.approx(3 * 0.05 * 1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DelayCompensated(0.1, 0.1), "inner must be another optimiser"),
        (lambda: DelayCompensated(DelayCompensated(SGD(1.0), 1), 1), "inner must be another"),
        (lambda: DelayCompensated(SGD(1.0), -1), "lam must be a number from 0, not -1"),
        (lambda: DelayCompensated(SGD(1.0), 0.1, sparse=True), "sparse is for the inner"),
        (
            lambda: DelayCompensated(SGD(1.0), 0.1).minimize(
                gf.sum(gf.variable(np.ones(2))), scaling=gf.optim.LossScaling()
            ),
            "scaling must be None",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as caught:
        make()
    assert "test_delay_compensated.py:" in str(caught.value)
