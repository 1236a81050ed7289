"""What the page tells of a node and of a group, by its own code, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from graphflow.placement.plans.plan import Plan
from graphflow.placement.view.page.html import SCRIPTS
from graphflow.placement.view.page.payload import payload
from tests.placement.view.view_plans import towers

STUBS = """
const made = () => ({
  text: [], style: {}, dataset: {}, getContext: () => ({}), replaceChildren() { this.text = [] },
  append(...each) { this.text.push(...each) },
})
const elements = {}
const document = {createElement: made, getElementById: id => elements[id] ??= made()}
const window = {}, Bokeh = {documents: []}
"""
ASK = """
D = JSON.parse(require("fs").readFileSync(0, "utf-8"))
prepare()
state.boxes = new Map()
const told = {}
for (let item = 0; item < N + G.label.length; item++) {
  state.picked = item
  panel()
  const list = elements.detail.text.find(each => each.text?.some(e => e.textContent === "takes"))
  told[fullName(item)] = {tip: tip(item), panel: list.text.map(each => each.textContent)}
}
console.log(JSON.stringify(told))
"""


def read_tips(plan: Plan) -> dict[str, Any]:
    """Return by name what is shown on hovering, and in the panel."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node to run the page's code outside of a browser")
    folder = files("graphflow.placement.view.page")
    code = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    code = code[: code.rindex("begin().catch")]
    script = "\n".join([STUBS, code, ASK])
    done = subprocess.run(
        [node, "-e", script], input=json.dumps(payload(plan)), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def uncertain(plan: Plan) -> Plan:
    """Each node that takes time may take from half as long to twice as long."""
    return replace(
        plan,
        nodes=tuple(
            replace(
                node, low=(node.finish - node.start) / 2, high=(node.finish - node.start) * 2,
                basis="calibration of the op",
            ) if node.finish > node.start else node
            for node in plan.nodes
        ),
    )  # fmt: skip


def test_a_node_is_told_with_its_interval_and_its_basis() -> None:
    plan = uncertain(towers())
    found = read_tips(plan)
    name = "tower1/dense0/matmul"
    node = plan.by_name[name]
    took = node.finish - node.start
    digits = [f"{seconds * 1e6:.3g}" for seconds in (took, took / 2, took * 2)]
    text = f"{digits[0]} µs ({digits[1]} to {digits[2]})"
    assert found[name]["tip"]["took"].startswith(text)
    panel = found[name]["panel"]
    assert panel[panel.index("takes") + 1].startswith(text)
    assert panel[panel.index("known from") + 1] == "calibration of the op"


def test_without_an_interval_seconds_stand_alone() -> None:
    for name, each in read_tips(towers()).items():
        assert " to " not in each["tip"]["took"].partition(", from")[0], name
        assert "known from" not in each["panel"]


def test_a_group_has_no_interval_since_its_nodes_err_together_or_not() -> None:
    assert " to " not in read_tips(uncertain(towers()))["tower1"]["tip"]["took"]
