"""What is found by name: ops, and the functions behind Tensor's operators and methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from graphflow.base.argument_checks import validate_arguments

if TYPE_CHECKING:
    from graphflow.ir.op import Op

F = TypeVar("F", bound=Callable[..., Any])

REGISTRY: dict[str, Op] = {}
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def function(f: F) -> F:
    """Enter a public function under its own name, for Tensor's operators and methods to find; its
    arguments are checked, and its errors name it and the user's line."""
    entered = FUNCTIONS[f.__name__] = validate_arguments(f, f.__name__)
    return cast(F, entered)
