"""Registries of ops, and of the functions behind Tensor's operators and methods, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from graphflow.base.argument_checks import validate_arguments
from graphflow.base.source_location import is_own, user_location
from graphflow.errors import ArgumentError, GraphError
from graphflow.ir.declarations.op_declaration import Op

F = TypeVar("F", bound=Callable[..., Any])

REGISTRY: dict[str, Op] = {}
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def function(f: F) -> F:
    """Register a public function under its own name, for Tensor's operators and methods to find.

    The function that comes back validates its arguments, and its errors name it and the user's
    line.
    """
    registered = FUNCTIONS[f.__name__] = validate_arguments(f, f.__name__)
    return cast(F, registered)


_OWNERS: dict[str, tuple[str, str]] = {}  # of users' ops: the module and line that register each


def register(op: Op) -> Op:
    """Register an op under its name, by which workers find it, too.

    Raises:
        ArgumentError: not an op.
        GraphError: an op of graphflow or of a user has the name already.
    """
    if not isinstance(op, Op):
        raise ArgumentError(f"register_op at {user_location()}: give a gf.Op, not {op!r}")
    if op.name in REGISTRY:
        _, place = _OWNERS.get(op.name, ("", "graphflow itself"))
        raise GraphError(
            f"op {op.name!r} at {user_location()} is registered twice: there is one by {place}; "
            "choose another name, such as one that begins with your module's"
        )
    REGISTRY[op.name] = op
    caller = sys._getframe(1)
    if is_own(caller.f_code.co_filename, caller.f_globals):
        FUNCTIONS.setdefault(op.name, op)
    else:
        _OWNERS[op.name] = (str(caller.f_globals.get("__name__")), str(user_location()))
    return op


def owner_module(op: Op) -> str | None:
    """Return the module that registered a user's op; None for an op of graphflow."""
    return _OWNERS.get(op.name, (None,))[0]
