"""Pipelines without flush: one stage is the same as one micro-batch after the other, whatever the
step has besides a network and its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ScheduleError
from graphflow.parallel import Pipeline, pipedream

WIDTH, COUNT, EACH = 4, 3, 2
RANDOM = np.random.default_rng(0)
WEIGHT, OTHER = RANDOM.normal(size=(2, WIDTH, WIDTH)) / 2
X = RANDOM.normal(size=(COUNT * EACH, WIDTH))

Step = tuple[gf.Tensor, list[Any], list[gf.Tensor]]
"""A placeholder, what is fetched, and variables."""


def inner_gradient(strategy: Any) -> Step:
    """A loss after a step of descent: a gradient is in the network, of a loss that is not, and to
    a weight that is read twice."""
    x = gf.placeholder("float64", ("B", WIDTH), name="x")
    w = gf.variable(WEIGHT, name="w")
    inner = gf.mean(gf.square(gf.tanh(gf.tanh(x @ w) @ w) - x))
    ahead = w - 0.5 * gf.gradients(inner, [w])[0]
    loss = gf.mean(gf.square(gf.tanh(x @ ahead) - x))
    return x, [loss, gf.optim.SGD(0.2).minimize(loss, strategy=strategy)], [w]


def moving_means(strategy: Any) -> Step:
    """Weights' mean over steps, which the network reads; a centre of its inputs; the last loss; a
    count of steps, and of what a constant sets."""
    x = gf.placeholder("float64", ("B", WIDTH), name="x")
    w = gf.variable(WEIGHT, name="w")
    teacher = gf.variable(OTHER, name="teacher", trainable=False)
    centre = gf.variable(np.zeros(WIDTH), name="centre", trainable=False)
    last, steps, ready = (
        gf.variable(np.array(0.0), name=name, trainable=False)
        for name in ("last", "steps", "ready")
    )
    wanted = gf.stop_gradient(gf.tanh((x - centre) @ teacher))
    loss = gf.mean(gf.square(gf.tanh(x @ w) - wanted))
    assigned = [
        gf.assign(teacher, 0.9 * teacher + 0.1 * w),
        gf.assign(centre, 0.9 * centre + 0.1 * gf.mean(x, axis=0)),
        gf.assign(last, loss),
        gf.assign(steps, steps + 1.0),
        gf.assign(ready, 1.0),
    ]
    train = gf.optim.SGD(0.2, momentum=0.9).minimize(loss, strategy=strategy)
    return x, [loss, train, *assigned], [w, teacher, centre, last, steps, ready]


def build_scaled_step(strategy: Any) -> Step:
    """A scale that rises, of another dtype than the loss: passes read what is made of it."""
    x = gf.placeholder("float64", ("B", WIDTH), name="x")
    w = gf.variable(WEIGHT, name="w")
    scale = gf.variable(np.float32(8.0), name="scale", trainable=False)
    loss = gf.mean(gf.square(gf.tanh(x @ w) - x))
    scaling = gf.optim.LossScaling(scale, interval=2)
    train = gf.optim.SGD(0.2).minimize(loss, strategy=strategy, scaling=scaling)
    return x, [loss, train], [w, scale]


@pytest.mark.parametrize("make", [inner_gradient, moving_means, build_scaled_step])
def test_one_stage_is_one_micro_batch_after_the_other(make: Callable[[Any], Step]) -> None:
    x, fetches, variables = make(None)
    with gf.Session() as s:
        losses = [s.run(fetches, {x: part})[0] for part in np.split(X, COUNT)]
        wanted = [s.get(v) for v in variables]
    x, fetches, variables = make(Pipeline(1, "pipedream", COUNT))
    with gf.Session() as s:
        assert s.run(fetches, {x: X})[0] == pytest.approx(np.mean(losses), rel=1e-14)
        for have, want in zip([s.get(v) for v in variables], wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-13)


def test_each_micro_batch_draws_random_numbers_of_its_own() -> None:
    x = gf.placeholder("float64", ("B", WIDTH), name="x")
    w = gf.variable(np.ones((WIDTH, WIDTH)), name="w")
    kept = gf.nn.dropout(x, 0.5)
    loss = gf.mean(kept @ w)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=Pipeline(1, "pipedream", COUNT))
    with gf.Session() as s:
        masks = np.split(s.run([kept, train], {x: np.ones((COUNT * 16, WIDTH))})[0], COUNT)
    assert all((a != b).any() for a, b in itertools.combinations(masks, 2))


def test_a_mean_over_steps_goes_on_from_the_newest_in_any_stage() -> None:
    """Two stages: the first reads versions that are one update old, and still none is left out."""
    x = gf.placeholder("float64", ("B", WIDTH), name="x")
    centre = gf.variable(np.zeros(WIDTH), name="centre", trainable=False)
    with gf.name_scope("first"):
        h = gf.tanh((x - centre) @ gf.variable(WEIGHT))
    with gf.name_scope("second"):
        loss = gf.mean(gf.square(h @ gf.variable(OTHER)))
    moved = gf.assign(centre, 0.9 * centre + 0.1 * gf.mean(x, axis=0))
    strategy = Pipeline(["first", "second"], "pipedream", COUNT)
    train = gf.optim.SGD(0.2).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        s.run([train, moved], {x: X})
        found = s.get(centre)
    wanted = np.zeros(WIDTH)
    for part in np.split(X, COUNT):
        wanted = 0.9 * wanted + 0.1 * part.mean(axis=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_a_rate_that_is_fed_stays_what_it_is_in_an_update_of_several() -> None:
    """A mean of three times 0.01 would be another number."""
    x, rate = gf.placeholder("float64", ("B", WIDTH), name="x"), gf.placeholder("float64", ())
    w = gf.variable(np.zeros(WIDTH), name="w")
    schedule = pipedream(1, 3, "double-buffered", 3)
    loss = gf.mean(x * w)
    train = gf.optim.SGD(rate).minimize(loss, strategy=Pipeline(1, schedule))
    with gf.Session() as s:
        s.run(train, {x: np.ones((3, WIDTH)), rate: 0.01})
        np.testing.assert_array_equal(s.get(w), np.full(WIDTH, -0.01) / WIDTH)


def test_backward_passes_compute_again_without_a_flush_too() -> None:
    found = []
    for recompute in (None, True):
        x = gf.placeholder("float64", ("B", WIDTH), name="x")
        first, second = gf.variable(WEIGHT, name="first"), gf.variable(OTHER, name="second")
        h = gf.tanh(x @ first)
        loss = gf.mean(gf.square(gf.tanh(h @ second)))
        strategy = Pipeline(2, "pipedream", COUNT, recompute=recompute)
        step = [loss, gf.optim.SGD(0.2).minimize(loss, strategy=strategy)]
        plan = gf.plan(step, gf.Cluster.here(), shapes={x: X.shape})
        with gf.Session() as s:
            values = [s.run(step, {x: X})[0].tobytes() for _ in range(2)]
            values += [s.get(v).tobytes() for v in (first, second)]
        found.append((sum(node.op == "tanh" for node in plan.nodes), values))
    (once, kept), (twice, again) = found
    assert (once, twice) == (2 * COUNT, 4 * COUNT)
    assert kept == again


def test_what_may_be_fetched_without_a_flush() -> None:
    x = gf.placeholder("float64", ("B", WIDTH), name="x")
    w = gf.variable(WEIGHT, name="w")
    y = x @ w
    loss = gf.mean(gf.square(y))
    norms: list[gf.Tensor] = []

    def clip(grads: list[gf.Tensor]) -> list[gf.Tensor]:
        clipped, norm = gf.optim.clip_by_global_norm(grads, 1e-3)
        norms.append(norm)
        return clipped

    train = gf.optim.SGD(1e-9).minimize(
        loss, strategy=Pipeline(1, "pipedream", COUNT), transform=clip
    )
    with gf.Session() as s:
        _, rows, before, norm = s.run([train, y, w, norms[0]], {x: X})
        np.testing.assert_allclose(rows, X @ WEIGHT, atol=1e-8)
        np.testing.assert_array_equal(before, WEIGHT)
        parts = [2 * p.T @ (p @ WEIGHT) / p.size for p in np.split(X, COUNT)]
        assert norm == pytest.approx(np.mean([np.linalg.norm(g) for g in parts]), rel=1e-6)
        with pytest.raises(ScheduleError, match=r"fetch floats without axes.*astype\('float32'\)"):
            s.run([train, gf.sum((y > 0).astype("int64"))], {x: X})
