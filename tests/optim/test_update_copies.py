"""Which updates are copies, and what these keep of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.optim import update_copies


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the variables whose updates are copied from now on."""
    found: list[str] = []
    original = update_copies.UpdateCopies._copy_pattern

    def record_copy(self: Any, pattern: Any, variable: gf.Tensor, gradient: gf.Tensor) -> Any:
        found.append(variable.name)
        return original(self, pattern, variable, gradient)

    monkeypatch.setattr(update_copies.UpdateCopies, "_copy_pattern", record_copy)
    return found


def _weights(*shapes: tuple[int, ...], dtype: str = "float32") -> list[gf.Tensor]:
    return [gf.variable(np.ones(s, dtype), name=f"w{i}") for i, s in enumerate(shapes)]


def _loss(weights: list[gf.Tensor]) -> gf.Tensor:
    total: gf.Tensor = sum((gf.sum(gf.square(w)) for w in weights[1:]), gf.sum(weights[0] * 2.0))
    return total


def test_an_update_is_copied_for_each_further_variable_of_a_spec(copies: list[str]) -> None:
    gf.optim.Adam(0.1).minimize(_loss(_weights((3,), (2,), (3,), (2,), (4,))))
    assert copies == ["w2", "w3"]


def test_slots_are_named_after_their_own_variable_and_live_with_it(copies: list[str]) -> None:
    weights = _weights((3,), (3,))
    train = gf.optim.Adam(0.1).minimize(_loss(weights))
    slots = [n for n in Graph(train).variables if n.origin is weights[1].node]
    assert [slot.name for slot in slots] == ["train/w1/adam_mean", "train/w1/adam_square"]
    assert copies == ["w1"]


def test_a_pin_has_updates_of_its_own(copies: list[str]) -> None:
    weights = []
    for i in range(4):
        with gf.device(f"/worker:{i % 2}/cpu:0"):
            weights.append(gf.variable(np.ones(3, np.float32), name=f"w{i}"))
    train = gf.optim.SGD(0.1).minimize(_loss(weights))
    assert copies == ["w2", "w3"]
    for assign in Graph(train).of_op("assign"):
        assert str(assign.device) == str(assign.inputs[0].node.device)


def test_a_users_optimiser_may_look_at_the_variable(copies: list[str]) -> None:
    class Named(gf.optim.SGD):
        def _update(self, value: Any, gradient: Any, target: Any, shared: Any) -> Any:
            return value - gradient * (0.0 if target.variable.name == "w1" else 0.5)

    weights = _weights((3,), (3,))
    train = Named(0.1).minimize(_loss(weights))
    with gf.Session() as session:
        session.run(train)
        assert session.get(weights[0]).tolist() == [0.0] * 3
        assert session.get(weights[1]).tolist() == [1.0] * 3
    assert not copies


def test_a_rate_that_is_trained_itself_is_updated_by_itself() -> None:
    rate = gf.variable(np.float32(0.5), name="rate")
    weights = [rate, gf.variable(np.float32(2.0), name="w")]
    train = gf.optim.SGD(rate).apply([gf.constant(np.float32(1.0))] * 2, weights)
    with gf.Session() as session:
        session.run(train)
        assert [float(session.get(w)) for w in weights] == [0.0, 1.5]


def test_a_gradient_may_be_the_variable_or_that_of_another() -> None:
    weights = [gf.variable(np.float32(v), name=f"w{v}") for v in (1, 2, 4)]
    train = gf.optim.SGD(0.5).apply([weights[0], weights[0], weights[1]], weights)
    with gf.Session() as session:
        session.run(train)
        assert [float(session.get(w)) for w in weights] == [0.5, 1.5, 3.0]
