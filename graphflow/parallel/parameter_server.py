"""ParameterServer: workers push gradients to servers, which update variables as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.frontend.builders import placeholder
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import (
    REGISTRY,
    Location,
    Node,
    Tensor,
    next_stream,
    source_scope,
    user_location,
)
from graphflow.ops.control_flow.turn_rules import CONSISTENCIES, Consistency
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.row_ranges import Int64s
from graphflow.parallel.report import report_of
from graphflow.parallel.served_tables.hybrid import check_hybrid, count_replicas
from graphflow.parallel.servers.consistency import Rules
from graphflow.parallel.servers.dealing import deal_variables, find_groups
from graphflow.parallel.servers.filters.filter_arguments import check_filters
from graphflow.parallel.servers.filters.route_filters import RouteFilters
from graphflow.parallel.servers.micro_batches import MicroBatches, Turns
from graphflow.parallel.servers.party_devices import count_workers, party_devices
from graphflow.parallel.servers.served_evaluation import divide_evaluation
from graphflow.parallel.servers.server_moves import Parties, plan_moves
from graphflow.parallel.servers.server_report import ServerReport
from graphflow.parallel.servers.step_cut import StepCut, cut_step
from graphflow.parallel.servers.window import PARTY, ServedWindow
from graphflow.parallel.servers.window_fetches import finish_window
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.parallel.tables.table_moves import move_rows
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import RowMoves, ServerChange, ServerMoves, strategy_of


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class ParameterServer:
    """Servers that keep variables, and workers that push gradients to them.

    A run is a window of K turns of each of W workers. It is fed K·W micro-batches of one size, one
    after the other along the first axis. In a turn, a worker pulls the variables, takes a
    micro-batch through the step, and pushes the gradients. A server takes the mean of some pushes,
    updates its variables by the optimiser, and answers. The window commits as a whole.

    Floats without axes come back as means over turns, tensors that the batch leads in the order of
    the feeds. `Session.history` tells the order of pushes, and how stale each one was.

    Args:
        servers: their number. Variables are dealt to them by size, each with its slots.
        consistency: what a worker waits for before it goes on.
            "pool": for nothing; workers take micro-batches from one queue, so fast ones take more.
            "bsp": for the update of the round. The result is that of `Data`.
            "ssp": until no worker is more than `staleness` turns behind it.
            "async": for nothing; each worker takes K turns.
        staleness: with "ssp", the number of turns that a worker may be ahead of the slowest one.
        aggregate: the number of pushes whose mean makes an update, M. Default: W with "pool" and
            "bsp", else 1. With "bsp", fewer than W leave W − M backup workers: a round takes the
            first M pushes, late ones are dropped and counted, and their workers join the present
            round.
        window: the number of turns of each worker in a run, K.
        workers: their number; default: one for each device that is left beside the servers.
        tables: variables, their names, or patterns: their rows lie in ranges on all servers, each
            with its slots. Only rows that a turn looks up travel, and a window keeps those that it
            uses beside the table. `["*"]` means all variables that are looked up by ids only, and
            whose optimiser updates looked-up rows.
        filters: filters through which pushes and pulls go, one after the other:
            `[TopK(0.01), FixedPoint(8)]`. `{"push": [...], "pull": [...]}` gives each its own. What
            a push does not send is added to the worker's next one. A pull sends what changed since
            the worker's last one. A tensor of which they save nothing travels as it is.
        batch: the placeholders that hold the batch, or their names; default: those whose first axis
            has the symbol that most have. That axis has to be open.
        replicas: copies of the servers' variables; with 2, each has a mirror in another process,
            which takes over when the server is lost (see `Session`).
        devices: a device for each server, then one for each worker; names may repeat. Default: the
            first CPUs of the cluster; if there are too few, workers take all CPUs in turn, and
            servers the last ones.

    `ParameterServer(servers=2, tables=["*"]) * Data(n)` is a hybrid of n workers: other variables
    take synchronous steps, as with `Data(n)`, and each push updates rows of tables at once.

    Raises:
        ShardingError: a count is invalid; `consistency` is unknown; `staleness` is missing with
            "ssp" or given without it; when a graph is partitioned: the turns of a window do not
            divide by `aggregate`, backup workers have several servers, the batch has a fixed size
            or does not divide into micro-batches, there are more servers than variables, or an
            update needs gradients of several servers.

    Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014;
        Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
        server", NIPS 2013; Su et al., "GBA", NeurIPS 2022 (pool); Chen et al., "Revisiting
        distributed synchronous SGD", arXiv:1604.00981 (backup workers).
    """

    servers: int = 1
    consistency: Consistency = "pool"
    staleness: int | None = None
    aggregate: int | None = None
    window: int = 32
    workers: int | None = None
    tables: Sequence[Tensor | str] = ()
    batch: Sequence[Tensor | str] | None = None
    devices: Sequence[str] | None = None
    filters: Sequence[Filter] | Mapping[str, Sequence[Filter]] = ()
    replicas: int = 1
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _rows_at_once: bool = field(default=False, init=False, repr=False)
    _filters: RouteFilters | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("servers", "window", "workers", "aggregate", "replicas"):
            given = getattr(self, name)
            count = as_count(given)
            if count is None and not (given is None and name in ("workers", "aggregate")):
                raise ShardingError(
                    f"{self._where}: {name} must be an int of at least 1, not {given!r}"
                )
            set_frozen_fields(self, **{name: count})
        if self.consistency not in CONSISTENCIES:
            raise ShardingError(
                f"{self._where}: consistency must be one of {', '.join(map(repr, CONSISTENCIES))}, "
                f"not {self.consistency!r}"
            )
        if not isinstance(self.tables, list | tuple):
            raise ShardingError(
                f"{self._where}: tables must be a list of variables, names or patterns, "
                f'["*"], not {self.tables!r}'
            )
        self._check_staleness()
        push, pull = check_filters(self.filters, self._where)
        if push is not None or pull is not None:
            made = RouteFilters(push, pull, next_stream(), self._where)
            set_frozen_fields(self, _filters=made)

    def _check_staleness(self) -> None:
        """Check the bound of staleness, which "ssp" needs and nothing else has.

        Raises:
            ShardingError: see the class.
        """
        if self.consistency != "ssp":
            if self.staleness is not None:
                raise ShardingError(
                    f'{self._where}: staleness={self.staleness!r} is for consistency="ssp", and '
                    f"{self.consistency!r} has no bound to set; leave it out"
                )
            return
        bound = as_count(self.staleness, least=0)
        if bound is None:
            raise ShardingError(
                f'{self._where}: with "ssp", staleness must be the number of turns that a worker '
                f"may be ahead of the slowest one, an int from 0, not {self.staleness!r}"
            )
        if self.aggregate not in (None, 1):
            raise ShardingError(
                f'{self._where}: with "ssp" each push is an update, or the bound would not hold '
                f"for the pushes that wait for others; leave out aggregate={self.aggregate}"
            )
        set_frozen_fields(self, staleness=bound)

    @property
    def state_copies(self) -> int:
        """The copies of each variable that a session keeps."""
        return self.replicas

    @property
    def _where(self) -> str:
        return f"ParameterServer at {self.line}"

    @cached_property
    def order(self) -> Tensor:
        """The placeholder of the order in which servers take pushes, int32 (servers, K·W).

        It need not be fed. Feed the `order` of a `WindowHistory`, with the state and the feeds that
        the window had, to repeat the window bit for bit; -1 stands for any worker.
        """
        with source_scope("ParameterServer", self.line):
            return placeholder("int32", (None, None), name="order")

    def leaves_rows(self, variable: Tensor) -> bool:
        """Return True if `tables` names a variable, so that its looked-up rows travel by
        themselves."""
        return any(
            fnmatchcase(variable.node.name, key) if isinstance(key, str) else key is variable
            for key in self.tables
        )

    def filter_gradients(
        self,
        gradients: Sequence[Tensor],
        variables: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients with marks, at which the step is cut into turns and updates."""
        mark = REGISTRY["pushed_gradient"]
        return [mark(g, v) for g, v in zip(gradients, variables, strict=True)], []

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the graph of a window for the devices of a cluster.

        A graph that does not train is placed as any other, with variables at their servers.

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed.

        Raises:
            ShardingError: see `ParameterServer`.
        """
        workers, devices = self._parties(cluster)
        pieces = known or {}
        mesh = Mesh({PARTY: len(devices)}, devices)
        if strategy_of(graph) is None:
            return divide_evaluation(graph, mesh, pieces, devices[: self.servers], self.tables)
        rules = self._rules(workers)
        batch, sizes, cut = self._cut(graph, mesh, rules)
        check_hybrid(cut, rules, self._where)
        if cut.tables and rules.has_backups:
            raise ShardingError(
                f"{self._where}: a round without its late pushes (aggregate={self.aggregate} of "
                f"{workers} workers) may leave out rows of tables= that others pulled; leave out "
                "aggregate= or tables="
            )
        before = {
            node: own.server
            for node, own in pieces.items()
            if node in cut.assigned and own.server is not None
        }
        dealt = deal_variables(cut, self.servers, before)
        window = ServedWindow(
            cut, batch, sizes, rules, mesh, dealt, pieces, self.order, self._filters
        )
        notes = [self._describe(rules)]
        if self._filters is not None:
            notes += self._filters.describe(window.ports, bool(cut.tables))
        return finish_window(window, graph, notes=tuple(notes))

    def _parties(self, cluster: Cluster) -> tuple[int, list[DeviceName]]:
        """Return the number of workers, and a device for each server, then for each worker."""
        workers = count_workers(cluster, self.servers, self.workers, self.devices)
        return workers, party_devices(cluster, self.servers, workers, self.devices)

    def _cut(
        self, graph: Graph, mesh: Mesh, rules: Rules
    ) -> tuple[list[Tensor], MicroBatches, StepCut]:
        """Return the placeholders of the batch, the sizes of micro-batches, and the step that is
        cut into turns and updates."""
        batch = batch_placeholders(graph, self.batch)
        sizes = MicroBatches(mesh, graph, batch, rules.turns)
        return batch, sizes, cut_step(graph, batch, sizes.symbols_of_batch, self.tables)

    def _rules(self, workers: int) -> Rules:
        """Return the rules of a window with a number of workers.

        Raises:
            ShardingError: the pushes do not divide into updates.
        """
        turns = Turns(workers, self.window)
        together = workers if self.consistency in ("pool", "bsp") else 1
        aggregate = together if self.aggregate is None else self.aggregate
        bound = self.staleness or 0
        rules = Rules(turns, self.consistency, aggregate, bound, self._rows_at_once)
        if self.consistency == "bsp" and aggregate > workers:
            raise ShardingError(
                f"aggregate={aggregate}, but a round has one push of each of "
                f"{show_count(workers, 'worker')}; take {workers} at most"
            )
        if rules.has_backups and self.servers > 1:
            raise ShardingError(
                f"aggregate={aggregate} of {workers} workers leaves {workers - aggregate} as "
                f"backups, and each of {self.servers} servers would drop other pushes; take "
                "servers=1, or leave out aggregate="
            )
        if turns.total % aggregate and not rules.has_backups:
            raise ShardingError(
                f"{turns} do not divide into updates of aggregate={aggregate} pushes; choose "
                "a window= of which that many turns are a multiple"
            )
        return rules

    def _describe(self, rules: Rules) -> str:
        """Return a sentence for plans and reports."""
        together = (
            f"the mean of {rules.aggregate} pushes is an update, and each push one of tables"
            if rules.rows_at_once
            else "each push is an update"
            if rules.aggregate == 1
            else f"the mean of {rules.aggregate} pushes is an update"
        )
        if rules.has_backups:
            together = f"the mean of the first {rules.aggregate} pushes of a round is an update"
        bound = f", staleness {rules.staleness}" if rules.consistency == "ssp" else ""
        return (
            f"ParameterServer: {show_count(self.servers, 'server')}, {rules.turns}, "
            f"{rules.consistency}{bound}; {together}"
        )

    def __mul__(self, other: Any) -> ParameterServer:
        """Return the hybrid of tables at these servers, and of other variables as `Data` trains
        them.

        Raises:
            ShardingError: the servers have no tables, an option of one contradicts the other, or
                `other` is no Data.
        """
        workers = count_replicas(self, other)
        batch = other.batch if self.batch is None else self.batch
        product = replace(self, workers=workers, consistency="bsp", batch=batch)
        set_frozen_fields(product, _rows_at_once=True, line=user_location())
        return product

    __rmul__ = __mul__

    def move_rows(
        self,
        counts: Mapping[Node, Int64s],
        shards: Mapping[Node, ShardedVariable],
        homes: Mapping[Node, str],
    ) -> RowMoves | None:
        """Return the moves that let servers be asked for about as many rows; None if none is worth
        it.

        Args:
            counts: how many rows of each range are asked for, by table.
            shards: the shards of tables and slots.
            homes: the devices of shards.
        """
        return move_rows(counts, shards, homes)

    def devices_of_parties(self, cluster: Cluster) -> tuple[list[str], list[str]]:
        """Return the devices of servers, and those of workers, by their numbers."""
        names = [str(device) for device in self._parties(cluster)[1]]
        return names[: self.servers], names[self.servers :]

    def change_servers(
        self,
        change: ServerChange,
        cluster: Cluster,
        graphs: Sequence[Graph],
        shards: Mapping[Node, ShardedVariable],
    ) -> ServerMoves:
        """Return the moves that let a server join or leave between two windows. About 1/n of the
        variables and of each table's ranges change servers.

        Args:
            change: the server.
            cluster: the cluster.
            graphs: the graphs that the session runs.
            shards: the shards of their variables.

        Raises:
            ShardingError: the last server is to leave, no such server is there, or a variable or
                range is missing for one more.
        """
        workers, devices = self._parties(cluster)
        mesh, rules = Mesh({PARTY: len(devices)}, devices), self._rules(workers)
        trained = [graph for graph in graphs if strategy_of(graph) is not None]
        groups = [find_groups(self._cut(graph, mesh, rules)[2]) for graph in trained]
        parties = Parties(self.servers, devices).change(change, self._where)
        now = replace(
            self, servers=parties.servers, workers=workers, devices=[*map(str, parties.devices)]
        )
        set_frozen_fields(now, line=self.line, order=self.order, _filters=self._filters,
                          _rows_at_once=self._rows_at_once)  # fmt: skip
        states = None if self._filters is None else self._filters.states_of
        return plan_moves(now, parties, [g for own in groups for g in own], graphs, shards, states)

    def report(self, fetches: Any, cluster: Cluster | None = None) -> ServerReport:
        """Return what the strategy makes of some fetches: the bytes of a window that servers and
        workers send each other, by kind, by server and by link. Print it."""
        own = report_of(self, fetches, cluster)
        return ServerReport(own.division, own.cluster, self.servers)


__all__ = ["ParameterServer"]
