"""The base of strategies whose replicas have variables of their own: devices, turns, products."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Self, cast

from graphflow import init
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Location, Node, Tensor, origin_scope, user_location
from graphflow.parallel.data import Data
from graphflow.parallel.local_training.local_evaluation import divide_evaluation
from graphflow.parallel.local_training.replica_unroller import REPLICA, TURN, ReplicaUnroller
from graphflow.parallel.local_training.replicated_state import (
    ReplicatedState,
    find_replicated_state,
)
from graphflow.parallel.local_training.step_template import build_template
from graphflow.parallel.local_training.window_graph import finish_window
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.mesh_arguments import check_mesh_size, mesh_devices
from graphflow.parallel.replica_devices import device_groups, flatten_groups
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.parallel.tables.hash_lookups import is_hashed
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import COUNTER, strategy_of


class ReplicaStrategy:
    """Replicas that take turns of their own, and exchange values between turns.

    A subclass is a frozen dataclass with the fields below. It says what happens in a window of
    turns (`plan_window`), and writes it (`emit_window`).

    Attributes:
        replicas: their number.
        window: the number of turns in a run.
        batch: the placeholders that hold the batch, or their names; None for the default.
        bucket: bytes that are exchanged at once; 0: each value by itself.
        devices: the devices that the user names, or None.
        inner: the strategy of the devices within a replica, or None.
        line: the user's line.
    """

    replicas: int
    window: int
    batch: Sequence[Tensor | str] | None
    bucket: int
    devices: Sequence[str] | Sequence[Sequence[str]] | None
    inner: Any
    line: Location
    _counters: dict[Node, Node]
    """The counter of turns of each variable that replicas exchange."""

    # What subclasses define -----------------------------------------------------------------------

    def plan_window(self, done: int) -> Hashable:
        """Return what happens in a window of turns. Windows with equal plans share a program.

        Args:
            done: the number of turns before the window.
        """
        raise NotImplementedError

    def emit_window(self, unroller: ReplicaUnroller, state: ReplicatedState, plan: Any) -> None:
        """Write the turns of a window, and the exchanges between them.

        Args:
            unroller: writes turns, and has the current values.
            state: the variables that replicas would let drift apart.
            plan: the result of `plan_window`.
        """
        raise NotImplementedError

    def describe_window(self, unroller: ReplicaUnroller) -> Sequence[str]:
        """Return sentences about a window that was written, for plans and reports."""
        raise NotImplementedError

    @property
    def cycle(self) -> int:
        """The number of turns after which the plans of windows repeat."""
        raise NotImplementedError

    @property
    def first_differs(self) -> bool:
        """True if the plan of the first window is another than those of later ones."""
        return False

    @property
    def varies(self) -> bool:
        """True if the plans of windows differ, so that the number of turns has to be known."""
        return self.first_differs or self.window % self.cycle != 0

    def is_in_step(self, done: int) -> bool:
        """Return True if all replicas have the same parameters after a number of turns."""
        raise NotImplementedError

    # The interface of strategies ------------------------------------------------------------------

    def check_counts(self, *names: str) -> None:
        """Check that arguments are counts, and store them as ints.

        Raises:
            ShardingError: one is no int of at least 1, or `bucket` no int of at least 0.
        """
        where = f"{type(self).__name__} at {self.line}"
        for name in names:
            given = getattr(self, name)
            count = as_count(given)
            if count is None:
                raise ShardingError(f"{where}: {name} must be an int of at least 1, not {given!r}")
            set_frozen_fields(self, **{name: count})
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
                named=False, name=f"{type(self).__name__}/turns",
            ).node  # fmt: skip
        state = find_replicated_state(graph)
        known.update(dict.fromkeys((*state.parameters, *state.averaged), found))
        return found

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the graph of a window for the devices of a cluster.

            graph ─build_template→ the step of one replica ─emit_window→ ShardedGraph

        A graph that does not train runs on the first replica, with the means of variables.

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed, and the number of turns so far.
                Without that number the window ends a cycle.

        Raises:
            ShardingError: see the strategy.
        """
        check_mesh_size(graph, {**self.mesh, TURN: self.window})
        owners = mesh_devices(self.mesh, cluster, self._devices())
        places = len(owners) // self.replicas
        counter = self.counter_of(graph)
        ending = 2 * self.cycle - self.window % self.cycle
        done = (fed or {}).get(COUNTER, ending) if self.varies else 0
        if strategy_of(graph) is None:
            equal = self.is_in_step((fed or {}).get(COUNTER, 0))
            division = divide_evaluation(
                graph, self.inner, owners, self.replicas, cluster, known or {},
                self._counters if equal else {},
            )  # fmt: skip
            return replace(
                division, counter=counter, counted=lambda turns: self.is_in_step(turns) == equal
            )
        template = build_template(graph, self.inner, owners[:places], cluster)
        batch = batch_placeholders(graph, self.batch)
        unroller = ReplicaUnroller(template, self.replicas, self.window, owners, batch, known or {})
        plan, state = self.plan_window(done), find_replicated_state(template.source)
        if self.replicas > 1:
            _refuse_hash_tables(state.parameters)
        self.emit_window(unroller, state, plan)
        if counter is not None:
            count = unroller.add_counter(counter)
            with origin_scope(counter, "", owners[0]):
                unroller.current[counter] = [count + self.window]
        return finish_window(
            unroller,
            notes=tuple(self.describe_window(unroller)),
            counter=counter if self.varies else None,
            counter_step=self.window,
            counted=lambda turns: not self.varies or self.plan_window(turns) == plan,
        )

    def _devices(self) -> Sequence[Any] | None:
        """Return the devices that the user names, those of a replica next to each other."""
        if self.devices is None or self.inner is None:
            return self.devices
        each = prod(self.inner.mesh.values())
        where = f"{type(self).__name__} at {self.line}"
        groups = device_groups(self.devices, self.replicas, each, where, "replicas")
        return flatten_groups(groups, each)

    def __mul__(self, other: Any) -> Self:
        """Return the product with a Data: the devices of each replica share its micro-batches."""
        name = type(self).__name__
        if not isinstance(other, Data) or self.inner is not None or other.devices is not None:
            raise ShardingError(
                f"at {user_location()}: a {name} goes with one Data, without devices=, as in "
                f"{name}(2, …) * gf.parallel.Data(4), not with {other!r}"
            )
        if other.compress is not None:
            raise ShardingError(
                f"at {user_location()}: in a product the replicas of {name} exchange, so a filter "
                f"goes there: {name}(…, compress={other.compress!r}) * gf.parallel.Data(…)"
            )
        product: Self = replace(cast(Any, self), inner=other)
        set_frozen_fields(product, line=user_location())
        return product

    __rmul__ = __mul__

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the strategy makes of some fetches: each collective of a run that ends a
        cycle, with its bytes and the line that caused it. Print it."""
        return report_of(self, fetches, cluster)


def _refuse_hash_tables(parameters: Sequence[Node]) -> None:
    """Refuse hash tables among the variables that replicas train by themselves.

    Raises:
        ShardingError: there is one.
    """
    for node in parameters:
        if is_hashed(node):
            raise ShardingError(
                f"{node.name!r} (made at {node.location}) holds the rows of a HashTable. Each "
                "replica would give them to the ids that it saw, and the mean of two replicas' "
                "rows would mix ids; train the table synchronously, by gf.parallel.Data(…, "
                f"tables=[{node.name!r}])"
            )


__all__ = ["ReplicaStrategy"]
