"""Reports: what a strategy made of a graph, as a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphflow.parallel.moves import Move
from graphflow.parallel.shard import Sharded


@dataclass(frozen=True)
class Report:
    """What a strategy made of some fetches. Print it.

    Attributes:
        division: the graph of shards.
    """

    division: Sharded

    @cached_property
    def collectives(self) -> tuple[Move, ...]:
        """What was inserted, in order."""
        return self.division.moves

    @property
    def bytes(self) -> int:
        """That travel between places in a step, in all."""
        return sum(move.bytes for move in self.collectives)

    def count(self, kind: str) -> int:
        """How many collectives of a kind there are."""
        return sum(move.kind == kind for move in self.collectives)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        mesh = self.division.mesh
        told = " × ".join(f"{name} {size}" for name, size in mesh.sizes.items())
        division = self.division
        named = dict.fromkeys(str(device) for device in mesh.devices if str(device))
        if not named:  # a pipeline's places share devices: each stage has its own
            named = dict.fromkeys(sorted({str(n.device) for n in division.graph.nodes} - {""}))
        yield f"mesh {told}: {', '.join(named)}"
        layouts = [(node, pieces.layout) for node, pieces in division.variables.items()]
        layouts += [
            (node, division.values[node.outputs[0]].layout)
            for node in division.source.placeholders
            if node.outputs[0] in division.values  # a pipeline that does not flush has none
        ]
        rows = [
            (division.source.names[node], str(node.specs[0]), str(layout))
            for node, layout in layouts
            if any(layout.dims)
        ]
        yield from _table(("tensor", "whole", "cut along"), rows)
        if len(rows) < len(layouts):
            yield f"  {len(layouts) - len(rows)} tensors are whole at each place"
        yield f"{len(self.collectives)} collectives, {self.bytes:,} bytes a step"
        yield from _table(
            ("collective", "along", "of", "bytes", "because of", "at"),
            [
                (m.kind, m.axis, m.tensor, f"{m.bytes:,}", m.cause,
                 f"{os.path.basename(m.location.file)}:{m.location.line}")
                for m in self.collectives
            ],
        )  # fmt: skip


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        for row in (heads, *rows):
            yield "  " + "  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip()
