"""Recurrent functions against loops in numpy: gates, directions, lengths, peepholes, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

Step = Callable[..., tuple[np.ndarray, ...]]
T, B, N, H = 4, 3, 2, 2


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def loop(
    step: Step, x: np.ndarray, state: tuple[np.ndarray, ...], lengths: Any, reverse: bool
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """One direction, sequence by sequence."""
    y = np.zeros((len(x), x.shape[1], state[0].shape[-1]))
    last = [part.copy() for part in state]
    for b in range(x.shape[1]):
        length = len(x) if lengths is None else lengths[b]
        now = tuple(part[b] for part in state)
        for t in reversed(range(length)) if reverse else range(length):
            now = step(x[t, b], *now)
            y[t, b] = now[0]
        for part, end in zip(last, now, strict=True):
            part[b] = end
    return y, tuple(last)


def both_ways(
    steps: list[Step], x: np.ndarray, states: Any, lengths: Any, direction: str
) -> list[np.ndarray]:
    """y (T, B, D·H) and last states (D, B, H)."""
    runs = [
        loop(step, x, tuple(s[d] for s in states), lengths, d == 1 or direction == "reverse")
        for d, step in enumerate(steps)
    ]
    ends = zip(*(last for _, last in runs), strict=True)
    return [np.concatenate([y for y, _ in runs], -1), *(np.stack(end) for end in ends)]


def draw_weights(gates: int, sides: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((T, B, N), (sides, gates * H, N), (sides, gates * H, H), (sides, 2 * gates * H))
    return tuple(rng.normal(size=shape) for shape in shapes)


def assert_same(have: Any, want: list[np.ndarray], feeds: Any = None) -> None:
    y, state = have
    parts = [y, *(state if isinstance(state, tuple) else (state,))]
    for a, b in zip(evaluate(parts, feeds), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


DIRECTIONS = st.sampled_from(["forward", "reverse", "bidirectional"])
LENGTHS = st.none() | st.lists(st.integers(0, T), min_size=B, max_size=B)
CLIPS = st.sampled_from([None, 0.4])


@given(DIRECTIONS, LENGTHS, CLIPS, st.booleans(), st.booleans(), st.integers(0, 9))
@settings(max_examples=30)
def test_lstm_in_the_order_of_onnx_with_peepholes(
    direction: str, lengths: Any, limit: float | None, coupled: bool, peeps: bool, seed: int
) -> None:
    sides = 1 + (direction == "bidirectional")
    x, w, r, bias = draw_weights(4, sides, seed)
    rng = np.random.default_rng(seed + 100)
    states, peepholes = rng.normal(size=(2, sides, B, H)), rng.normal(size=(sides, 3 * H))

    def cut(z: np.ndarray) -> np.ndarray:
        return z if limit is None else np.clip(z, -limit, limit)

    def step_of(d: int) -> Step:
        p = np.split(peepholes[d] * peeps, 3)

        def step(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, ...]:
            wb, rb = np.split(bias[d], 2)
            i, o, f, g = np.split(w[d] @ x + r[d] @ h + wb + rb, 4)
            i = sigmoid(cut(i + p[0] * c))
            f = 1 - i if coupled else sigmoid(cut(f + p[2] * c))
            c = f * c + i * np.tanh(cut(g))
            return sigmoid(cut(o + p[1] * c)) * np.tanh(c), c

        return step

    have = nn.lstm(
        x, w, r, bias, tuple(states), peepholes=peepholes if peeps else None,
        lengths=None if lengths is None else np.array(lengths), direction=direction, clip=limit,
        input_forget=coupled, gates="iofg",
    )  # fmt: skip
    assert_same(have, both_ways([step_of(d) for d in range(sides)], x, states, lengths, direction))


@given(DIRECTIONS, LENGTHS, CLIPS, st.booleans(), st.integers(0, 9))
@settings(max_examples=30)
def test_gru_with_the_reset_before_or_after_the_linear_map(
    direction: str, lengths: Any, limit: float | None, after: bool, seed: int
) -> None:
    sides = 1 + (direction == "bidirectional")
    x, w, r, bias = draw_weights(3, sides, seed)
    states = np.random.default_rng(seed + 100).normal(size=(1, sides, B, H))

    def cut(z: np.ndarray) -> np.ndarray:
        return z if limit is None else np.clip(z, -limit, limit)

    def step_of(d: int) -> Step:
        def step(x: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, ...]:
            wb, rb = np.split(bias[d], 2)
            xz, xr, xn = np.split(w[d] @ x + wb, 3)
            (rz, rr, rn), (bz, br, bn) = np.split(r[d], 3), np.split(rb, 3)
            z, reset = sigmoid(cut(xz + rz @ h + bz)), sigmoid(cut(xr + rr @ h + br))
            past = reset * (rn @ h + bn) if after else rn @ (reset * h) + bn
            return ((1 - z) * np.tanh(cut(xn + past)) + z * h,)

        return step

    have = nn.gru(
        x, w, r, bias, states[0], lengths=None if lengths is None else np.array(lengths),
        direction=direction, clip=limit, linear_before_reset=after, gates="zrn",
    )  # fmt: skip
    assert_same(have, both_ways([step_of(d) for d in range(sides)], x, states, lengths, direction))


def test_rnn_takes_any_activation_and_the_batch_first() -> None:
    x, w, r, bias = draw_weights(1, 1, 0)

    def step(x: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.maximum(w[0] @ x + r[0] @ h + bias[0, :H] + bias[0, H:], 0),)

    want = both_ways([step], x, np.zeros((1, 1, B, H)), None, "forward")
    assert_same(nn.rnn(x, w, r, bias, activations="relu"), want)
    assert_same(nn.rnn(x, w, r, bias, activations=lambda z: gf.maximum(z, 0.0)), want)
    first = np.ascontiguousarray(x.swapaxes(0, 1))
    want[0] = want[0].swapaxes(0, 1)
    assert_same(nn.rnn(first, w, r, bias, activations="relu", batch_first=True), want)


def test_sizes_of_time_and_batch_may_be_unknown() -> None:
    data, w, r, _ = draw_weights(4, 1, 0)
    x = gf.placeholder("float64", (None, None, N))
    known, state = nn.lstm(data, w, r)
    y, (h, _) = nn.lstm(x, w, r)
    (slope,) = gf.gradients(gf.sum(y), [x])
    have = evaluate([y, h, slope], {x: data})
    want = evaluate([known, state[0]])
    for a, b in zip(have, want, strict=False):
        np.testing.assert_array_equal(a, b)
    assert have[2].shape == data.shape and have[2].any()


def test_sizes_of_states_and_cotangents_may_turn_out_to_fit_when_they_are_fed() -> None:
    """So they do where a strategy has cut an axis, and gathers it."""
    data, w, r, _ = draw_weights(4, 1, 0)
    x = gf.placeholder("float64", ("times", "rows", N))
    h, c = (gf.placeholder("float64", (1, name, H)) for name in ("h", "c"))
    y, _ = nn.lstm(x, w, r, initial=(h, c))
    seed = gf.placeholder("float64", ("steps", "examples", H))
    slopes = gf.gradients(gf.sum(seed * y), [x, h, c])
    zeros, ones = np.zeros((1, B, H)), np.ones((T, B, H))
    known = gf.constant(data)
    first, _ = nn.lstm(known, w, r)
    want = evaluate([first, *gf.gradients([first], [known])])
    have = evaluate([y, *slopes], {x: data, h: zeros, c: zeros, seed: ones})
    for a, b in zip(have, want, strict=False):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "f, gates, options",
    [(nn.lstm, 4, {}), (nn.gru, 3, {}), (nn.gru, 3, {"linear_before_reset": False})],
)
def test_recurrent_functions_are_differentiable_twice(
    f: Any, gates: int, options: dict[str, Any]
) -> None:
    x, w, r, bias = draw_weights(gates, 1, 0)
    v = gf.placeholder("float64", x.shape)
    y, _ = f(v, w, r, bias, **options)
    (g,) = gf.gradients(gf.sum(gf.square(y)), [v])
    (second,) = gf.gradients(gf.sum(gf.square(g)), [v])
    step = np.random.default_rng(1).normal(size=x.shape) * 1e-5
    up, down = (evaluate([g], {v: x + s})[0] for s in (step, -step))
    numeric = float((up**2).sum() - (down**2).sum()) / 2
    exact = float((evaluate([second], {v: x})[0] * step).sum())
    assert exact == pytest.approx(numeric, rel=1e-5)


def test_recurrent_functions_refuse_what_does_not_fit() -> None:
    x, w, r, bias = (a.astype("f") for a in draw_weights(4, 1, 0))
    with pytest.raises(ArgumentError, match=r"lstm at .*test_recurrent.*direction must be one of"):
        nn.lstm(x, w, r, direction="both")
    with pytest.raises(ShapeError, match=r"w \(1, 8, 2\) is not \(2, 8, 2\)"):
        nn.lstm(x, w, r, direction="bidirectional")
    with pytest.raises(ShapeError, match=r"bias \(1, 15\) is not"):
        nn.lstm(x, w, r, bias[:, :15])
    with pytest.raises(DTypeError, match="r is float64, x is float32"):
        nn.lstm(x, w, r.astype("float64"))
    with pytest.raises(ArgumentError, match="activation must be a function or one of"):
        nn.lstm(x, w, r, activations=("sigmoid", "tanh", "tan"))
    with pytest.raises(ArgumentError, match="3 activations"):
        nn.lstm(x, w, r, activations="tanh")
    with pytest.raises(ArgumentError, match="gates must be the letters"):
        nn.gru(x, w[:, :6], r[:, :6], gates="zrh")
    with pytest.raises(ArgumentError, match="clip must be a positive number"):
        nn.lstm(x, w, r, clip=0)
    with pytest.raises(ArgumentError, match="initial must hold 2 tensors"):
        nn.lstm(x, w, r, initial=(x,))
    with pytest.raises(DTypeError, match="lengths must be ints"):
        nn.lstm(x, w, r, lengths=np.ones(B, "f"))
    with pytest.raises(ShapeError, match=r"x must be \(T, B, inputs\)"):
        nn.rnn(x[0], w, r)


@pytest.mark.every(3)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(
    "f, gates, options",
    [
        (nn.lstm, 4, {}),
        (nn.lstm, 4, {"clip": 1.0, "input_forget": True}),
        (nn.gru, 3, {}),
        (nn.gru, 3, {"linear_before_reset": False}),
        (nn.rnn, 1, {"activations": "relu"}),
    ],
)
def test_padding_of_nan_reaches_no_output_and_no_gradient(
    f: Any, gates: int, options: dict[str, Any], direction: str, bad: float
) -> None:
    x, *weights = draw_weights(gates, 1 + (direction == "bidirectional"), 0)
    lengths = np.array([T, 2, 0])
    inside = np.arange(T)[:, None, None] < lengths[:, None]
    given = [gf.placeholder(a.dtype, a.shape) for a in (x, *weights)]
    y, last = f(*given, lengths=lengths, direction=direction, **options)
    outputs = [y, *(last if isinstance(last, tuple) else (last,))]
    slopes = gf.gradients([gf.sum(gf.sin(t)) for t in outputs], given)
    curved = gf.gradients([gf.sum(gf.sin(g)) for g in slopes], given)
    moved = gf.jvp(outputs, given, [np.ones(a.shape) for a in (x, *weights)])

    def evaluate_outputs(padding: float) -> list[Any]:
        feeds = dict(zip(given, (np.where(inside, x, padding), *weights), strict=True))
        return list(evaluate([*outputs, *slopes, *curved, *moved], feeds))

    for a, b in zip(evaluate_outputs(bad), evaluate_outputs(0.0), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
