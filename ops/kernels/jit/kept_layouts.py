"""Layouts of weights that kernels keep from one step to the next.

Some kernels read weights in an order of their own, or transformed. Where a program does not assign
the weights, its first step keeps their layout here. Later steps read it, until the weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.ops.kernels.jit.scratch_memory import scratch


class KeptLayouts:
    """The layouts of one operand. They are valid until `clear`."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Any] = {}
        self._valid: set[Hashable] = set()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in list(self._arrays.values()))

    def clear(self) -> None:
        """Discard the layouts, since the operand changes. Their memory stays for the next ones."""
        self._valid.clear()

    def drop(self) -> None:
        """Discard the layouts and their memory."""
        self._valid.clear()
        self._arrays.clear()

    def get(self, key: Hashable, nbytes: int, write: Callable[[Any], None]) -> Any:
        """Return the layout of a key, which `write` fills if there is no valid one.

        Args:
            nbytes: size of the layout, which lies in aligned bytes.
        """
        if key not in self._arrays:
            self._arrays[key] = empty_aligned(nbytes)
        if key not in self._valid:
            write(self._arrays[key])
            self._valid.add(key)  # only once it is whole
        return self._arrays[key]


class DeviceLayouts:
    """The layouts of a device's variables, which all of its programs share."""

    def __init__(self) -> None:
        self._variables: dict[str, KeptLayouts] = {}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in list(self._variables.values()))

    def of(self, variable: str) -> KeptLayouts:
        """Return the layouts of a variable."""
        return self._variables.setdefault(variable, KeptLayouts())

    def clear(self, variables: Iterable[str]) -> None:
        """Discard the layouts of variables that change."""
        for name in variables if self._variables else ():
            if name in self._variables:
                self._variables[name].clear()

    def drop(self) -> None:
        """Discard all layouts and their memory."""
        for each in self._variables.values():
            each.drop()


def lay_out(
    kept: KeptLayouts | None, name: str, shape: Hashable, nbytes: int, write: Callable[[Any], None]
) -> Any:
    """Return bytes that `write` has filled with a layout of an operand.

    Args:
        kept: where the layout stays. If None, it is written anew, to scratch memory.
        name, shape: identify the layout.
    """
    if kept is not None:
        return kept.get((name, shape), nbytes, write)
    memory = scratch(np, name, (nbytes,), np.uint8)
    write(memory)
    return memory
