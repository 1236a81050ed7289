"""Loops that run as plain Python or compiled, from one source.

The modules `*_loops` hold functions over flat sequences and numbers. Small problems run them as
they are, on lists, because compiling would take longer than placing; large ones as machine code, on
arrays (`placement.native`: a tenth of a second, once per machine). Loops with heaps are compiled by
numba, which takes seconds, so only much larger problems wait for it. All give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from graphflow.placement.solvers.loop_compiler import native

COMPILE_ABOVE = 500_000
"""Steps of a loop above which it is worth loading the compiled one; 0.1 s of plain Python."""
NUMBA_ABOVE = 40_000_000
"""The same where numba compiles, which takes many seconds the first time on a machine."""
HEAPS = ("earliest_start", "ready_order")
"""Modules whose loops keep heaps."""

_loaded: set[str] = set()


class Loops:
    """The functions of one module, and the sequences they take: arrays if compiled, else lists."""

    def __init__(self, functions: dict[str, Callable[..., Any]], compiled: bool) -> None:
        self._functions, self.compiled = functions, compiled

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def take(self, array: Any) -> Any:
        """An input: read-only, contiguous, flat; what was taken for other loops is as good."""
        if not self.compiled:
            return array if isinstance(array, list) else array.ravel().tolist()
        flat = np.ascontiguousarray(array).reshape(-1).view()
        flat.setflags(write=False)
        return flat

    def all(self, *arrays: Any) -> list[Any]:
        """Several inputs."""
        return [self.take(array) for array in arrays]

    def floats(self, count: int, value: float = 0.0) -> Any:
        """Room for seconds or bytes."""
        return np.full(count, value) if self.compiled else [value] * count

    def ints(self, count: int, value: int = 0) -> Any:
        """Room for indices."""
        return np.full(count, value, dtype=np.int64) if self.compiled else [value] * count


def loops(module: str, steps: float, compiled: bool | None = None) -> Loops:
    """The loops of `graphflow.placement.placers.loops.<module>` for a problem of about that many
    steps.

    `compiled` says which to take; by default compiled ones where they are loaded or worth it.
    """
    heaps = module in HEAPS
    if compiled is None:
        compiled = module in _loaded or steps > (NUMBA_ABOVE if heaps else COMPILE_ABOVE)
    source = import_module(f"graphflow.placement.placers.loops.{module}")
    found = (_by_numba if heaps else _by_llvm)(source) if compiled else None
    if found is not None:
        _loaded.add(module)
        return Loops(found, True)
    return Loops({name: getattr(source, name) for name in source.LOOPS}, False)


@cache
def _by_llvm(source: ModuleType) -> dict[str, Callable[..., Any]] | None:
    """The functions named in `LOOPS`, each compiled when it is first called; None without LLVM."""
    try:
        import_module("llvmlite.binding")
    except ImportError:
        return None
    return {name: native(source, name) for name in source.LOOPS}


@cache
def _by_numba(source: ModuleType) -> dict[str, Callable[..., Any]] | None:
    """The same by numba; None where it is missing.

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
