"""Layouts of weights that kernels keep from one step to the next.

Some kernels read weights in an order of their own, or transformed. Where a program does not assign
the weights, its first step keeps their layout here. Later steps read it, until the weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.ops.kernels.jit.scratch_memory import scratch


class KeptLayouts:
    """The layouts of one operand. They are valid until `clear`, and their memory stays in place."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Any] = {}
        self._valid: set[Hashable] = set()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in list(self._arrays.values()))

    def clear(self) -> None:
        """Mark the layouts as invalid, since the operand changes."""
        self._valid.clear()

    def are_valid(self, keys: Set[Hashable]) -> bool:
        """Return True if the layouts of some keys need not be written."""
        return keys <= self._valid

    def reserve(self, key: Hashable, nbytes: int) -> Any:
        """Return the memory of a layout, as aligned bytes."""
        if key not in self._arrays:
            self._arrays[key] = empty_aligned(nbytes)
        return self._arrays[key]

    def get(self, key: Hashable, nbytes: int, write: Callable[[Any], None]) -> Any:
        """Return the layout of a key, which `write` fills if there is no valid one."""
        memory = self.reserve(key, nbytes)
        if key not in self._valid:
            write(memory)
            self._valid.add(key)  # only once it is whole
        return memory


class ReservedLayouts(KeptLayouts):
    """The memory of layouts for a kernel that is recorded, without their contents.

    Attributes:
        keys: the layouts that the kernel reads.
    """

    def __init__(self, kept: KeptLayouts) -> None:
        super().__init__()
        self._kept = kept
        self.keys: set[Hashable] = set()

    def get(self, key: Hashable, nbytes: int, write: Callable[[Any], None]) -> Any:
        """Return the memory of a layout that the recorded calls read."""
        self.keys.add(key)
        return self._kept.reserve(key, nbytes)


class LayoutRefresh:
    """Lays weights out before a recorded kernel reads them, if they have changed.

    Args:
        run: the kernel (out, *arrays), which writes the layouts as well.
        active: gives a context in which the kernel may run.
    """

    def __init__(
        self,
        kept: KeptLayouts,
        keys: Set[Hashable],
        run: Callable[..., None],
        active: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._kept, self._keys, self._run, self._active = kept, keys, run, active

    def __call__(self, *arrays: Any) -> None:
        if not self._kept.are_valid(self._keys):
            with self._active(), np.errstate(all="ignore"):
                self._run(*arrays)


class DeviceLayouts:
    """The layouts of a device's variables, which live as long as a program that reads them."""

    def __init__(self) -> None:
        self._variables: WeakValueDictionary[str, KeptLayouts] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in list(self._variables.values()))

    def find(self, variable: str) -> KeptLayouts:
        """Return the layouts of a variable."""
        return self._variables.setdefault(variable, KeptLayouts())

    def clear(self, variables: Iterable[str]) -> None:
        """Mark the layouts of variables that change as invalid."""
        for name in variables if self._variables else ():
            known = self._variables.get(name)
            if known is not None:
                known.clear()


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
