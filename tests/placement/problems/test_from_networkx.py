"""networkx graphs as problems: what attributes mean, and errors that name nodes and edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ProblemError
from graphflow.placement import Problem, place, simulate
from tests.placement.instances import topcuoglu

INF = float("inf")


def chain(**settings: Any) -> nx.DiGraph:
    g = nx.DiGraph(**settings)
    g.add_node("load", compute={"cpu": 1.0}, output_memory=8)
    g.add_node("train", compute={"cpu": 5.0, "gpu": 1.0}, memory=100, group="model")
    g.add_node("save", compute={"cpu": 1.0, "gpu": 2.0}, group="model", prefer="train")
    g.add_edge("load", "train", bytes=10, tensor="batch")
    g.add_edge("load", "save", bytes=10, tensor="batch")
    g.add_edge("train", "save")
    return g


def test_attributes_become_arrays_in_the_order_of_the_nodes() -> None:
    problem = Problem.from_networkx(
        chain(latency=0.5, bandwidth=10.0, capacity={"gpu": 200}, contention=True)
    )
    assert problem.compute.tolist() == [[1.0, INF], [5.0, 1.0], [1.0, 2.0]]
    assert problem.edges.tolist() == [[0, 1], [0, 2], [1, 2]]
    assert problem.bytes.tolist() == [10.0, 10.0, 0.0]
    assert problem.tensor[0] == problem.tensor[1] != problem.tensor[2]
    assert problem.memory.tolist() == [0.0, 100.0, 0.0]
    assert problem.output_memory is not None and problem.output_memory.tolist() == [8.0, 0.0, 0.0]
    assert problem.groups[0] == -1 and problem.groups[1] == problem.groups[2] >= 0
    assert problem.prefer.tolist() == [-1, -1, 1]
    assert problem.capacity.tolist() == [INF, 200.0]
    assert problem.latency.tolist() == [[0.5, 0.5]] * 2 and problem.contention
    timeline = simulate(problem, place(problem, "exact"))
    assert timeline.makespan == 1.0 + 0.5 + 1.0 + 1.0 + 2.0


def test_a_textbook_graph_comes_back_the_same() -> None:
    known = topcuoglu()
    g = nx.DiGraph()
    for v in range(known.nodes):
        g.add_node(f"n{v + 1}", compute=known.compute[v])
    for (a, b), size in zip(known.edges.tolist(), known.bytes.tolist(), strict=True):
        g.add_edge(f"n{a + 1}", f"n{b + 1}", bytes=size)
    problem = Problem.from_networkx(g)
    assert simulate(problem, place(problem, "heft")).makespan == pytest.approx(80.0)
    assert simulate(problem, place(problem, "auto")).makespan == pytest.approx(73.0)


def test_one_number_of_seconds_is_for_all_devices_and_edges_may_be_parallel() -> None:
    g = nx.MultiDiGraph(devices=3)
    g.add_node(0, compute=2)
    g.add_node(1, compute=[1, 2, 3])
    g.add_edge(0, 1, bytes=4)
    g.add_edge(0, 1, bytes=6)
    problem = Problem.from_networkx(g)
    assert problem.compute.tolist() == [[2.0] * 3, [1.0, 2.0, 3.0]]
    assert problem.bytes.tolist() == [4.0, 6.0] and len(set(problem.tensor.tolist())) == 2


def test_the_graph_of_a_plan_is_a_problem_again() -> None:
    x = gf.placeholder("float32", (256, 512), name="x")
    y = gf.sum(gf.tanh(x @ gf.variable(gf.init.zeros((512, 512)), name="w")))
    made = gf.plan(y, gf.Cluster.hypothetical("2xh100")).to_networkx()
    made.remove_node("x")
    problem = Problem.from_networkx(made)
    assert problem.devices == 3 and problem.client == 2  # who feeds and fetches is one, too
    assert problem.nodes == len(made)
    assert np.isfinite(problem.compute[:, :2]).all() and np.isinf(problem.compute[:, 2]).all()


def test_an_empty_graph_is_an_empty_problem() -> None:
    assert Problem.from_networkx(nx.DiGraph()).nodes == 0


def node(g: nx.DiGraph, name: str, **changes: Any) -> None:
    g.nodes[name].update(changes)


def edge(g: nx.DiGraph, *ends: str, **changes: Any) -> None:
    g.edges[ends].update(changes)


def drop(g: nx.DiGraph, name: str, key: str) -> None:
    del g.nodes[name][key]


WRONG: list[tuple[Callable[[nx.DiGraph], Any], str]] = [
    (lambda g: drop(g, "train", "compute"), "node 'train': 'compute' is missing"),
    (
        lambda g: (drop(g, "train", "compute"), node(g, "train", compue=1)),
        "node 'train': 'compue' is no attribute; did you mean 'compute'",
    ),
    (lambda g: node(g, "load", compute={"cpu": -1}), "node 'load': compute is -1"),
    (lambda g: node(g, "load", compute={"cpu": "1"}), "node 'load': compute is '1', not a number"),
    (lambda g: node(g, "load", compute={"cpu": float("nan")}), "node 'load': compute is nan"),
    (lambda g: node(g, "load", compute={"cpu": INF}), "node 'load' has no device"),
    (lambda g: node(g, "save", compute=[1.0]), "node 'save': compute has 1 numbers for 2 devices"),
    (lambda g: node(g, "save", memory=-5), "node 'save': memory is -5"),
    (lambda g: node(g, "save", memory=INF), "node 'save': memory is inf"),
    (lambda g: node(g, "save", prefer="lode"), "node 'save': prefer names 'lode', which is no"),
    (lambda g: node(g, "save", group=[1]), r"node 'save': group \[1\] cannot be a name"),
    (
        lambda g: (node(g, "train", compute={"gpu": 1}), node(g, "save", compute={"cpu": 1})),
        "group 'model' has no device .*'train' runs on 'gpu'; 'save' runs on 'cpu'",
    ),
    (lambda g: edge(g, "load", "train", bytes=-1), "edge 'load' -> 'train': bytes is -1"),
    (lambda g: edge(g, "load", "train", bytes="x"), "edge 'load' -> 'train': bytes is 'x'"),
    (
        lambda g: edge(g, "load", "train", bytes=11),
        "edge 'load' -> 'save' and edge 'load' -> 'train' carry tensor 'batch', but differ",
    ),
    (
        lambda g: edge(g, "train", "save", tensor="batch", bytes=10),
        "carry tensor 'batch', but come from different nodes",
    ),
    (
        lambda g: edge(g, "train", "save", byts=3),
        "edge 'train' -> 'save': 'byts' is no attribute; did you mean 'bytes'",
    ),
    (
        lambda g: g.add_edge("save", "train"),
        "cycle: ('save' -> 'train' -> 'save'|'train' -> 'save' -> 'train')",
    ),
    (lambda g: g.graph.update(devices=["cpu"]), "node 'train': compute names 'gpu'; devices are"),
    (
        lambda g: node(g, "load", groups="model"),
        "node 'load': 'groups' is no attribute; did you mean 'group'",
    ),
    (
        lambda g: g.graph.update(latancy=1.0),
        "graph: 'latancy' is no attribute; did you mean 'latency'",
    ),
    (lambda g: g.graph.update(devices="cpu"), "'devices' is 'cpu': give names"),
    (lambda g: g.graph.update(devices=["a", "a"]), "give each name once"),
    (lambda g: g.graph.update(client="tpu"), "'client' is 'tpu', which is no device"),
    (lambda g: g.graph.update(capacity={"tpu": 1}), "'capacity' names 'tpu', no device"),
    (lambda g: g.graph.update(latency=-1.0), "'latency' is -1"),
    (lambda g: g.graph.update(bandwidth=[[1, 0], [1, 1]]), "not connected"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_a_wrong_attribute_names_its_node_or_edge(
    spoil: Callable[[nx.DiGraph], Any], message: str
) -> None:
    g = chain(devices=["cpu", "gpu"])
    spoil(g)
    with pytest.raises(ProblemError, match=message):
        Problem.from_networkx(g)


def test_graphs_without_directions_and_other_things_are_refused() -> None:
    with pytest.raises(ProblemError, match="not directed"):
        Problem.from_networkx(nx.Graph([(1, 2)]))
    with pytest.raises(ProblemError, match=r"made of a networkx\.DiGraph, not 7"):
        Problem.from_networkx(7)
    g = nx.DiGraph()
    g.add_node("a", compute=1.0)
    with pytest.raises(ProblemError, match="node 'a': no 'compute' that says which devices"):
        Problem.from_networkx(g)
