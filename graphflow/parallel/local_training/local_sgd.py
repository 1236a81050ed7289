"""LocalSGD: replicas that train by themselves, and exchange their parameters every H turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import Any

from graphflow import init
from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Location, Node, Tensor, origin_scope, user_location
from graphflow.parallel.data import Data
from graphflow.parallel.local_training.local_evaluation import divide_evaluation
from graphflow.parallel.local_training.parameter_exchange import Exchanged, mean_over_replicas
from graphflow.parallel.local_training.replica_unroller import REPLICA, ReplicaUnroller
from graphflow.parallel.local_training.replicated_state import find_replicated_state
from graphflow.parallel.local_training.step_template import build_template
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.mesh_arguments import check_mesh_size, mesh_devices
from graphflow.parallel.replica_devices import device_groups, flatten_groups
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES
from graphflow.parallel.sharding.batch_axis import batch_placeholders
from graphflow.parallel.sharding.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import COUNTER, strategy_of


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class LocalSGD:
    """Replicas that train by themselves and average their parameters every `period` turns.

    A run is a window of turns. It is fed the micro-batches of all replicas and turns, one after the
    other along the first axis: those of the first turn come first. Floats without axes come back as
    means over turns and replicas, tensors that the batch leads in the order of the feeds.
    `Session.get` returns the mean of a variable over replicas.

    Args:
        replicas: their number.
        period: the number of turns between two exchanges, H.
        window: the number of turns in a run.
        batch: the placeholders that hold the batch, or their names; default: those whose first axis
            has the symbol that most have. That axis has to be open.
        bucket: bytes of parameters that are exchanged at once; 0: each by itself.
        devices: the devices of the replicas; default: the first of the cluster. In a product a list
            for each replica.
        inner: the strategy of the devices within a replica, as a product sets it.

    Raises:
        ShardingError: a count is invalid; when a graph is partitioned: there are more replicas than
            devices, the batch has a fixed size, or is smaller than replicas × turns.

    Source: McMahan et al., AISTATS 2017 (FedAvg); Stich, "Local SGD Converges Fast and Communicates
        Little", ICLR 2019.
    """

    replicas: int
    period: int
    window: int = 1
    batch: Sequence[Tensor | str] | None = None
    bucket: int = BUCKET_BYTES
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None
    inner: Any = None
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _counters: dict[Node, Node] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"LocalSGD at {self.line}"
        for what in ("replicas", "period", "window"):
            given = getattr(self, what)
            count = as_count(given)
            if count is None:
                raise ShardingError(f"{where}: {what} must be an int of at least 1, not {given!r}")
            set_frozen_fields(self, **{what: count})
        bucket = as_count(self.bucket, least=0)
        if bucket is None:
            raise ShardingError(f"{where}: bucket must be a number of bytes, not {self.bucket!r}")
        set_frozen_fields(self, bucket=bucket)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh axes."""
        return {REPLICA: self.replicas, **({} if self.inner is None else self.inner.mesh)}

    def counter_of(self, graph: Graph) -> Node | None:
        """Return the variable that counts the turns of a graph's parameters; None if there is none
        yet, as in a graph that does not train before the first step that does."""
        known = self._counters
        found = next((known[v] for v in graph.variables if v in known), None)
        if strategy_of(graph) is None:
            return found
        if found is None:
            found = REGISTRY["variable"](
                initial=init.zeros((), "int64"), trainable=False, shape=(), dtype="int64",
                named=False, name="local_sgd/turns",
            ).node  # fmt: skip
        known.update(dict.fromkeys(find_replicated_state(graph).parameters, found))
        return found

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the graph of a window for the devices of a cluster.

            graph ─build_template→ the step of one replica ─ReplicaUnroller→ turns of all replicas
                  ─mean_over_replicas after each period→ ShardedGraph

        A graph that does not train runs on the first replica, with the means of variables.

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed, and the number of turns so far.

        Raises:
            ShardingError: see `LocalSGD`.
        """
        check_mesh_size(graph, {**self.mesh, "turn": self.window})
        owners = mesh_devices(self.mesh, cluster, self._devices())
        places = prod(self.mesh.values()) // self.replicas
        counter = self.counter_of(graph)
        if strategy_of(graph) is None:
            return divide_evaluation(graph, self.inner, owners, self.replicas, cluster, known or {})
        template = build_template(graph, self.inner, owners[:places], cluster)
        batch = batch_placeholders(graph, self.batch)
        unroller = ReplicaUnroller(template, self.replicas, self.window, owners, batch, known or {})
        done = (fed or {}).get(COUNTER, self.period - self.window % self.period)
        wanted = self._exchanges_at(done)
        for turn in range(self.window):
            unroller.emit_turn(turn)
            if wanted[turn]:
                self._exchange(unroller, graph)
        if counter is not None:
            count = unroller.add_counter(counter)
            with origin_scope(counter, "", owners[0]):
                unroller.current[counter] = [count + self.window]
        varies = self.window % self.period != 0
        return unroller.finish(
            counter=counter if varies else None,
            counted=lambda turns: not varies or self._exchanges_at(turns) == wanted,
        )

    def _exchanges_at(self, done: int) -> list[bool]:
        """Return for each turn of a window whether an exchange follows it.

        Args:
            done: the number of turns before the window.
        """
        if self.window % self.period == 0:
            done = 0
        return [(done + turn + 1) % self.period == 0 for turn in range(self.window)]

    def _exchange(self, unroller: ReplicaUnroller, graph: Graph) -> None:
        """Replace parameters, and other state that is averaged, by their means."""
        state = find_replicated_state(graph)
        values = [Exchanged(v, unroller.current[v]) for v in (*state.parameters, *state.averaged)]
        means = mean_over_replicas(unroller, values, self.bucket)
        for value, mean in zip(values, means, strict=True):
            unroller.current[value.variable] = mean

    def _devices(self) -> Sequence[Any] | None:
        """Return the devices that the user names, those of a replica next to each other."""
        if self.devices is None or self.inner is None:
            return self.devices
        each = prod(self.inner.mesh.values())
        where = f"LocalSGD at {self.line}"
        groups = device_groups(self.devices, self.replicas, each, where, "replicas")
        return flatten_groups(groups, each)

    def __mul__(self, other: Any) -> LocalSGD:
        """Return the product with a Data: the devices of each replica share its micro-batches."""
        if not isinstance(other, Data) or self.inner is not None or other.devices is not None:
            raise ShardingError(
                f"at {user_location()}: a LocalSGD goes with one Data, without devices=, as in "
                f"LocalSGD(2, period=8) * gf.parallel.Data(4), not with {other!r}"
            )
        product = replace(self, inner=other)
        set_frozen_fields(product, line=user_location())
        return product

    __rmul__ = __mul__

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the strategy makes of some fetches: each collective of a run that ends
        with an exchange, with its bytes and the line that caused it. Print it."""
        return report_of(self, fetches, cluster)


__all__ = ["LocalSGD"]
