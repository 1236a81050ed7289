"""Builders of placeholders, variables, constants and assignments."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.array_conversion import NoArrayError, array_of, cast_in_range, is_foreign
from graphflow.errors import ArgumentError, DTypeError, VariableError
from graphflow.frontend.feeds import cast
from graphflow.init import Initializer
from graphflow.ir.nodes.scopes import current_prefix
from graphflow.ir.op import DEFAULT_DTYPES, REGISTRY, Tensor, as_tensor, error_location
from graphflow.ir.spec import as_dtype, normalize_shape

RESERVED = "__metadata__"
"""A name that variables cannot have: safetensors, the format of checkpoints, reserves it."""


@checks_argument_names(ArgumentError)
def placeholder(dtype: Any, shape: Any = (), name: str | None = None) -> Tensor:
    """Make a tensor that is fed at each step.

    Args:
        dtype: "float32", "int64", "bool", …
        shape: for each axis an int, None for any size, or a string for a size that several
            placeholders share.

    Raises:
        DTypeError, ShapeError: not a dtype, not a shape.
    """
    with error_location("placeholder"):
        if isinstance(dtype, tuple | list):
            raise DTypeError(f"the dtype is first: gf.placeholder('float32', {dtype!r})")
        shown = current_prefix() + ("placeholder" if name is None else f"{name}")
        sizes, name_of_dtype = normalize_shape(shape, of=shown), as_dtype(dtype).name
    tensor: Tensor = REGISTRY["placeholder"](shape=sizes, dtype=name_of_dtype, name=name)
    return tensor


@checks_argument_names(ArgumentError)
def variable(
    initial: Any, name: str | None = None, trainable: bool = True, dtype: Any = None
) -> Tensor:
    """Make a variable, whose value a session keeps from step to step.

    A step reads the value that the variable had when the step began.

    Args:
        initial: an array of numpy or of a library with DLPack (a plain list of floats becomes
            float32), or a `gf.init` initializer.
        name: unique in a session; default: generated.
        trainable: whether `minimize` updates it by default.

    Raises:
        VariableError, DTypeError: the initial value is symbolic, or has no supported dtype.
        ArgumentError: trainable is no bool, name no str, or one that checkpoints cannot hold.
    """
    with error_location("variable"):
        if not isinstance(trainable, bool):
            raise ArgumentError(f"trainable is True or False, not {trainable!r}")
        # refused here, since a checkpoint would refuse it hours later
        if isinstance(name, str) and name == RESERVED and not current_prefix():
            raise ArgumentError(f"files of checkpoints keep the name {name!r}; choose another")
        if not isinstance(initial, Initializer):
            initial = _copy_initial(initial, dtype)
        elif dtype is not None:
            initial = initial.with_dtype(dtype)
    return make_variable(initial, name, trainable)


def make_variable(initial: Any, name: str | None, trainable: bool) -> Tensor:
    """Make a variable without copying its initial array, which nobody may change."""
    tensor: Tensor = REGISTRY["variable"](
        initial=initial,
        trainable=trainable,
        shape=tuple(initial.shape),
        dtype=np.dtype(initial.dtype).name,
        named=name is not None,
        name=name,
    )
    return tensor


def _copy_initial(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return a read-only copy of an initial value."""
    if isinstance(value, Tensor):
        raise VariableError("the initial value is a tensor; give an array")
    try:
        array = array_of(value)
    except NoArrayError as error:
        raise DTypeError(f"the initial value is {error}") from None
    wanted = None if dtype is None else as_dtype(dtype)
    if not is_foreign(value) and array.dtype.name in DEFAULT_DTYPES:
        wanted = wanted or np.dtype(DEFAULT_DTYPES[array.dtype.name])
    given = as_dtype(array.dtype)
    try:
        array = cast_in_range(array, given if wanted is None else wanted)
    except OverflowError as error:
        raise DTypeError(f"the initial value: {error}; give a larger dtype") from None
    array = np.array(array, order="C")
    array.flags.writeable = False
    return array


@checks_argument_names(ArgumentError)
def constant(value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """Put a copy of an array into the graph; Python lists of floats become float32.

    Arrays of other libraries keep their dtype, as numpy's do.

    Raises:
        DTypeError: no array of a supported dtype.
    """
    with error_location("constant"):
        if is_foreign(value) and not isinstance(value, Tensor | np.generic):
            value = _convert_foreign(value)
        tensor = as_tensor(value, dtype)
        if tensor is value and (name is not None or dtype is not None):
            raise ArgumentError("the value is a tensor already; use .astype for another dtype")
    if name is None:
        return tensor
    named: Tensor = REGISTRY["constant"](value=tensor.node.attrs["value"], name=name)
    return named


def _convert_foreign(value: Any) -> np.ndarray[Any, Any]:
    """Convert an array of another library to numpy's."""
    try:
        return array_of(value)
    except NoArrayError as error:
        raise DTypeError(f"the value is {error}") from None


@checks_argument_names(ArgumentError)
def assign(variable: Tensor, value: Any, name: str | None = None) -> Tensor:
    """Set a variable at the end of the step; the fetched value is the new one.

    Raises:
        VariableError: the first argument is not a variable.
        ShapeError, DTypeError: the value does not fit.
    """
    with error_location("assign"):
        if not isinstance(variable, Tensor) or variable.node.op is not REGISTRY["variable"]:
            raise VariableError(f"{variable!r} is not a variable; gf.variable(initial) makes one")
        if not isinstance(value, Tensor):
            value = as_tensor(cast(variable.node, value, DTypeError), variable.dtype)
    tensor: Tensor = REGISTRY["assign"](variable, value, name=name)
    return tensor
