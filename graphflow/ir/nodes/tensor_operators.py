"""Python's operators and numpy's methods on tensors.

Each one looks its function up by name in `FUNCTIONS`, so this module knows no particular op.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError
from graphflow.ir.declarations.registry import FUNCTIONS
from graphflow.ir.spec import Dim


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        if not is_operand(other):
            return NotImplemented
        return FUNCTIONS[name](other, self) if swapped else FUNCTIONS[name](self, other)

    return operator


def _unary(name: str) -> Callable[[Any], Any]:
    def operator(self: Any) -> Any:
        return FUNCTIONS[name](self)

    return operator


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[name](self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"`gf.{name}(self, ...)`."
    return method


class TensorOperators:
    """The operators and methods of `Tensor` that build nodes."""

    __slots__ = ()

    __hash__ = object.__hash__

    __add__, __radd__ = _binary("add"), _binary("add", True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", True)
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _binary("floor_divide", True)
    __mod__, __rmod__ = _binary("remainder"), _binary("remainder", True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", True)
    __matmul__, __rmatmul__ = _binary("matmul"), _binary("matmul", True)
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")
    __eq__ = _binary("equal")
    __ne__ = _binary("not_equal")
    __and__, __rand__ = _binary("bitwise_and"), _binary("bitwise_and", True)
    __or__, __ror__ = _binary("bitwise_or"), _binary("bitwise_or", True)
    __xor__, __rxor__ = _binary("bitwise_xor"), _binary("bitwise_xor", True)
    __lshift__ = _binary("bitwise_left_shift")
    __rlshift__ = _binary("bitwise_left_shift", True)
    __rshift__ = _binary("bitwise_right_shift")
    __rrshift__ = _binary("bitwise_right_shift", True)
    __invert__ = _unary("bitwise_invert")
    __neg__, __pos__, __abs__ = _unary("negative"), _unary("positive"), _unary("abs")
    __getitem__ = _method("getitem")

    sum, mean, max, min, prod = map(_method, ("sum", "mean", "max", "min", "prod"))
    var, std, any, all = map(_method, ("var", "std", "any", "all"))
    argmax, argmin, conj = _method("argmax"), _method("argmin"), _method("conj")
    astype, squeeze = _method("astype"), _method("squeeze")
    to_device = _method("to_device")

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return `gf.array_api`, the functions of the array API standard for tensors."""
        namespace = import_module("graphflow.array_api")
        if api_version not in (None, *namespace.VERSIONS):
            raise ArgumentError(
                f"version {api_version!r} of the array API is not supported; use one of "
                f"{', '.join(namespace.VERSIONS)}"
            )
        return namespace

    def reshape(self, *shape: Any, **named: Any) -> Any:
        """`gf.reshape(self, shape)`; sizes may be separate arguments, as for numpy's arrays."""
        given = shape if len(shape) < 2 else (shape,)
        return FUNCTIONS["reshape"](self, *given, **named)


_OPERANDS = (
    TensorOperators, bool, int, float, complex, np.ndarray, np.generic, list, tuple, Dim,
)  # fmt: skip


def is_operand(value: Any) -> bool:
    """Return True for a tensor, and for a value of a type that becomes a constant."""
    return isinstance(value, _OPERANDS) or hasattr(value, "__dlpack__")
