"""An eager array over graphs: each operation builds a graph, runs it, and holds the result.

With it, checks that are written for arrays with values test `gf.array_api`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

import graphflow as gf

OPERATORS = (
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift radd rsub rmul rtruediv "
    "rfloordiv rmod rpow rmatmul rand ror rxor rlshift rrshift lt le gt ge eq ne invert neg pos "
    "abs getitem"
)


@cache
def session() -> gf.Session:
    return gf.Session()


class EagerArray:
    """A value, with the operators of a tensor."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value = value
        self.shape, self.dtype, self.ndim = value.shape, value.dtype, value.ndim

    @property
    def mT(self) -> Any:
        return apply(lambda x: x.mT, self)

    @property
    def T(self) -> Any:
        return apply(lambda x: x.T, self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.value, dtype)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: apply(lambda first, *rest: getattr(first, name)(*rest), *args)


for _name in OPERATORS.split():
    setattr(EagerArray, f"__{_name}__", _operator(f"__{_name}__"))


def _map(kind: type, change: Callable[[Any], Any], nest: Any) -> Any:
    """Change what is of a kind in a nest of lists and (named) tuples."""
    if isinstance(nest, kind):
        return change(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_map(kind, change, each) for each in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(_map(kind, change, each) for each in nest)
    return nest


def apply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a graph of a function's result for values, run it, and hold what it gives."""
    feeds: dict[gf.Tensor, Any] = {}

    def feed(array: EagerArray) -> gf.Tensor:
        tensor = gf.placeholder(array.dtype, array.shape)
        feeds[tensor] = array.value
        return tensor

    built = function(
        *_map(EagerArray, feed, args),
        **{name: _map(EagerArray, feed, each) for name, each in kwargs.items()},
    )
    fetches: list[gf.Tensor] = []
    _map(gf.Tensor, fetches.append, built)
    read = gf.Graph(fetches).nodes if fetches else ()
    fed = {tensor: value for tensor, value in feeds.items() if tensor.node in read}
    values = iter(session().run(fetches, fed) if fetches else ())
    return _map(gf.Tensor, lambda _: EagerArray(next(values)), built)


class EagerNamespace:
    """The names of a module of `gf.array_api`, whose functions give values at once."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, ModuleType):
            return EagerNamespace(found)
        if not callable(found) or isinstance(found, type | np.dtype):
            return found
        return lambda *args, **kwargs: apply(found, *args, **kwargs)
