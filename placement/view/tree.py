"""Node names → a tree that folds: a group for each name scope, for each node that holds bodies, and
for the nodes of a scope that run as one kernel.

A drawing shows a group as one box until it is opened. No group has more than `WIDEST` members: what
has more is divided along the way of the data, so that every step of opening fits on a screen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from graphflow.base.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData

WIDEST = 40
"""Members of a group at most."""
KERNEL = "kernel: "
"""How the labels of groups that are one kernel begin."""


@dataclass(frozen=True)
class Leaf:
    """A node as drawings need it; what it holds itself is not timed on its own (`held`).

    Args:
        index: of the planned node, or of the one that holds it.
        inputs: positions, among all leaves, of what it reads.
    """

    name: str
    op: str
    output: str
    location: str
    index: int
    held: bool
    inputs: tuple[int, ...]


@dataclass(eq=False)
class Group:
    """A scope: `own` is the leaf of the node that holds bodies, and is itself no member.

    `kernel` names the last node of the kernel as which all of its members run; "" if they do not.
    """

    label: str
    path: str
    members: list[Group | int] = field(default_factory=list)
    own: int = -1
    kernel: str = ""
    key: tuple[int, int] = (0, 0)
    scopes: dict[str, Group] = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    """The groups of a plan.

    Args:
        leaves: nodes in their order of execution, those in bodies after the node that holds them.
        labels: of the leaves inside their group.
        root: the group of everything.
    """

    leaves: tuple[Leaf, ...]
    labels: list[str]
    root: Group


def tree(plan: PlanData) -> Tree:
    """Group the nodes of a plan. Time about linear in nodes and edges."""
    leaves = _leaves(plan)
    root = Group("", "")
    labels = [leaf.name.rpartition("/")[2] or leaf.name for leaf in leaves]
    holders = {i for i, leaf in enumerate(leaves) if _holds(leaves, i)}
    for i, leaf in enumerate(leaves):
        scope, parts = root, leaf.name.split("/")
        for part in parts if i in holders else parts[:-1]:
            scope = _inside(scope, part)
        if i in holders:
            scope.own = i
        else:
            scope.members.append(i)
    _gather_kernels(plan, leaves, labels, root)
    keys = _keys(leaves)
    _settle(root, keys, labels)
    return Tree(leaves, labels, root)


def _gather_kernels(plan: PlanData, leaves: Sequence[Leaf], labels: list[str], root: Group) -> None:
    """Nodes of one kernel become a group inside their scope; where they are all that is there, the
    scope is that group."""
    pending = [root]
    while pending:
        scope = pending.pop()
        pending += scope.scopes.values()
        kernels: dict[str, list[int]] = {}
        for member in scope.members:
            if isinstance(member, int) and not leaves[member].held:
                fused = plan.nodes[leaves[member].index].fused
                if fused:
                    kernels.setdefault(fused, []).append(member)
        for fused, members in kernels.items():
            if 1 < len(members) == len(scope.members) and scope.own < 0:
                scope.kernel = fused
            elif len(members) > 1:
                group = Group(_kernel_label(labels, members), scope.path, kernel=fused)
                group.members += members
                inside = set(members)
                scope.members = [m for m in scope.members if m not in inside] + [group]
                scope.scopes[f"kernel of {fused}"] = group


def _kernel_label(labels: list[str], members: Sequence[int]) -> str:
    """kernel: add … relu"""
    first, last = labels[members[0]], labels[members[-1]]
    return f"{KERNEL}{first}, {last}" if len(members) == 2 else f"{KERNEL}{first} … {last}"


def _holds(leaves: Sequence[Leaf], i: int) -> bool:
    after = leaves[i + 1] if i + 1 < len(leaves) else None
    return after is not None and after.held and after.name.startswith(leaves[i].name + "/")


def _inside(scope: Group, part: str) -> Group:
    found = scope.scopes.get(part)
    if found is None:
        path = f"{scope.path}/{part}" if scope.path else part
        found = scope.scopes[part] = Group(part, path)
        scope.members.append(found)
    return found


def _leaves(plan: PlanData) -> tuple[Leaf, ...]:
    leaves: list[Leaf] = []
    at: dict[str, int] = {}
    for index, node in enumerate(plan.nodes):
        reads = tuple(at[name] for name in dict.fromkeys(node.inputs) if name in at)
        at[node.name] = len(leaves)
        leaves.append(Leaf(node.name, node.op, node.output, node.location, index, False, reads))
        inner: dict[str, int] = {}
        for held in node.holds:
            reads = tuple(inner[name] for name in dict.fromkeys(held.inputs) if name in inner)
            inner[held.name] = len(leaves)
            name = f"{node.name}/{held.name}"
            leaves.append(Leaf(name, held.op, held.output, held.location, index, True, reads))
    return tuple(leaves)


def _keys(leaves: Sequence[Leaf]) -> list[tuple[int, int]]:
    """Return the sort key of leaves along the data flow: depth, then position. What depends on
    nothing that is fed (a variable, a scaled momentum) is as deep as its first reader, as it could
    be anywhere before."""
    depth, fed = [0] * len(leaves), [False] * len(leaves)
    for i, leaf in enumerate(leaves):
        depth[i] = max((depth[source] + 1 for source in leaf.inputs), default=0)
        fed[i] = leaf.op == "placeholder" or any(fed[source] for source in leaf.inputs)
    first, some = [len(leaves)] * len(leaves), any(fed)
    for i in range(len(leaves) - 1, -1, -1):
        inputs = leaves[i].inputs
        if first[i] < len(leaves) and (not inputs or (not fed[i] and some)):
            depth[i] = max(depth[i], first[i])
        for source in inputs:
            first[source] = min(first[source], depth[i] - 1)
    return [(deep, i) for i, deep in enumerate(depth)]


def _settle(root: Group, keys: list[tuple[int, int]], labels: list[str]) -> None:
    """Sort members along the data's way, drop groups of one, divide those that are too wide.

    A group is where the first quarter of its nodes is: its backward half does not count, and one
    node of the gradients that is ready early does not either. A kernel waits for all that any of
    its nodes reads: it is where its last node is.
    """
    pending, found = [root], []
    while pending:  # no recursion: scopes may be nested deeply
        found.append(group := pending.pop())
        pending += group.scopes.values()
    inside: dict[Group, list[tuple[int, int]]] = {}
    for group in reversed(found):
        mine = [keys[member] for member in group.members if isinstance(member, int)]
        for scope in group.scopes.values():
            mine += inside.pop(scope)
        mine.sort()
        group.key = mine[-1 if group.kernel else len(mine) // 4] if mine else (0, 0)
        if group.own >= 0:
            group.key, mine = keys[group.own], [keys[group.own]]
        inside[group] = mine
        group.members = [_alone(member, labels) for member in group.members]
        group.members.sort(key=lambda member: _key(member, keys))
        while len(group.members) > WIDEST:
            group.members = _divide(group, keys, labels)


def _key(member: Group | int, keys: list[tuple[int, int]]) -> tuple[int, int]:
    return keys[member] if isinstance(member, int) else member.key


def _alone(member: Group | int, labels: list[str]) -> Group | int:
    """A group of one is its member, which takes over its name."""
    if isinstance(member, int) or len(member.members) != 1 or member.own >= 0:
        return member
    (only,) = member.members
    if isinstance(only, int):
        labels[only] = f"{member.label}/{labels[only]}"
    else:
        only.label = f"{member.label}/{only.label}"
    return only


def _divide(group: Group, keys: list[tuple[int, int]], labels: list[str]) -> list[Group | int]:
    members = group.members
    size = min(WIDEST, math.ceil(math.sqrt(len(members))))
    parts: list[Group | int] = []
    for at in range(0, len(members), size):
        some = members[at : at + size]
        if len(some) == 1:
            parts += some
            continue
        first, last = (labels[m] if isinstance(m, int) else _range(m) for m in (some[0], some[-1]))
        label = _from_to(first.partition(" … ")[0], last)
        parts.append(Group(label, group.path, some, key=_key(some[0], keys)))
    return parts


def _range(group: Group) -> str:
    """Return a group's name inside a larger group's name; for a kernel its nodes, first … last."""
    name = group.label
    return name.replace(KERNEL, "").replace(", ", " … ") if group.kernel else name


def _from_to(first: str, last: str) -> str:
    """layer_0 … 39"""
    name = first.rstrip("0123456789")
    number = last.rpartition(" … ")[2]
    if number.isdigit():  # what ends the data's way is a range itself
        return f"{first} … {number}"
    shared = name and name != first and number.removeprefix(name).isdigit()
    return f"{first} … {number.removeprefix(name) if shared else number}"
