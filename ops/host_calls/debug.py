"""Values and assertions in a running graph. Public as `gf.debug`.

Both functions return their input, so they run only if a fetch depends on their result.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, CheckError, DTypeError
from graphflow.ir.op import (
    Cost,
    Op,
    Tensor,
    as_tensor,
    error_location,
    register,
    sample,
    user_location,
)
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base import batching_rules as batching

F = spec("float32", (3, 4))


def _print_kernel(xp: Any, x: Any, message: str) -> Any:
    host = x.get() if hasattr(x, "get") else np.asarray(x)
    text = f"{message}: {host.dtype}{host.shape} {np.array2string(host, threshold=100)}\n"
    sys.stdout.write(text)
    sys.stdout.flush()
    return x


def _print_into(xp: Any, out: Any, x: Any, message: str) -> None:
    xp.copyto(out, _print_kernel(xp, x, message))


_print = register(
    Op(
        "print",
        infer=lambda x, message: x,
        kernel=_print_kernel,
        into=_print_into,
        vjp=lambda g, y, x, message: (g,),
        batch=batching.rows,
        cost=lambda x, message: Cost(flops=0),
        halves=True,
        samples=(sample(F, message="x"), sample(spec("int64"), message="n")),
        pure=False,
    )
)


@checks_argument_names(ArgumentError)
def print(x: Any, message: str = "", name: str | None = None) -> Tensor:
    """Return x; each time it is computed, print its value on the worker that computes it.

    Args:
        x: a tensor, or what converts to one.
        message: text before the value; default: the tensor's name and the line of this call.

    Raises:
        ArgumentError: message is not a str.
    """
    with error_location("debug.print"):
        x = as_tensor(x)
        if not isinstance(message, str):
            raise ArgumentError(f"message must be a str, got {message!r}")
    message = message or f"{x.name} at {user_location()}"
    result: Tensor = _print(x, message=message, name=name)
    return result


def _infer_check(x: TensorSpec, condition: TensorSpec, message: str) -> TensorSpec:
    if condition.dtype != bool:
        raise DTypeError(
            f"the condition must be bool, got {condition.dtype}; compare it with something"
        )
    return x


def _check_kernel(xp: Any, x: Any, condition: Any, message: str) -> Any:
    if not bool(condition.all()):
        false = int(condition.size - xp.count_nonzero(condition))
        where = tuple(int(axis[0]) for axis in xp.nonzero(~xp.atleast_1d(condition)))
        first = f", first at index {where}" if condition.ndim else ""
        raise CheckError(f"{message}: false for {false} of {condition.size} elements{first}")
    return x


def _check_into(xp: Any, out: Any, x: Any, condition: Any, message: str) -> None:
    xp.copyto(out, _check_kernel(xp, x, condition, message))


_check = register(
    Op(
        "check",
        infer=_infer_check,
        kernel=_check_kernel,
        into=_check_into,
        vjp=lambda g, y, x, condition, message: (g, None),
        batch=batching.rows,
        cost=lambda x, condition, message: Cost(flops=condition.size),
        halves=True,
        # An empty condition always holds; random bools would not.
        samples=(sample(F, spec("bool", (0,)), message="never"),),
        pure=False,
    )
)


@checks_argument_names(ArgumentError)
def check(x: Any, condition: Any, message: str, name: str | None = None) -> Tensor:
    """Return x; a step in which the condition is false anywhere raises CheckError.

    Args:
        x: a tensor, or what converts to one.
        condition: a bool tensor of any shape, also another than that of x.
        message: what is wrong if the condition is false.

    Raises:
        DTypeError: the condition is not bool.
        ArgumentError: message is not a str, or is empty.
        CheckError: from the step; it holds the message and the number of false elements.
    """
    with error_location("debug.check"):
        if not isinstance(message, str) or not message:
            raise ArgumentError(f"message must be a str that says what is wrong, got {message!r}")
    result: Tensor = _check(x, condition, message=f"{message} ({user_location()})", name=name)
    return result


__all__ = ["check", "print"]
