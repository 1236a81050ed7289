"""Loops that run as plain Python or compiled, from one source.

The modules `*_loops` hold functions over flat sequences and numbers. Small problems run them as
they are, on lists, because compiling would take longer than placing; large ones, and everything
after the first large one, run them through numba, on arrays. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPILE_ABOVE = 1_000_000
"""Steps of a loop above which it is worth loading the compiled one; about 0.3 s of plain Python."""

_loaded: set[str] = set()


class Loops:
    """The functions of one module, and the sequences they take: arrays if compiled, else lists."""

    def __init__(self, functions: dict[str, Callable[..., Any]], compiled: bool) -> None:
        self._functions, self.compiled = functions, compiled

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def take(self, array: NDArray[Any]) -> Any:
        """An input: read-only, contiguous, flat."""
        if not self.compiled:
            return array.ravel().tolist()
        flat = np.ascontiguousarray(array).reshape(-1).view()
        flat.setflags(write=False)
        return flat

    def floats(self, count: int, value: float = 0.0) -> Any:
        """Room for seconds or bytes."""
        return np.full(count, value) if self.compiled else [value] * count

    def ints(self, count: int, value: int = 0) -> Any:
        """Room for indices."""
        return np.full(count, value, dtype=np.int64) if self.compiled else [value] * count


def loops(module: str, steps: float, compiled: bool | None = None) -> Loops:
    """The loops of `graphflow.placement.placers.<module>` for a problem of about that many steps.

    `compiled` says which to take; by default compiled ones where they are loaded or worth it.
    """
    if compiled is None:
        compiled = module in _loaded or steps > COMPILE_ABOVE
    source = import_module(f"graphflow.placement.placers.{module}")
    if compiled:
        found = _compile(source)
        if found is not None:
            _loaded.add(module)
            return Loops(found, True)
    return Loops({name: getattr(source, name) for name in source.LOOPS}, False)


@cache
def _compile(source: ModuleType) -> dict[str, Callable[..., Any]] | None:
    """The functions named in `LOOPS`, callees first, compiled; None where numba is missing.

    They are copies whose globals are the compiled functions: the module itself stays plain.
    """
    try:
        import numba
    except ImportError:
        return None
    names = dict(vars(source))
    for name in source.LOOPS:
        copy = FunctionType(getattr(source, name).__code__, names, name)
        try:
            names[name] = numba.njit(cache=True)(copy)
        except RuntimeError:  # nowhere to keep the result
            names[name] = numba.njit(copy)
    return {name: names[name] for name in source.LOOPS}
