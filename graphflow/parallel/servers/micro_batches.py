"""The micro-batches of a window: equal parts of the batch, one for each turn of each worker.

Micro-batch m of K·W has the rows m·b to (m + 1)·b of what is fed. Turn c of worker k of W takes
micro-batch c·W + k; in a pool, any worker may take any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Dim, Size, evaluate, show_shape, show_symbol, sole_symbol, symbols
from graphflow.parallel.mesh.axis_split import ShardExtent
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.emission.sharded_graph import FeedSlice
from graphflow.parallel.sharding.propagation.batch_axis import equal_sizes


@dataclass(frozen=True)
class Turns:
    """The numbers of a window.

    Attributes:
        workers: the number of workers, W.
        each: the turns of each worker, K; of a pool, those of the mean worker.
    """

    workers: int
    each: int

    @property
    def total(self) -> int:
        """The number of micro-batches, K·W."""
        return self.workers * self.each

    def __str__(self) -> str:
        return f"{self.total} micro-batches ({self.workers} workers × {self.each} turns)"


class MicroBatches(SizePartitioner):
    """The sizes of micro-batches: each symbol of the batch stands for `turns.total` equal parts.

    Attributes:
        symbols_of_batch: the symbols of the batch: one, or several that ops require to be equal.
        size: the size of a micro-batch.
        sizes: the sizes that stand for symbols of the step in a turn.
    """

    def __init__(self, mesh: Mesh, graph: Graph, batch: Sequence[Tensor], turns: Turns) -> None:
        super().__init__(mesh)
        self.turns = turns
        self.symbols_of_batch = _batch_symbols(graph, batch, turns)
        first = self.symbols_of_batch[0]
        self._micro = f"{first}@turn"
        self.size: Size = Dim.symbol(self._micro)
        self.sizes: dict[str, Size] = dict.fromkeys(self.symbols_of_batch, self.size)

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the size of a micro-batch, given that of the batch.

        Raises:
            ShardingError: the batch does not divide into micro-batches of one size.
        """
        found = super().bindings(sizes)
        size = next((sizes[s] for s in self.symbols_of_batch if s in sizes), None)
        if size is None:
            return found
        if size % self.turns.total or not size:
            name = show_symbol(self.symbols_of_batch[0])
            raise ShardingError(
                f"a batch of {size} ({name}) does not divide into {self.turns} of one size; feed "
                f"a multiple of {self.turns.total}, or choose another window="
            )
        return {**found, self._micro: size // self.turns.total}

    def worker_rows(self, node: Node, worker: int) -> FeedSlice:
        """Return what a worker is fed of a placeholder: its own micro-batches, in order."""
        shape = node.specs[0].shape
        pieces = tuple(ShardExtent(0, size, size) for size in shape)
        return _WorkerRows(node, pieces, worker, self.turns)


@dataclass(frozen=True)
class _WorkerRows(FeedSlice):
    """The micro-batches of one worker.

    Attributes:
        worker: the number of the worker.
        turns: the numbers of the window.
    """

    worker: int
    turns: Turns

    def index(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the index of the rows, given the sizes of symbols."""
        size = evaluate(self.pieces[0].total, sizes) // self.turns.total
        first = np.arange(self.worker, self.turns.total, self.turns.workers) * size
        return ((first[:, None] + np.arange(size)).reshape(-1),)


def row_of(server: int, servers: int, pushes: int) -> tuple[ShardExtent, ...]:
    """Return the extents of a server's row in the orders of all servers, (servers, pushes)."""
    return ShardExtent(server, 1, servers), ShardExtent(0, pushes, pushes)


def whole_feed(node: Node) -> FeedSlice:
    """Return what a worker of a pool is fed of a placeholder: all of it."""
    return FeedSlice(node, tuple(ShardExtent(0, size, size) for size in node.specs[0].shape))


def _batch_symbols(graph: Graph, batch: Sequence[Tensor], turns: Turns) -> list[str]:
    """Return the symbols of the batch.

    Raises:
        ShardingError: the batch has a fixed size, or its placeholders have different symbols; or
            another axis has its size.
    """
    same = equal_sizes(graph)
    firsts: list[Size] = [t.shape[0] if t.ndim else 0 for t in batch]
    first = same.get(firsts[0], firsts[0]) if firsts else None
    if not isinstance(first, Dim) or any(
        not sole_symbol(d) or same.get(d, d) != first for d in firsts
    ):
        shapes = ", ".join(f"{t.name!r} {show_shape(t.shape)}" for t in batch)
        raise ShardingError(
            f"each of {turns} goes through the step as a batch of its own, of another size than "
            f"{shapes}; leave the batch open, one symbol that its placeholders share: "
            "gf.placeholder('float32', ('B', 784))"
        )
    sizes = dict.fromkeys([*firsts, *(d for d in same if same[d] == first)])
    names = [name for size in sizes if (name := sole_symbol(size))]
    for node in graph.placeholders:
        others = {s for size in node.specs[0].shape[1:] for s in symbols(size)}
        if not others.isdisjoint(names):
            raise ShardingError(
                f"placeholder {node.name!r} (made at {node.location}) of shape "
                f"{show_shape(node.specs[0].shape)} has the batch on another axis than the first, "
                f"and {show_count(turns.total, 'micro-batch')} divide the first; transpose it"
            )
    return names


__all__ = ["MicroBatches", "Turns", "row_of", "whole_feed"]
