"""Shards of initial values that are created as a whole, when the first of them is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.spec import Span, index_of


class SharedInitial:
    """An initial value that several shards share: an array, or a small recipe.

    The array is created for the first shard that is read, and freed after the last.
    """

    def __init__(self, initial: Any) -> None:
        self._initial, self._parts = initial, 0
        self._made: np.ndarray[Any, Any] | None = None
        self._seen: set[int] = set()

    def add_shard(
        self, spans: tuple[Span, ...], shape: tuple[int, ...], dtype: str
    ) -> InitialShard:
        """Register one more shard.

        Args:
            spans: the part of each axis.
        """
        self._parts += 1
        return InitialShard(self, self._parts, spans, shape, dtype)

    def read_shard(self, number: int, spans: tuple[Span, ...]) -> np.ndarray[Any, Any]:
        """Return the array of one shard."""
        made = self._made
        if made is None:
            made = np.asarray(self._initial() if callable(self._initial) else self._initial)
        self._seen.add(number)
        if len(self._seen) == self._parts:
            self._made, self._seen = None, set()
        else:
            self._made = made
        return np.array(made[index_of(spans, made.shape)])


@dataclass(frozen=True, eq=False)
class InitialShard:
    """A shard of an initial value, created when it is read.

    A search over strategies splits large models many times and reads none of their values.
    """

    whole: SharedInitial
    number: int
    spans: tuple[Span, ...]
    shape: tuple[int, ...]
    dtype: str

    def __call__(self) -> np.ndarray[Any, Any]:
        """Return the array; each call returns the same values."""
        return self.whole.read_shard(self.number, self.spans).reshape(self.shape)


__all__ = ["InitialShard", "SharedInitial"]
