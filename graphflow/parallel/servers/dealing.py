"""Deals the variables of a step to servers.

Variables whose updates read each other, or the same gradients, go to one server: a weight, its
slots, and an average of it. A variable whose updates read nothing of that kind, such as a count of
steps, is kept by each server that reads it. All have the same value at the end of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.formatting import show_bytes
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.op import Node
from graphflow.parallel.servers.step_cut import StepCut


@dataclass(frozen=True)
class Dealt:
    """The servers of variables.

    Attributes:
        server: for each assigned variable the server that keeps it between windows.
        carried: for each server the variables that it updates, in order.
    """

    server: Mapping[Node, int]
    carried: Sequence[Sequence[Node]]


def deal_variables(cut: StepCut, servers: int, known: Mapping[Node, int]) -> Dealt:
    """Deal the assigned variables of a step to servers, the largest first, each to the server that
    has the fewest bytes.

    Args:
        cut: the step.
        servers: the number of servers.
        known: the servers of variables that were dealt before.

    Raises:
        ShardingError: there are more servers than variables that can be updated apart.
    """
    reads = {variable: _find_reads(cut, variable) for variable in cut.served}
    neutral = _find_neutral(cut, reads)
    groups = _group_variables(cut, reads, neutral)
    if len(groups) < servers and not cut.tables:
        raise ShardingError(_describe_shortage(cut, groups, servers))
    held = [0] * servers
    free = [*range(servers)]
    server: dict[Node, int] = {}
    for group in sorted(groups, key=lambda group: (-_nbytes(group), group[0].serial)):
        before = next((known[v] for v in group if v in known), None)
        # Each server gets a group while there are servers without one.
        chosen = min(free or range(servers), key=lambda s: (held[s], s))
        chosen = chosen if before is None else before
        if chosen in free:
            free.remove(chosen)
        held[chosen] += _nbytes(group)
        server |= dict.fromkeys(group, chosen)
    carried: list[list[Node]] = [[] for _ in range(servers)]
    for variable in cut.graph.variables:
        if variable in server:
            carried[server[variable]].append(variable)
    of_tables = _read_by_tables(cut)
    if servers > 1 and not of_tables <= {*neutral}:
        raise ShardingError(_describe_reader(of_tables - {*neutral}, servers))
    for variable in neutral:
        readers = {server[v] for v in server if v in reads and variable in reads[v]}
        readers |= {*range(servers)} if variable in of_tables else set()
        own = sorted(readers) or [0]
        server[variable] = known.get(variable, own[0])
        for each in dict.fromkeys((server[variable], *own)):
            carried[each].append(variable)
    return Dealt(server, carried)


def find_groups(cut: StepCut) -> list[list[Node]]:
    """Return the assigned variables in groups that have to be on one server."""
    reads = {variable: _find_reads(cut, variable) for variable in cut.served}
    return _group_variables(cut, reads, _find_neutral(cut, reads))


def _find_reads(cut: StepCut, variable: Node) -> set[Node]:
    """Return the assigned variables that an update reads, directly or by their gradients."""
    nodes, crossing = cut.update_of([cut.served[variable]])
    read = {node for node in nodes if node in cut.assigned}
    return read | {push.variable for push in crossing if push.variable is not None}


def _find_neutral(cut: StepCut, reads: Mapping[Node, set[Node]]) -> list[Node]:
    """Return the variables whose updates read only each other, in order."""
    found = {v for v in cut.served if not cut.update_of([cut.served[v]])[1]}
    while True:
        kept = {v for v in found if reads[v] <= found}
        if kept == found:
            return sorted(found, key=lambda node: node.serial)
        found = kept


def _group_variables(
    cut: StepCut, reads: Mapping[Node, set[Node]], neutral: Sequence[Node]
) -> list[list[Node]]:
    """Return the assigned variables in groups that have to be on one server."""
    leader = {v: v for v in sorted(cut.assigned - {*neutral}, key=lambda node: node.serial)}

    def find(node: Node) -> Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for variable in leader:
        for other in sorted(reads.get(variable, set()), key=lambda node: node.serial):
            if other in leader:
                first, second = sorted((find(variable), find(other)), key=lambda n: n.serial)
                leader[second] = first
    groups: dict[Node, list[Node]] = {}
    for variable in leader:
        groups.setdefault(find(variable), []).append(variable)
    return [*groups.values()]


def _read_by_tables(cut: StepCut) -> set[Node]:
    """Return the assigned variables that updates of tables read, such as a count of steps."""
    nodes, crossing = cut.update_of([t for table in cut.tables for t in table.outside])
    read = {node for node in nodes if node in cut.assigned}
    return read | {push.variable for push in crossing if push.variable is not None}


def _describe_reader(read: set[Node], servers: int) -> str:
    """Describe a variable that updates of tables read, and that one server has."""
    node = min(read, key=lambda node: node.serial)
    return (
        f"updates of tables on {servers} servers read {node.name!r} (made at {node.location}), "
        "which one server trains; take servers=1, or let the optimiser not read it"
    )


def _nbytes(group: Sequence[Node]) -> int:
    return sum(int(node.specs[0].nbytes) for node in group)


def _describe_shortage(cut: StepCut, groups: Sequence[Sequence[Node]], servers: int) -> str:
    """Describe why there are too many servers."""
    trained = len({push.variable for push in cut.gradients})
    if trained < servers:
        return (
            f"servers={servers}, but the step trains only {trained} variables, and each server "
            f"keeps one at least; take {len(groups)}"
        )
    tied = max(groups, key=len)
    return (
        f"servers={servers}, but the updates of {len(tied)} variables read each other's gradients "
        f"({show_bytes(_nbytes(tied))}), as with a global norm or a loss scale, which need all of "
        f"them at once; take servers={len(groups)}, or clip each gradient by its own norm"
    )


__all__ = ["Dealt", "deal_variables", "find_groups"]
