"""The form that a kernel of matrix products is written for, and its table of sizes."""

from __future__ import annotations

from enum import IntEnum, auto

from graphflow.base.lazy_dataclass import dataclass


class GemmSize(IntEnum):
    """Indices into the table of sizes; strides are in bytes."""

    COLUMNS = 0
    K = auto()
    TILES = auto()  # of one matrix
    HEIGHT = auto()  # rows of a tile
    PANEL_COLUMNS = auto()
    TALL = auto()  # tiles of the full height; the others come last and have a row less
    BLOCK = auto()
    GROUP = auto()  # columns of the panels that go through a chunk of terms before the next chunk
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
    PANEL = auto()  # offsets in scratch memory, after the packed tiles
    BUFFER = auto()


IN_PLACE, COPIED, EXCHANGED = range(3)
"""Layouts of x's tiles and y's panels: read in place, packed by copying, packed transposed."""
ACCUMULATE, TRANSPOSED, APART = 1, 2, 4
"""Flags: the product is added to `out`; `out` is stored by columns; the product is added to another
array, laid out like `out` (which it may be)."""


@dataclass(frozen=True)
class GemmForm:
    """The specialisation of a kernel: equal forms share one.

    Attributes:
        element: "float" or "double".
        width: elements of a register.
        height: rows of a tile.
        vectors: registers of a row of a tile.
    """

    element: str
    width: int
    height: int
    vectors: int

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return self.width * self.vectors

    @property
    def registers(self) -> int:
        """Registers that hold a column of a tile."""
        return -(-self.height // self.width)

    def function_name(self, function: str) -> str:
        """Return a function's name, which tells its specialisation.

        Kernels in one module then share the functions that they have in common.
        """
        return f"gemm_{function}_{self.element}{self.width}"
