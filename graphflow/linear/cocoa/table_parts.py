"""The table in parts: each worker holds some rows, or some columns, and keeps them.

Part k of K has the coordinates k, k + K, k + 2K, …, so that sorted labels lie in all parts. Its
matrix has a row for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import LinearModelError
from graphflow.ir.op import REGISTRY, Tensor, device
from graphflow.linear.losses import Floats
from graphflow.linear.problem import multiply


@dataclass(frozen=True)
class TablePart:
    """A part of the table, on its device.

    Attributes:
        device: the name of the device.
        number, parts: this is part `number` of so many.
        rows: (count, width) the matrix of the part, dense or CSR, in the client's memory.
        matrix: the same in variables of the device: one, or values, columns and row offsets.
    """

    device: str
    number: int
    parts: int
    rows: Any
    matrix: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """The number of coordinates."""
        return int(self.rows.shape[0])

    def pick(self, values: Floats) -> Floats:
        """Return the elements of this part, of an array with one for each coordinate."""
        return np.ascontiguousarray(values[self.number :: self.parts])

    def keep(self, value: Any, name: str) -> Tensor:
        """Return a variable on the device of this part, with a value to begin with."""
        return _keep(value, f"cocoa/{name}/{self.number}", self.device)

    def weighted_squares(self, weights: Floats | None = None) -> Floats:
        """Return the squared norm of each row of the part.

        Args:
            weights: (width,) factors of the squares; None for 1.
        """
        rows = self.rows
        ones = np.ones(rows.shape[1]) if weights is None else weights
        if isinstance(rows, np.ndarray):
            return np.asarray(np.einsum("ij,ij,j->i", rows, rows, ones, dtype=np.float64))
        squared = rows.copy()
        squared.data = squared.data.astype(np.float64) ** 2
        return multiply(squared, ones)

    def weighted_means(self, weights: Floats) -> Floats:
        """Return the mean of each row of the part under some weights of its columns."""
        return multiply(self.rows, weights) / float(weights.sum())


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
    count, parts = rows.shape[0], len(devices)
    if parts > count:
        name = axis.removesuffix("s")
        raise LinearModelError(
            f"the table has {show_count(count, name)} for {parts} workers, and each of them needs "
            f"one at least; give a cluster of at most {show_count(count, 'worker')}"
        )
    found = []
    for number, place in enumerate(devices):
        own = rows[number::parts]
        arrays = {"matrix": np.ascontiguousarray(own)} if is_dense else _csr_arrays(own)
        matrix = [_keep(array, f"cocoa/{what}/{number}", place) for what, array in arrays.items()]
        found.append(TablePart(place, number, parts, own, tuple(matrix)))
    return found


def _csr_arrays(rows: Any) -> dict[str, Any]:
    rows.sort_indices()
    return {"values": rows.data, "places": rows.indices, "offsets": rows.indptr}


def _keep(value: Any, name: str, place: str) -> Tensor:
    """Return a variable of a device. Its name may be that of another one, of an earlier fit."""
    value = np.asarray(value)
    with device(place):
        tensor: Tensor = REGISTRY["variable"](
            initial=value, trainable=False, shape=value.shape, dtype=value.dtype.name,
            named=False, name=name,
        )  # fmt: skip
    return tensor


__all__ = ["TablePart", "cut_table"]
