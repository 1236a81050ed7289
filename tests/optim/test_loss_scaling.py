"""Loss scaling: what float16 would lose arrives, and a step that overflows changes nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.ir.graph import Graph

OPTIMIZERS = [
    gf.optim.SGD(0.1),
    gf.optim.SGD(0.1, momentum=0.9),
    gf.optim.Adam(0.01),
    gf.optim.AdamW(0.01),
    gf.optim.RMSProp(0.01, momentum=0.5),
    gf.optim.Adagrad(0.01),
]


def scale_of(value: float) -> gf.Tensor:
    return gf.variable(np.float32(value), name="scale", trainable=False)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_step_that_overflows_changes_nothing_but_the_scale(optimizer: Any, bad: float) -> None:
    w = gf.variable(np.array([1.0, -2.0], "float32"), name="w")
    b = gf.variable(np.array([0.5], "float16"), name="b")
    x = gf.placeholder("float32", (2,))
    scale = scale_of(1024)
    loss = gf.sum(w * x) + gf.sum(b.astype("float32") * b.astype("float32"))
    step = optimizer.minimize(loss, scaling=gf.optim.LossScaling(scale))
    state = [n.outputs[0] for n in Graph(step).variables]
    with gf.Session() as s:
        s.run(step, {x: [1.0, 1.0]})
        before = {v.name: s.get(v).tobytes() for v in state}
        for _ in range(2):
            s.run(step, {x: [1.0, bad]})
        after = {v.name: s.get(v).tobytes() for v in state}
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"scale", "train/scale/good_steps"}
        assert s.get(scale) == 256
        moved = s.get(w).copy()
        s.run(step, {x: [1.0, 1.0]})
        assert (s.get(w) != moved).all() and s.get(scale) == 256


def test_the_scale_doubles_after_so_many_good_steps_and_stays_in_bounds() -> None:
    w = gf.variable(np.float32(1.0), name="w")
    x = gf.placeholder("float32")
    scale = scale_of(2.0**119)
    scaling = gf.optim.LossScaling(scale, interval=3)
    step = gf.optim.SGD(0.0).minimize(w * x, scaling=scaling)
    good, bad = 1e-10, float("nan")
    with gf.Session() as s:
        seen = []
        for value in [good] * 7 + [bad, good, good, bad, good, good, good]:
            s.run(step, {x: value})
            seen.append(float(np.log2(s.get(scale))))
        assert seen == [119, 119, 120, 120, 120, 120, 120, 119, 119, 119, 118, 118, 118, 119]
        s.set(scale, np.float32(2.0**-24))
        s.run(step, {x: bad})
        assert s.get(scale) == 2.0**-24


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_with_all_gradients_finite_a_power_of_two_changes_no_bit(optimizer: Any) -> None:
    finals = []
    for scaling in (None, gf.optim.LossScaling(4096.0)):
        w = gf.variable(np.linspace(-1, 1, 6, dtype="float32"), name="w")
        step = optimizer.minimize(gf.sum(gf.exp(w) * w), scaling=scaling)
        with gf.Session() as s:
            for _ in range(5):
                s.run(step)
            finals.append(s.get(w).tobytes())
    assert finals[0] == finals[1]


def test_gradients_below_float16_arrive() -> None:
    w = gf.variable(np.float16(1.0), name="w")
    loss = (w * np.float16(1e-4)) * np.float16(1e-5)  # its slope of 1e-9 is 0 in float16
    plain = gf.optim.SGD(1e6).minimize(loss, [w])
    scaled = gf.optim.SGD(1e6).minimize(loss, [w], scaling=gf.optim.LossScaling(2.0**15))
    with gf.Session() as s:
        s.run(plain)
        assert s.get(w) == 1
        s.run(scaled)
        assert s.get(w) == pytest.approx(0.999, abs=5e-4)


def test_the_transform_sees_gradients_of_the_loss_itself() -> None:
    w = gf.variable(np.float32(0.0), name="w")
    seen: list[Any] = []

    def keep(grads: list[gf.Tensor]) -> list[gf.Tensor]:
        seen.extend(grads)
        return grads

    gf.optim.SGD(1.0).minimize(w * 3.0, transform=keep, scaling=gf.optim.LossScaling())
    with gf.Session() as s:
        assert s.run(seen[0]) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 0},
        {"initial": float("inf")},
        {"initial": "high"},
        {"growth": 0.5},
        {"growth": None},
        {"backoff": 0},
        {"backoff": 1.5},
        {"interval": 0},
        {"interval": 2.0},
        {"interval": True},
    ],
)
def test_numbers_out_of_range_are_refused_with_the_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"LossScaling at .*test_loss_scaling\.py:\d+: "):
        gf.optim.LossScaling(**wrong)


def test_a_scale_is_a_float32_scalar_variable_and_scaling_a_loss_scaling() -> None:
    w = gf.variable(np.ones(2, "float32"))
    for wrong in (w, gf.placeholder("float32"), gf.variable(np.float64(1))):
        with pytest.raises(ArgumentError, match="float32 scalar variable"):
            gf.optim.LossScaling(wrong)
    with pytest.raises(ArgumentError, match=r"minimize at .*LossScaling, not 1024"):
        gf.optim.SGD(0.1).minimize(gf.sum(w), scaling=1024)  # type: ignore[arg-type]
