"""Servers that join or leave between two windows: the variables and ranges of rows that move.

    Parties.change ─→ places of before and after ─plan_moves→ copies, and the shards once they ran

A variable moves whole, with those that its update reads, and rows move by ranges of the ring. All
others stay in the variables that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.init import ReplicaRows, zeros
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.served_tables.table_moves import move_tables
from graphflow.parallel.servers.window import PARTY
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable
from graphflow.strategy import ServerChange, ServerMoves, Strategy

Shards = Mapping[Node, ShardedVariable]
Groups = Sequence[Sequence[Node]]


@dataclass(frozen=True)
class Parties:
    """The servers and workers of a session.

    Attributes:
        servers: the number of servers.
        devices: a device for each server, then one for each worker.
        places: the place before of each of them; None for a server that joins.
        leaving: the number of the server that leaves; None if none does.
        left: its device.
    """

    servers: int
    devices: Sequence[DeviceName]
    places: Sequence[int | None] = ()
    leaving: int | None = None
    left: str | None = None

    def change(self, change: ServerChange, where: str) -> Parties:
        """Return the parties once a server has joined or left.

        Args:
            where: the user's line, for errors.

        Raises:
            ShardingError: there is no such server, or no other one.
        """
        count, leaving = self.servers, change.leaving
        places: list[int | None] = [*range(len(self.devices))]
        if leaving is None:
            places.insert(count, None)
            joining = DeviceName.parse(change.joining or "")
            own = [joining if at is None else self.devices[at] for at in places]
            return Parties(count + 1, own, places)
        leaving = leaving + count if leaving < 0 else leaving
        if count == 1:
            raise ShardingError(f"{where}: the last server cannot leave; let another one join")
        if not 0 <= leaving < count:
            raise ShardingError(
                f"{where}: there is no server {change.leaving}; {show_count(count, 'server')} are "
                f"numbered from 0 to {count - 1}"
            )
        del places[leaving]
        own = [self.devices[at] for at in places if at is not None]
        return Parties(count - 1, own, places, leaving, str(self.devices[leaving]))

    @property
    def joining(self) -> int | None:
        """The number of the server that joins; None if none does."""
        return self.places.index(None) if None in self.places else None

    def number_after(self, server: int) -> int | None:
        """Return the number of a server of before; None if it leaves."""
        return self.places.index(server) if server in self.places else None


def plan_moves(
    strategy: Strategy,
    parties: Parties,
    groups: Groups,
    graphs: Sequence[Graph],
    shards: Shards,
    states_of: Callable[[Node], Sequence[Node]] | None,
) -> ServerMoves:
    """Return what is copied so that a server joins or leaves.

    Args:
        strategy: the strategy from then on.
        parties: the servers and workers from then on.
        groups: variables that move together.
        graphs: the graphs that the session runs.
        shards: the shards of their variables.
        states_of: returns the variables of the states of a variable's filters.

    Raises:
        ShardingError: no variable is left for a server that joins.
    """
    mesh = Mesh({PARTY: len(parties.devices)}, parties.devices)
    names = {node: name for graph in graphs for node, name in graph.names.items()}
    tables = move_tables(parties, shards, names)
    chosen = _choose_servers(parties, _merge(groups), shards, has_tables=bool(tables.shards))
    if states_of is not None:
        for node, server in [*chosen.items()]:
            chosen |= dict.fromkeys(states_of(node), server)
    whole: list[tuple[Node, Node]] = []
    found: dict[Node, ShardedVariable] = dict(tables.shards)
    for node, own in shards.items():
        if list(own.mesh) == [PARTY]:
            found[node], copies = _move_variable(node, own, chosen.get(node), parties, mesh)
            whole += copies
    return ServerMoves(
        strategy, found, tuple(whole), tuple(tables.copies), parties.servers,
        tuple(map(str, parties.devices)), parties.left, tables.ranges,
    )  # fmt: skip


# Which variables move ----------------------------------------------------------------------------


def _merge(groups: Groups) -> list[list[Node]]:
    """Return groups of variables of several graphs, merged where they share one."""
    found: list[list[Node]] = []
    for group in groups:
        near = [each for each in found if not {*each}.isdisjoint(group)]
        merged = [*dict.fromkeys([*group, *(node for each in near for node in each)])]
        found = [*(each for each in found if each not in near), merged]
    return found


def _choose_servers(
    parties: Parties, groups: Groups, shards: Shards, *, has_tables: bool
) -> dict[Node, int]:
    """Return the new servers of the variables that move, by their numbers from then on."""
    servers = parties.servers
    held: list[list[Sequence[Node]]] = [[] for _ in range(servers)]
    homeless: list[Sequence[Node]] = []
    known = {node: own.server for node, own in shards.items() if own.server is not None}
    for group in groups:
        before = next((known[node] for node in group if node in known), None)
        if before is not None:
            after = parties.number_after(before)
            (homeless if after is None else held[after]).append(group)
    sizes = [_total(own) for own in held]
    chosen: dict[Node, int] = {}
    for group in sorted(homeless, key=_nbytes, reverse=True):
        least = min(range(servers), key=sizes.__getitem__)
        sizes[least] += _nbytes(group)
        chosen |= dict.fromkeys(group, least)
    joining = parties.joining
    if joining is not None:
        for group in _take_share(held, joining, has_tables=has_tables):
            chosen |= dict.fromkeys(group, joining)
    moved = {node: server for node, server in chosen.items() if node in known}
    lone = {n for n, server in known.items() if parties.number_after(server) is None} - {*moved}
    return moved | dict.fromkeys(lone, 0)


def _take_share(
    held: Sequence[list[Sequence[Node]]], joining: int, *, has_tables: bool
) -> list[Sequence[Node]]:
    """Return the groups that a new server takes: up to its share of the bytes, each from the server
    that has most.

    Args:
        held: the groups of each server; that of the new one is empty.
        joining: the number of the new server.
    """
    share = sum(map(_total, held)) / len(held)
    taken: list[Sequence[Node]] = []
    while True:
        for own in sorted(held, key=_total, reverse=True):
            most = min(share, _total(own)) - _total(taken)
            fitting = [group for group in own if 0 < _nbytes(group) <= most and len(own) > 1]
            if fitting:
                break
        else:
            break
        largest = max(fitting, key=_nbytes)
        own.remove(largest)
        taken.append(largest)
    if not taken and not has_tables:  # each server keeps one variable at least
        own = max(held, key=len)
        if len(own) < 2:
            count = sum(map(len, held))
            raise ShardingError(
                f"{show_count(len(held) - 1, 'server')} keep {show_count(count, 'variable')} that "
                "can be updated apart, and a further server would have none"
            )
        taken.append(min(own, key=_nbytes))
    return taken


def _total(groups: Groups) -> int:
    return sum(map(_nbytes, groups))


def _nbytes(group: Sequence[Node]) -> int:
    return sum(int(node.specs[0].nbytes) for node in group)


# Where they lie then -----------------------------------------------------------------------------

Copies = list[tuple[Node, Node]]


def _move_variable(
    node: Node, own: ShardedVariable, chosen: int | None, parties: Parties, mesh: Mesh
) -> tuple[ShardedVariable, Copies]:
    """Return the shards of a variable, and what is copied.

    Args:
        node: the user's variable, or the strategy's.
        own: its shards before.
        chosen: the server to which it moves; None if it stays.
    """
    count = len(parties.places)
    if own.server is not None:
        after = parties.number_after(own.server) if chosen is None else chosen
        assert after is not None
        (spans, *_), (before, *_) = own.spans, own.nodes
        now = before if chosen is None else _copy_to(node, before, after, mesh)
        kept = replace(own, nodes=(now,) * count, spans=(spans,) * count, mesh=mesh.sizes,
                       server=after)  # fmt: skip
        return kept, [] if now is before else [(before, now)]
    return _keep_copies(node, own, parties, mesh)


def _keep_copies(
    node: Node, own: ShardedVariable, parties: Parties, mesh: Mesh
) -> tuple[ShardedVariable, Copies]:
    """Return the shards of a variable that no server updates, such as copies of one that is only
    read. If servers have copies, one that joins gets one as well."""
    present = {*parties.devices}
    copies: Copies = []
    moved: dict[Node, Node] = {}

    def find(piece: Node, place: int) -> Node:
        """Return a piece, or a copy of it on a device that is still there."""
        if not piece.device or piece.device in present:
            return piece
        if piece not in moved:
            twins = [n for n, s in zip(own.nodes, own.spans, strict=True)
                     if s == own.spans[own.nodes.index(piece)] and n.device in present]  # fmt: skip
            moved[piece] = twins[0] if twins else _copy_to(node, piece, place, mesh)
            if not twins:
                copies.append((piece, moved[piece]))
        return moved[piece]

    before = [0 if at is None else at for at in parties.places]
    nodes = [find(own.nodes[at], place) for place, at in enumerate(before)]
    joining = parties.joining
    if joining is not None:
        device = mesh.devices[joining]
        near = next((n for n in own.nodes if n.device == device), None)
        has_own = any(own.nodes[s].device == parties.devices[s] for s in range(joining))
        if near is not None and own.spans[own.nodes.index(near)] == own.spans[0]:
            nodes[joining] = near
        elif near is None and has_own and not own.derived:
            nodes[joining] = _copy_to(node, nodes[0], joining, mesh)
            copies.append((nodes[0], nodes[joining]))
    spans = tuple(own.spans[at] for at in before)
    return replace(own, nodes=tuple(nodes), spans=spans, mesh=mesh.sizes), copies


def _copy_to(node: Node, piece: Node, place: int, mesh: Mesh) -> Node:
    """Return a variable like a piece of another one, on the device of a place."""
    spec = piece.specs[0]
    attrs: dict[str, Any] = {**piece.attrs, "named": False}
    if not isinstance(attrs["initial"], ReplicaRows):  # its value is copied before it is read
        attrs["initial"] = zeros(tuple(map(int, spec.shape)), spec.dtype)
    name = f"{node.name}{mesh.tag(mesh.places[place])}"
    return piece.copy_for((), name, mesh.devices[place], node, attrs)


__all__ = ["Parties", "plan_moves"]
