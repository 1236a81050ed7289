"""Optimisers against their formulas in plain numpy, and their unusual cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DifferentiationError, VariableError

Array = np.ndarray[Any, Any]
Rule = Callable[[Array, Array, dict[str, Array], int], Array]
STEPS = 20


# The formulas, from the papers and torch's documentation --------------------------------------


def _sgd(rate: float, momentum: float = 0.0, nesterov: bool = False, decay: float = 0.0) -> Rule:
    def step(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
        g = g + decay * w
        if not momentum:
            return w - rate * g
        slots["v"] = momentum * slots.get("v", np.zeros_like(w)) + g
        return w - rate * (g + momentum * slots["v"] if nesterov else slots["v"])

    return step


def _adam(
    rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, decay: float = 0.0
) -> Rule:
    def step(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
        w = w * (1 - rate * decay)
        slots["m"] = b1 * slots.get("m", np.zeros_like(w)) + (1 - b1) * g
        slots["s"] = b2 * slots.get("s", np.zeros_like(w)) + (1 - b2) * g**2
        m, s = slots["m"] / (1 - b1**t), slots["s"] / (1 - b2**t)
        return w - rate * m / (np.sqrt(s) + eps)

    return step


def _rmsprop(rate: float, decay: float = 0.99, momentum: float = 0.0, eps: float = 1e-8) -> Rule:
    def step(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
        slots["s"] = decay * slots.get("s", np.zeros_like(w)) + (1 - decay) * g**2
        slots["v"] = momentum * slots.get("v", np.zeros_like(w)) + g / (np.sqrt(slots["s"]) + eps)
        return w - rate * slots["v"]

    return step


def _adagrad(rate: float, initial: float = 0.0, eps: float = 1e-10) -> Rule:
    def step(w: Array, g: Array, slots: dict[str, Array], t: int) -> Array:
        slots["s"] = slots.get("s", np.full_like(w, initial)) + g**2
        return w - rate * g / (np.sqrt(slots["s"]) + eps)

    return step


CASES: Sequence[tuple[Any, Rule]] = [
    (gf.optim.SGD(0.1), _sgd(0.1)),
    (gf.optim.SGD(0.05, momentum=0.9), _sgd(0.05, 0.9)),
    (gf.optim.SGD(lr=0.05, momentum=0.9, nesterov=True), _sgd(0.05, 0.9, True)),
    (gf.optim.SGD(0.05, 0.9, True), _sgd(0.05, 0.9, True)),
    (gf.optim.SGD(0.1, weight_decay=0.2), _sgd(0.1, decay=0.2)),
    (gf.optim.SGD(0.05, 0.9, True, weight_decay=0.2), _sgd(0.05, 0.9, True, 0.2)),
    (gf.optim.Adam(lr=0.1), _adam(0.1)),
    (gf.optim.Adam(0.1, beta1=0.5, beta2=0.9, epsilon=1e-3), _adam(0.1, 0.5, 0.9, 1e-3)),
    (gf.optim.AdamW(lr=0.1, weight_decay=0.1), _adam(0.1, decay=0.1)),
    (gf.optim.RMSProp(0.05), _rmsprop(0.05)),
    (gf.optim.RMSProp(lr=0.05, decay=0.9, momentum=0.5), _rmsprop(0.05, 0.9, 0.5)),
    (gf.optim.Adagrad(0.5), _adagrad(0.5)),
    (gf.optim.Adagrad(lr=0.5, initial=0.1), _adagrad(0.5, 0.1)),
]


def _problem(dtype: str) -> tuple[gf.Tensor, gf.Tensor, Callable[[Array], Array]]:
    """A crooked bowl: w, its loss, and the gradient by hand."""
    scale = np.array([1.0, 3.0, 0.1], dtype)
    w = gf.variable(np.array([1.0, -2.0, 3.0], dtype), name="w")
    return w, gf.sum(scale * w * w), lambda v: 2 * scale * v


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("optimizer", "rule"), CASES, ids=lambda c: getattr(c, "__qualname__", str(c))[:50]
)
def test_twenty_steps_follow_the_formula(optimizer: Any, rule: Rule, dtype: str) -> None:
    w, loss, gradient = _problem(dtype)
    train = optimizer.minimize(loss)
    value = np.array([1.0, -2.0, 3.0])
    slots: dict[str, Array] = {}
    with gf.Session() as s:
        for t in range(1, STEPS + 1):
            assert s.run(train) is None
            value = rule(value, gradient(value.astype(dtype)).astype("float64"), slots, t)
            close = 1e-12 if dtype == "float64" else 2e-5
            assert np.allclose(s.get(w), value, rtol=close, atol=close), t


@pytest.mark.parametrize(
    "make", [gf.optim.SGD, gf.optim.Adam, gf.optim.AdamW, gf.optim.RMSProp, gf.optim.Adagrad,
             gf.optim.RowwiseAdagrad]
)  # fmt: skip
def test_a_rate_that_is_a_graph_value_is_a_schedule(make: Any) -> None:
    """A step counter in the graph halves the rate at each step; the same by hand."""
    step = gf.variable(np.int64(0), name="step")
    w, loss, _ = _problem("float32")
    rate = 0.1 * 0.5 ** step.astype("float64")
    scheduled = [make(rate).minimize(loss), gf.assign(step, step + 1)]
    plain, plain_loss, _ = _problem("float32")
    given = gf.placeholder("float64", name="rate")
    train = make(given).minimize(plain_loss)
    with gf.Session() as a, gf.Session() as b:
        for t in range(6):
            a.run(scheduled)
            b.run(train, {given: 0.1 * 0.5**t})
            assert np.array_equal(a.get(w), b.get(plain))
        assert a.get(step) == 6


@pytest.mark.parametrize("rate", [np.float64(0.1), np.float32(0.5), 1, np.int64(1)])
def test_numbers_of_numpy_are_rates_like_pythons_own(rate: Any) -> None:
    w, loss, _ = _problem("float32")
    train = gf.optim.SGD(rate, momentum=np.float64(0.5)).minimize(loss)
    with gf.Session() as s:
        s.run(train)
        assert s.get(w).dtype == "float32"


def test_gradients_clipped_by_their_joint_norm_have_that_norm() -> None:
    a = gf.variable(np.array([3.0, 0.0]), name="a")
    b = gf.variable(np.array([[0.0], [4.0]], "float32"), name="b")
    loss = gf.sum(a * a) / 2 + gf.sum(b * b).astype("float64") / 2
    grads = gf.gradients(loss, [a, b])
    clipped, norm = gf.optim.clip_by_global_norm(grads, 1.0)
    loose, _ = gf.optim.clip_by_global_norm(grads, 5.0)
    with gf.Session() as s:
        values, found, same, whole = s.run([clipped, norm, loose, grads])
    assert found == pytest.approx(5.0)
    assert [v.dtype for v in values] == ["float64", "float32"]
    assert np.allclose(values[0], [0.6, 0]) and np.allclose(values[1], [[0], [0.8]])
    for x, y in zip(same, whole, strict=True):
        assert np.array_equal(x, y)


def test_the_norm_of_half_precision_gradients_does_not_overflow() -> None:
    g = gf.constant(np.full(4, 300.0, "float16"))
    clipped, norm = gf.optim.clip_by_global_norm([g], 1.0)
    with gf.Session() as s:
        value, found = s.run([clipped[0], norm])
    assert found == 600 and np.allclose(value, 0.5, rtol=1e-3)


def test_clipping_as_transform_changes_the_step() -> None:
    w, loss, _ = _problem("float64")
    clip = lambda g: gf.optim.clip_by_global_norm(g, 0.5)[0]  # noqa: E731
    train = gf.optim.SGD(1.0).minimize(loss, transform=clip)
    with gf.Session() as s:
        before = s.get(w)
        s.run(train)
        assert np.linalg.norm(s.get(w) - before) == pytest.approx(0.5)


def test_variables_that_are_not_trained_or_not_asked_for_are_left_alone() -> None:
    w = gf.variable([1.0], name="w")
    fixed = gf.variable([2.0], name="fixed", trainable=False)
    counter = gf.variable(np.int64(3), name="counter")
    other = gf.variable([4.0], name="other")
    loss = gf.sum(w * fixed * other * counter.astype("float32"))
    with gf.Session() as s:
        s.run(gf.optim.SGD(0.1).minimize(loss, [w]))
        assert (s.get(fixed), s.get(counter), s.get(other)) == (2, 3, 4)
        assert s.get(w) == pytest.approx(1 - 0.1 * 24)
        s.run(gf.optim.SGD(0.1).minimize(loss))
        assert (s.get(fixed), s.get(counter)) == (2, 3)
        assert s.get(other) != 4


def test_a_variable_that_the_loss_does_not_depend_on_gets_a_gradient_of_zero() -> None:
    w, loss, _ = _problem("float32")
    other = gf.variable([5.0], name="other")
    with gf.Session() as s:
        s.run(gf.optim.Adam(0.1).minimize(loss, [w, other]))
        assert s.get(other) == 5


def test_half_precision_is_trained_in_single_precision() -> None:
    """ε = 1e-8 and the squares of small gradients are 0 in float16."""
    w = gf.variable(np.array([1.0, 2.0], "float16"), name="w")
    loss = gf.sum((w * gf.constant(np.array([1e-3, 0.0], "float16"))).astype("float32"))
    with gf.Session() as s:
        train = gf.optim.Adam(0.125).minimize(loss)
        for _ in range(4):
            s.run(train)
        assert s.get(w).dtype == "float16"
        assert s.get(w).tolist() == [0.5, 2.0]


def test_loss_and_training_in_one_step_see_the_old_weights() -> None:
    _, loss, _ = _problem("float64")
    train = gf.optim.SGD(0.01).minimize(loss)
    with gf.Session() as s:
        losses = [float(s.run([loss, train])[0]) for _ in range(3)]
        assert losses[0] == pytest.approx(1 + 12 + 0.9)
        assert losses == sorted(losses, reverse=True)


def test_two_updates_of_a_variable_in_one_step_are_told_by_the_lines_that_ask_for_them() -> None:
    w = gf.variable(np.ones(2), name="w")
    loss = gf.sum(w * w)
    halved = gf.assign(w, w * 0.5)
    train = gf.optim.SGD(0.1).minimize(loss)
    lines = [tensor.node.location for tensor in (halved, train)]
    with gf.Session() as s, pytest.raises(VariableError, match=r"'w'.*twice") as raised:
        s.run([halved, train])
    assert f"at {lines[0]} and {lines[1]};" in str(raised.value)


def test_slots_and_updates_are_built_where_the_variable_is_pinned() -> None:
    with gf.device("cpu:1"):
        w = gf.variable([1.0], name="w")
    loss = gf.sum(w * w)
    train = gf.optim.Adam(0.1).minimize(loss)
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        s.run(train)
        placement = s.plan().placement
    assert placement["w"] == "/worker:0/cpu:1"
    slots = [name for name in placement if name.startswith("train/w/")]
    assert len(slots) == 2
    assert all(placement[name] == "/worker:0/cpu:1" for name in slots)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).minimize(gf.constant(1.0))),
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, [])),
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, w)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, var_list=[w])),
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, 5)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, transform=3)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, transform=lambda g: None)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1, 0.9, "yes")),
        (ArgumentError, lambda w, loss: gf.optim.SGD(True)),
        (ArgumentError, lambda w, loss: gf.optim.clip_by_global_norm(w, 1.0)),
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, [w, w])),
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, [w * 1.0])),
        (VariableError, lambda w, loss: gf.optim.SGD(0.1).apply([w, w], [w])),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1).apply([np.ones(3)], [w])),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1).minimize(loss, strategy="data")),
        (DifferentiationError, lambda w, loss: gf.optim.SGD(0.1).minimize(w)),
        (DifferentiationError, lambda w, loss: gf.optim.SGD(0.1).minimize(3.0)),
        (DifferentiationError, lambda w, loss: gf.optim.SGD(0.1).minimize(gf.argmax(w))),
        (ArgumentError, lambda w, loss: gf.optim.SGD(-0.1)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(float("nan"))),
        (ArgumentError, lambda w, loss: gf.optim.SGD("fast")),
        (ArgumentError, lambda w, loss: gf.optim.SGD(w)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1, nesterov=True)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1, momentum=1.5)),
        (ArgumentError, lambda w, loss: gf.optim.SGD(0.1, momentum=gf.constant(0.5))),
        (ArgumentError, lambda w, loss: gf.optim.Adam(beta1=1.0)),
        (ArgumentError, lambda w, loss: gf.optim.Adam(epsilon=-1.0)),
        (ArgumentError, lambda w, loss: gf.optim.AdamW(weight_decay=-1)),
        (ArgumentError, lambda w, loss: gf.optim.RMSProp(decay=2.0)),
        (ArgumentError, lambda w, loss: gf.optim.Adagrad(initial=None)),
        (ArgumentError, lambda w, loss: gf.optim.clip_by_global_norm([], 1.0)),
        (ArgumentError, lambda w, loss: gf.optim.clip_by_global_norm([w], 0.0)),
        (ArgumentError, lambda w, loss: gf.optim.clip_by_global_norm([w], "1")),
        (ArgumentError, lambda w, loss: gf.optim.clip_by_global_norm([1.0], 1.0)),
    ],
)
def test_mistakes_are_told_with_their_line(error: type[Exception], wrong: Any) -> None:
    w, loss, _ = _problem("float32")
    with pytest.raises(error, match=r"test_optimizers\.py:\d+") as caught:
        wrong(w, loss)
    assert len(str(caught.value)) > 40
