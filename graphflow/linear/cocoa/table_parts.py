"""The table in parts: each worker holds some rows, or some columns, and keeps them.

Of a table in the client's memory, part k of K has the coordinates k, k + K, k + 2K, …, so that
sorted labels lie in all parts. Of a svmlight file it has the lines between two bytes, which its
worker reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import LinearModelError
from graphflow.frontend.builders import assign
from graphflow.ir.op import REGISTRY, Tensor, device
from graphflow.linear.cocoa.file_ops import svmlight_rows, svmlight_sizes
from graphflow.linear.losses import Floats
from graphflow.linear.problem import multiply
from graphflow.linear.tables.sparse_table import SvmlightTable
from graphflow.sessions.session import Session


@dataclass(frozen=True)
class TablePart:
    """A part of the table, on its device.

    Attributes:
        device: the name of the device.
        number: the number of the part.
        chosen: its coordinates.
        count: how many these are.
        matrix: variables of the device: a dense matrix with a row for each coordinate, or values,
            columns and row offsets of one.
        rows: the same in the client's memory; None if it is not there.
    """

    device: str
    number: int
    chosen: slice
    count: int
    matrix: tuple[Tensor, ...]
    rows: Any = None

    def pick(self, values: Floats) -> Floats:
        """Return the elements of this part, of an array with one for each coordinate."""
        return np.ascontiguousarray(values[self.chosen])

    def keep(self, value: Any, name: str) -> Tensor:
        """Return a variable on the device of this part, with a value to begin with."""
        return _keep(value, f"cocoa/{name}/{self.number}", self.device)

    def weighted_squares(self, weights: Floats) -> Floats:
        """Return the squared norm of each row of the part.

        Args:
            weights: (width,) factors of the squares.
        """
        if isinstance(self.rows, np.ndarray):
            rows = self.rows
            return np.asarray(np.einsum("ij,ij,j->i", rows, rows, weights, dtype=np.float64))
        squared = self.rows.copy()
        squared.data = squared.data.astype(np.float64) ** 2
        return multiply(squared, weights)

    def weighted_means(self, weights: Floats) -> Floats:
        """Return the mean of each row of the part under some weights of its columns."""
        return multiply(self.rows, weights) / float(weights.sum())


@dataclass(frozen=True)
class FileTable:
    """The rows of a svmlight file in the memory of workers, which read a part each.

    Attributes:
        shape: rows and columns.
        nnz: the number of entries.
        parts: the parts.
        targets: (rows,) the labels in the file.
    """

    shape: tuple[int, int]
    nnz: int
    parts: tuple[TablePart, ...]
    targets: Floats


def cut_table(x: Any, axis: str, devices: Sequence[str]) -> list[TablePart]:
    """Return a part of a table for each of some devices.

    Args:
        x: (rows, columns) dense, or CSR or CSC.
        axis: "rows" or "columns", the coordinates.
        devices: the names of the devices.

    Raises:
        LinearModelError: there are more devices than coordinates.
    """
    is_dense = isinstance(x, np.ndarray)
    rows = x if axis == "rows" else x.T
    rows = rows if is_dense else rows.tocsr()
    parts = len(devices)
    _require_enough(rows.shape[0], axis, parts)
    found = []
    for number, place in enumerate(devices):
        chosen = slice(number, None, parts)
        own = rows[chosen]
        arrays = {"matrix": np.ascontiguousarray(own)} if is_dense else _csr_arrays(own)
        matrix = [_keep(array, f"cocoa/{what}/{number}", place) for what, array in arrays.items()]
        found.append(TablePart(place, number, chosen, own.shape[0], tuple(matrix), own))
    return found


def read_parts(session: Session, table: SvmlightTable, devices: Sequence[str]) -> FileTable:
    """Let each device's worker read its part of a file, which it finds under the same path.

    Args:
        session: the session of the workers.
        table: the file.
        devices: the names of the devices.

    Raises:
        LinearModelError: columns are not as the table was opened; there are fewer rows than
            devices.
        OpError: a worker cannot read the file, or a line is broken; names it.
    """
    path, parts = os.path.abspath(table.path), len(devices)
    sizes = []
    for number, place in enumerate(devices):
        with device(place):
            sizes.append(svmlight_sizes(path=path, part=number, parts=parts))
    counts = np.stack(session.run(sizes))
    first, columns = table.place_columns(int(counts[:, 2].min()), int(counts[:, 3].max()))
    ends = np.cumsum([0, *counts[:, 0]])
    _require_enough(int(ends[-1]), "rows", parts)
    if not counts[:, 0].all():
        raise LinearModelError(
            f"{path}: worker {int(counts[:, 0].argmin())} of {parts} has no row, since a line is "
            "longer than its share of the file; give a cluster of fewer workers"
        )
    found, labels, updates = [], [], []
    for number, place in enumerate(devices):
        rows, entries = map(int, counts[number, :2])
        with device(place):
            targets, *read = svmlight_rows(
                path=path, part=number, parts=parts, rows=rows, entries=entries, first=first
            )
            names = zip(("values", "places", "offsets"), read, strict=True)
            matrix = tuple(_keep(each, f"cocoa/{what}/{number}", place) for what, each in names)
            updates += [assign(own, each) for own, each in zip(matrix, read, strict=True)]
            labels.append(targets)
        chosen = slice(int(ends[number]), int(ends[number + 1]))
        found.append(TablePart(place, number, chosen, rows, matrix))
    with device(devices[0]):
        loaded = REGISTRY["group"](*updates, name="cocoa/load")
    *values, _ = session.run([*labels, loaded])
    return FileTable(
        (int(ends[-1]), columns), int(counts[:, 1].sum()), tuple(found),
        np.concatenate(values),
    )  # fmt: skip


def _require_enough(count: int, axis: str, parts: int) -> None:
    if parts > count:
        raise LinearModelError(
            f"the table has {show_count(count, axis.removesuffix('s'))} for {parts} workers, and "
            f"each of them needs one at least; give a cluster of at most "
            f"{show_count(count, 'worker')}"
        )


def _csr_arrays(rows: Any) -> dict[str, Any]:
    rows.sort_indices()
    return {"values": rows.data, "places": rows.indices, "offsets": rows.indptr}


def _keep(value: Any, name: str, place: str) -> Tensor:
    """Return a variable of a device, with the value or the shape of an array or a tensor.

    Its name may be that of another one, of an earlier fit.
    """
    if isinstance(value, Tensor):
        initial: Any = init.zeros(value.shape, value.dtype.name)
    else:
        initial = np.asarray(value)
    with device(place):
        tensor: Tensor = REGISTRY["variable"](
            initial=initial, trainable=False, shape=tuple(value.shape), dtype=value.dtype.name,
            named=False, name=name,
        )  # fmt: skip
    return tensor


__all__ = ["FileTable", "TablePart", "cut_table", "read_parts"]
