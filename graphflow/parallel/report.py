"""Reports: what a strategy made of a graph, as tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.frontend.pytree import flatten
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, user_location
from graphflow.ir.spec import product
from graphflow.ops.communication.collectives import groups_of
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor
from graphflow.parallel.pipelining.stage_report import (
    REPLICATED_OPS,
    StageRow,
    bytes_between_stages,
    format_names,
    predict_timeline,
    stage_rows,
)
from graphflow.parallel.pipelining.timeline import ScheduleTimeline, draw
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.passes import optimize
from graphflow.placement.calibration.automatic_cluster import measured_cluster
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import Strategy, divide_with

MAX_LINE = 100
"""The most characters of a line of a drawn schedule."""


@dataclass(frozen=True)
class StrategyReport:
    """The report of a strategy for some fetches. Print it.

    Attributes:
        division: the partitioned graph.
        cluster: the cluster that it was partitioned for. Its cost model predicts the times of a
            pipeline.
    """

    division: ShardedGraph
    cluster: Cluster

    @cached_property
    def collectives(self) -> tuple[CommunicationRecord, ...]:
        """The collectives in order, without those that passes merge with equal ones."""
        return tuple(move for move in self._records if move.kind != "fetch")

    @cached_property
    def fetched(self) -> tuple[CommunicationRecord, ...]:
        """The transfers from other places to the first one, for fetches."""
        return tuple(move for move in self._records if move.kind == "fetch")

    @property
    def bytes(self) -> int:
        """The bytes that travel between places in a step: in collectives, to be fetched, and
        between stages."""
        return sum(move.bytes for move in self._records) + self.between

    @cached_property
    def filtered(self) -> tuple[int, int] | None:
        """The bytes that travel through filters in a step, and what would travel without them; None
        without filters."""
        moved = [move for move in self.collectives if move.plain is not None]
        if not moved:
            return None
        return sum(move.bytes for move in moved), sum(move.plain or 0 for move in moved)

    @cached_property
    def fed(self) -> dict[str, int]:
        """The bytes that the client feeds to each device in a step. Of a split batch, a device is
        fed its part."""
        graph, guess = self._optimized.graph, self.division.partitioner.guess
        found: dict[str, int] = {}
        for node in graph.placeholders:
            size = guess(product(node.specs[0].shape)) * node.specs[0].dtype.itemsize
            for device in {str(reader.device) for reader in graph.consumers[node]} - {""}:
                found[device] = found.get(device, 0) + size
        return dict(sorted(found.items()))

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes that travel between places in a step, by the kind of exchange."""
        found: dict[str, int] = {}
        for move in self._records:
            found[move.kind] = found.get(move.kind, 0) + move.bytes
        return found

    def count(self, kind: str) -> int:
        """Return how many collectives of a kind there are."""
        return sum(move.kind == kind for move in self.collectives)

    # Pipelines --------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> tuple[StageRow, ...]:
        """The contents of each stage of a pipeline; () if the strategy is no pipeline."""
        cut = self.division
        if cut.pipeline is None:
            return ()
        return tuple(
            stage_rows(
                cut.pipeline,
                cut.source,
                self._optimized.graph,
                cut.partitioner,
                self._in_collectives,
            )
        )

    @cached_property
    def between(self) -> int:
        """The bytes that stages of a pipeline send each other in a step."""
        cut = self.division
        if cut.pipeline is None:
            return 0
        return bytes_between_stages(
            cut.pipeline, self._optimized.graph, cut.partitioner, self._in_collectives
        )

    @cached_property
    def timeline(self) -> ScheduleTimeline | None:
        """When a pipeline's tasks run, with the seconds that are predicted for each stage; None if
        there are no stages."""
        cut = self.division
        if cut.pipeline is None:
            return None
        return predict_timeline(cut.pipeline, cut.graph, cut.partitioner, self.cluster)

    # Optimised --------------------------------------------------------------------------------

    @cached_property
    def _optimized(self) -> ShardedGraph:
        """The partitioned graph after the passes, as it will run."""
        return self.division.map_graph(optimize)

    @cached_property
    def _records(self) -> tuple[CommunicationRecord, ...]:
        """The communication of the optimised graph: nothing that was sent before, and nothing that
        no node reads."""
        graph = self._optimized.graph
        together = {node for group in groups_of(graph.nodes) for node in group}
        seen: set[SentTensor] = set()
        found = []
        for move in (*self._optimized.records, *self._optimized.fetched):
            left: dict[SentTensor, float] = {}
            for (tensor, to), size in move.sent.items():
                node = tensor.node
                if node not in graph.names or node.op.name in REPLICATED_OPS:
                    continue
                if to is not None or node in together:
                    left[tensor, to] = size
                else:
                    left |= self._received_alone(node)
            left = {part: size for part, size in left.items() if part not in seen}
            seen.update(left)
            if left:
                found.append(move.restrict_to(left))
        return tuple(found)

    def _received_alone(self, node: Node) -> dict[SentTensor, float]:
        """Return what a node of a collective receives if the other nodes of its group are
        unused."""
        guess, rank = self.division.partitioner.guess, node.attrs["rank"]
        return {
            (t, rank): guess(product(t.shape)) * t.spec.dtype.itemsize
            for i, t in enumerate(node.inputs)
            if i != rank
        }

    @cached_property
    def _in_collectives(self) -> set[SentTensor]:
        """The parts that are sent in collectives."""
        return {part for move in self._records for part in move.sent}

    # Text -------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        mesh = self.division.mesh
        shape = " × ".join(f"{name} {size}" for name, size in mesh.sizes.items())
        division = self.division
        named = dict.fromkeys(str(device) for device in mesh.devices if str(device))
        if not named:  # in a pipeline the nodes have devices, not the places
            named = dict.fromkeys(sorted({str(n.device) for n in division.graph.nodes} - {""}))
        yield f"mesh {shape}: {', '.join(named)}"
        yield from (f"  {note}" for note in self.division.notes)
        yield from self._pipeline_lines()
        layouts = [(node, pieces.layout) for node, pieces in division.variables.items()]
        layouts += [
            (node, division.values[node.outputs[0]].layout)
            for node in division.source.placeholders
            if node.outputs[0] in division.values  # not in a pipeline that does not flush
        ]
        cut = [
            (division.source.names[node], str(node.specs[0]), str(layout))
            for node, layout in layouts
            if any(layout.dims)
        ]
        yield from format_table(("tensor", "whole", "cut along"), cut)
        if len(cut) < len(layouts):
            yield f"  {len(layouts) - len(cut)} tensors are whole at each place"
        if self.fed:
            yield f"  fed a step: {', '.join(self._fed_lines())}"
        moved = sum(move.bytes for move in self.collectives)
        yield f"{len(self.collectives)} collectives, {moved:,} bytes a step"
        if self.filtered is not None:
            after, before = self.filtered
            share = f"{after / before:.2%}"
            yield f"  of these {after:,} through filters, in place of {before:,} ({share})"
        if self.fetched:
            yield f"  and {sum(move.bytes for move in self.fetched):,} bytes to the first place"
        yield from format_table(
            ("collective", "along", "of", "bytes", "because of", "at"),
            [
                (m.kind, m.axis, m.tensor, f"{m.bytes:,}", m.cause,
                 f"{os.path.basename(m.location.file)}:{m.location.line}")
                for m in self._records
            ],
        )  # fmt: skip

    def _fed_lines(self) -> Iterator[str]:
        """Yield how much each device is fed; devices that are fed alike share a line."""
        by_size: dict[int, list[str]] = {}
        for device, size in self.fed.items():
            by_size.setdefault(size, []).append(device)
        for size, devices in by_size.items():
            names = devices[0] if len(devices) == 1 else f"each of {len(devices)} devices"
            yield f"{size:,} bytes to {names}"

    def _pipeline_lines(self) -> Iterator[str]:
        """Yield the lines that only pipelines have: stages, schedule, idle time."""
        if self.division.pipeline is None or self.timeline is None:
            return
        schedule = self.division.pipeline.schedule
        yield f"{schedule.stages} stages, {schedule.microbatches} micro-batches, {schedule.name}"
        yield from format_table(
            ("stage", "on", "has", "nodes", "parameters", "bytes", "sends forward", "and back"),
            [
                (str(row.number), ", ".join(row.devices), format_names(row.names),
                 f"{row.nodes:,}", f"{row.parameters:,}", f"{row.bytes:,}",
                 f"{row.forward:,}", f"{row.backward:,}")
                for row in self.stages
            ],
        )  # fmt: skip
        yield f"  (sent: bytes a micro-batch; {self.between:,} bytes a step from stage to stage)"
        for line in draw(schedule).splitlines():
            yield "  " + (line if len(line) <= MAX_LINE else line[: MAX_LINE - 2] + " …")
        stored = ", ".join(map(str, self.timeline.stored))
        yield (
            f"  idle: {self.timeline.bubble:.1%} of the devices' time, predicted for the stages as "
            f"they are; micro-batches stored at most: {stored}"
        )


def format_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns."""
    if rows:
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        for row in (heads, *rows):
            yield "  " + "  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip()


def report_of(strategy: Strategy, fetches: Any, cluster: Cluster | None) -> StrategyReport:
    """Return the report of a strategy for some fetches.

    Raises:
        ShardingError: `cluster` is no gf.Cluster, or the strategy cannot partition the graph.
    """
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ShardingError(
            f"report at {user_location()}: the cluster must be a gf.Cluster, not {cluster!r}"
        )
    graph = Graph(flatten(fetches)[0]).verify()
    there = measured_cluster() if cluster is None else cluster
    division: Any = divide_with(strategy, graph, there)
    return StrategyReport(division, there)
