"""What planned nodes tell of the bodies that they hold."""

from __future__ import annotations

import graphflow as gf
from graphflow.placement.plans.plan_file import dumps, loads
from graphflow.placement.view.page.payload import payload


def plan_loop() -> gf.Plan:
    x = gf.placeholder("float32", (4, 8), name="x")

    def body(carry: gf.Tensor, row: gf.Tensor) -> tuple[gf.Tensor, gf.Tensor]:
        at = gf.tanh(carry + row)
        at = gf.cond(gf.sum(at) > 0.0, gf.exp, lambda a: a - 1.0, at)
        return at, at * 2.0

    with gf.name_scope("net"):
        carry, rows = gf.scan(body, x[0], x)
    return gf.plan(gf.sum(carry) + gf.sum(rows))


def test_a_plan_tells_what_its_nodes_hold() -> None:
    plan = plan_loop()
    holding = {node.name: [held.name for held in node.holds] for node in plan.nodes if node.holds}
    (name,) = holding
    assert name == "net/scan"
    assert {"add", "tanh", "cond", "cond/then/exp", "cond/orelse/subtract"} <= set(holding[name])
    by_name = {held.name: held for held in plan.by_name[name].holds}
    assert by_name["tanh"].inputs == ("add",)
    assert by_name["tanh"].output == "float32(8,)"
    assert by_name["tanh"].location.startswith("test_body_nodes.py:")


def test_what_nodes_hold_is_saved_and_loaded() -> None:
    plan = plan_loop()
    assert gf.Plan(**loads(dumps(plan), "plan.json")).nodes == plan.nodes


def test_what_nodes_hold_is_inside_them_in_the_page() -> None:
    data = payload(plan_loop())
    assert "net/scan/cond/then/exp" in data["nodes"]["name"]
    assert "net/scan" in data["groups"]["path"]
