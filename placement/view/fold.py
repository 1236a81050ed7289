"""A large plan → one of groups, as a drawing on paper has room for: nodes of a scope on a device.

Folding a scope may close a circle (a layer's gradients wait for the layers after it), and layers
are drawn from top to bottom. So a scope is folded into as many boxes as it takes for none to wait
for itself: forward and backward, say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.view.tree import Group, Tree, tree

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import PlannedNode, PlannedTransfer

LARGEST = 400
"""Boxes that a drawing on paper has room for."""


def fold_large(plan: PlanData) -> PlanData:
    """The plan itself, or of a large one a plan whose nodes stand for groups, with the sums of
    their seconds and bytes. Time about linear in nodes and edges."""
    if len(plan.nodes) <= LARGEST:
        return plan
    made = tree(plan)
    limit = LARGEST // 4  # folding against circles makes more of them
    while True:
        small = fold(plan, made, limit)
        if len(small.nodes) <= LARGEST or limit == 1:
            return small
        limit //= 2


def fold(plan: PlanData, made: Tree, limit: int) -> PlanData:
    """The plan with `limit` groups at most folded, each into one box or a few."""
    return _plan(plan, _clusters(plan, made, limit))


_Key = tuple[int, str, str]
"""A group's identity and name, and a device."""


@dataclass(eq=False)
class _Cluster:
    """Nodes that are drawn as one box. What it reads is on lower levels, so there is no circle."""

    label: str
    level: int
    nodes: list[PlannedNode] = field(default_factory=list)


def _labels(made: Tree, limit: int) -> dict[int, tuple[int, str]]:
    """Planned node → the group that stands for it (its identity and name), when the tree is opened
    from its root on as long as it shows no more than `limit` boxes."""
    shown: list[Group | int] = [made.root]
    while True:  # a level at a time, so that boxes of one kind are folded alike
        following: list[Group | int] = []
        for item in shown:
            if isinstance(item, int) or item.own >= 0:
                following.append(item)
            else:
                following += item.members
        if following == shown or len(following) > limit:
            break
        shown = following
    labels: dict[int, tuple[int, str]] = {}
    for number, item in enumerate(shown):
        pending: list[Group | int] = [item]
        name = made.leaves[item].name if isinstance(item, int) else _name(item)
        while pending:
            member = pending.pop()
            if isinstance(member, int):
                labels[made.leaves[member].index] = (number, name)
                continue
            pending += member.members if member.own < 0 else [*member.members, member.own]
    return labels


def _name(group: Group) -> str:
    told = " … " in group.label or group.kernel
    return group.label if told else group.path or "everything"


def _clusters(plan: PlanData, made: Tree, limit: int) -> list[_Cluster]:
    """The box of each node."""
    labels = _labels(made, limit)
    index = {node.name: i for i, node in enumerate(plan.nodes)}
    reads = [[index[name] for name in node.inputs if name in index] for node in plan.nodes]
    readers: list[list[int]] = [[] for _ in plan.nodes]
    for i, sources in enumerate(reads):
        for source in sources:
            readers[source].append(i)
    keys = [(*labels[i], node.device) for i, node in enumerate(plan.nodes)]
    found: list[_Cluster | None] = [None] * len(plan.nodes)
    latest: dict[_Key, _Cluster] = {}
    for i, sources in enumerate(reads):
        if not sources:
            continue
        before = [cluster for s in sources if (cluster := found[s]) is not None]
        mine = latest.get(keys[i])
        if mine is None or any(c is not mine and c.level >= mine.level for c in before):
            level = 1 + max((cluster.level for cluster in before), default=0)
            mine = latest[keys[i]] = _Cluster(keys[i][1], level)
        found[i] = mine
    for i, sources in enumerate(reads):
        if not sources:
            after = [(keys[r], cluster) for r in readers[i] if (cluster := found[r]) is not None]
            found[i] = _box_to_join(keys[i], latest.get(keys[i]), after)
        if found[i] is None:
            alone = (-1 - keys[i][0], *keys[i][1:])
            found[i] = latest.setdefault(alone, _Cluster(keys[i][1], 0))
    return [cluster for cluster in found if cluster is not None]


def _box_to_join(
    mine: _Key, place: _Cluster | None, after: Sequence[tuple[_Key, _Cluster]]
) -> _Cluster | None:
    """The box that a node joins which reads nothing: its first reader's or that of its group, if
    that is of the same group and its other readers are further down; else None."""
    first = min((cluster for _, cluster in after), key=lambda c: c.level, default=None)
    for cluster in (first, place):
        if cluster is None or cluster.label != mine[1]:
            continue
        if any(c is not cluster and c.level <= cluster.level for _, c in after):
            continue
        is_alike = any(key == mine and c is cluster for key, c in after)
        if is_alike or (cluster is place and not after):
            return cluster
    return None


def _plan(plan: PlanData, clusters: list[_Cluster]) -> PlanData:
    for cluster, node in zip(clusters, plan.nodes, strict=True):
        cluster.nodes.append(node)
    boxes = sorted(dict.fromkeys(clusters), key=lambda cluster: cluster.level)
    names: dict[_Cluster, str] = {}
    used: Counter[str] = Counter()
    for box in boxes:
        name = box.nodes[0].name if len(box.nodes) == 1 else box.label
        used[name] += 1
        names[box] = name if used[name] == 1 else f"{name} ({used[name]})"
    of = {node.name: names[box] for node, box in zip(plan.nodes, clusters, strict=True)}
    nodes = tuple(_box(box, names[box], of) for box in boxes)
    sent: dict[tuple[str, str], PlannedTransfer] = {}
    for row in plan.transfers:
        maker = of.get(plan.maker(row.tensor), row.tensor)
        before = sent.get((maker, row.target))
        sent[maker, row.target] = replace(
            row,
            tensor=maker,
            start=min(row.start, before.start) if before else row.start,
            finish=max(row.finish, before.finish) if before else row.finish,
            bytes=row.bytes + (before.bytes if before else 0),
        )
    return replace(plan, nodes=nodes, transfers=tuple(sent.values()), measured=None, model=None)


def _box(box: _Cluster, name: str, of: dict[str, str]) -> PlannedNode:
    inputs = dict.fromkeys(of[read] for node in box.nodes for read in node.inputs if read in of)
    inputs.pop(name, None)
    if len(box.nodes) == 1:
        return replace(box.nodes[0], name=name, inputs=tuple(inputs))
    start = min(node.start for node in box.nodes)
    kinds = Counter(node.op for node in box.nodes).most_common(3)
    return replace(
        box.nodes[0],
        name=name,
        op=show_count(len(box.nodes), "node"),
        start=start,
        finish=start + sum(node.finish - node.start for node in box.nodes),
        output=", ".join(f"{count:,} {op}" for op, count in kinds),
        bytes=sum(node.bytes for node in box.nodes),
        inputs=tuple(inputs),
        location="",
        why="",
        candidates={},
        holds=(),
        fused="",
    )
