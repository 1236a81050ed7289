"""The functions of `gf.data` that open sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.data.dataset import Dataset
from graphflow.data.prefetch import prefetch_items
from graphflow.data.source_files import SourceFiles, open_source
from graphflow.data.sources.array_source import ArraySource
from graphflow.data.sources.table_files import expand_pattern
from graphflow.data.sources.wrapped_source import WrappedSource
from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location

Path = str | os.PathLike[str]
Files = Path | Sequence[Path]


def arrays(columns: Mapping[str, Any] | None = None, /, **named: Any) -> Dataset:
    """Return a dataset of arrays of one length: `arrays(x=images, y=labels)`.

    Args:
        columns: arrays by name; or give them as keywords.

    Raises:
        ArgumentError: there is none, they differ in length, or rows of one differ in shape.
    """
    if columns is not None and not isinstance(columns, Mapping):
        raise ArgumentError(
            f"gf.data.arrays at {user_location()}: give arrays by name, such as arrays(x=images, "
            f"y=labels), not {type(columns).__name__}"
        )
    at = f"gf.data.arrays at {user_location()}"
    return Dataset(ArraySource(at, {**(columns or {}), **named}))


def npy(**files: Path) -> Dataset:
    """Return a dataset of `.npy` files, one a column: `npy(x="images.npy", y="labels.npy")`.

    They are mapped, and read where rows are asked for.
    """
    return _open("npy", list(files.values()), tuple(files))


@checks_argument_names(ArgumentError)
def npz(file: Path) -> Dataset:
    """Return a dataset of the arrays of an `.npz` file, which are read into memory."""
    return _open("npz", [file])


@checks_argument_names(ArgumentError)
def parquet(
    files: Files, columns: Sequence[str] | None = None, memory: int | None = None
) -> Dataset:
    """Return a dataset of Parquet files, which may be larger than memory.

    Args:
        files: a path, a pattern such as "part-*.parquet", or a list of them.
        columns: names of those to read; None: all.
        memory: bytes of decoded row groups that are kept; default: 256 MiB. A shuffle needs those
            of its `blocks` at once, and otherwise reads them again and again.

    Raises:
        ArgumentError: a file is missing or no Parquet, or a column is missing.
    """
    return _open_tables("parquet", files, columns, memory)


@checks_argument_names(ArgumentError)
def arrow(files: Files, columns: Sequence[str] | None = None, memory: int | None = None) -> Dataset:
    """Return a dataset of Arrow IPC files, which are mapped. Arguments as of `parquet`."""
    return _open_tables("arrow", files, columns, memory)


@checks_argument_names(ArgumentError)
def csv(files: Files, columns: Sequence[str] | None = None, memory: int | None = None) -> Dataset:
    """Return a dataset of CSV files with a header, which may be larger than memory.

    Arguments as of `parquet`. Types are those of the first block of lines.

    Raises:
        ArgumentError: a row has another number of fields than the header; the line is named.
    """
    return _open_tables("csv", files, columns, memory)


@checks_argument_names(ArgumentError)
def json_lines(
    files: Files, columns: Sequence[str] | None = None, memory: int | None = None
) -> Dataset:
    """Return a dataset of files with a JSON object in each line. Arguments as of `parquet`."""
    return _open_tables("json_lines", files, columns, memory)


@checks_argument_names(ArgumentError)
def images(folder: Path, size: tuple[int, int] = (224, 224), channels: int = 3) -> Dataset:
    """Return a dataset of images that lie in one folder for each class.

    Its columns: `image`, float32 (rows, channels, height, width) from 0 to 1, and `label`, the
    number of the folder in the order of names.

    Args:
        folder: holds the folders.
        size: (height, width) to which images are scaled.
        channels: 3 for RGB, 1 for grey.
    """
    if not (isinstance(size, tuple) and len(size) == 2 and all(type(n) is int for n in size)):
        raise ArgumentError(
            f"gf.data.images at {user_location()}: size must be (height, width), not {size!r}"
        )
    return _open("images", [folder], size, channels)


@checks_argument_names(ArgumentError)
def svmlight(file: Path, columns: int | None = None) -> Dataset:
    """Return a dataset of an svmlight file: `x`, float32 (rows, columns), and `y`.

    It is read into memory as a sparse table by scikit-learn, and rows become dense in batches.

    Args:
        columns: number of columns; None: the largest that occurs.
    """
    return _open("svmlight", [file], columns)


@checks_argument_names(ArgumentError)
def wrap(rows: Any, names: Sequence[str] | None = None) -> Dataset:
    """Return a dataset of what has a length and rows: a dataset of torch or Hugging Face, a table
    of polars or pandas, or a source of your own.

    Args:
        rows: answers a list or array of row numbers with a dict of arrays, or one number with a
        row. names: names of the columns of rows that are tuples; default: x, y, z.
    """
    listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if names is not None and not listed:
        raise ArgumentError(
            f"gf.data.wrap at {user_location()}: names must be a list of strings, not {names!r}"
        )
    return Dataset(WrappedSource(rows, tuple(names or ())))


@checks_argument_names(ArgumentError)
def iterate(batches: Callable[[], Iterable[Mapping[str, Any]]], prefetch: int = 0) -> Iterator[Any]:
    """Return the batches of an iterator that has no length, such as a stream, prepared ahead.

    Such a training cannot be resumed at a batch; skip those that were used yourself.

    Args:
        batches: a function that returns an iterator over dicts of arrays.
        prefetch: number of batches that a thread prepares ahead.
    """
    if not callable(batches):
        raise ArgumentError(
            f"gf.data.iterate at {user_location()}: give a function that returns an iterator, not "
            f"{type(batches).__name__}"
        )
    made = iter(batches())
    return prefetch_items(made, int(prefetch)) if prefetch else made


def _open(kind: str, paths: Sequence[Path], *options: Any) -> Dataset:
    """Return a dataset of files, which other processes can open, too."""
    at = f"gf.data.{kind} at {user_location()}"
    try:
        files = SourceFiles(kind, tuple([os.fspath(path) for path in paths]), options)
    except TypeError as error:
        raise ArgumentError(f"{at}: {error}") from None
    return Dataset(open_source(files, at), files=files.absolute())


def _open_tables(
    kind: str, files: Files, columns: Sequence[str] | None, memory: int | None
) -> Dataset:
    at = f"gf.data.{kind} at {user_location()}"
    if memory is not None and (type(memory) is not int or memory < 1):
        raise ArgumentError(f"{at}: memory must be bytes, an int from 1, not {memory!r}")
    chosen = None if columns is None else tuple(columns)
    return _open(kind, expand_pattern(at, files), chosen, memory)
