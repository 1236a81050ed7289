"""Strategies by annotations: how a mesh of devices is laid over a model, in a few words.

    gf.parallel.Shard(mesh={"data": 2, "model": 2}, rules={"w1": (None, "model"), "x": ("data",)})

What is not said follows (see `propagate`). `Data` is the short form in which only the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from graphflow.base.argument_checks import checks_arguments, did_you_mean
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.frontend.pytree import flatten
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, Tensor, user_location
from graphflow.ir.spec import show_shape
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.device_mesh import MICRO, PATH, WHOLE, AxisSplit, Mesh, SizePartitioner
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.pipelining.microbatch_order import order_by_microbatch
from graphflow.parallel.report import StrategyReport
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES
from graphflow.parallel.sharding.batch_axis import batch_placeholders
from graphflow.parallel.sharding.partitioner import ShardedGraph, ShardedVariable, partition_graph
from graphflow.parallel.sharding.propagation import is_slot
from graphflow.parallel.sharding.replica_terms import ReplicationConfig, split_batch
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import Strategy, divide_with, strategy_of

Axis = str | Sequence[str] | None
MAX_NODES = 4_000_000
"""The nodes that a graph of shards may have, about."""


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class Shard:
    """A mesh of devices, and how some tensors are cut over it.

    Args:
        mesh: sizes of its axes by name, `{"data": 2, "model": 2}`.
        rules: for each axis of a tensor the axis of the mesh along which it is cut, several for one
            cut by both, or None; axes left out at the end stay whole. A tensor is told by itself,
            by the name of a variable or placeholder, or by a pattern such as `"*/wq"`.
        batch: an axis of the mesh along which the batch is cut: the first axis of all placeholders
            that have its size, unless a rule cuts it.
        bucket: bytes of gradients that are summed in one exchange.
        devices: of the mesh, the last axis running fastest; default: the first of the cluster. On a
            cluster of one device, all shards are there. In a product with a Pipeline, a list for
            each place, with a device for each stage.
        shard_state, accumulate, synchronised: as of `Data`, along `batch`: whether each place keeps
            only its share of the optimiser's slots; in how many micro-batches a place goes through
            its part of the batch; whether batch norm takes the moments of the whole batch.
        examples: the placeholders that hold the batch, or their names; default: see `batch_of`.
        sequence: an axis of the mesh. What the rules leave whole along it, such as norms and sums
            between layers that they cut, is cut along the second axis of the batch.

    Raises:
        ShardingError: when a graph is divided, with numbers: the mesh is larger than the cluster, a
            rule names nothing, an axis that the mesh does not have, more axes than a tensor has, or
            one that is too small.

    Source: Xu et al., "GSPMD", arXiv:2105.04663; Rajbhandari et al., "ZeRO", SC 2020 (shares of
        the state).
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
                f"{where}: rules are a dict from tensors or names to axes of the mesh, "
                f'{{"w": (None, "model")}}, not {self.rules!r}'
            )
        for what in ("batch", "sequence"):
            axis = getattr(self, what)
            if axis is not None and axis not in list(self.mesh):
                raise ShardingError(
                    f"{where}: {what} is an axis of the mesh ({', '.join(self.mesh)}), not {axis!r}"
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
        """On what terms places with other parts of the batch go together."""
        replication = replication_of(self, self.batch)
        return replace(replication, sequence_axis=self.sequence, examples=self.examples)

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """A graph of shards, for the devices of a cluster.

        Raises:
            ShardingError: see above.
        """
        return cut_over(self, graph, cluster, known, fed)

    def __mul__(self, other: Any) -> Any:
        """With a Data, one mesh of both; with a Pipeline, each stage is cut so."""
        if defines_products(other):
            return NotImplemented
        if isinstance(other, Shard):
            both = {**self.mesh, **other.mesh}
            told = "a Shard's mesh may have several axes: write one Shard, mesh="
            raise ShardingError(f"at {user_location()}: {told}{both!r}, with the rules of both")
        raise no_product_error(self, other)

    __rmul__ = __mul__

    def layouts(self, graph: Graph, mesh: Mesh, strict: bool = True) -> dict[Tensor, Layout]:
        """What the rules say of tensors of a graph.

        Args:
            strict: refuse rules that name nothing in it.
        """
        given = layouts_of_rules(graph, self.rules, mesh, strict)
        if self.batch is None and not mesh.sequential:
            return given
        batch = batch_placeholders(graph, self.examples)
        return split_batch(graph, batch, given, self.batch, mesh, strict)

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """What the strategy makes of some fetches: layouts of variables, and each collective with
        its bytes and the line that caused it. Print it."""
        return report_of(self, fetches, cluster)


def report_of(strategy: Strategy, fetches: Any, cluster: Cluster | None) -> StrategyReport:
    """The report of a strategy."""
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ShardingError(
            f"report at {user_location()}: a report is for a gf.Cluster, not {cluster!r}"
        )
    graph = Graph(flatten(fetches)[0]).verify()
    there = Cluster.here() if cluster is None else cluster
    division: Any = divide_with(strategy, graph, there)
    return StrategyReport(division, there)


def defines_products(other: Any) -> bool:
    """Whether something is a strategy that says itself what a product with it is."""
    return (
        not isinstance(other, Shard | type)
        and callable(getattr(other, "divide", None))
        and hasattr(type(other), "__rmul__")
    )


def no_product_error(strategy: Any, other: Any) -> ShardingError:
    """There is no such product."""
    name = type(strategy).__name__
    return ShardingError(
        f"at {user_location()}: a {name} goes with a Data, a Shard or a Pipeline of gf.parallel's, "
        f"as in {name}(…) * gf.parallel.Pipeline(2), not with {other!r}"
    )


def check_mesh(mesh: Mapping[str, int], what: str) -> Mapping[str, int]:
    """The sizes of a mesh; refuse what is none.

    Raises:
        ShardingError: no axes, names that are no names, sizes that are no counts.
    """
    where = f"{what} at {user_location()}"
    if not isinstance(mesh, Mapping) or not mesh:
        raise ShardingError(f'{where}: a mesh is a dict of sizes, {{"data": 2}}, not {mesh!r}')
    sizes = {}
    for name, given in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ShardingError(f"{where}: an axis of a mesh has a name, not {name!r}")
        size = as_count(given)
        if size is None:
            raise ShardingError(f"{where}: axis {name!r} has a size from 1 on, not {given!r}")
        sizes[name] = size
    return sizes


def check_replication(strategy: Any, where: str) -> None:
    """Refuse what says nothing of how places with the same model go together.

    Raises:
        ShardingError: see above.
    """
    turns = as_count(strategy.accumulate)
    if turns is None:
        raise ShardingError(
            f"{where}: accumulate is a count from 1 on, not {strategy.accumulate!r}"
        )
    bucket = as_count(strategy.bucket, least=0)
    if bucket is None:
        raise ShardingError(f"{where}: bucket is a number of bytes, not {strategy.bucket!r}")
    for what in ("shard_state", "synchronised"):
        given = getattr(strategy, what)
        if not isinstance(given, bool):
            raise ShardingError(f"{where}: {what} is True or False, not {given!r}")
    set_frozen_fields(strategy, accumulate=turns, bucket=bucket)


def replication_of(strategy: Any, axis: str | None) -> ReplicationConfig:
    """What a strategy whose batch is cut along an axis of the mesh says of it."""
    apart = frozenset({MICRO, PATH, *([] if axis is None else [axis])})
    return ReplicationConfig(
        strategy.bucket,
        frozenset() if strategy.synchronised else apart,
        axis if strategy.shard_state else None,
    )


def cut_over(
    strategy: Any,
    graph: Graph,
    cluster: Cluster,
    known: Mapping[Node, ShardedVariable] | None,
    fed: Mapping[str, int] | None,
) -> ShardedGraph:
    """A graph cut over a strategy's mesh, whose places go through their micro-batches by turns.

    Raises:
        ShardingError: the mesh is too large, or the batch too small; see `Strategy.layouts`.
    """
    sizes, turns = dict(strategy.mesh), strategy.accumulate
    every = {**sizes, MICRO: turns} if turns > 1 else sizes
    check_mesh_size(graph, every)
    owners = mesh_devices(sizes, cluster, strategy.devices)
    devices = [owner for owner in owners for _ in range(turns)]
    mesh = Mesh(every, devices, frozenset({MICRO}) & set(every))
    given = strategy.layouts(graph, mesh, strict=strategy_of(graph) is not None)
    cut = partition_graph(graph, mesh, given, known, replication=strategy.replication, fed=fed)
    return order_by_microbatch(cut, MICRO) if turns > 1 else cut


def check_mesh_size(graph: Graph, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh that is larger than a graph can be written for.

    Raises:
        ShardingError: see above.
    """
    count, nodes = prod(mesh.values()), len(graph.nodes)
    if count * nodes > MAX_NODES:
        told = " × ".join(f"{name} {size:,}" for name, size in mesh.items())
        raise ShardingError(
            f"the mesh ({told}) has {count:,} places, for each of which the {nodes:,} nodes of the "
            f"step would be written; make it smaller, {max(1, MAX_NODES // nodes):,} places at most"
        )


def mesh_devices(
    mesh: Mapping[str, int],
    cluster: Cluster,
    wanted: Any = None,
) -> list[DeviceName]:
    """A device for each place of a mesh.

    Raises:
        ShardingError: there are too few.
    """
    count = prod(mesh.values())
    told = " × ".join(f"{name} {size}" for name, size in mesh.items())
    if wanted is not None:
        if (
            isinstance(wanted, str)
            or not isinstance(wanted, Sequence)
            or not all(isinstance(name, str) for name in wanted)
        ):
            raise ShardingError(
                f"devices is a list with a name for each of the {count} places of the mesh "
                f"({told}), such as {(list(cluster.devices) * count)[:count]}, not {wanted!r}"
            )
        if len(wanted) != count:
            raise ShardingError(
                f"the mesh ({told}) has {count} places, but devices names {len(wanted)}: "
                f"{', '.join(wanted)}; name one for each"
            )
        return [DeviceName.parse(cluster.device(name).name) for name in wanted]
    names = list(cluster.devices)
    if len(names) == 1:
        return [DeviceName.parse(names[0])] * count
    kinds = {name: cluster.device(name).kind for name in names}
    for kind in sorted(set(kinds.values()), key=lambda k: k != "gpu"):
        own = [name for name in names if kinds[name] == kind]
        if len(own) >= count:
            return [DeviceName.parse(name) for name in own[:count]]
    if len(names) >= count:
        return [DeviceName.parse(name) for name in names[:count]]
    raise ShardingError(
        f"the mesh ({told}) takes {count} devices, and the cluster has {len(names)}: "
        f"{', '.join(names)}; make an axis smaller, or give a cluster of {count} devices, such as "
        f"gf.Cluster.local({count})"
    )


def layouts_of_rules(
    graph: Graph, rules: Mapping[Any, Sequence[Axis]], mesh: Mesh, strict: bool = True
) -> dict[Tensor, Layout]:
    """The layouts that rules give to tensors of a graph.

    Args:
        strict: refuse rules that name nothing in the graph, and sizes too small for their shards.

    Raises:
        ShardingError: a rule that cannot be followed.
    """
    named = {graph.names[node]: node.outputs[0] for node in (*graph.placeholders, *graph.variables)}
    given: dict[Tensor, Layout] = {}
    told: dict[Tensor, tuple[Any, bool]] = {}
    for key, axes in rules.items():
        found = _match_tensors(graph, key, named)
        if not found and strict:
            raise _unknown_rule_error(key, named)
        exact = isinstance(key, Tensor) or key in named
        for name, tensor in found.items():
            layout = _rule_layout(name, tensor, axes, mesh, strict)
            before, was_exact = told.get(tensor, (key, exact))
            if was_exact == exact and given.get(tensor, layout) != layout:
                raise ShardingError(
                    f"two rules for {name!r} (made at {tensor.node.location}) differ: {before!r} "
                    f"says {given[tensor]}, {key!r} says {layout}; leave out one, or give the "
                    "tensor a rule by its own name, which goes before patterns"
                )
            if exact or not was_exact:
                given[tensor], told[tensor] = layout, (key, exact)
    return given


def _match_tensors(graph: Graph, key: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(key, Tensor):
        return {graph.names[key.node]: key} if key.node in graph.names else {}
    if not isinstance(key, str):
        raise ShardingError(f"a rule is for a tensor or a name, not {key!r}")
    if key in named:
        return {key: named[key]}
    return {
        name: t for name, t in named.items() if fnmatchcase(name, key) and _can_match_pattern(t)
    }


def _can_match_pattern(tensor: Tensor) -> bool:
    """Whether a pattern may mean a tensor: slots lie as their variables do, and scalars, such as an
    optimiser's, have no axis."""
    return tensor.ndim > 0 and not is_slot(tensor.node)


def _unknown_rule_error(key: Any, named: Mapping[str, Tensor]) -> ShardingError:
    if isinstance(key, Tensor):
        return ShardingError(f"a rule is for {key!r}, on which nothing that is run depends")
    named = {name: t for name, t in named.items() if _can_match_pattern(t)}
    inside = [name for name in named if fnmatchcase(name, f"*/{key}")]  # named in a scope
    hint = did_you_mean(key, named, 3, 0.5) or f"there are {', '.join(map(repr, named))}"
    if inside:
        hint = f"did you mean {' or '.join(map(repr, inside[:3]))}, or all such, '*/{key}'?"
    return ShardingError(
        f"a rule names {key!r}, but no variable or placeholder has that name; {hint}"
    )


def _rule_layout(name: str, tensor: Tensor, axes: Any, mesh: Mesh, strict: bool) -> Layout:
    """The layout that a rule gives to a tensor."""
    where = f"rule {name!r}: {axes!r}"
    example = (mesh.names[0], *[None] * (tensor.ndim - 1))
    made = f"{name!r} is {tensor.spec} (made at {tensor.node.location})"
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise ShardingError(
            f"{where}: give an axis of the mesh or None for each axis, as a tuple: {example}"
        )
    if len(axes) > tensor.ndim:
        raise ShardingError(f"{where} is for {len(axes)} axes, but {made}: it has {tensor.ndim}")
    partitioner, used = SizePartitioner(mesh), set[str]()
    dims = []
    for d, entry in enumerate([*axes, *[None] * (tensor.ndim - len(axes))]):
        if not isinstance(entry, str | Sequence | None):
            raise ShardingError(
                f"{where}: give an axis of the mesh ({', '.join(mesh.names)}) or None for each "
                f"axis, not {entry!r}"
            )
        along = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in along:
            if axis not in mesh.sizes:
                raise ShardingError(
                    f"{where}: the mesh has no axis {axis!r}; it has {', '.join(mesh.sizes)}"
                )
            if axis in used:
                raise ShardingError(
                    f"{where} uses axis {axis!r} of the mesh twice, but it cuts one axis of a "
                    f"tensor, into {mesh.sizes[axis]}; leave out one, or give the mesh another axis"
                )
            used.add(axis)
        split = AxisSplit(along) if along else WHOLE
        if strict and not partitioner.can_split(tensor.shape[d], split):
            count = mesh.part_count(along)
            raise ShardingError(
                f"{where} cuts axis {d} into {count}, but {made}: "
                f"{show_shape(tensor.shape)}[{d}] is {tensor.shape[d]}, too small for {count} "
                "shards that are not empty; leave the axis whole or make the mesh smaller"
            )
        dims.append(split)
    return Layout(tuple(dims))
