"""Arrays of a shape without elements, on which a kernel shows the memory that it takes.

A recording refuses kernels that read elements in Python. These arrays let such a kernel run to its
end without work, so that its scratch memory is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.kernel_recording import (
    ArrayStandIn,
    KernelRecording,
    NotRecordable,
    region,
)


class ShapeStandIn(ArrayStandIn):
    """An array of a shape, whose elements are neither read nor written."""

    def like(self, shape: Sequence[int]) -> ShapeStandIn:
        """Return an array of another shape."""
        return ShapeStandIn(self.place, shape, self.dtype)

    def astype(self, dtype: Any) -> ShapeStandIn:
        """Return an array of another dtype."""
        return ShapeStandIn(self.place, self.shape, dtype)

    @property
    def _template(self) -> np.ndarray[Any, Any]:
        """An array of this shape that takes no memory."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def reshape(self, *shape: Any) -> ShapeStandIn:
        """Return an array of as many elements in another shape."""
        return self.like(super().reshape(*shape).shape)

    def swapaxes(self, one: int, other: int) -> ShapeStandIn:
        """Return the array with two axes exchanged."""
        return self.like(self._template.swapaxes(one, other).shape)

    def transpose(self, *axes: int) -> ShapeStandIn:
        """Return the array with its axes in another order."""
        return self.like(self._template.transpose(*axes).shape)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> ShapeStandIn:
        return self.like(self._template[index].shape)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write nothing."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out"):
            return options["out"][0]
        if method != "__call__":
            raise NotRecordable
        shapes = [np.shape(_template_of(each)) for each in inputs]
        return self.like(np.broadcast_shapes(*shapes))

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        if function is np.copyto:
            return None
        if options.get("out") is not None:
            return options["out"]
        if function is np.moveaxis:
            return self.like(np.moveaxis(self._template, *given[1:], **options).shape)
        raise NotRecordable


def _template_of(array: Any) -> Any:
    return array._template if isinstance(array, ShapeStandIn) else array


class SlotCount(KernelRecording):
    """Counts the scratch memory of a kernel that runs as Python, all threads together."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, keeps_calls=False)

    def scratch(self, slot: str, shape: tuple[int, ...], dtype: Any) -> ShapeStandIn:
        """Return a stand-in for scratch memory."""
        found = ShapeStandIn(region(1), shape, dtype)
        self._scratch[slot, found.nbytes] = 0
        return found
