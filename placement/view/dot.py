"""Plan → Graphviz DOT: a cluster for each device, for those who lay graphs out themselves.

dot -Tpdf plan.dot -o plan.pdf
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.view import colours
from graphflow.placement.view.text import printable

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import PlannedNode


def render(plan: PlanData) -> str:
    """A DOT digraph; node identifiers are n0, n1, … in the order of execution."""
    devices = dict.fromkeys([*plan.cluster.devices, *(node.device for node in plan.nodes)])
    index = {node.name: i for i, node in enumerate(plan.nodes)}
    nodes = show_count(len(plan.nodes), "node")
    lines = [
        "digraph plan {",
        f"  label={quote(f'{nodes}, {show_seconds(plan.makespan)} a step')};",
        '  graph [rankdir=TB, fontname="Helvetica", labelloc=t];',
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];',
        f'  edge [color="{colours.WIRE}", arrowsize=0.6, fontname="Helvetica", fontsize=8];',
    ]
    for i, device in enumerate(devices):
        members = [node for node in plan.nodes if node.device == device]
        if not members:
            continue
        shade = colours.CLIENT if device == CLIENT else colours.shade(i)
        lines.append(f"  subgraph cluster_{i} {{")
        lines.append(f'    label={quote(device)}; color="{shade.strong}"; style=rounded;')
        lines.append(f'    node [fillcolor="{shade.tint}", color="{shade.strong}"];')
        lines += [f"    n{index[node.name]} {_attributes(node)};" for node in members]
        lines.append("  }")
    lines += _edges(plan, index)
    return "\n".join([*lines, "}", ""])


def _attributes(node: PlannedNode) -> str:
    label = f"{node.name}\n{node.op} {node.output}\n{show_seconds(node.finish - node.start)}"
    tip = f"{node.why}\n{node.location}"
    return f"[label={quote(label)}, tooltip={quote(tip)}]"


def _edges(plan: PlanData, index: dict[str, int]) -> list[str]:
    lines = []
    for node in plan.nodes:
        for name in dict.fromkeys(node.inputs):
            if name not in index:
                continue
            source = plan.nodes[index[name]]
            look = ""
            if source.device not in (node.device, CLIENT):
                size = quote(show_bytes(source.bytes))
                look = f' [color="{colours.CUT}", penwidth=2, label={size}]'
            lines.append(f"  n{index[name]} -> n{index[node.name]}{look};")
    return lines


def quote(text: str) -> str:
    """A DOT string that shows exactly `text`: in labels a backslash starts an escape."""
    text = printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\r", "").replace("\n", "\\n") + '"'
