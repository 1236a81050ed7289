"""Loops that run as plain Python or compiled, from one source.

The modules `*_loops` hold functions over flat sequences and numbers. Small problems run them as
they are, on lists, because compiling would take longer than placing. Large ones run as machine code
on arrays (`loop_compiler.native`: a tenth of a second, once per machine). Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from graphflow.ops.kernels.compiled_loops.loop_compiler import native

COMPILE_ABOVE = 500_000
"""Steps of a loop above which it is worth loading the compiled one; 0.1 s of plain Python."""

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
        return _allocate(count, value) if self.compiled else [value] * count

    def ints(self, count: int, value: int = 0) -> Any:
        """Room for indices."""
        return _allocate(count, value) if self.compiled else [value] * count


def _allocate(count: int, value: float) -> Any:
    """An array of one number; the pages of zeros that are never written take no memory."""
    dtype = np.float64 if isinstance(value, float) else np.int64
    return np.full(count, value, dtype) if value else np.zeros(count, dtype)


def loops(module: str, steps: float, compiled: bool | None = None) -> Loops:
    """The loops of `graphflow.placement.placers.loops.<module>` for a problem of about that many
    steps.

    `compiled` says which to take; by default compiled ones where they are loaded or worth it.
    """
    if compiled is None:
        compiled = module in _loaded or steps > COMPILE_ABOVE
    source = import_module(f"graphflow.placement.placers.loops.{module}")
    found = _compile(source) if compiled else None
    if found is not None:
        _loaded.add(module)
        return Loops(found, True)
    return Loops({name: getattr(source, name) for name in source.LOOPS}, False)


@cache
def _compile(source: ModuleType) -> dict[str, Callable[..., Any]] | None:
    """The functions named in `LOOPS`, each compiled when it is first called; None without LLVM."""
    try:
        import_module("llvmlite.binding")
    except ImportError:
        return None
    return {name: native(source, name) for name in source.LOOPS}
