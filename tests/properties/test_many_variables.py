"""The way to the first step takes work in proportion to the variables, and not much for each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.nodes.scopes import seed_scope
from graphflow.optim.optimizer_base import Optimizer
from graphflow.passes import optimize

STEPS: dict[str, Callable[[], tuple[Optimizer, Any]]] = {
    "sgd": lambda: (gf.optim.SGD(0.1), None),
    "adam": lambda: (gf.optim.Adam(0.1), None),
    "sgd in replicas": lambda: (gf.optim.SGD(0.1), gf.parallel.Data(2)),
    "adam in replicas": lambda: (gf.optim.Adam(0.1), gf.parallel.Data(2)),
    "adam, its state shared": lambda: (
        gf.optim.Adam(0.1),
        gf.parallel.Data(2, shard_state=True),
    ),
}
OPTIMISERS = [
    gf.optim.SGD(0.1),
    gf.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    gf.optim.Adam(0.1),
    gf.optim.AdamW(0.1),
    gf.optim.RMSProp(0.1, momentum=0.5),
    gf.optim.Adagrad(0.1),
]


def _loss(count: int, large: int = 0) -> tuple[gf.Tensor, gf.Tensor]:
    """A placeholder and a loss of many small variables, and one of so many rows."""
    x = h = gf.placeholder("float32", ("batch", 4), name="x")
    for i in range(count):
        h = h + gf.variable(np.full(4, 0.001 * i, np.float32), name=f"v{i}") * 0.01
    if large:
        h = h + gf.mean(gf.variable(np.zeros((large, 4), np.float32), name="large"), axis=0)
    return x, gf.mean(gf.square(h))


def _first_step(count: int, name: str, large: int = 0) -> None:
    optimiser, strategy = STEPS[name]()
    x, loss = _loss(count, large)
    train = optimiser.minimize(loss, strategy=strategy)
    with gf.Session() as session:
        session.run([loss, train], {x: np.ones((6, 4), np.float32)})


def _calls(work: Callable[[], None]) -> Counter[str]:
    """How often functions were called, by name; those of C together, as ""."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1
        elif event == "c_call":
            found[""] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("name", STEPS)
def test_twice_the_variables_take_twice_the_calls(name: str) -> None:
    _first_step(20, name)  # what is compiled and imported once
    few, many = (_calls(lambda n=n: _first_step(n, name)) for n in (100, 200))
    assert many.total() < 2.2 * few.total()


def test_small_updates_beside_a_large_one_take_calls_in_proportion() -> None:
    rows = 1 << 16  # threads share its update, with the small ones in their wake
    _first_step(20, "sgd", rows)
    few, many = (_calls(lambda n=n: _first_step(n, "sgd", rows)) for n in (100, 200))
    assert many.total() < 2.2 * few.total()


@pytest.mark.parametrize(("name", "most"), [("adam", 12), ("adam in replicas", 16)])
def test_shapes_are_inferred_for_what_users_write_and_not_for_each_update(
    name: str, most: int
) -> None:
    _first_step(20, name)
    few, many = (_calls(lambda n=n: _first_step(n, name)) for n in (50, 100))
    assert (many["make_node"] - few["make_node"]) / 50 <= most


def _run_training(optimiser: Optimizer, strategy: Any) -> tuple[list[str], list[bytes]]:
    """The graphs of a step, as built and optimised; and the bits of variables, and of a number that
    is drawn from the next random stream, after some steps."""
    with seed_scope(0):
        x, loss = _loss(5)
        weights = [gf.variable(np.linspace(-i, 1, 12).reshape(4, 3)) for i in range(2)]
        errors = x.astype("float64") @ weights[0] - gf.tanh(x.astype("float64") @ weights[1])
        train = optimiser.minimize(loss + gf.mean(errors).astype("float32"), strategy=strategy)
        noise = gf.random.normal((3,))
    graph = Graph([loss, train, noise])
    with gf.Session() as session:
        for step in range(3):
            fed = np.random.default_rng(step).standard_normal((6, 4)).astype(np.float32)
            drawn = session.run([loss, train, noise], {x: fed})[2]
        values = [session.get(node.outputs[0]) for node in graph.variables]
    made = [
        f"{node.device} {node.turn} {node.location} {node.origin and node.origin.name}"
        for node in graph.nodes
    ]
    bits = [drawn.tobytes(), *(np.asarray(value).tobytes() for value in values)]
    return [str(graph), str(optimize(graph)), *made], bits


@pytest.mark.parametrize("strategy", [None, gf.parallel.Data(2)], ids=["alone", "replicas"])
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=repr)
def test_copied_updates_are_those_that_are_built_one_by_one(
    optimiser: Optimizer, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = _run_training(optimiser, strategy)
    monkeypatch.setattr(Optimizer, "_is_determined_by_specs", lambda *_: False)
    assert copied == _run_training(optimiser, strategy)
