"""Data parallelism: each replica has the model and a share of the batch; gradients are summed.

It is `Shard` along one axis of the mesh with rules that go without saying: the batch is cut, the
variables are whole. So losses, means and gradients are those of the whole batch, also where shares
differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphflow.arguments import checks
from graphflow.errors import ShardingError
from graphflow.graph import Graph
from graphflow.op import Location, Node, Tensor, user_location
from graphflow.parallel.batch import batch_of
from graphflow.parallel.buckets import BUCKET
from graphflow.parallel.counts import count_of, settle
from graphflow.parallel.layouts import Layout, whole
from graphflow.parallel.mesh import MICRO, WHOLE, Cuts, Mesh, Split, too_small
from graphflow.parallel.propagate import is_slot
from graphflow.parallel.report import Report
from graphflow.parallel.shard import Pieces, Sharded, divided
from graphflow.parallel.strategies import (
    Shard,
    check_bucket,
    check_places,
    devices_for,
    no_product,
    report_of,
    takes_products,
)
from graphflow.parallel.turns import in_micro_batches
from graphflow.placement.cluster import Cluster
from graphflow.spec import Dim
from graphflow.strategy import strategy_of

DATA = "data"
"""The axis of the mesh along which replicas are."""


@checks(ShardingError)
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
        devices: of the replicas; default: the first of the cluster.

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
    bucket: int = BUCKET
    devices: Sequence[str] | None = None
    line: Location = field(default_factory=user_location, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"Data at {self.line}"
        for what in ("replicas", "accumulate"):
            given = getattr(self, what)
            count = count_of(given)
            if count is None:
                raise ShardingError(f"{where}: {what} is a count from 1 on, not {given!r}")
            settle(self, **{what: count})
        for what in ("shard_state", "synchronised"):
            if not isinstance(getattr(self, what), bool):
                raise ShardingError(
                    f"{where}: {what} is True or False, not {getattr(self, what)!r}"
                )
        settle(self, bucket=check_bucket(self.bucket, where))

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes, those along which places share a device too."""
        sizes = {DATA: self.replicas}
        return sizes if self.accumulate == 1 else {**sizes, MICRO: self.accumulate}

    def layouts(self, graph: Graph, mesh: Mesh, strict: bool = True) -> dict[Tensor, Layout]:
        """The batch is cut, variables are whole, and slots are cut if their state is shared out."""
        cuts = Cuts(mesh)
        given = {
            t: _batch_layout(graph, t, tuple(self.mesh), cuts, strict)
            for t in batch_of(graph, self.batch)
        }
        for node in graph.variables:
            (tensor,) = node.outputs
            cut = self.shard_state and is_slot(node)
            given[tensor] = _slot_layout(tensor, cuts) if cut else whole(tensor.ndim)
        return given

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, Pieces] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> Sharded:
        """A graph of replicas, for the devices of a cluster.

        Raises:
            ShardingError: see above.
        """
        check_places(graph, self.mesh)
        owners = devices_for({DATA: self.replicas}, cluster, self.devices)
        devices = [owner for owner in owners for _ in range(self.accumulate)]
        mesh = Mesh(self.mesh, devices, frozenset({MICRO}) & set(self.mesh))
        apart = frozenset[str]() if self.synchronised else frozenset(self.mesh)
        given = self.layouts(graph, mesh, strict=strategy_of(graph) is not None)
        cut = divided(graph, mesh, given, known, bucket=self.bucket, apart=apart, fed=fed)
        return in_micro_batches(cut, MICRO) if self.accumulate > 1 else cut

    def __mul__(self, other: Any) -> Any:
        """With a Shard, one mesh of both, the replicas outermost; with a Pipeline, each stage has
        replicas."""
        if isinstance(other, Shard):
            return self._with(other)
        if takes_products(other) and not isinstance(other, Data):
            return NotImplemented
        if isinstance(other, Data):
            both = self.replicas * other.replicas
            raise ShardingError(
                f"at {user_location()}: Data * Data is no other strategy; write Data({both})"
            )
        raise no_product(self, other)

    __rmul__ = __mul__

    def _with(self, shard: Shard) -> Shard:
        """Replicas of what a Shard cuts.

        Raises:
            ShardingError: both have the axis; an option that a Shard's rules would have to follow.
        """
        where = f"Data * Shard at {user_location()}"
        given = {
            "shard_state=True": self.shard_state,
            f"accumulate={self.accumulate}": self.accumulate > 1,
            "synchronised=False": not self.synchronised,
            "batch=[…]": self.batch is not None,
            "devices=[…]": self.devices is not None,
        }
        for told in (option for option, is_set in given.items() if is_set):
            raise ShardingError(
                f"{where}: Data's {told} does not go with a Shard; leave it out, and say in the "
                "Shard's mesh, rules, batch= and devices= what is cut and where"
            )
        if DATA in shard.mesh or shard.batch is not None:
            raise ShardingError(
                f"{where}: the Shard cuts the batch already (mesh {dict(shard.mesh)!r}, "
                f"batch={shard.batch!r}); leave out the Data, or make that axis longer"
            )
        mesh = {DATA: self.replicas, **shard.mesh}
        return Shard(mesh, shard.rules, DATA, self.bucket, shard.devices)

    def report(self, fetches: Any, cluster: Cluster | None = None) -> Report:
        """What the strategy makes of some fetches: each collective with its bytes and the line that
        caused it. Print it."""
        return report_of(self, fetches, cluster)


def _batch_layout(
    graph: Graph, tensor: Tensor, axes: tuple[str, ...], cuts: Cuts, strict: bool
) -> Layout:
    split = Split(axes)
    if strict and not cuts.can(tensor.shape[0], split):
        name = graph.names[tensor.node]
        told = f"{tensor.shape[0]} (of {name!r}, made at {tensor.node.location})"
        raise too_small(told, axes, cuts.mesh)
    return whole(tensor.ndim).with_dim(0, split)


def _slot_layout(tensor: Tensor, cuts: Cuts) -> Layout:
    """Cut along the first axis that is large enough."""
    for d, size in enumerate(tensor.shape):
        if not isinstance(size, Dim) and cuts.can(size, Split((DATA,))):
            return whole(tensor.ndim).with_dim(d, Split((DATA,)))
    return Layout((WHOLE,) * tensor.ndim)
