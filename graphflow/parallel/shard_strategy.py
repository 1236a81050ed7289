"""Shard: a strategy by annotations. It lays a mesh over a model and splits some tensors by rules.

    gf.parallel.Shard(mesh={"data": 2, "model": 2}, rules={"w1": (None, "model"), "x": ("data",)})

All other layouts follow by propagation (`sharding/propagation/propagation.py`).
`Data` is the short form that splits only the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, Tensor, user_location
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.device_mesh import MICRO, PATH, Mesh
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.mesh.mesh_arguments import check_mesh
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.partitioner import divide_over_mesh
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.parallel.sharding.propagation.replication import ReplicationConfig, split_batch
from graphflow.parallel.sharding.propagation.rule_layouts import Axis, layouts_of_rules
from graphflow.placement.clusters.cluster import Cluster


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class Shard:
    """A mesh of devices, and how some tensors are split over it.

    Args:
        mesh: the sizes of its axes by name, `{"data": 2, "model": 2}`.
        rules: for each axis of a tensor, the mesh axis that splits it, several, or None for whole.
            Axes left out at the end stay whole. The key is a tensor, the name of a variable or
            placeholder, or a pattern such as `"*/wq"`.
        batch: the mesh axis that splits the batch: the first axis of all placeholders that have its
            size, unless a rule splits it.
        bucket: bytes of gradients that are summed in one exchange.
        devices: the devices of the mesh, the last axis running fastest; default: the first of the
            cluster. On a cluster of one device, all shards are there. In a product with a Pipeline,
            a list for each place, with a device for each stage.
        shard_state, accumulate, synchronised: as in `Data`, along `batch`: whether each place keeps
            only its part of the optimiser's slots; the number of micro-batches that a place runs
            one after the other; whether batch norm takes the moments of the whole batch.
        examples: the placeholders that hold the batch, or their names; default: those whose first
            axis has the size that most have.
        sequence: a mesh axis. Activations that the rules leave whole along it, such as norms and
            sums between tensor-parallel layers, are split along the second axis of the batch.

    Raises:
        ShardingError: when a graph is partitioned, with numbers: the mesh is larger than the
            cluster; a rule names nothing, an axis that the mesh does not have, more axes than a
            tensor has, or one that is too small.

    Source: Xu et al., "GSPMD", arXiv:2105.04663; Rajbhandari et al., "ZeRO", SC 2020 (shares of the
        state).
    """

    mesh: Mapping[str, int]
    rules: Mapping[Any, Sequence[Axis]] = field(default_factory=dict)
    batch: str | None = None
    bucket: int = BUCKET_BYTES
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None
    shard_state: bool = False
    accumulate: int = 1
    synchronised: bool = True
    examples: Sequence[Tensor | str] | None = None
    sequence: str | None = None
    line: Location = field(default_factory=user_location, init=False, repr=False)

    def __post_init__(self) -> None:
        set_frozen_fields(self, mesh=check_mesh(self.mesh, "Shard"))
        where = f"Shard at {self.line}"
        if not isinstance(self.rules, Mapping):
            raise ShardingError(
                f"{where}: rules must be a dict from tensors or names to axes of the mesh, "
                f'{{"w": (None, "model")}}, not {self.rules!r}'
            )
        for what in ("batch", "sequence"):
            axis = getattr(self, what)
            if axis is not None and axis not in list(self.mesh):
                raise ShardingError(
                    f"{where}: {what} must be an axis of the mesh ({', '.join(self.mesh)}), "
                    f"not {axis!r}"
                )
        if self.batch is not None and self.batch == self.sequence:
            raise ShardingError(
                f"{where}: batch and sequence are both {self.batch!r}; give the mesh two axes, "
                'as in {"data": 2, "model": 2}'
            )
        check_replication(self, where)
        if self.shard_state and self.batch is None:
            raise ShardingError(
                f"{where}: shard_state=True shares the state out over places with other parts of "
                f"the batch; say which axis of the mesh cuts it, batch={next(iter(self.mesh))!r}"
            )

    @property
    def replication(self) -> ReplicationConfig:
        """The replication configuration along the batch's axis."""
        replication = replication_of(self, self.batch)
        return replace(replication, sequence_axis=self.sequence, examples=self.examples)

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
            ShardingError: see `Shard`.
        """
        return divide_over_mesh(self, graph, cluster, known, fed)

    def __mul__(self, other: Any) -> Any:
        """Return the product with a Data (one mesh of both) or with a Pipeline (each stage is
        split)."""
        if defines_products(other):
            return NotImplemented
        if isinstance(other, Shard):
            both = {**self.mesh, **other.mesh}
            hint = "a Shard's mesh may have several axes: write one Shard, mesh="
            raise ShardingError(f"at {user_location()}: {hint}{both!r}, with the rules of both")
        raise no_product_error(self, other)

    __rmul__ = __mul__

    def layouts(self, graph: Graph, mesh: Mesh, strict: bool = True) -> dict[Tensor, Layout]:
        """Return the layouts that the rules and the batch give to tensors of a graph.

        Args:
            graph: the graph.
            mesh: the mesh.
            strict: refuse rules that name nothing in the graph.
        """
        given = layouts_of_rules(graph, self.rules, mesh, strict)
        if self.batch is None and not mesh.sequential:
            return given
        batch = batch_placeholders(graph, self.examples)
        return split_batch(graph, batch, given, self.batch, mesh, strict)

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the strategy makes of some fetches: the layouts of variables, and each
        collective with its bytes and the line that caused it. Print it."""
        return report_of(self, fetches, cluster)


def defines_products(other: Any) -> bool:
    """Return True if `other` is a strategy that defines the product itself."""
    return (
        not isinstance(other, Shard | type)
        and callable(getattr(other, "divide", None))
        and hasattr(type(other), "__rmul__")
    )


def no_product_error(strategy: Any, other: Any) -> ShardingError:
    """Return the error of a product that has no meaning."""
    name = type(strategy).__name__
    return ShardingError(
        f"at {user_location()}: a {name} goes with a Data, a Shard or a Pipeline of gf.parallel's, "
        f"as in {name}(…) * gf.parallel.Pipeline(2), not with {other!r}"
    )


def check_replication(strategy: Any, where: str) -> None:
    """Check the arguments that say how places with the same model work together.

    Raises:
        ShardingError: `accumulate`, `bucket`, `shard_state` or `synchronised` is invalid.
    """
    turns = as_count(strategy.accumulate)
    if turns is None:
        raise ShardingError(
            f"{where}: accumulate must be an int of at least 1, not {strategy.accumulate!r}"
        )
    bucket = as_count(strategy.bucket, least=0)
    if bucket is None:
        raise ShardingError(f"{where}: bucket must be a number of bytes, not {strategy.bucket!r}")
    for what in ("shard_state", "synchronised"):
        given = getattr(strategy, what)
        if not isinstance(given, bool):
            raise ShardingError(f"{where}: {what} must be True or False, not {given!r}")
    set_frozen_fields(strategy, accumulate=turns, bucket=bucket)


def replication_of(strategy: Any, axis: str | None) -> ReplicationConfig:
    """Return how places work together if the batch is split along a mesh axis."""
    apart = frozenset({MICRO, PATH, *([] if axis is None else [axis])})
    return ReplicationConfig(
        strategy.bucket,
        frozenset() if strategy.synchronised else apart,
        axis if strategy.shard_state else None,
    )
