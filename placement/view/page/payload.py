"""Plan → the data inside its page: columns and tables, compressed, as base64.

Nodes are numbered as the tree of groups is walked, so that a group is a range of numbers, and what
the page has to add up for a folded group lies side by side. Base64 also means that no name, however
hostile, is ever part of the page's HTML.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.reports.critical_path import critical_path
from graphflow.placement.view import colours
from graphflow.placement.view.memory import curves
from graphflow.placement.view.text import printable
from graphflow.placement.view.tree import Group, Tree, tree

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import Interval

LINKS = 24
"""Links with a row of their own in the timeline: those that move most."""
KINDS = ("compute", "transfer", "wait", "send")
"""Of bars, by the numbers that drawing.js knows them by."""


def pack(data: Any) -> str:
    """The payload as the page reads it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 6)).decode()


def unpack(text: str) -> Any:
    """Unpack what `pack` packed."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


class _StringTable:
    """Texts, each once; columns hold their numbers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self.texts)
            self.texts.append(printable(text))
        return index


def payload(plan: PlanData) -> dict[str, Any]:
    """Everything that the page shows, as JSON.

    Raises:
        PlanError: the plan cannot be drawn.
    """
    made = tree(plan)
    groups, place = _walk(made)
    order = sorted(range(len(place)), key=place.__getitem__)
    devices, shades = _devices(plan)
    number = {name: i for i, name in enumerate(devices)}
    at = {leaf.name: place[i] for i, leaf in enumerate(made.leaves) if not leaf.held}
    path = [at[part.name] for part in critical_path(plan) if part.kind == "computing"]
    edges = sorted(
        (place[i], place[source]) for i, leaf in enumerate(made.leaves) for source in leaf.inputs
    )
    return {
        "makespan": plan.makespan,
        "measured": plan.measured.makespan if plan.measured else None,
        "devices": [
            {"name": printable(name), "strong": shade.strong, "client": name == CLIENT}
            for name, shade in zip(devices, shades, strict=True)
        ],
        "nodes": _columns(plan, made, order, number),
        "groups": groups,
        "edges": {"to": [to for to, _ in edges], "from": [source for _, source in edges]},
        "critical": path,
        "kernels": _kernels(plan, made, place),
        "timeline": _timeline(plan, at, number),
        "memory": [
            {"device": number[name], "x": [_short(x) for x, _ in c], "y": [int(y) for _, y in c]}
            for name, c in curves(plan).items()
        ],
        "limits": {number[name]: plan.cluster.device(name).memory for name in plan.cluster.devices},
        "peaks": {
            number[name]: int(value)
            for name, value in (plan.measured.peak_memory if plan.measured else {}).items()
            if name in number
        },
    }


def _kernels(plan: PlanData, made: Tree, place: Sequence[int]) -> list[list[int]]:
    """The nodes of each kernel that has several."""
    found: dict[str, list[int]] = {}
    for i, leaf in enumerate(made.leaves):
        if not leaf.held and plan.nodes[leaf.index].fused:
            found.setdefault(plan.nodes[leaf.index].fused, []).append(place[i])
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def _devices(plan: PlanData) -> tuple[list[str], list[colours.Shade]]:
    names = list(plan.cluster.devices)
    names += [n for n in dict.fromkeys(node.device for node in plan.nodes) if n not in set(names)]
    shades = [colours.CLIENT if n == CLIENT else colours.shade(i) for i, n in enumerate(names)]
    return names, shades


def _walk(made: Tree) -> tuple[dict[str, list[Any]], list[int]]:
    """Columns of the groups, parents first, and the number of each leaf."""
    names = ("label", "path", "parent", "from", "to", "own", "kernel")
    groups: dict[str, list[Any]] = {name: [] for name in names}
    place = [-1] * len(made.leaves)
    count = 0
    pending: list[tuple[Group | int, int]] = [(made.root, -1)]
    while pending:
        member, parent = pending.pop()
        if isinstance(member, int):
            if parent < 0:  # the end of the group whose number is -parent - 2
                groups["to"][-parent - 2] = count
                continue
            place[member], count = count, count + 1
            continue
        group = len(groups["label"])
        row = (
            printable(member.label), printable(member.path), parent, count, count, -1,
            int(bool(member.kernel)),
        )  # fmt: skip
        for column, value in zip(groups.values(), row, strict=True):
            column.append(value)
        if member.own >= 0:
            groups["own"][group] = place[member.own] = count
            count += 1
        pending.append((0, -group - 2))
        pending += [(inner, group) for inner in reversed(member.members)]
    return groups, place


def _columns(
    plan: PlanData, made: Tree, order: Sequence[int], number: dict[str, int]
) -> dict[str, Any]:
    tables = {name: _StringTable() for name in ("ops", "outputs", "places", "whys", "bases")}
    measured: dict[tuple[str, str], float] = {}
    for bar in plan.measured.timeline if plan.measured else ():
        key = (bar.track, bar.name)
        measured[key] = measured.get(key, 0.0) + bar.finish - bar.start
    columns: dict[str, list[Any]] = {
        key: []
        for key in (
            "name", "label", "op", "device", "start", "took", "bytes", "output", "place", "why",
            "held", "measured", "low", "high", "basis",
        )
    }  # fmt: skip
    for i in order:
        leaf = made.leaves[i]
        node = plan.nodes[leaf.index]
        took = measured.get((node.device, node.name), -1.0)
        row = (
            printable(leaf.name), printable(made.labels[i]), tables["ops"](leaf.op),
            number[node.device], _short(node.start),
            0 if leaf.held else _short(node.finish - node.start),
            0 if leaf.held else node.bytes,
            tables["outputs"](leaf.output), tables["places"](leaf.location),
            tables["whys"]("" if leaf.held else node.why), int(leaf.held),
            -1 if leaf.held else _short(took),
            -1 if leaf.held or node.low is None else _short(node.low),
            -1 if leaf.held or node.high is None else _short(node.high),
            tables["bases"]("" if leaf.held else node.basis),
        )  # fmt: skip
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns | {name: table.texts for name, table in tables.items()}


def _timeline(plan: PlanData, at: dict[str, int], number: dict[str, int]) -> dict[str, Any]:
    """Rows, and their bars by start: devices first, then the links that move most."""
    sides: list[tuple[bool, Iterable[Interval]]] = [(False, plan.timeline)]
    if plan.measured is not None:
        sides.append((True, plan.measured.timeline))
    found: dict[str, dict[bool, list[Interval]]] = {}
    for side, bars in sides:
        for bar in bars:
            found.setdefault(bar.track, {}).setdefault(side, []).append(bar)
    tracks, hidden = _tracks(plan, found, number)
    rows: list[dict[str, Any]] = []
    texts = _StringTable()
    columns: dict[str, list[Any]] = {
        k: [] for k in ("row", "start", "took", "node", "kind", "text")
    }
    for track, (side, _) in product(tracks, sides):
        # Feeds and fetches are part of the step but no measurement of their own.
        if CLIENT in track and side not in found[track]:
            continue
        mine = sorted(found[track].get(side, []), key=lambda bar: (bar.start, bar.finish))
        for bar in mine:
            node = _node(plan, bar, at)
            values = (
                len(rows), _short(bar.start), _short(bar.finish - bar.start), node,
                KINDS.index(bar.kind),
                -1 if node >= 0 and bar.name in at else texts(bar.name),
            )  # fmt: skip
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        rows.append({"label": printable(track), "measured": side, "device": number.get(track, -1)})
    return {
        "rows": rows,
        "bars": columns,
        "texts": texts.texts,
        "hidden": hidden,
    }


def _tracks(
    plan: PlanData, found: Collection[str], number: dict[str, int]
) -> tuple[list[str], int]:
    """Tracks with rows of their own, and how many links have none."""
    devices = [name for name in number if name in found and name != CLIENT]
    links = [name for name in found if name not in number]
    moved: dict[str, int] = {}
    for row in plan.transfers:
        track = f"{row.source} → {row.target}"
        moved[track] = moved.get(track, 0) + row.bytes
    links.sort(key=lambda track: (CLIENT in track, -moved.get(track, 0), track))
    return devices + links[:LINKS], max(0, len(links) - LINKS)


def _node(plan: PlanData, bar: Interval, at: dict[str, int]) -> int:
    """The node that a bar is about: what it computes, or the maker of what travels; -1: none."""
    name = bar.name
    if bar.kind in ("wait", "send"):  # recv/<tensor>/<edge>, send/<tensor>/<edge>
        name = name[len("recv/") :].rpartition("/")[0]
    return at.get(name if name in at else plan.maker(name), -1)
