"""What the cost model knows of nodes that run as one kernel, and what a plan says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphflow as gf
from graphflow.ir.op import Tensor
from graphflow.placement.view.tree import Group, tree

TWO = gf.Cluster.hypothetical(
    2, ("cpu:0",), flops=2e12, bandwidth=1e10, memory=1 << 30, launch=1e-6, link_bandwidth=1e9
)
"""What a session learned on this machine, busy as it may be, does not count."""


def gate(x: Tensor) -> Tensor:
    """Six elementwise nodes, whose values but the last nobody else reads."""
    return gf.tanh(x * 2.0 + 1.0) * gf.nn.sigmoid(x) - 0.5


def test_a_region_is_one_kernel_of_the_plan_and_its_nodes_share_its_time() -> None:
    x = gf.placeholder("float32", (512, 512))
    plan = gf.plan(gate(x), TWO)
    inside = [node for node in plan.nodes if node.op != "placeholder"]
    assert {node.fused for node in inside} == {inside[-1].name}
    apart = gf.plan([gate(x), *_each(x)], TWO)  # every value is kept: more passes over memory
    assert plan.makespan < apart.makespan


def _each(x: Tensor) -> list[Tensor]:
    first = gf.tanh(x * 2.0 + 1.0)
    return [first, gf.nn.sigmoid(x), x * 2.0]


def test_a_fused_chain_is_predicted_to_take_less_than_its_nodes_by_themselves() -> None:
    x = gf.placeholder("float32", (1024, 1024))
    chain = x
    for _ in range(10):
        chain = chain + 1.0
    one, ten = gf.plan(x + 1.0, TWO), gf.plan(chain, TWO)
    took = [sum(n.finish - n.start for n in plan.nodes if n.op == "add") for plan in (one, ten)]
    assert took[0] * (1 - 1e-9) <= took[1] < 3 * took[0]


def test_pins_part_a_region() -> None:
    x = gf.placeholder("float32", (64, 64))
    with gf.device("/worker:0"):
        a = gf.tanh(x) * 2.0
    with gf.device("/worker:1"):
        b = gf.exp(a) + 1.0
    plan = gf.plan(b, TWO)
    kernels = {node.fused for node in plan.nodes if node.fused}
    assert len(kernels) == 2
    for name in kernels:
        assert len({n.device for n in plan.nodes if n.fused == name}) == 1


def test_explain_names_the_others_of_a_kernel_and_a_file_keeps_them(tmp_path: Path) -> None:
    x = gf.placeholder("float32", (8, 8))
    plan = gf.plan(gate(x), TWO)
    (tanh,) = [node.name for node in plan.nodes if node.op == "tanh"]
    assert "one kernel with: multiply" in plan.explain(tanh)
    plan.save(tmp_path / "plan.json")
    assert gf.Plan.load(tmp_path / "plan.json").nodes == plan.nodes


@pytest.mark.parametrize("scoped", [False, True])
def test_the_page_folds_the_nodes_of_a_kernel_inside_their_scope(scoped: bool) -> None:
    x = gf.placeholder("float32", (8, 8))
    with gf.name_scope("block") if scoped else gf.name_scope("other"):
        y = gate(x @ x) @ x
    made = tree(gf.plan(y, TWO))
    labels, pending = [], [made.root]
    while pending:
        group = pending.pop()
        labels.append(group.label)
        pending += [member for member in group.members if isinstance(member, Group)]
    assert any("kernel: multiply … subtract" in label for label in labels)
