"""Where graphs begin: placeholders, variables, constants and assignments."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, GraphError, VariableError
from graphflow.init import Initializer
from graphflow.op import REGISTRY, Tensor, as_tensor, user_location
from graphflow.spec import as_dtype, normalize_shape


def placeholder(dtype: Any, shape: Any = (), name: str | None = None) -> Tensor:
    """A tensor that is fed at each step.

    Args:
        dtype: "float32", "int64", "bool", …
        shape: ints; None for any size; a string for a size shared by several placeholders.

    Raises:
        DTypeError, ShapeError: not a dtype, not a shape.
    """
    at = user_location()
    try:
        sizes, name_of_dtype = normalize_shape(shape), as_dtype(dtype).name
    except GraphError as error:
        raise type(error)(f"placeholder at {at}: {error}") from None
    tensor: Tensor = REGISTRY["placeholder"](shape=sizes, dtype=name_of_dtype, name=name)
    return tensor


def variable(
    initial: Any, name: str | None = None, trainable: bool = True, dtype: Any = None
) -> Tensor:
    """State that lives in a session: reading it gives its value as the step began.

    Args:
        initial: an array (converted to float32 if it is a plain list of floats) or a `gf.init`
            initializer.
        name: unique in a session; made up if not given.
        trainable: whether `minimize` updates it unless told otherwise.

    Raises:
        VariableError, DTypeError: the initial value is symbolic, or has no supported dtype.
    """
    at = user_location()
    if isinstance(initial, Tensor):
        raise VariableError(f"variable at {at}: the initial value is a tensor; give an array")
    if not isinstance(trainable, bool):
        raise ArgumentError(f"variable at {at}: trainable is True or False, not {trainable!r}")
    if not isinstance(initial, Initializer):
        plain = not isinstance(initial, np.ndarray | np.generic)
        initial = np.asarray(initial)
        if plain and initial.dtype == np.float64:
            initial = initial.astype(np.float32)
        try:
            initial = np.array(initial, as_dtype(dtype or initial.dtype), order="C")
        except DTypeError as error:
            raise DTypeError(f"variable at {at}: {error}") from None
        initial.flags.writeable = False
    elif dtype is not None:
        initial = initial.with_dtype(dtype)
    tensor: Tensor = REGISTRY["variable"](
        initial=initial,
        trainable=trainable,
        shape=tuple(initial.shape),
        dtype=np.dtype(initial.dtype).name,
        named=name is not None,
        name=name,
    )
    return tensor


def constant(value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """A fixed array in the graph (a copy; plain lists of floats become float32)."""
    tensor = as_tensor(value, dtype)
    if name is None:
        return tensor
    named: Tensor = REGISTRY["constant"](value=tensor.node.attrs["value"], name=name)
    return named


def assign(variable: Tensor, value: Any, name: str | None = None) -> Tensor:
    """Set a variable at the end of the step; the fetched value is the new one.

    Raises:
        VariableError: the first argument is not a variable.
        ShapeError, DTypeError: the value does not fit.
    """
    if not isinstance(variable, Tensor) or variable.node.op is not REGISTRY["variable"]:
        raise VariableError(f"assign at {user_location()}: {variable!r} is not a variable")
    if not isinstance(value, Tensor):
        value = as_tensor(value, variable.dtype)
    tensor: Tensor = REGISTRY["assign"](variable, value, name=name)
    return tensor
