"""Update rules against torch's own, or against their formulas in numpy where torch has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, VariableError

schedules = gf.optim.schedules
Array = np.ndarray[Any, Any]
Arrays = list[Array]
STEPS = 50

_random = np.random.default_rng(3)
STARTS: Arrays = [_random.normal(size=s) for s in ((5, 3), (3, 4), (4,), ())]
INPUT = _random.normal(size=(16, 5))
WANTED = _random.normal(size=(16, 4))


def build(dtype: str = "float64") -> tuple[list[gf.Tensor], gf.Tensor]:
    """Return the variables and the loss of a small network of two layers."""
    w, v, b, s = (gf.variable(a.astype(dtype), name=n) for a, n in zip(STARTS, "wvbs", strict=True))
    h = gf.tanh(gf.constant(INPUT.astype(dtype)) @ w)
    loss = gf.mean(gf.square(s * (h @ v) + b - gf.constant(WANTED.astype(dtype))))
    return [w, v, b, s], loss


def slopes(values: Arrays) -> Arrays:
    """Return the gradients of that loss in numpy."""
    w, v, b, s = values
    h = np.tanh(INPUT @ w)
    g = 2 * (s * (h @ v) + b - WANTED) / WANTED.size
    back = s * g @ v.T * (1 - h * h)
    return [INPUT.T @ back, s * h.T @ g, g.sum(0), np.sum(g * (h @ v))]


def run_training(optimizer: Any, steps: int = STEPS, dtype: str = "float64", **how: Any) -> Arrays:
    """Return the variables after steps of an optimiser."""
    variables, loss = build(dtype)
    optimizer = optimizer(loss) if not isinstance(optimizer, gf.optim.Optimizer) else optimizer
    train = optimizer.minimize(loss, **how)
    with gf.Session() as session:
        for _ in range(steps):
            session.run(train)
        return [session.get(variable) for variable in variables]


def assert_near(found: Arrays, wanted: Arrays, relative: float = 1e-10) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, relative, relative)


# Formulas, for rules that torch has not ------------------------------------------------------


Rule = Callable[[Array, Array, dict[str, Array], int], Array]


def _by_formula(rule: Rule) -> Arrays:
    values, slots = [a.copy() for a in STARTS], [dict[str, Array]() for _ in STARTS]
    for t in range(1, STEPS + 1):
        grads = slopes(values)
        values = [rule(w, g, s, t) for w, g, s in zip(values, grads, slots, strict=True)]
    return values


def _lion(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
    m = slots.get("m", np.zeros_like(w))
    slots["m"] = 0.8 * m + 0.2 * g
    return w * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.6 * m + 0.4 * g)


def _lars(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
    length, slope = np.linalg.norm(w), np.linalg.norm(g)
    ratio = 0.02 * length / (slope + 0.1 * length) if length > 0 and slope > 0 else 1.0
    slots["v"] = 0.9 * slots.get("v", np.zeros_like(w)) + 0.5 * ratio * (g + 0.1 * w)
    return w - slots["v"]


def _lamb(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
    slots["m"] = 0.9 * slots.get("m", np.zeros_like(w)) + 0.1 * g
    slots["s"] = 0.99 * slots.get("s", np.zeros_like(w)) + 0.01 * g * g
    root = np.sqrt(slots["s"] / (1 - 0.99**t))
    r = slots["m"] / (1 - 0.9**t) / (root + 1e-6) + 0.1 * w
    length = np.linalg.norm(w)
    return w - 0.02 * (length / np.linalg.norm(r) if length > 0 else 1.0) * r


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (gf.optim.Lion(0.01, 0.6, 0.8, weight_decay=0.1), _lion),
        (gf.optim.LARS(0.5, weight_decay=0.1, trust=0.02), _lars),
        (gf.optim.LAMB(0.02, beta2=0.99, weight_decay=0.1), _lamb),
    ],
    ids=["Lion", "LARS", "LAMB"],
)
def test_fifty_steps_follow_the_formula(optimizer: Any, rule: Rule) -> None:
    assert_near(run_training(optimizer), _by_formula(rule))


def test_muon_takes_steps_of_nearly_orthogonal_matrices() -> None:
    start = np.random.default_rng(0).normal(size=(40, 12))
    w = gf.variable(start, name="w")
    loss = gf.sum(w * gf.constant(np.random.default_rng(1).normal(size=(40, 12))))
    with gf.Session() as session:
        session.run(gf.optim.Muon(1.0, weight_decay=0.0).minimize(loss))
        step = (start - session.get(w)) / np.sqrt(40 / 12)
    values = np.linalg.svd(step, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3


def test_a_rule_for_matrices_refuses_others_and_says_what_to_do() -> None:
    _, loss = build()
    with pytest.raises(VariableError, match=r"no matrix; give it to another rule.*Groups"):
        gf.optim.Muon().minimize(loss)


# torch's own ---------------------------------------------------------------------------------


AS_TORCH: dict[str, Any] = {
    "adam": gf.optim.Adam(0.05),
    "adamw": gf.optim.AdamW(0.05, amsgrad=True),
    "amsgrad": gf.optim.Adam(0.05, beta2=0.9, weight_decay=0.1, amsgrad=True),
    "nadam": gf.optim.NAdam(0.05, weight_decay=0.1),
    "radam": gf.optim.RAdam(0.05, weight_decay=0.1),
    "adadelta": gf.optim.Adadelta(1.0, weight_decay=0.1),
    "adafactor": gf.optim.Adafactor(0.05, weight_decay=0.1),
    "lbfgs": gf.optim.LBFGS(0.3, history=4),
    "sgd": gf.optim.SGD(0.05, 0.9, True, 0.1),
    "linear": gf.optim.Adam(schedules.linear(0.02, 0.1, 20)),
    "cosine": gf.optim.Adam(schedules.cosine(0.1, STEPS, 0.01)),
    "exponential": gf.optim.Adam(schedules.exponential(0.1, 0.9)),
    "one_cycle": gf.optim.Adam(schedules.one_cycle(0.2, STEPS + 1)),
    "piecewise": gf.optim.Adam(schedules.piecewise({0: 0.1, 10: 0.05, 30: 0.025})),
    "plateau": lambda loss: gf.optim.SGD(schedules.plateau(1.5, loss, factor=0.5, patience=2)),
}
WANTED_OF_TORCH = json.loads(Path(__file__).with_name("torch_steps.json").read_text())


@pytest.mark.parametrize("name", AS_TORCH)
def test_fifty_steps_are_those_of_torch(name: str) -> None:
    """`python -m tests.optim.torch_steps` wrote what torch computes."""
    wanted = [np.reshape(a, b.shape) for a, b in zip(WANTED_OF_TORCH[name], STARTS, strict=True)]
    near = {"nadam": 1e-6, "plateau": 1e-8}.get(name, 1e-10)  # its NAdam holds float32
    assert_near(run_training(AS_TORCH[name]), wanted, near)


# Divided steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        gf.optim.Adam(0.05, weight_decay=0.1, amsgrad=True), gf.optim.NAdam(0.05),
        gf.optim.RAdam(0.05), gf.optim.Lion(0.01), gf.optim.Adadelta(), gf.optim.Adafactor(0.05),
        gf.optim.LARS(0.5), gf.optim.LAMB(0.05), gf.optim.LBFGS(0.3, history=3),
        gf.optim.Groups({"[wv]": gf.optim.Muon(0.02)}, gf.optim.AdamW(0.05)),
        gf.optim.Accumulate(gf.optim.Adam(0.05), 3), gf.optim.MovingAverage(gf.optim.SGD(0.1), 0.9),
        gf.optim.Adam(gf.optim.schedules.warmup(gf.optim.schedules.cosine(0.1, 9), 3)),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)  # fmt: skip
@pytest.mark.every(5)
@pytest.mark.parametrize("shared", [False, True], ids=["replicated", "sharded state"])
def test_replicas_step_alike_and_as_two_devices_do(optimizer: Any, shared: bool) -> None:
    """Two replicas of the same examples have the gradients of one, to the bit."""

    def curve(strategy: Any) -> list[Array]:
        x = gf.placeholder("float64", (None, 5), name="x")
        w, v = (gf.variable(a, name=n) for a, n in zip(STARTS[:2], "wv", strict=True))
        b = gf.variable(STARTS[2], name="b")
        loss = gf.mean(gf.square(gf.tanh(x @ w) @ v + b))
        train = optimizer.minimize(loss, strategy=strategy)
        feed = np.concatenate([INPUT[:4], INPUT[:4]]) if strategy else INPUT[:4]
        with gf.Session(gf.Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)) as session:
            for _ in range(6):
                session.run(train, {x: feed})
            return [session.get(variable) for variable in (w, v, b)]

    found = curve(gf.parallel.Data(2, shard_state=shared))
    for a, b in zip(found, curve(None), strict=True):
        np.testing.assert_allclose(a, b, 1e-12, 1e-12)


# Wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gf.optim.Adam(amsgrad=1), "amsgrad must be True or False, not 1"),
        (lambda: gf.optim.Lion(-1.0), "lr must be a number from 0, not -1.0"),
        (lambda: gf.optim.Muon(steps=0), "steps must be an int from 1, not 0"),
        (lambda: gf.optim.LBFGS(history=1.5), "history must be an int from 1, not 1.5"),
        (lambda: gf.optim.LAMB(sparse=True), "its step depends on whole gradients"),
        (lambda: gf.optim.NAdam(beta2=1.0), r"beta2 must be a number in \[0, 1\)"),
    ],
)
def test_wrong_numbers_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
