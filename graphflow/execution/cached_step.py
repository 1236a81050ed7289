"""The fast path of steps whose feeds are like those of an earlier step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.frontend.feeds import convert, convert_feeds
from graphflow.ir.op import Node, Tensor
from graphflow.runtime.host.host_interface import DirectStep

Array = np.ndarray[Any, Any]

_MAX_PLAIN_FLOAT = 6e4
"""Python floats below this are finite in all dtypes, float16 included."""


class CachedStep:
    """A fast path for steps whose feeds have the shapes and dtypes of an earlier step.

    It holds only what has to be checked again in each step.

    Args:
        ready: runs the step on the host.
        feeds: for each placeholder that is fed: its tensor, its name on the worker (None if
            only its size matters), and the shape.
        values: for each fetch, its index among the worker's results, None for a fetch without a
            value, or a function of the feeds.
        bindings: sizes of the symbols.
    """

    def __init__(
        self,
        ready: DirectStep,
        feeds: Sequence[tuple[Tensor, str | None, tuple[int, ...]]],
        values: Sequence[int | Callable[[Mapping[Node, Array]], Any] | None],
        bindings: dict[str, int],
    ) -> None:
        self.ready = ready
        self.bindings = bindings
        self._feeds = tuple((t, name, shape, t.dtype) for t, name, shape in feeds)
        self._values = tuple(values)
        self._fed = any(callable(v) for v in values)
        self._whole = self._values == tuple(range(len(values)))

    def match_feeds(self, given: Any) -> dict[str, Array] | None:
        """Return the feeds by the worker's names; None if they do not fit this step.

        Raises:
            FeedError: a value does not convert.
        """
        if given is None:
            return {} if not self._feeds else None
        if type(given) is not dict or len(given) != len(self._feeds):
            return None
        result = {}
        for tensor, name, shape, dtype in self._feeds:
            value = given.get(tensor)
            if type(value) is not np.ndarray or value.dtype != dtype:
                if value is None:
                    return None
                if type(value) is float and dtype.kind == "f" and abs(value) < _MAX_PLAIN_FLOAT:
                    value = np.array(value, dtype)
                else:
                    value = convert(tensor.node, value)
            if value.shape != shape:
                return None
            if name is not None:
                result[name] = value
        return result

    def values(self, fetched: list[Array], given: Any) -> list[Any]:
        """Return the value of each fetch."""
        if self._whole:
            return fetched
        arrays = convert_feeds(given) if self._fed else {}
        return [
            None if v is None else fetched[v] if isinstance(v, int) else v(arrays)
            for v in self._values
        ]
