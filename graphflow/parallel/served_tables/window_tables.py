"""The tables of a window: their routes, pieces, and what is written to them when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.frontend.concurrent_loops import ConcurrentLoops, PartyChannel
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Size
from graphflow.parallel.served_tables.party_tables import ServerTables
from graphflow.parallel.served_tables.table_pieces import make_pieces, ranges_of
from graphflow.parallel.served_tables.table_route import TableRoute, WorkingSet
from graphflow.parallel.served_tables.table_selection import ServedTable
from graphflow.parallel.servers.consistency import Rules
from graphflow.parallel.servers.party_copy import PartyCopy
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable


class WindowTables:
    """The tables of a window.

    Args:
        loops: the loops of the window.
        tables: the tables.
        names: the names of the step's nodes.
        rules: the rules of the window.
        sizes: the sizes that stand for symbols of the step in a turn.
        homes: the devices of the servers.
        known: the shards of variables that exist already.

    Attributes:
        routes: the route of each table.
        pieces: the pieces of tables and of their slots.
        relays: in a pool, for each server but the first, the channels by which the first tells it
            the next micro-batch of each worker.
    """

    def __init__(
        self,
        loops: ConcurrentLoops,
        tables: Sequence[ServedTable],
        names: Mapping[Node, str],
        rules: Rules,
        sizes: Mapping[str, Size],
        homes: Sequence[DeviceName],
        known: Mapping[Node, ShardedVariable],
    ) -> None:
        self._rules = rules
        self._servers = len(homes)
        self.routes: list[TableRoute] = []
        self.pieces: dict[Node, ShardedVariable] = {}
        turns = rules.turns
        for table in tables:
            ranges = ranges_of(table.node, names[table.node], known, len(homes))
            self.routes.append(TableRoute(loops, table, ranges, sizes, turns.total, turns.workers))
            for state in table.states:
                existing = known.get(state)
                self.pieces[state] = existing or make_pieces(state, names[state], ranges, homes)
        is_told = bool(tables) and rules.is_pool
        self.relays: list[tuple[PartyChannel, ...]] = [
            tuple(loops.channel((), "int32") for _ in range(turns.workers))
            for _ in range(len(homes) - 1 if is_told else 0)
        ]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of looked-up rows, which turns compute, and the ids."""
        tables = [route.table for route in self.routes]
        found = [each.gradient for table in tables for each in table.update.lookups]
        return [*found, *(t for table in tables for t in table.ids)]

    @property
    def feeds(self) -> list[Node]:
        """The placeholders that ids follow from."""
        return [*dict.fromkeys(node for route in self.routes for node in route.feeds)]

    def at_server(
        self,
        server: int,
        batches: Mapping[Node, Tensor],
        outside: Mapping[Node, Tensor],
        copy: PartyCopy,
    ) -> ServerTables:
        """Return the tables at a server; the arguments are those of `ServerTables`."""
        pieces = [
            [self.pieces[state].nodes[server].outputs[0] for state in route.table.states]
            for route in self.routes
        ]
        relays = self.relays if server == 0 else self.relays[server - 1 : server]
        return ServerTables(
            server, self._rules, self.routes, pieces, batches, outside, copy, relays
        )

    def write_back(self, rows: Sequence[Sequence[WorkingSet]]) -> dict[Node, Tensor]:
        """Return the updates of tables and slots.

        Args:
            rows: for each server, the working set of each table at the end of the window.
        """
        updates: dict[Node, Tensor] = {}
        for number, route in enumerate(self.routes):
            for at, state in enumerate(route.table.states):
                assigned = []
                for server, piece in enumerate(self.pieces[state].nodes):
                    own = rows[server][number]
                    with origin_scope(state, "", piece.device):
                        places = FUNCTIONS["astype"](own.keys, "int64") - 1
                        value = REGISTRY["update_rows"](
                            piece.outputs[0], places, own.states[at], own.number
                        )
                        assigned.append(REGISTRY["assign"](piece.outputs[0], value))
                with origin_scope(state, "", DeviceName()):
                    updates[state] = REGISTRY["group"](*assigned, name=f"{state.name}/rows")
        return updates


__all__ = ["WindowTables"]
