"""Data: data parallelism. Each replica has the model and a part of the batch; gradients are summed.

It is `Shard` along one mesh axis with implicit rules: the batch is split, the variables are whole.
So losses, means and gradients are those of the whole batch, also if parts differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, Tensor, user_location
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.gradient_filters import filter_gradients, replica_variables
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.mesh.row_ranges import Int64s
from graphflow.parallel.replica_devices import device_groups, flatten_groups
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES
from graphflow.parallel.shard_strategy import (
    Shard,
    check_replication,
    defines_products,
    no_product_error,
    replication_of,
)
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.partitioner import divide_over_mesh
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.parallel.sharding.propagation.propagation import is_slot
from graphflow.parallel.sharding.propagation.replication import ReplicationConfig, split_batch
from graphflow.parallel.sharding.propagation.rule_layouts import layouts_of_rules
from graphflow.parallel.tables.table_moves import move_rows
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import RowMoves

DATA = "data"
"""The mesh axis of replicas."""


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class Data:
    """Replicas of a model, each with its part of the batch.

    Args:
        replicas: their number. If the batch does not divide evenly, the first ones get one example
            more.
        shard_state: each replica keeps only its part of the optimiser's slots, and updates that
            part of the variables. Gradients are reduce-scattered, new values are gathered.
        accumulate: the number of micro-batches into which a replica divides its part. Gradients are
            summed before replicas exchange them.
        synchronised: batch norm takes the moments of the whole batch, as one device would.
            Otherwise each replica (and micro-batch) takes those of its own part, and the running
            moments are means.
        batch: the placeholders that hold the batch, or their names; default: those whose first axis
            has the size that most have.
        bucket: bytes of gradients that are exchanged at once; 0: each by itself.
        tables: variables, their names, or patterns such as `"emb*"`. Their rows are divided over
            the replicas, with their slots. Looked-up rows and their gradients travel, and each
            replica updates its own rows.
        devices: the devices of the replicas; default: the first of the cluster. In a product in
            which a replica takes several devices, a list for each; with stages, those of the first
            stage come first.
        compress: a filter, such as `TopK(0.01)`, through which replicas exchange gradients. A
            gradient of which it saves nothing travels as it is. With `shard_state` too, each
            replica receives the whole sum.

    Raises:
        ShardingError: a count is invalid; when a graph is partitioned: there are more replicas than
            devices, the batch is smaller than the replicas, or it is unclear which placeholders
            hold the batch; in `minimize`: `compress` saves no bytes at all.

    Source: Li et al., "PyTorch Distributed", VLDB 2020 (buckets); Rajbhandari et al., "ZeRO", SC
        2020 (shares of the state).
    """

    replicas: int
    shard_state: bool = False
    accumulate: int = 1
    synchronised: bool = True
    batch: Sequence[Tensor | str] | None = None
    bucket: int = BUCKET_BYTES
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None
    tables: Sequence[Tensor | str] = ()
    compress: Filter | None = None
    line: Location = field(default_factory=user_location, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"Data at {self.line}"
        count = as_count(self.replicas)
        if count is None:
            raise ShardingError(
                f"{where}: replicas must be an int of at least 1, not {self.replicas!r}"
            )
        if not isinstance(self.tables, list | tuple):
            raise ShardingError(
                f"{where}: tables must be a list of variables, names or patterns, "
                f'["emb*"], not {self.tables!r}'
            )
        set_frozen_fields(self, replicas=count)
        check_replication(self, where)
        if self.compress is not None and not isinstance(self.compress, Filter):
            raise ShardingError(
                f"{where}: compress must be a filter, such as gf.parallel.FixedPoint(8), not "
                f"{self.compress!r}"
            )

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh axes."""
        return {DATA: self.replicas}

    @property
    def examples(self) -> Sequence[Tensor | str] | None:
        """The placeholders that hold the batch, if the user names them."""
        return self.batch

    @property
    def replication(self) -> ReplicationConfig:
        """The replication configuration along the replicas' axis."""
        replication = replication_of(self, DATA)
        return replace(replication, ring_axis=DATA) if self.tables else replication

    def layouts(self, graph: Graph, mesh: Mesh, strict: bool = True) -> dict[Tensor, Layout]:
        """Return layouts that split the batch, and the rows of tables and of their slots.

        Other variables are whole, except for sharded slots.
        """
        tables = layouts_of_rules(graph, self._table_rules, mesh, strict)
        batch = batch_placeholders(graph, self.batch)
        given = split_batch(graph, batch, tables, DATA, mesh, strict)
        for node in graph.variables:
            tensor = node.outputs[0]
            owner = node.origin.outputs[0] if is_slot(node) and node.origin is not None else tensor
            if owner in tables:
                given[tensor] = Layout(tables[owner].dims[: tensor.ndim])
            elif not (self.shard_state and is_slot(node)):
                given[tensor] = whole(tensor.ndim)
        for tensor in replica_variables(graph):
            given[tensor] = whole(tensor.ndim).with_dim(0, AxisSplit((DATA,)))
        return given

    def filter_gradients(
        self,
        gradients: Sequence[Tensor],
        variables: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients that replicas exchange through `compress`, and updates of its state.

        Raises:
            ShardingError: see `compress`.
        """
        if self.compress is None:
            return [*gradients], []
        whole_ones = [i for i, v in enumerate(variables) if not self._is_table(v)]
        own, trained = ([each[i] for i in whole_ones] for each in (gradients, variables))
        try:
            made, updates = filter_gradients(self.compress, own, trained, self.replicas, scale)
        except ShardingError as error:
            raise ShardingError(f"Data at {self.line}: {error}") from None
        sums = dict(zip(whole_ones, made, strict=True))
        return [sums.get(i, gradient) for i, gradient in enumerate(gradients)], updates

    def _is_table(self, variable: Tensor) -> bool:
        """Return True if `tables` names a variable."""
        name = variable.node.name
        return any(
            fnmatchcase(name, key) if isinstance(key, str) else key is variable
            for key in self.tables
        )

    @property
    def _table_rules(self) -> dict[Tensor | str, tuple[str]]:
        """The rules that divide the rows of tables."""
        return dict.fromkeys(self.tables, (DATA,))

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the partitioned graph for the devices of a cluster (see
        `sharding/partitioner.py`).

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed.

        Raises:
            ShardingError: see `Data`.
        """
        return divide_over_mesh(self, graph, cluster, known, fed)

    def move_rows(
        self,
        counts: Mapping[Node, Int64s],
        shards: Mapping[Node, ShardedVariable],
        homes: Mapping[Node, str],
    ) -> RowMoves | None:
        """Return the moves that let owners of tables be asked for about as many rows; None if none
        is worth it.

        Args:
            counts: how many rows of each range are asked for, by table.
            shards: the shards of tables and slots.
            homes: the devices of shards.
        """
        return move_rows(counts, shards, homes)

    def __mul__(self, other: Any) -> Any:
        """Return the product with a Shard (one mesh of both, replicas outermost) or with a Pipeline
        (each stage has replicas)."""
        if isinstance(other, Shard):
            return self._replicate(other)
        if defines_products(other) and not isinstance(other, Data):
            return NotImplemented
        if isinstance(other, Data):
            both = self.replicas * other.replicas
            raise ShardingError(
                f"at {user_location()}: Data * Data is no other strategy; write Data({both})"
            )
        raise no_product_error(self, other)

    __rmul__ = __mul__

    def _replicate(self, shard: Shard) -> Shard:
        """Return a Shard with these replicas as its outermost mesh axis.

        Raises:
            ShardingError: both split the batch, or both set the same option.
        """
        where = f"Data * Shard at {user_location()}"
        if self.compress is not None:
            raise ShardingError(
                f"{where}: compress={self.compress!r} is for whole gradients, and a Shard "
                "cuts them; leave out compress=, or the Shard"
            )
        if DATA in shard.mesh or shard.batch is not None:
            raise ShardingError(
                f"{where}: the Shard cuts the batch already (mesh {dict(shard.mesh)!r}, "
                f"batch={shard.batch!r}); leave out the Data, or make that axis longer"
            )
        mesh = {DATA: self.replicas, **shard.mesh}
        devices = shard.devices
        if self.devices is not None:
            if devices is not None:
                raise ShardingError(
                    f"{where}: both say devices=; say them in the Data, a list for each replica"
                )
            places = prod(shard.mesh.values())
            devices = flatten_groups(
                device_groups(self.devices, self.replicas, places, where, "replicas"), places
            )
        if self.accumulate > 1 < shard.accumulate:
            raise ShardingError(
                f"{where}: Data has accumulate={self.accumulate} and the Shard "
                f"{shard.accumulate}; say it in one of them"
            )
        product = replace(
            shard,
            mesh=mesh,
            rules={**self._table_rules, **shard.rules},
            devices=devices,
            batch=DATA,
            bucket=shard.bucket if self.bucket == BUCKET_BYTES else self.bucket,
            shard_state=self.shard_state,
            accumulate=max(self.accumulate, shard.accumulate),
            synchronised=self.synchronised and shard.synchronised,
            examples=shard.examples if self.batch is None else self.batch,
        )
        set_frozen_fields(product, line=user_location())
        return product

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the strategy makes of some fetches: each collective with its bytes and the
        line that caused it. Print it."""
        return report_of(self, fetches, cluster)
