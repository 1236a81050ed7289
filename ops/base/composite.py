"""Functions of several ops that round 16-bit floats once, as a single op does.

Each op rounds its result to the dtype of its inputs. A function of several ops would round at each
step, and an intermediate value above 65,504 would become infinite in float16. A composite therefore
computes in float32 and rounds only its results. The conversions are nodes with gradients, so
gradients round once, too. For other dtypes a composite builds exactly the nodes of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass, replace
from functools import cache, wraps
from typing import Any, Literal, TypeVar, cast

import numpy as np

from graphflow.base.argument_checks import signature_of
from graphflow.ir.op import (
    FUNCTIONS,
    Node,
    Tensor,
    as_tensor,
    autocast,
    autocast_inputs,
    current_scope,
)
from graphflow.ir.spec import is_half, is_inexact
from graphflow.ops.base.shape_rules import is_zeros

F = TypeVar("F", bound=Callable[..., Any])
_SINGLE = np.dtype("float32")


def composite(*names: str, to: Literal["low", "high"] | None = None) -> Callable[[F], F]:
    """Return a decorator that lets a public function compute 16-bit floats in float32.

    If all float arguments named here have one 16-bit dtype, they are widened, and float32 results
    are rounded back to that dtype. Arguments of mixed float dtypes are left to the function. The
    decorator stands above `@function`.

    Args:
        names: arguments that are tensors, arrays, or lists of these.
        to: how the function takes part in a `gf.autocast` block, like `autocast` of an op. "high"
            gives float32 results there; "low" leaves the dtypes to the ops.
    """

    def decorate(f: F) -> F:
        places = cache(lambda: [(n, list(signature_of(f).parameters).index(n)) for n in names])

        @wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensors = [args[i] if i < len(args) else kwargs.get(n) for n, i in places()]
            dtype = _common_half_dtype(tensors)
            casting = current_scope.get().autocast is not None
            if dtype is None or (casting and to == "low"):
                return f(*args, **kwargs)
            high = casting and to == "high"
            wide = _autocast_high if high else widen
            at = {i for _, i in places()}
            taken = [_map_tensors(x, wide) if i in at else x for i, x in enumerate(args)]
            named = {n: _map_tensors(x, wide) if n in names else x for n, x in kwargs.items()}
            if high:
                return f(*taken, **named)
            with autocast(None):
                return _map_tensors(f(*taken, **named), lambda y: round_to(y, dtype))

        if FUNCTIONS.get(f.__name__) is f:
            FUNCTIONS[f.__name__] = wrapper
        return cast(F, wrapper)

    return decorate


def in_float32(node: Node, *tensors: Any, again: bool = True) -> tuple[Any, ...]:
    """Return what the vjp or jvp of a node reads, with 16-bit floats widened to float32.

    The result holds the node's outputs, its inputs, and the given tensors (or tuples of tensors). A
    vjp of several ops then rounds once. Nodes whose vjp is a single op keep 16 bits: ops that move
    numbers, products and collectives.

    Args:
        again: recompute cheap outputs from the widened inputs, so that they are not rounded.
    """
    op, xs = node.op, node.inputs
    y: Any = node.outputs[0] if len(node.outputs) == 1 else node.outputs
    exact = op.halves or op.alias or op.autocast == "low" or op.joint is not None
    if exact or not any(is_half(t.dtype) for t in (*node.outputs, *xs)):
        return y, xs, *tensors
    xs = tuple(map(widen, xs))
    if again and op.expr is not None and not op.random:
        y = op(*xs, **node.attrs)
    return _map_tensors(y, widen), xs, *(_map_tensors(t, widen) for t in tensors)


def widen(x: Any) -> Any:
    """Convert a tensor of 16-bit floats to float32; return anything else as it is."""
    if not isinstance(x, Tensor) or not is_half(x.dtype):
        return x
    return FUNCTIONS["full_like"](x, 0, _SINGLE) if is_zeros(x) else FUNCTIONS["astype"](x, _SINGLE)


def round_to(x: Any, dtype: np.dtype[Any]) -> Any:
    """Round a float32 tensor to a 16-bit dtype; return anything else as it is."""
    if not isinstance(x, Tensor) or x.dtype != _SINGLE:
        return x
    before = _undo_conversion(x)
    return before if before.dtype == dtype else FUNCTIONS["astype"](x, dtype)


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors in order, of 16-bit floats without intermediate rounding.

    Tensors that were rounded from float32 are added as they were before. More than two 16-bit
    tensors are added in float32.
    """
    if len(parts) > 1 and any(is_half(part.dtype) for part in parts):
        parts = [s if (s := _undo_conversion(part)).dtype == _SINGLE else part for part in parts]
        if len(parts) > 2 or any(part.dtype == _SINGLE for part in parts):
            parts = [widen(part) for part in parts]
    first, *rest = parts
    return sum(rest, first)


def _undo_conversion(x: Tensor) -> Tensor:
    """Return the input of an `astype`; any other tensor is returned as it is."""
    return x.node.inputs[0] if x.node.op.name == "astype" else x


def _autocast_high(x: Any) -> Any:
    return autocast_inputs([x], "high")[0] if isinstance(x, Tensor) else x


def _common_half_dtype(values: Iterable[Any]) -> np.dtype[Any] | None:
    """Return the dtype of all floats among the values if it is one and has 16 bits, else None."""
    dtypes = {dtype for value in values for dtype in _dtypes(value) if is_inexact(dtype)}
    return dtypes.pop() if len(dtypes) == 1 and is_half(next(iter(dtypes))) else None


def _dtypes(value: Any, listed: bool = False) -> list[np.dtype[Any]]:
    """Return the dtypes of a tensor, array or list; floats in a list count as float32."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return [value.dtype]
    if is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    if isinstance(value, list | tuple):
        return [dtype for x in value for dtype in _dtypes(x, True)]
    return [_SINGLE] if listed and isinstance(value, float) else []


def _map_tensors(value: Any, each: Callable[[Any], Any]) -> Any:
    """Apply a function to a value, or to each item of a list, a (named) tuple or a dataclass."""
    if is_dataclass(value) and not isinstance(value, type | Tensor):
        return replace(value, **{name: _map_tensors(x, each) for name, x in vars(value).items()})
    if isinstance(value, list | tuple):
        items = [_map_tensors(x, each) for x in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return each(as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value)


__all__ = ["composite", "in_float32", "round_to", "add_up", "widen"]
