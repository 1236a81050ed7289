"""A dataset: a source, and how its rows become batches.

    source ─shuffle→ order of rows ─batch→ rows of a batch ─map→ batch ─prefetch→ the training

A position is (epoch, batch). The rows of a batch follow from it alone, so any batch is found at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_argument_names, require_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.data.orders import RowOrder, rows_in_order
from graphflow.data.prefetch import prefetch_items
from graphflow.data.source_files import SourceFiles
from graphflow.data.sources.source import Array, Batch, Source
from graphflow.errors import ArgumentError, GraphflowError
from graphflow.ir.name_hints import HintingClass
from graphflow.ir.op import user_location


class Position(NamedTuple):
    """The place of a training in its data: the number of the epoch, and of the batch in it."""

    epoch: int
    batch: int


class _Map(NamedTuple):
    """A function of batches, and its seed if it draws random numbers."""

    function: Callable[..., Any]
    seed: int | None


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Dataset(metaclass=HintingClass):
    """Rows of a source in an order, as batches.

    Made by functions such as `gf.data.arrays`; each method returns a new dataset.

    Iterating gives the batches of all epochs: dicts from column to array, which a session takes as
    feeds of the placeholders of those names.

    Args:
        source: where rows come from.
        order: the order of rows.
        size: rows of a batch; None until `batch` says it.
        drop_last: leave out the last batch of an epoch if it is smaller.
        maps: functions of batches.
        count: number of epochs; None: without end.
        ahead: number of batches that are prepared ahead.
        files: how other processes open the source; None: only this one has it.
        chosen_columns: names of the columns in use; None: all.
        by_workers: workers read the rows (see `on_workers`).
    """

    source: Source
    order: RowOrder = RowOrder()
    size: int | None = None
    drop_last: bool = False
    maps: tuple[_Map, ...] = ()
    count: int | None = 1
    ahead: int = 0
    files: SourceFiles | None = None
    chosen_columns: tuple[str, ...] | None = None
    by_workers: bool = False

    @property
    def rows(self) -> int:
        """The number of rows in an epoch."""
        return len(self.source) if self.order.chosen is None else len(self.order.chosen)

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        size = self._batch_size()
        return self.rows // size if self.drop_last else math.ceil(self.rows / size)

    def __len__(self) -> int:
        """Return the number of batches of all epochs."""
        if self.count is None:
            raise ArgumentError(
                f"len at {user_location()}: a dataset without end has no length; see "
                "batches_per_epoch"
            )
        return self.count * self.batches_per_epoch

    # Making others -------------------------------------------------------------------------------

    def shuffle(self, seed: int = 0, blocks: int = 16) -> Dataset:
        """Return the dataset with the rows of each epoch in a random order of its own.

        The order follows from (seed, epoch). Sources that read in blocks, such as Parquet, have
        their blocks in random order, and the rows of each `blocks` blocks in a row mixed.

        Args:
            seed: an int from 0.
            blocks: an int from 1; more mix better and hold more blocks in memory.
        """
        require_count("shuffle", "seed", seed, 0)
        require_count("shuffle", "blocks", blocks, 1)
        return replace(self, order=replace(self.order, seed=int(seed), blocks=int(blocks)))

    def batch(self, size: int, drop_last: bool = False) -> Dataset:
        """Return the dataset with batches of so many rows.

        Args:
            size: an int from 1.
            drop_last: leave out the last batch of an epoch if it is smaller; False keeps it.
        """
        require_count("batch", "size", size, 1)
        if not isinstance(drop_last, bool):
            raise ArgumentError(
                f"batch at {user_location()}: drop_last must be True or False, not {drop_last!r}"
            )
        if drop_last and self.rows < size:
            raise ArgumentError(
                f"batch at {user_location()}: there are {self.rows} rows, fewer than the "
                f"{size} of a batch, and drop_last leaves nothing; take smaller batches"
            )
        return replace(self, size=int(size), drop_last=drop_last)

    def map(self, function: Callable[..., Any], seed: int | None = None) -> Dataset:
        """Return the dataset with a function applied to each batch.

        Args:
            function: takes a batch, a dict of arrays, and returns another one. With a seed, it
                takes a numpy random generator as second argument, whose numbers follow from
                (seed, epoch, batch).
            seed: an int from 0, or None.
        """
        if not callable(function):
            raise ArgumentError(
                f"map at {user_location()}: give a function of batches, not {function!r}"
            )
        if seed is not None:
            require_count("map", "seed", seed, 0)
        return replace(self, maps=(*self.maps, _Map(function, seed)))

    def epochs(self, count: int | None) -> Dataset:
        """Return the dataset with so many epochs; None: without end."""
        if count is not None:
            require_count("epochs", "count", count, 0)
        return replace(self, count=None if count is None else int(count))

    def prefetch(self, batches: int = 2) -> Dataset:
        """Return the dataset with batches prepared ahead by a thread.

        Args:
            batches: at most so many wait; 0: none, the training's thread prepares them.
        """
        require_count("prefetch", "batches", batches, 0)
        return replace(self, ahead=int(batches))

    def columns(self, *names: str) -> Dataset:
        """Return the dataset with some of its columns only."""
        if not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"columns at {user_location()}: give names, not {names!r}")
        if self.maps:
            return self.map(lambda batch: _choose(batch, names))
        return replace(self, chosen_columns=names)

    def on_workers(self) -> Dataset:
        """Return the dataset with rows that each worker reads from the files itself.

        `gf.fit` then sends a position instead of the rows. Batches are the same. Each worker reads
        its part of a batch, and the next one ahead. The workers of `gf.Cluster.local` read what
        the user may; others, the folders of `graphflow worker --allow-data`.

        Raises:
            ArgumentError: the rows are not in files, or functions of `map` change them.
        """
        at = f"on_workers at {user_location()}"
        if self.files is None:
            raise ArgumentError(
                f"{at}: the rows of {type(self.source).__name__} are in this process only; save "
                "them (np.save), and open the files by gf.data.npy"
            )
        if self.maps:
            raise ArgumentError(
                f"{at}: functions of map run in this process only; write them in the graph, as ops "
                "on the placeholders of the columns"
            )
        return replace(self, by_workers=True)

    def split(self, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Return two datasets of random rows: about `share` of them, and the rest.

        Args:
            share: above 0 and below 1.
            seed: which rows; an int from 0.
        """
        require_count("split", "seed", seed, 0)
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 < share < 1:
            raise ArgumentError(
                f"split at {user_location()}: share must be between 0 and 1, not {share!r}"
            )
        order = replace(self.order, seed=None)
        every = rows_in_order(self.source, order, 0, 0, self.rows)
        mixed = rows_in_order(self.source, RowOrder(int(seed), chosen=every), 0, 0, self.rows)
        cut = round(share * self.rows)
        splits = self.order.splits
        first, rest = (
            replace(self, order=replace(
                self.order, chosen=np.sort(rows), splits=(*splits, (float(share), int(seed), part))
            ))
            for part, rows in enumerate((mixed[:cut], mixed[cut:]))
        )  # fmt: skip
        return first, rest

    # Reading -------------------------------------------------------------------------------------

    def position(self, step: int) -> Position:
        """Return where a training is after so many batches."""
        require_count("position", "step", step, 0)
        return Position(*divmod(int(step), max(self.batches_per_epoch, 1)))

    def positions(self, step: int = 0) -> Iterator[Position]:
        """Return the positions from a step on."""
        per_epoch = self.batches_per_epoch
        epoch, batch = self.position(step)
        while per_epoch and (self.count is None or epoch < self.count):
            while batch < per_epoch:
                yield Position(epoch, batch)
                batch += 1
            epoch, batch = epoch + 1, 0

    def row_numbers(self, position: tuple[int, int]) -> Array:
        """Return the numbers of the rows of a batch, int64."""
        return self._rows_of(position, 0, self.batch_rows(position))

    def batch_rows(self, position: tuple[int, int]) -> int:
        """Return how many rows a batch has."""
        _, batch = _check_position(position)
        size = self._batch_size()
        if batch >= self.batches_per_epoch:
            raise ArgumentError(
                f"read at {user_location()}: there is no batch {batch} in an epoch of "
                f"{self.batches_per_epoch}"
            )
        return min(size, self.rows - batch * size)

    def read_part(self, position: tuple[int, int], first: int, count: int) -> Batch:
        """Return some rows of a batch, before functions of `map`.

        Args:
            position: of the batch.
            first: the first row in the batch.
            count: how many.
        """
        columns: Any = self.source[self._rows_of(position, first, count)]
        found = {str(name): np.asarray(value) for name, value in columns.items()}
        return found if self.chosen_columns is None else _choose(found, self.chosen_columns)

    def _rows_of(self, position: tuple[int, int], first: int, count: int) -> Array:
        epoch, batch = position
        start = batch * self._batch_size() + first
        return rows_in_order(self.source, self.order, epoch, start, start + count)

    def read(self, position: tuple[int, int]) -> Batch:
        """Return a batch.

        Raises:
            ArgumentError: there is no such batch, a row cannot be read, or a function of `map`
                returned no dict of arrays.
        """
        epoch, batch = _check_position(position)
        found = self.read_part(position, 0, self.batch_rows(position))
        for function, seed in self.maps:
            try:
                if seed is None:
                    mapped = function(found)
                else:
                    sequence = np.random.SeedSequence((seed, epoch, batch))
                    mapped = function(found, np.random.Generator(np.random.Philox(sequence)))
            except GraphflowError:
                raise
            except Exception as error:
                error.add_note(f"in a function of map, for batch {batch} of epoch {epoch}")
                raise
            if not isinstance(mapped, Mapping):
                raise ArgumentError(
                    f"a function of map must return a dict of arrays, not {type(mapped).__name__}"
                )
            found = {str(name): np.asarray(value) for name, value in mapped.items()}
        return found

    def start(self, step: int = 0) -> Iterator[Batch]:
        """Return the batches from a step on: `data.start(session.step)` after a checkpoint.

        Args:
            step: how many batches were used before.
        """
        require_count("start", "step", step, 0)
        self._batch_size()
        made = (self.read(position) for position in self.positions(step))
        return prefetch_items(made, self.ahead) if self.ahead else made

    def __iter__(self) -> Iterator[Batch]:
        return self.start()

    def _batch_size(self) -> int:
        if self.size is None:
            raise ArgumentError(
                f"dataset at {user_location()}: say how many rows a batch has: data.batch(64)"
            )
        return self.size

    def __repr__(self) -> str:
        parts = [f"{self.rows} rows of {type(self.source).__name__}"]
        if self.order.seed is not None:
            parts.append(f"shuffled by seed {self.order.seed}")
        if self.size is not None:
            parts.append(f"batches of {self.size}")
        parts.append("epochs without end" if self.count is None else f"epochs: {self.count}")
        return f"<Dataset: {', '.join(parts)}>"


def _choose(batch: Batch, names: Sequence[str]) -> Batch:
    """Return some columns of a batch."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ArgumentError(
            f"dataset at {user_location()}: there is no column {missing[0]!r}; there are "
            f"{', '.join(batch)}"
        )
    return {name: batch[name] for name in names}


def _check_position(position: Any) -> Position:
    pair = isinstance(position, tuple | list) and len(position) == 2
    if not pair or not all(type(number) is int and number >= 0 for number in position):
        raise ArgumentError(
            f"read at {user_location()}: a position must be (epoch, batch), two ints from 0, not "
            f"{position!r}"
        )
    return Position(*position)
