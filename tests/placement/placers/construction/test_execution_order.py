"""The order that a schedule asks of devices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers.construction.execution_order import in_turns
from graphflow.placement.problems.problem import Assignment, Problem


def with_turns(outputs: list[Tensor], turns: dict[Node, int]) -> list[Tensor]:
    """The same graph, its nodes in turns."""
    twins: dict[Tensor, Tensor] = {}
    for node in Graph(outputs).nodes:
        twin = Node(
            node.op, tuple(twins[t] for t in node.inputs), node.attrs, node.specs, name=node.name,
            device=node.device, location=node.location, turn=turns.get(node, -1),
        )  # fmt: skip
        twins.update(zip(node.outputs, twin.outputs, strict=True))
    return [twins[t] for t in outputs]


@given(st.permutations(range(5)))
@settings(max_examples=20)
def test_a_device_runs_what_is_ready_in_turns(turns: list[int]) -> None:
    x = gf.placeholder("float32", (4, 4), name="x")
    products = []
    for i in range(5):
        with gf.name_scope(f"product{i}"):
            products.append(gf.matmul(x, x[::-1] * float(i + 2)))
    wanted = {y.node: turn for y, turn in zip(products, turns, strict=True)}
    plan = gf.plan(with_turns(products, wanted), Cluster.local(2))
    for device in plan.cluster.devices:
        mine = [n.name for n in plan.nodes if n.device == device and n.op == "matmul"]
        assert mine == sorted(mine, key=lambda name: turns[int(name[len("product")])])


def test_what_a_node_reads_comes_before_it_whatever_the_turns() -> None:
    edges = [(0, 1), (1, 2), (0, 3)]
    problem = Problem(np.ones((4, 1)), np.array(edges), np.zeros(3))
    x = gf.placeholder("float32", (), name="x")
    made = [
        Node(x.node.op, (), x.node.attrs, x.node.specs, name="n", device=x.node.device,
             location=x.node.location, turn=turn)
        for turn in (-1, 5, 0, 1)
    ]  # fmt: skip
    placed = Assignment(np.zeros(4, int), np.array([0, 1, 2, 3]))
    assert in_turns(placed, problem, made).order.tolist() == [0, 3, 1, 2]


def test_without_turns_nothing_changes() -> None:
    problem = Problem(np.ones((2, 1)), np.empty((0, 2), int), np.empty(0))
    x = gf.placeholder("float32", (), name="x").node
    placed = Assignment(np.zeros(2, int), np.array([1, 0]))
    assert in_turns(placed, problem, [x, x]) is placed


def test_what_replicas_exchange_leaves_in_the_order_in_which_it_was_made() -> None:
    x, y = (gf.placeholder("float32", (64, 64), name=name) for name in ("x", "y"))
    h, weights = x, []
    for i in range(4):
        weights.append(gf.variable(np.ones((64, 64), "float32"), name=f"w{i}"))
        h = gf.tanh(h @ weights[-1])
    strategy = gf.parallel.Data(2, bucket=0)
    train = gf.optim.SGD(0.1).minimize(gf.mean((h - y) ** 2), strategy=strategy)
    ones = np.ones((64, 64), "float32")
    with gf.Session(gf.Cluster.local(2)) as s:
        s.run(train, {x: ones, y: ones})
        plan = s.plan()
    mine = [n for n in plan.nodes if n.device.startswith("/worker:0")]
    sums = [i for i, n in enumerate(mine) if n.op == "all_reduce"]
    products = [i for i, n in enumerate(mine) if n.op == "matmul"]
    assert len(sums) == 4
    assert [sum(i < at for i in products) for at in sums] == [6, 8, 10, 11]


@pytest.mark.parametrize("replicas", [1, 2])
def test_updates_hold_up_no_pass_of_a_device_and_sums_over_replicas_are_not_put_off(
    replicas: int,
) -> None:
    x, y = (gf.placeholder("float64", ("B", 8), name=name) for name in "xy")
    h = x
    for i in range(4):
        with gf.name_scope(f"layer{i}"):
            h = gf.tanh(h @ gf.variable(np.ones((8, 8)), name=f"w{i}"))
    strategy = gf.parallel.Pipeline(4, "interleaved", 4)
    if replicas > 1:
        strategy = strategy * gf.parallel.Data(replicas, bucket=0)
    train = gf.optim.Adam(0.1).minimize(gf.mean((h - y) ** 2), strategy=strategy)
    plan = gf.plan(train, gf.Cluster.local(2 * replicas), {x: (16, 8), y: (16, 8)})
    for device in plan.cluster.devices:
        mine = [n for n in plan.nodes if n.device == device]
        passes = [i for i, n in enumerate(mine) if n.task]
        updates = [i for i, n in enumerate(mine) if n.op == "assign"]
        sums = [i for i, n in enumerate(mine) if n.op == "all_reduce"]
        assert len(updates) >= 6 and min(updates) > max(passes)  # of two stages
        assert not sums or min(sums) < max(passes)
        assert bool(sums) == (replicas > 1)


@pytest.mark.parametrize("dense", [False, True])
def test_keys_of_rows_leave_first_and_then_what_others_ask_for(dense: bool) -> None:
    """A device that began with the answer to others would send its keys behind many rows."""
    ids = [gf.placeholder("int64", (4096,), name=name) for name in ("users", "items")]
    tables = [gf.variable(gf.init.normal((100_000, 64)), name=f"table{i}") for i in range(2)]
    rows = [gf.nn.embedding(each, table) for each, table in zip(ids, tables, strict=True)]
    h = rows[0] * rows[1]
    if dense:
        h = gf.tanh(h @ gf.variable(gf.init.glorot((64, 64)), name="w"))
    strategy = gf.parallel.Data(2, tables=["table*"])
    train = gf.optim.Adagrad(0.1).minimize(gf.mean(h**2), strategy=strategy)
    slow = Cluster.hypothetical(
        2, ("cpu:0",), flops=1e10, bandwidth=1e10, memory=1 << 36, launch=1e-6, link_bandwidth=12e6
    )
    plan = gf.plan(train, slow)
    for number, device in enumerate(plan.cluster.devices):
        mine = [n for n in plan.nodes if n.device == device]
        routes = [i for i, n in enumerate(mine) if n.op == "route_rows"]
        lookups = [i for i, n in enumerate(mine) if n.op == "place_rows"]
        moved = [i for i, n in enumerate(mine) if n.op == "used_rows"]
        assert len(moved) == 10, number  # keys, rows for others and itself, sums of gradients
        assert max(*routes, moved[1]) < moved[2] < moved[3] < min(lookups)
