from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import PlacementError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition
from tests.properties.random_graphs import random_case
from tests.properties.test_bit_equality import scatter_nodes
from tests.runtime.programs import CPU, OTHER, place_nodes

DEVICES = ("/worker:0/cpu:0", "/worker:0/cpu:1", "/worker:1/cpu:0")


def list_computing_nodes(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op.name not in (*UNPLACED_OPS, "send", "recv")]


def cut(seed: int) -> tuple[Graph, dict[Node, str], dict[str, Partition]]:
    graph = random_case(seed, nodes=15).graph
    devices = scatter_nodes(graph, DEVICES, seed)
    return graph, devices, partition(graph, devices)


seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=30)


@given(seeds)
@few
def test_a_tensor_crosses_to_a_device_once_however_many_read_it_there(seed: int) -> None:
    graph, devices, parts = cut(seed)
    wanted = {
        (tensor, devices[node])
        for node in graph.nodes
        if node.op.name not in UNPLACED_OPS
        for tensor in node.inputs
        if tensor.node.op.name not in UNPLACED_OPS and devices[tensor.node] != devices[node]
    }
    sends = [
        (s.attrs["edge"], name, s.attrs["target"], s.inputs[0].spec)
        for name, part in parts.items()
        for s in part.graph.of_op("send")
    ]
    recvs = [
        (r.attrs["edge"], r.attrs["source"], name, r.specs[0])
        for name, part in parts.items()
        for r in part.graph.of_op("recv")
    ]
    assert sorted(sends, key=str) == sorted(recvs, key=str)
    assert len(sends) == len(wanted)
    assert sorted(edge for edge, *_ in sends) == list(range(len(sends)))


@given(seeds)
@few
def test_the_partitions_together_are_the_graph(seed: int) -> None:
    graph, devices, parts = cut(seed)
    for name, part in parts.items():
        assert part.device == name
        part.graph.verify()
        mine = [graph.names[n] for n in list_computing_nodes(graph) if devices[n] == name]
        assert [
            part.graph.names[n] for n in list_computing_nodes(part.graph)
        ] == mine  # and in its order
        assert {n.op.name for n in part.graph.nodes} & {"group"} == set()
    have = Counter(
        part.graph.names[n] for part in parts.values() for n in list_computing_nodes(part.graph)
    )
    assert have == Counter(graph.names[n] for n in list_computing_nodes(graph))


@given(seeds)
@few
def test_a_partition_is_fed_what_it_reads_and_fetches_what_it_has(seed: int) -> None:
    graph, devices, parts = cut(seed)
    for part in parts.values():
        assert sorted(part.feeds) == sorted(part.graph.names[n] for n in part.graph.placeholders)
    fetched = {i: name for name, part in parts.items() for i in part.fetches}
    assert fetched == {
        str(i): devices[t.node]
        for i, t in enumerate(graph.outputs)
        if t.node.op.name not in UNPLACED_OPS
    }


@given(seeds)
@few
def test_a_send_follows_its_node_at_once_and_the_program_does_not_wait_for_itself(
    seed: int,
) -> None:
    _, _, parts = cut(seed)
    for part in parts.values():
        nodes = part.graph.nodes
        for i, node in enumerate(nodes):
            if node.op.name == "send":
                made = nodes.index(node.inputs[0].node)
                assert all(n.op.name == "send" for n in nodes[made + 1 : i])


@given(seeds)
@few
def test_programs_that_run_in_their_order_never_deadlock(seed: int) -> None:
    _, _, parts = cut(seed)
    sent: set[int] = set()
    left = {name: list(part.graph.nodes) for name, part in parts.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for nodes in left.values():
            while nodes and (nodes[0].op.name != "recv" or nodes[0].attrs["edge"] in sent):
                node = nodes.pop(0)
                if node.op.name == "send":
                    sent.add(node.attrs["edge"])
        assert sum(map(len, left.values())) < before


def test_constants_and_feeds_are_wherever_they_are_read() -> None:
    x = gf.placeholder("float32", (3,), name="x")
    c = gf.constant([1.0, 2.0, 3.0])
    left, right = gf.multiply(x, c, name="left"), gf.multiply(x, c, name="right")
    graph = Graph([left, right])
    parts = partition(graph, place_nodes(graph, right=OTHER))
    assert [p.feeds for p in parts.values()] == [("x",), ("x",)]
    for part in parts.values():
        assert [n.op.name for n in part.graph.nodes if n.op.name in ("send", "recv")] == []
        assert len(part.graph.of_op("constant")) == 1


def test_nodes_keep_name_line_and_specs() -> None:
    x = gf.placeholder("float32", ("n", 3), name="x")
    y = gf.tanh(x, name="y")
    graph = Graph([y])
    (twin,) = partition(graph, place_nodes(graph))[CPU].graph.of_op("tanh")
    assert (twin.location, twin.specs) == (y.node.location, y.node.specs)


def test_an_order_is_kept() -> None:
    x = gf.placeholder("float32", (3,), name="x")
    a, b = gf.tanh(x, name="a"), gf.exp(x, name="b")
    graph = Graph([a, b])
    part = partition(graph, place_nodes(graph), order=[x.node, b.node, a.node])[CPU]
    assert [part.graph.names[n] for n in list_computing_nodes(part.graph)] == ["b", "a"]
    assert {i: part.graph.names[t.node] for i, t in part.fetches.items()} == {"0": "a", "1": "b"}


def test_variables_go_by_their_names_in_the_session() -> None:
    v = gf.variable([1.0], name="v")
    graph = Graph([v * 2.0])
    part = partition(graph, place_nodes(graph), variables={v.node: "v_7"})[CPU]
    assert [n.name for n in part.graph.variables] == ["v_7"]


def test_a_device_with_nothing_to_do_has_no_partition() -> None:
    x = gf.placeholder("float32", (3,), name="x")
    graph = Graph([x, gf.constant(1.0)])
    assert partition(graph, {}) == {}


def test_an_assignment_away_from_its_variable_is_refused() -> None:
    v = gf.variable(np.zeros(3, "float32"), name="v")
    update = gf.assign(v, v + 1.0, name="update")
    graph = Graph([update])
    with pytest.raises(PlacementError, match=r"'update' \(made at .*test_partition.py:\d+\)"):
        partition(graph, place_nodes(graph, update=OTHER))
