"""A partitioned graph: what stands for the user's placeholders, variables and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Span, evaluate
from graphflow.parallel.mesh.axis_split import ShardExtent
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, ShardedTensor
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.pipelining.stage_report import StagedPipeline

Array = np.ndarray[Any, Any]


def contiguous(array: Array) -> Array:
    """The array, in the order of its axes in memory (of rank 0 too)."""
    return np.ascontiguousarray(array).reshape(array.shape)


@dataclass(frozen=True)
class FeedSlice:
    """What a placeholder of a shard is fed: a part of what the user's placeholder is.

    Attributes:
        placeholder: the user's.
        pieces: for each axis its piece, of known or symbolic size.
    """

    placeholder: Node
    pieces: tuple[ShardExtent, ...]

    def index(self, sizes: Mapping[str, int]) -> tuple[slice, ...]:
        """The part, for sizes of symbols."""
        return tuple(slice(evaluate(p.start, sizes), evaluate(p.stop, sizes)) for p in self.pieces)


@dataclass(frozen=True)
class ShardedVariable:
    """The variables that stand for one of the user's, and what part of it each has.

    Attributes:
        mesh: the sizes of its axes.
    """

    nodes: tuple[Node, ...]
    spans: tuple[tuple[Span, ...], ...]
    layout: Layout
    mesh: Mapping[str, int]

    def check(self, node: Node, mesh: Mesh) -> ShardedVariable:
        """The same, if they lie on a mesh, or would lie there as they do.

        Raises:
            ShardingError: they were cut for another mesh.
        """
        whole_ones = not any(self.layout.dims) and len(self.nodes) == len(mesh.places)
        if whole_ones or list(self.mesh.items()) == list(mesh.sizes.items()):
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
    """A graph that was cut over a mesh.

    Attributes:
        graph: output i is what fetch i of the whole graph was; one more, where there are updates
            of which no fetch has need.
        shares: what the placeholders of shards are fed.
        variables: the pieces of the user's variables.
        moves: the collectives that were inserted.
        fetched: what goes to the first place, to be fetched.
        values: what stands for each tensor of the whole graph.
        staged: the pipeline that it is, if it is one.
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
    _parts: dict[frozenset[tuple[str, int]], dict[Node, tuple[slice, ...]]] = field(
        repr=False, default_factory=dict
    )
    """What placeholders are fed for the sizes that came last: of each, a sum over those before."""

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of all symbols, those of pieces too."""
        return {**sizes, **self.partitioner.bindings(sizes)}

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a pipeline's nodes belong to, by turn: F0, B0, …; else nothing."""
        return () if self.pipeline is None else self.pipeline.labels

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Whether a step with symbols of these sizes would be cut as this is."""
        return self.partitioner.suits(sizes)

    def map_graph(self, change: Callable[[Graph], Graph]) -> ShardedGraph:
        """The same with another graph, of equal outputs, and what is sent in that."""
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
        """What the placeholders of shards are fed: their part of what the user feeds."""
        key = frozenset(sizes.items())
        if key not in self._parts:
            self._parts.clear()
            self._parts[key] = {node: share.index(sizes) for node, share in self.shares.items()}
        return {
            node: contiguous(arrays[share.placeholder][self._parts[key][node]])
            for node, share in self.shares.items()
            if share.placeholder in arrays
        }
