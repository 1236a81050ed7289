"""Clip gradients: by their joint norm, each by its own norm, or element by element."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import kind, promote, real_dtype
from graphflow.ops.base.composite import widen
from graphflow.optim.update_targets import (
    Rate,
    in_dtype_of,
    rate_for,
    wide_dtype,
)


def _magnitude(x: Tensor) -> Tensor:
    """Return x, or the absolute values of complex numbers."""
    size: Tensor = FUNCTIONS["abs"](x) if kind(x.dtype) == "complex" else x
    return size


@checks_argument_names(ArgumentError)
def clip_by_global_norm(grads: Sequence[Tensor], max_norm: Rate) -> tuple[list[Tensor], Tensor]:
    """Scale gradients down together to a joint 2-norm of at most `max_norm`.

    Return the gradients and the norm before (at least float32).

    Source: Pascanu, Mikolov & Bengio, ICML 2013.

    Raises:
        ArgumentError: no gradients, or a norm that is not a positive number.
    """
    _check("clip_by_global_norm", grads, "max_norm", max_norm)
    widest = real_dtype(reduce(promote, (wide_dtype(g.dtype) for g in grads)))
    wide = (FUNCTIONS["astype"](_magnitude(g), widest) for g in grads)
    total, *rest = (FUNCTIONS["sum"](g * g) for g in wide)
    for square in rest:
        total = total + square
    norm: Tensor = FUNCTIONS["sqrt"](total)
    limit = rate_for(max_norm, norm)
    scale = limit / FUNCTIONS["maximum"](norm, limit)
    pairs = [(g, widen(g)) for g in grads]
    return [in_dtype_of(w * in_dtype_of(scale, w), g) for g, w in pairs], norm


@checks_argument_names(ArgumentError)
def clip_by_norm(grads: Sequence[Tensor], max_norm: Rate) -> list[Tensor]:
    """Scale each gradient down to a 2-norm of at most `max_norm`.

    Raises:
        ArgumentError: no gradients, or a norm that is not a positive number.
    """
    _check("clip_by_norm", grads, "max_norm", max_norm)
    return [clip_by_global_norm([gradient], max_norm)[0][0] for gradient in grads]


@checks_argument_names(ArgumentError)
def clip_by_value(grads: Sequence[Tensor], limit: Rate) -> list[Tensor]:
    """Cut each element of gradients to the range from −limit to limit.

    Raises:
        ArgumentError: no gradients, complex ones, or a limit that is not a positive number.
    """
    _check("clip_by_value", grads, "limit", limit)
    for gradient in grads:
        if kind(gradient.dtype) == "complex":
            raise ArgumentError(
                f"clip_by_value at {user_location()}: {gradient!r} is complex; use clip_by_norm"
            )
    bounds = [(g, rate_for(limit, g)) for g in grads]
    return [FUNCTIONS["clip"](g, -bound, bound) for g, bound in bounds]


def _check(what: str, grads: Any, name: str, limit: object) -> None:
    """Check the arguments of a function that clips gradients; raises as it."""
    at = f"{what} at {user_location()}"
    listed = isinstance(grads, list | tuple) and bool(grads)
    if not listed or not all(isinstance(g, Tensor) for g in grads):
        raise ArgumentError(f"{at}: give a list of gradients, not {grads!r}")
    if not isinstance(limit, Tensor) and not (is_number(limit) and limit > 0):
        raise ArgumentError(f"{at}: {name} must be a positive number, not {limit!r}")
