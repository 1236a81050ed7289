"""What is told to a kernel of matrix products: the form that it is written for, and the table of
sizes that it is given each time."""

from __future__ import annotations

from enum import IntEnum, auto

from graphflow.base.lazy_dataclass import dataclass


class GemmSize(IntEnum):
    """Places in the table of sizes; strides are in bytes."""

    COLUMNS = 0
    K = auto()
    TILES = auto()  # of one matrix
    HEIGHT = auto()  # rows of a tile
    PANEL_COLUMNS = auto()
    TALL = auto()  # tiles of the full height; the others, which come last, have a row less
    BLOCK = auto()
    GROUP = auto()  # columns of the panels that take a chunk of terms before the next chunk comes
    CHUNK = auto()  # terms at a time
    X_ROW = auto()
    X_K = auto()
    X_LAYOUT = auto()
    Y_K = auto()
    Y_COLUMN = auto()
    Y_LAYOUT = auto()
    OUT_ROW = auto()
    OUT_COLUMN = auto()
    FLAGS = auto()
    INNER = auto()  # matrices along the last axis of the batch
    X_OUTER = auto()
    X_INNER = auto()
    Y_OUTER = auto()
    Y_INNER = auto()
    OUT_OUTER = auto()
    OUT_INNER = auto()
    PANEL = auto()  # where it begins in the scratch memory; packed tiles come first
    BUFFER = auto()


IN_PLACE, COPIED, EXCHANGED = range(3)
"""Layouts: how tiles of x and panels of y are read."""
ACCUMULATE, TRANSPOSED, APART = 1, 2, 4
"""Flags: whether the product is added to what `out` holds; whether `out` is stored by columns;
whether it is added to something else, which is stored as `out` is (and may be it)."""


@dataclass(frozen=True)
class GemmForm:
    """What a kernel is specialised for: equal forms share one.

    Attributes:
        element: "float" or "double"; `width`: of them in a register.
        height: rows of a tile.
        vectors: registers of a row of a tile.
    """

    element: str
    width: int
    height: int
    vectors: int

    @property
    def columns(self) -> int:
        """Of a panel."""
        return self.width * self.vectors

    @property
    def registers(self) -> int:
        """That hold a column of a tile."""
        return -(-self.height // self.width)

    def function_name(self, function: str) -> str:
        """A function's name, which tells what it is specialised for: kernels that stand together
        have most functions in common, and these once."""
        return f"gemm_{function}_{self.element}{self.width}"
