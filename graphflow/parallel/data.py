"""Data parallelism: each replica has the model and a share of the batch; gradients are summed.

It is `Shard` along one axis of the mesh with rules that go without saying: the batch is cut, the
variables are whole. So losses, means and gradients are those of the whole batch, also where shares
differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, Tensor, user_location
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout, whole
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
from graphflow.parallel.sharding.batch_axis import batch_placeholders
from graphflow.parallel.sharding.partitioner import divide_over_mesh
from graphflow.parallel.sharding.propagation import is_slot
from graphflow.parallel.sharding.replica_terms import ReplicationConfig, split_batch
from graphflow.parallel.sharding.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.placement.clusters.cluster import Cluster

DATA = "data"
"""The axis of the mesh along which replicas are."""


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class Data:
    """Replicas of a model, each with its share of the batch.

    Args:
        replicas: how many. The first get one example more where the batch does not divide.
        shard_state: each replica keeps only its share of the optimiser's slots, and updates that
            part of the variables: gradients are reduce-scattered, new values gathered.
        accumulate: in how many micro-batches a replica goes through its share; gradients are summed
            before replicas exchange them.
        synchronised: batch norm takes the moments of the whole batch, as one device would; else
            each replica (and micro-batch) those of its own share, and the running ones are means.
        batch: the placeholders that hold the batch, or their names; default: those whose first axis
            has the size that most have, see `batch_of`.
        bucket: bytes of gradients that are exchanged at once; 0: each by itself.
        devices: of the replicas; default: the first of the cluster. In a product, in which each
            takes several, a list for each; of stages, those of the first one come first.

    Raises:
        ShardingError: a count that is none; when a graph is divided: more replicas than devices, a
            batch that is smaller than the replicas, no telling what the batch is.

    Source: Li et al., "PyTorch Distributed", VLDB 2020 (buckets); Rajbhandari et al., "ZeRO",
        SC 2020 (shares of the state).
    """

    replicas: int
    shard_state: bool = False
    accumulate: int = 1
    synchronised: bool = True
    batch: Sequence[Tensor | str] | None = None
    bucket: int = BUCKET_BYTES
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None
    line: Location = field(default_factory=user_location, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"Data at {self.line}"
        count = as_count(self.replicas)
        if count is None:
            raise ShardingError(f"{where}: replicas is a count from 1 on, not {self.replicas!r}")
        set_frozen_fields(self, replicas=count)
        check_replication(self, where)

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes."""
        return {DATA: self.replicas}

    @property
    def examples(self) -> Sequence[Tensor | str] | None:
        """The placeholders that hold the batch, where that was said."""
        return self.batch

    @property
    def replication(self) -> ReplicationConfig:
        """On what terms replicas go together."""
        return replication_of(self, DATA)

    def layouts(self, graph: Graph, mesh: Mesh, strict: bool = True) -> dict[Tensor, Layout]:
        """The batch is cut, and variables are whole, but for slots whose state is shared out."""
        given = split_batch(graph, batch_placeholders(graph, self.batch), {}, DATA, mesh, strict)
        for node in graph.variables:
            if not (self.shard_state and is_slot(node)):
                given[node.outputs[0]] = whole(node.outputs[0].ndim)
        return given

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """A graph of replicas, for the devices of a cluster.

        Raises:
            ShardingError: see above.
        """
        return divide_over_mesh(self, graph, cluster, known, fed)

    def __mul__(self, other: Any) -> Any:
        """With a Shard, one mesh of both, the replicas outermost; with a Pipeline, each stage has
        replicas."""
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
        """Replicas of what a Shard cuts.

        Raises:
            ShardingError: both cut the batch, or say the same otherwise.
        """
        where = f"Data * Shard at {user_location()}"
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
        """What the strategy makes of some fetches: each collective with its bytes and the line that
        caused it. Print it."""
        return report_of(self, fetches, cluster)
