"""Loops, branches and calls on pieces: each place runs a body of its own where it can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.parallel.models import Model, difference, train_on_one_device

Data, Shard = gf.parallel.Data, gf.parallel.Shard


def recurrent(strategy: Any = None, kind: str = "scan") -> Model:
    random = np.random.default_rng(0)
    x = gf.placeholder("float64", (None, 5, 3), name="x")
    t = gf.placeholder("float64", (None, 4), name="t")
    w = gf.variable(random.normal(size=(3, 4)) * 0.5, name="w")
    u = gf.variable(random.normal(size=(4, 4)) * 0.5, name="u")
    steps = gf.permute_dims(x, (1, 0, 2))
    begin = gf.zeros((x.shape[0], 4), "float64")

    def step(h: Any, row: Any) -> Any:
        new = gf.tanh(row @ w + h @ u)
        return new, new * gf.tanh(new @ u) if kind == "twice" else new

    if kind in ("scan", "twice"):
        h, rows = gf.scan(step, begin, steps)
        h = gf.sum(rows, 0) if kind == "twice" else h
    elif kind == "while":
        h, _ = gf.while_loop(
            lambda state: state[1] < 3,
            lambda state: (gf.tanh(x[:, 0] @ w + state[0] @ u), state[1] + 1),
            (begin, gf.constant(np.int64(0))),
            max_iterations=4,
        )
    elif kind == "cond":
        h = gf.cond(gf.sum(w) > 100.0, lambda: gf.tanh(x[:, 0] @ w), lambda: x[:, 1] @ w @ u)
    elif kind == "call":
        h = gf.call(lambda a: gf.tanh(a @ w) @ u, x[:, 0])
    else:
        h = gf.checkpoint(lambda a: gf.tanh(a @ w) @ u)(x[:, 0])
    loss = gf.mean((h - t) ** 2.0)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)

    def feeds(random: np.random.Generator, batch: int) -> dict[gf.Tensor, Any]:
        return {x: random.normal(size=(batch, 5, 3)), t: random.normal(size=(batch, 4))}

    return Model([loss, train], [w, u], feeds)


KINDS = ("scan", "twice", "while", "cond", "call", "checkpoint")


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "strategy",
    [Data(2), Data(3, shard_state=True), Shard({"m": 2}, {"w": (None, "m")}),
     Shard({"m": 2}, {"u": ("m",)})],
    ids=["two", "three", "columns", "rows"],
)  # fmt: skip
def test_bodies_on_pieces_give_what_they_give_whole(kind: str, strategy: Any) -> None:
    assert (
        difference(recurrent(strategy, kind).train(), train_on_one_device(recurrent, kind=kind))
        < 1e-12
    )


@pytest.mark.parametrize("kind", ["scan", "twice", "while", "call"])
def test_only_sums_of_gradients_travel_where_replicas_run_bodies(kind: str) -> None:
    model = recurrent(Data(2), kind)
    report = Data(2).report(model.fetches[1:])  # without the loss, which would ride along
    assert {m.kind for m in report.collectives} == {"all-reduce"}
    assert sum(m.bytes for m in report.collectives) == 2 * 8 * (3 * 4 + 4 * 4)


@pytest.mark.parametrize("kind, op", [("scan", "scan"), ("while", "while_loop"), ("cond", "cond")])
def test_each_replica_runs_its_own_loop_on_its_share(kind: str, op: str) -> None:
    model = recurrent(Data(2), kind)
    graph = Data(2).report(model.fetches).division.graph
    nodes = [n for n in graph.nodes if n.op.name == op]
    assert {n.name.partition("/")[0] for n in nodes} == {"data=0", "data=1"}
    sizes = {str(s) for n in nodes for spec in n.specs for s in spec.shape}
    assert any("@data=0" in s for s in sizes) and not any("+" in s for s in sizes)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["scan", "while"])
@pytest.mark.parametrize("rule", [{"u": ("model",)}, {"w": (None, "model"), "u": (None, "model")}])
def test_replicas_keep_their_shares_where_weights_in_a_body_are_cut(kind: str, rule: Any) -> None:
    strategy = Data(2) * Shard({"model": 2}, rule)
    model = recurrent(strategy, kind)
    report = strategy.report(model.fetches)
    assert {m.kind for m in report.collectives if m.axis == "data"} == {"all-reduce"}
    loops = [n for n in report.division.graph.nodes if n.op.name in ("scan", "while_loop")]
    assert {n.name.partition(",")[0] for n in loops} == {"data=0", "data=1"}
    assert difference(model.train(), train_on_one_device(recurrent, kind=kind)) < 1e-12
    pipeline = gf.parallel.Pipeline(2, "1f1b", 2) * strategy
    assert (
        difference(recurrent(pipeline, kind).train(), train_on_one_device(recurrent, kind=kind))
        < 1e-12
    )


def test_what_was_tried_in_vain_is_not_reported() -> None:
    """A loop reads a sum, and gathers a weight that is cut: the sum is made once."""
    x = gf.placeholder("float64", (5, 6, 4), name="x")
    w, u = (gf.variable(np.ones((4, 4)) / 9, name=name) for name in "wu")
    _, h = gf.scan(lambda h, row: (gf.tanh(row + h @ u),) * 2, gf.zeros((6, 4), "float64"), x @ w)
    loss = gf.mean(h)
    strategy = Shard({"m": 2}, {"w": ("m",), "u": ("m",)})
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    found = strategy.report([loss, train]).collectives
    assert [m.bytes for m in found if m.kind == "all-reduce"] == [2 * 5 * 6 * 4 * 8]


def test_two_workers_run_a_body_each() -> None:
    here = recurrent(Data(2)).train()
    there = recurrent(Data(2)).train(gf.Cluster.local(2))
    assert here[0] == there[0]
