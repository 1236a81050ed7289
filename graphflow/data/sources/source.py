"""The interface of sources: rows by number, as arrays by column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]


class Source(Protocol):
    """Rows that can be read by number.

    A source of your own needs these two methods, and no base class. One that reads faster in
    blocks of neighbouring rows, as files of tables do, also has `starts`: the first row of each
    block, ascending, as int64. `shuffle` then keeps the rows of a few blocks together.
    """

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, indices: Array) -> Mapping[str, Any]:
        """Return rows by their numbers, an int64 array: for each column an array of that length."""
        ...
