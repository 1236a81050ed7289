"""Graphs whose rows workers read: placeholders of columns become nodes that read files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.data.dataset import Dataset
from graphflow.data.read_data_op import read_data
from graphflow.data.row_reader import describe
from graphflow.data.sources.source import Array
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.feeds import convert
from graphflow.ir.graph import Graph, substitute_tensors
from graphflow.ir.op import Tensor, user_location
from graphflow.strategy import strategy_of

Feeds = dict[Tensor, Array]


@checks_argument_names(ArgumentError)
def bind(data: Dataset, fetches: Sequence[Tensor]) -> WorkerReading:
    """Return fetches that read rows on workers instead of being fed them, and their feeds.

    For a loop of your own: `reading = gf.data.bind(data, [train, loss])`, then
    `session.run(reading.fetches, feeds)` for `feeds` in `reading.start(session.step)`.

    Args:
        data: batches of files; see `Dataset.on_workers`.
        fetches: tensors whose placeholders have the names of columns.

    Raises:
        ArgumentError: workers cannot read the rows, or no placeholder has the name of a column.
        FeedError: a column does not convert to the dtype or shape of its placeholder.
    """
    at = f"bind at {user_location()}"
    if not isinstance(data, Dataset):
        raise ArgumentError(
            f"{at}: give a dataset, such as gf.data.npy(x=…).batch(64), not {data!r}"
        )
    given = [fetches] if isinstance(fetches, Tensor) else fetches
    if not isinstance(given, list | tuple) or not all(isinstance(t, Tensor) for t in given):
        raise ArgumentError(f"{at}: fetches must be a list of tensors, not {fetches!r}")
    return WorkerReading(data.on_workers(), list(given))


class WorkerReading:
    """Fetches that read the rows of a dataset where they run, and the feeds of each batch.

    A feed is a position, 16 bytes, and an empty array for each column. Strategies that cut a step
    into turns also need the number of each row, 4 bytes. Made by `bind`.

    Args:
        data: the dataset.
        fetches: tensors whose placeholders have the names of columns.

    Attributes:
        data: the dataset.
        fetches: the tensors that read rows.
    """

    def __init__(self, data: Dataset, fetches: Sequence[Tensor]) -> None:
        at = f"bind at {user_location()}"
        self.data = data
        graph = Graph(fetches)
        named = {node.name: node for node in graph.placeholders}
        first = data.read((0, 0))
        columns = tuple(name for name in first if name in named)
        if not columns:
            raise ArgumentError(
                f"{at}: no placeholder has the name of a column; the columns are "
                f"{', '.join(first)}, the placeholders {', '.join(named) or 'none'}"
            )
        text = describe(data.columns(*columns))
        self._position = placeholder("int64", (2,), name="position")
        self._shapes: dict[Tensor, tuple[int, ...]] = {}
        self._numbers: list[Tensor] = []
        strategy = strategy_of(graph)
        # Shards of a mesh know where in the batch they begin. Turns of a window do not.
        in_turns = strategy is not None and not hasattr(strategy, "layouts")
        replaced = {}
        for column in columns:
            node = named[column]
            array = convert(node, first[column])
            # By the placeholder's name, so that strategies find the batch as before.
            rows = placeholder("int8", (*node.specs[0].shape, 0), name=column)
            self._shapes[rows] = (*array.shape[1:], 0)
            numbers = []
            if in_turns:
                size = node.specs[0].shape[0]
                numbers = [placeholder("int32", (size,), name=f"{column}_rows")]
            self._numbers += numbers
            replaced[node.outputs[0]] = read_data(
                self._position, rows, *numbers, data=text, column=column,
                dtype=node.specs[0].dtype.name, first=0, name=f"read_{column}",
            )  # fmt: skip
        self._replaced: Mapping[Tensor, Tensor] = replaced
        self.fetches = self.substitute(fetches)

    def substitute(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the same placeholders, with nodes that read rows in their place."""
        return substitute_tensors(tensors, self._replaced)

    def feeds(self, position: tuple[int, int]) -> Feeds:
        """Return the feeds of a batch."""
        count = self.data.batch_rows(position)
        empty = {t: np.empty((count, *shape), np.int8) for t, shape in self._shapes.items()}
        numbers = dict.fromkeys(self._numbers, np.arange(count, dtype=np.int32))
        return {self._position: np.array(position, np.int64), **empty, **numbers}

    def start(self, step: int = 0) -> Iterator[Feeds]:
        """Return the feeds of the batches from a step on."""
        return map(self.feeds, self.data.positions(step))


__all__ = ["WorkerReading", "bind"]
