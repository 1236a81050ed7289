"""A partitioned graph, and what stands in it for the user's placeholders, variables and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.frontend.interpreter import evaluate as interpret
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Span, evaluate
from graphflow.parallel.mesh.axis_split import ShardExtent
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, ShardedTensor
from graphflow.parallel.mesh.row_ranges import Int64s, RowRanges
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.pipelining.stage_report import StagedPipeline
from graphflow.parallel.tables.hash_lookups import find_hash_lookups, is_hashed
from graphflow.parallel.tables.range_moves import count_ids, count_rows
from graphflow.parallel.tables.row_updates import find_row_updates, readers_of
from graphflow.strategy import COUNTER, StepFacts

Array = np.ndarray[Any, Any]


def contiguous(array: Array) -> Array:
    """Return the array in C order, also one of rank 0 (numpy's ascontiguousarray gives that an
    axis)."""
    return np.ascontiguousarray(array).reshape(array.shape)


@dataclass(frozen=True)
class FeedSlice:
    """The part of a user's placeholder that the placeholder of a shard is fed.

    Attributes:
        placeholder: the user's placeholder.
        pieces: the extent along each axis, of known or symbolic size.
    """

    placeholder: Node
    pieces: tuple[ShardExtent, ...]

    def index(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the index of the part, given the sizes of symbols."""
        return tuple(slice(evaluate(p.start, sizes), evaluate(p.stop, sizes)) for p in self.pieces)


@dataclass(frozen=True)
class ShardedVariable:
    """The variables that stand for one variable of the user's.

    Attributes:
        nodes: the variable of each place; places that share a device may share it.
        spans: which part of the whole each one has, axis by axis.
        layout: the layout of the whole variable.
        mesh: the sizes of the mesh axes.
        independent: places with the same part have values of their own, of which the variable's is
            the mean.
        derived: the strategy made the variable. A checkpoint is complete without it.
        server: the parameter server that keeps it whole; None if none does.
    """

    nodes: tuple[Node, ...]
    spans: tuple[tuple[Span, ...], ...]
    layout: Layout
    mesh: Mapping[str, int]
    independent: bool = False
    derived: bool = False
    server: int | None = None

    @property
    def ranges(self) -> RowRanges | None:
        """The owners of ranges of its rows, if it lies in ranges."""
        return self.layout.dims[0].ranges if self.layout.dims else None

    def with_ranges(self, ranges: RowRanges) -> ShardedVariable:
        """Return the same with other ranges of rows for each owner, of as many rows as before."""
        before = self.ranges
        assert before is not None
        now = {before.bounds_of(i): ranges.bounds_of(i) for i in range(ranges.count)}
        spans = tuple((own[0]._replace(ranges=now[own[0].ranges]), *own[1:]) for own in self.spans)
        layout = self.layout.with_dim(0, replace(self.layout.dims[0], ranges=ranges))
        return replace(self, spans=spans, layout=layout)

    def check(self, node: Node, mesh: Mesh) -> ShardedVariable:
        """Return the variable if its shards fit a mesh.

        Raises:
            ShardingError: it was split for another mesh.
        """
        whole_ones = not any(self.layout.dims) and len(self.nodes) == len(mesh.places)
        if (whole_ones and not self.independent) or list(self.mesh.items()) == list(
            mesh.sizes.items()
        ):
            return self
        have, want = (
            " × ".join(f"{axis} {size}" for axis, size in sizes.items())
            for sizes in (self.mesh, mesh.sizes)
        )
        raise ShardingError(
            f"variable {node.name!r} (made at {node.location}) lies over the mesh {have}, as a "
            f"step with another strategy left it, and this one has the mesh {want}; train it by "
            "one strategy in a session, and go on from a checkpoint in another session"
        )


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """A graph that was partitioned over a mesh.

    Attributes:
        source: the whole graph.
        graph: the graph of shards. Output i stands for output i of the whole graph. One more output
            follows if there are updates that no fetch needs.
        mesh: the mesh.
        partitioner: the extents of shards.
        shares: what the placeholders of shards are fed.
        variables: the shards of the user's variables.
        records: the collectives and halos that were inserted.
        fetched: the transfers to the first place, for fetches.
        values: what stands for each tensor of the whole graph.
        pipeline: the stages and the schedule, if the graph is a pipeline.
        counter: the variable whose value decides how the strategy partitions the graph, if there is
            one. Callers pass its value among the sizes, as `COUNTER`.
        counter_step: the number by which a step moves the counter.
        counted: returns True for values of the counter that the graph was partitioned for.
        labels: the labels of what nodes belong to, by their turns, if the graph is no pipeline.
        notes: sentences about the strategy, for plans and reports.
        facts: what each step records beside the user's fetches, if there is something.
    """

    source: Graph
    graph: Graph
    mesh: Mesh
    partitioner: SizePartitioner
    shares: Mapping[Node, FeedSlice]
    variables: Mapping[Node, ShardedVariable]
    records: tuple[CommunicationRecord, ...]
    fetched: tuple[CommunicationRecord, ...] = ()
    values: Mapping[Tensor, ShardedTensor] = field(repr=False, default_factory=dict)
    pipeline: StagedPipeline | None = None
    counter: Node | None = None
    counter_step: int = 0
    counted: Callable[[int], bool] = field(repr=False, default=lambda count: True)
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: StepFacts | None = None
    _parts: dict[frozenset[tuple[str, int]], dict[Node, tuple[Any, ...]]] = field(
        repr=False, default_factory=dict
    )
    """The slices of all feeds for the sizes that came last. Each slice is a sum over the extents
    before it, so they are computed once."""

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of all symbols, those of extents too, given the sizes of the whole
        graph."""
        return {**sizes, **self.partitioner.bindings(sizes)}

    @cached_property
    def _lookups(self) -> dict[Node, dict[Tensor, RowRanges]]:
        """The ids that look rows up in each table that lies in ranges, as far as ids follow from
        feeds alone."""
        found: dict[Node, dict[Tensor, RowRanges]] = {}
        if all(pieces.ranges is None for pieces in self.variables.values()):
            return found
        readers = readers_of(self.source)
        updates = find_row_updates(self.source, readers)
        inside = {node for update in updates for node in update.replaced}
        lookups = [
            (node.inputs[0].node, node.inputs[1])
            for node in self.source.of_op("take")
            if node not in inside and node.attrs["axis"] == 0
        ]
        lookups += [(each.table, each.ids) for each in find_hash_lookups(self.source, readers)]
        for table, ids in lookups:
            pieces = self.variables.get(table)
            if pieces is None or pieces.ranges is None:
                continue
            behind = [each.op for each in Graph([ids]).nodes]
            if all(
                op.name == "placeholder" or (op.pure and op.name != "variable") for op in behind
            ):
                found.setdefault(table, {})[ids] = pieces.ranges
        return found

    @cached_property
    def id_feeds(self) -> frozenset[Node]:
        """The placeholders behind the ids of tables whose rows lie in ranges."""
        ids = [each for own in self._lookups.values() for each in own]
        return frozenset(Graph(ids).placeholders) if ids else frozenset()

    def count_rows(self, batches: Sequence[Mapping[Node, Array]]) -> dict[Node, Int64s]:
        """Return for each table in ranges how many rows of each range some batches ask for.

        Args:
            batches: what `id_feeds` were fed.
        """
        counts: dict[Node, Int64s] = {}
        for batch in batches:
            feeds = {node.outputs[0]: array for node, array in batch.items()}
            for table, lookups in self._lookups.items():
                for ids, ranges in lookups.items():
                    (value,) = interpret([ids], feeds)
                    count = count_ids if is_hashed(table) else count_rows
                    counts[table] = counts.get(table, 0) + count(value, ranges)
        return counts

    @property
    def tasks(self) -> tuple[str, ...]:
        """The labels of tasks by turn: "F0", "B0", … of a pipeline, "T0", "E0", … of replicas that
        take turns; () if there are no turns."""
        return self.labels if self.pipeline is None else self.pipeline.labels

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Return True if a step with symbols of these sizes would be partitioned as this one."""
        return self.partitioner.suits(sizes) and self.counted(sizes.get(COUNTER, 0))

    def map_graph(self, change: Callable[[Graph], Graph]) -> ShardedGraph:
        """Return the same with a changed graph of equal outputs. Records follow the tensors that
        are sent."""
        sent = list(dict.fromkeys(t for m in (*self.records, *self.fetched) for t, _ in m.sent))
        graph = change(Graph([*self.graph.outputs, *sent]))
        count = len(self.graph.outputs)
        now = dict(zip(sent, graph.outputs[count:], strict=True))

        def restrict(records: Sequence[CommunicationRecord]) -> tuple[CommunicationRecord, ...]:
            return tuple(
                m.restrict_to({(now[t], to): n for (t, to), n in m.sent.items()}) for m in records
            )

        own = Graph(graph.outputs[:count], graph.names)
        return replace(
            self, graph=own, records=restrict(self.records), fetched=restrict(self.fetched)
        )

    def feeds(self, arrays: Mapping[Node, Array], sizes: Mapping[str, int]) -> dict[Node, Array]:
        """Return what the placeholders of shards are fed, given the user's arrays and the sizes of
        symbols."""
        key = frozenset(sizes.items())
        if key not in self._parts:
            self._parts.clear()
            self._parts[key] = {node: share.index(sizes) for node, share in self.shares.items()}
        if self.facts is not None:
            arrays = self.facts.complete_feeds(arrays)
        return {
            node: contiguous(arrays[share.placeholder][self._parts[key][node]])
            for node, share in self.shares.items()
            if share.placeholder in arrays
        }
