"""The tree that folds, the page's data, and the curves of memory."""

from __future__ import annotations

from dataclasses import replace

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.placement.plans.plan import Plan
from graphflow.placement.view import fold, svg
from graphflow.placement.view.fold import LARGEST, fold_large
from graphflow.placement.view.memory import POINTS, curves
from graphflow.placement.view.page.payload import LINKS, pack, payload, unpack
from graphflow.placement.view.tree import WIDEST, Group, tree
from tests.placement.view.view_plans import (
    Drawing,
    add_measurements,
    chain,
    kernels,
    network,
    plan_hostile_names,
    plan_nested_bodies,
    towers,
)

names = st.lists(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join),
    unique=True,
    max_size=60,
)


def plan_of_names(found: list[str]) -> Plan:
    d = Drawing(2)
    for i, name in enumerate(found):
        d.add(name, "tanh", i % 2, found[max(0, i - 2) : i], (8, 8))
    return d.plan()


def groups(root: Group) -> list[Group]:
    found = [root]
    for group in found:  # grows as it is read
        found += [member for member in group.members if isinstance(member, Group)]
    return found


@given(names)
def test_every_node_is_in_exactly_one_group(found: list[str]) -> None:
    made = tree(plan_of_names(found))
    members = [m for group in groups(made.root) for m in group.members if isinstance(m, int)]
    assert sorted(members) == list(range(len(found)))


@given(names)
def test_a_group_holds_what_its_path_begins(found: list[str]) -> None:
    made = tree(plan_of_names(found))
    for group in groups(made.root):
        for member in group.members:
            if isinstance(member, int) and group.path:
                assert f"{made.leaves[member].name}/".startswith(f"{group.path}/")


@given(names)
def test_the_nodes_of_a_group_are_a_range_in_the_page(found: list[str]) -> None:
    data = payload(plan_of_names(found))
    columns, inside = data["groups"], data["nodes"]["name"]
    assert sorted(inside) == sorted(found)
    for parent, start, end in zip(columns["parent"], columns["from"], columns["to"], strict=True):
        if parent >= 0:
            assert columns["from"][parent] <= start < end <= columns["to"][parent]


@given(names)
def test_edges_of_the_page_are_those_of_the_plan(found: list[str]) -> None:
    plan = plan_of_names(found)
    data = payload(plan)
    name, edges = data["nodes"]["name"], data["edges"]
    assert {(name[a], name[b]) for a, b in zip(edges["from"], edges["to"], strict=True)} == {
        (source, node.name) for node in plan.nodes for source in node.inputs
    }


@pytest.mark.parametrize("count", [WIDEST, WIDEST + 1, 3000])
def test_no_group_is_wider_than_a_screen(count: int) -> None:
    found = groups(tree(chain(count)).root)
    assert max(len(group.members) for group in found) <= WIDEST
    assert (len(found) == 1) == (count <= WIDEST)


def test_a_divided_group_tells_from_where_to_where() -> None:
    labels = [m.label for m in tree(chain(100)).root.members if isinstance(m, Group)]
    assert labels[:2] == ["tanh_0 … 9", "tanh_10 … 19"]


def test_kernels_are_groups_and_lend_their_nodes_names_to_ranges() -> None:
    groups = payload(kernels())["groups"]
    marked = [label for label, one in zip(groups["label"], groups["kernel"], strict=True) if one]
    assert marked == ["kernel: multiply … subtract", "gate", "kernel: add, abs"]
    d = Drawing(1)
    for i in range(200):
        d.add(f"exp_{i}", "exp", 0, [f"neg_{i - 1}"] if i else [])
        d.add(f"neg_{i}", "neg", 0, [f"exp_{i}"])
        for name in (f"exp_{i}", f"neg_{i}"):
            d.nodes[name] = replace(d.nodes[name], fused=f"neg_{i}")
    wide = payload(d.plan())["groups"]
    ranges = [
        label for label, one in zip(wide["label"], wide["kernel"], strict=True) if label and not one
    ]
    assert ranges and not [label for label in ranges if "kernel" in label]
    assert ranges[0].startswith("exp_0 … neg_")


def test_groups_stand_in_the_order_in_which_data_passes_them() -> None:
    data = payload(network(1000))
    layers = [label for label in data["groups"]["label"] if label.startswith("layer_")]
    assert layers == [f"layer_{i}" for i in range(20)]


def test_a_node_that_holds_bodies_is_a_group_of_what_they_hold() -> None:
    data = payload(plan_nested_bodies())
    names, found = data["nodes"]["name"], data["groups"]
    at = found["path"].index("net/scan")
    inside = names[found["from"][at] : found["to"][at]]
    assert inside[0] == "net/scan" == names[found["own"][at]]
    assert set(inside[1:]) == {
        f"net/scan/{h.name}" for h in plan_nested_bodies().by_name["net/scan"].holds
    }
    cond = found["path"].index("net/scan/cond")
    assert found["parent"][cond] == at
    # What it holds has no seconds and no bytes of its own, and reads only within its body.
    assert sum(data["nodes"]["took"]) == pytest.approx(
        sum(n.finish - n.start for n in plan_nested_bodies().nodes)
    )
    edges = {
        (names[a], names[b])
        for a, b in zip(data["edges"]["from"], data["edges"]["to"], strict=True)
    }
    assert ("net/scan/cond/then/argument_0", "net/scan/cond/then/neg") in edges
    assert ("net/first", "net/scan") in edges


def test_the_critical_path_ends_with_the_step() -> None:
    plan = towers()
    data = payload(plan)
    nodes, last = data["nodes"], data["critical"][-1]
    assert nodes["start"][last] + nodes["took"][last] == pytest.approx(plan.makespan)


def test_measured_bars_know_their_nodes() -> None:
    data = payload(add_measurements(towers()))
    bars, rows = data["timeline"]["bars"], data["timeline"]["rows"]
    of_nodes = [
        node
        for node, row in zip(bars["node"], bars["row"], strict=True)
        if rows[row]["measured"] and rows[row]["device"] >= 0
    ]
    assert of_nodes and all(node >= 0 for node in of_nodes)


def test_of_many_links_those_that_move_most_are_shown() -> None:
    d = Drawing(8)
    for i in range(8):
        d.add(f"a{i}", "tanh", i, (), (8, i + 1))
    for i in range(8):
        d.add(f"b{i}", "add_n", i, [f"a{j}" for j in range(8)], (8,))
    line = payload(d.plan())["timeline"]
    links = [row for row in line["rows"] if row["device"] < 0]
    assert len(links) == LINKS and line["hidden"] == 56 - LINKS
    assert not any(row["label"].startswith("/worker:0") for row in links)


def test_the_data_of_a_large_plan_is_small() -> None:
    data = payload(network(10_000))
    packed = pack(data)
    assert unpack(packed)["nodes"]["name"] == data["nodes"]["name"]
    assert len(packed) < 40 * 10_000


def test_hostile_names_survive_packing() -> None:
    data = payload(plan_hostile_names())
    assert "<" not in pack(data)
    assert any("<script>" in name for name in unpack(pack(data))["nodes"]["name"])


# Memory -------------------------------------------------------------------------------------------


def test_memory_peaks_where_the_plan_says() -> None:
    plan = towers()
    for name, curve in curves(plan).items():
        assert max(held for _, held in curve) == pytest.approx(plan.peak_memory[name])
        assert [at for at, _ in curve] == sorted(at for at, _ in curve)
        assert min(held for _, held in curve) >= 0


def test_an_output_is_held_until_its_last_reader_is_done() -> None:
    d = Drawing(1)
    d.add("a", "tanh", 0, (), (1000,), 1.0)
    d.add("b", "tanh", 0, ["a"], (10,), 1.0)
    d.add("c", "tanh", 0, ["b"], (10,), 1.0)
    plan = replace(d.plan(), peak_memory={d.cluster.devices[0]: 4040})
    (curve,) = curves(plan).values()
    assert dict(curve)[0.0] == 4000 and dict(curve)[1.0] == 4040
    assert curve[-1] == (3.0, 0)


def test_a_curve_of_many_moments_keeps_its_peak() -> None:
    plan = chain(3000)
    for name, curve in curves(plan).items():
        assert len(curve) <= POINTS + 1
        assert max(held for _, held in curve) == plan.peak_memory[name]


# Folding for paper --------------------------------------------------------------------------------


def test_a_plan_that_fits_on_paper_is_not_folded() -> None:
    plan = towers()
    assert fold_large(plan) is plan


@pytest.mark.parametrize(
    "plan",
    [network(2000), towers(count=8, layers=8), chain(1500), towers(workers=4, count=16, layers=4)],
    ids=["network", "towers", "chain", "many"],
)
def test_a_folded_plan_has_the_seconds_and_bytes_of_the_plan_and_no_circle(plan: Plan) -> None:
    small = fold_large(plan)
    assert len(small.nodes) <= LARGEST < len(plan.nodes)
    assert len(small.by_name) == len(small.nodes)
    for device in {node.device for node in plan.nodes}:
        for of in (lambda node: node.finish - node.start, lambda node: node.bytes):
            here, there = (
                sum(of(node) for node in each.nodes if node.device == device)
                for each in (plan, small)
            )
            assert here == pytest.approx(there)
    assert sum(t.bytes for t in small.transfers) == sum(t.bytes for t in plan.transfers)
    assert networkx.is_directed_acyclic_graph(small.to_networkx())


@given(names)
def test_folding_closes_no_circle(found: list[str]) -> None:
    plan = plan_of_names(found)
    made = tree(plan)
    for limit in (1, 2, 5):
        small = fold.fold(plan, made, limit)
        assert networkx.is_directed_acyclic_graph(small.to_networkx())
        assert sum(node.bytes for node in small.nodes) == sum(node.bytes for node in plan.nodes)


def test_a_layers_forward_and_backward_are_folded_apart() -> None:
    names = [node.name for node in fold_large(towers(count=8, layers=8)).nodes]
    assert {"tower3/dense4", "tower3/dense4 (2)"} <= set(names)


def test_the_svg_of_a_large_plan_stays_small() -> None:
    drawn = svg.render(network(20_000))
    assert len(drawn) < 500_000
    assert "layer_0 … " in drawn
