"""Stages of networks: as given, as the planner finds them, and what each gradient waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ScheduleError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.parallel.pipelining.stages import origin_of, stages_of, weight_gradients


def tower(layers: int = 6, size: int = 32, tied: bool = False) -> Tensor:
    """The loss of a chain of layers, each under a scope of its own."""
    x = gf.placeholder("float32", ("B", size), name="x")
    h = x
    first = None
    for i in range(layers):
        with gf.name_scope(f"layer{i}"):
            w = gf.variable(np.ones((size, size), np.float32), name=f"w{i}")
            first = w if first is None else first
            h = gf.tanh(h @ (first if tied and i == layers - 1 else w))
    with gf.name_scope("loss"):
        return gf.mean(gf.square(h - x))


SCOPES = [["layer0", "layer1"], ["layer2", "layer3", "layer4"], ["layer5", "loss"]]


def matmuls(loss: Tensor, stages: Any) -> list[int]:
    found = stages_of(loss, stages)
    return [found[node] for node in Graph([loss]).of_op("matmul")]


def test_scopes_are_stages() -> None:
    assert matmuls(tower(), SCOPES) == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (1, [0, 0, 0, 0, 0, 0]),
        (2, [0, 0, 0, 1, 1, 1]),
        (3, [0, 0, 1, 1, 2, 2]),
        (6, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_planner_divides_a_chain_evenly(count: int, wanted: list[int]) -> None:
    assert matmuls(tower(), count) == wanted


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    def build_narrow_network() -> Tensor:
        x = gf.placeholder("float32", (64, 256), name="x")
        h: Tensor = x
        for i, (n, m) in enumerate([(256, 256), (256, 256), (256, 4), (4, 256), (256, 256)]):
            h = gf.tanh(h @ gf.variable(np.ones((n, m), np.float32), name=f"w{i}"))
        return gf.mean(h)

    def cuts(bandwidth: float) -> list[int]:
        there = gf.Cluster.hypothetical(
            2, flops=1e12, bandwidth=1e12, memory=1 << 30, launch=0.0, link_bandwidth=bandwidth
        )
        loss = build_narrow_network()
        found = stages_of(loss, 2, there)
        return [found[node] for node in Graph([loss]).of_op("matmul")]

    assert cuts(1e13) == [0, 0, 1, 1, 1]
    assert cuts(1e9) == [0, 0, 0, 1, 1]  # 1 KiB crosses
    assert sorted(set(cuts(1e3))) == [0, 1]  # no link is so slow that a stage stays empty


def test_every_node_is_in_one_stage_and_reads_from_earlier_ones() -> None:
    loss = tower()
    for stages in (SCOPES, 2, 4):
        found = stages_of(loss, stages)
        for node in Graph([loss]).nodes:
            if node.op.name not in ("constant", "placeholder"):
                assert all(found.get(t.node, 0) <= found[node] for t in node.inputs)


def test_a_tied_weight_lives_where_it_is_read_first() -> None:
    loss = tower(tied=True)
    found = stages_of(loss, SCOPES)
    (variable,) = [v for v in Graph([loss]).variables if v.name.endswith("w0")]
    assert found[variable] == 0


def test_a_gradient_in_the_network_is_in_the_stage_of_its_scope() -> None:
    x = gf.placeholder("float64", (None, 3), name="x")
    with gf.name_scope("network"):
        u = gf.tanh(x @ gf.variable(np.ones((3, 2)), name="w"))
    with gf.name_scope("equation"):
        (slope,) = gf.gradients(gf.sum(u), [x])
        loss = gf.mean(gf.square(slope + 1.0))
    found = stages_of(loss, ["network", "equation"])
    assert found[slope.node] == 1


def test_nodes_may_be_listed() -> None:
    x = gf.placeholder("float32", (4, 3), name="x")
    h = gf.exp(x)
    loss = gf.sum(h)
    found = stages_of(loss, [[h], [loss.node]])
    assert (found[h.node], found[loss.node]) == (0, 1)


def test_only_gradients_of_weights_are_put_off() -> None:
    loss = tower()
    train = gf.optim.Adam(1e-3).minimize(loss)
    graph = Graph([train, loss])
    late = weight_gradients(graph, stages_of(loss, 3))
    products = [n for n in graph.of_op("matmul") if n.name.startswith("gradients/")]
    by_layer: dict[str, list[bool]] = {}
    for node in products:
        by_layer.setdefault(origin_of(node).name, []).append(node in late)
    assert by_layer.pop("layer0/matmul") == [True]  # nobody needs the gradient of x
    assert len(by_layer) == 5
    assert all(sorted(found) == [False, True] for found in by_layer.values())


X = gf.placeholder("float32", (4, 3), name="x")
H = gf.exp(X)
LOSS = gf.sum(gf.square(H))
H_1 = gf.exp(H)
DEEP = gf.sum(gf.exp(H_1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stages_of(tower(), 0), "0 stages for a network of"),
        (lambda: stages_of(tower(), 1000), "1000 stages for a network of 15 nodes"),
        (lambda: stages_of(tower(), "auto"), "give a number, or a list"),
        (lambda: stages_of(tower(), []), "give a number, or a list"),
        (lambda: stages_of(tower(), True), "give a number, or a list"),
        (lambda: stages_of(tower(), ["layer0", "layer1"]), "11 of 15 nodes are in none of the 2"),
        (
            lambda: stages_of(tower(), ["layers"]),
            "no node is under the name scope 'layers'.*layer0",
        ),
        (lambda: stages_of(tower(), [["layer0"], ["layer0", "layer1"]]), "is in stages 0 and 1"),
        (lambda: stages_of(LOSS, [[LOSS], [H, LOSS.node.inputs[0]]]), "reads.*of stage 1"),
        (lambda: stages_of(DEEP, [DEEP.node.inputs[0], DEEP]), r"2 of 4.*: 'exp' .*, 'exp_1' "),
        (
            lambda: stages_of(DEEP, [[DEEP, H, H_1], DEEP.node.inputs[0]]),
            "put 'exp_2' into stage 0",
        ),
        (lambda: stages_of(LOSS, [[gf.exp(LOSS)]]), "the loss does not depend on it"),
        (lambda: stages_of(LOSS, [[3]]), "stage 0 has 3"),
        (lambda: stages_of(LOSS, [[H, LOSS], []]), "stage 1 is empty: give it nodes"),
        (lambda: stages_of(LOSS, [X, [H, LOSS]]), "stage 0 computes nothing: it has only"),
    ],
)
def test_what_makes_no_stages_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()
