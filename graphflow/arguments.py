"""Arguments of public functions are what their annotations say, or an error names them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, GraphError
from graphflow.location import told


def checked(f: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function whose flags, numbers, words and functions are what its annotations say, and whose
    errors say that they are of `what`, on the user's line."""
    plain = _plain_arguments(f)

    @functools.wraps(f)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            for place, name, (wanted, fits) in plain:
                value = args[place] if place < len(args) else kwargs.get(name, _ABSENT)
                if value is not _ABSENT and not fits(value):
                    raise ArgumentError(f"{name} is {wanted}, not {value!r}")
            return f(*args, **kwargs)
        except GraphError as error:
            raise told(what, error) from None
        except MemoryError as error:  # numbers that it puts into the graph
            too_large = ArgumentError(f"{error} while the graph is built; give smaller sizes")
            raise told(what, too_large) from None

    return entered


_ABSENT = object()


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | np.bool_) and value in (0, 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool | complex)


_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", _is_flag),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda value: value is None or _is_number(value)),
    "Callable[[Tensor], Tensor]": ("a function of a tensor", callable),
    "str": ("a str", lambda value: isinstance(value, str)),
    "str | None": ("a str or None", lambda value: value is None or isinstance(value, str)),
}


def _plain_arguments(f: Callable[..., Any]) -> list[tuple[int, str, Any]]:
    """Place, name and check of a function's arguments that are annotated as flags, numbers and
    words: what else is given for one would fail far from where it is said, or pass for true."""
    code = getattr(f, "__code__", None)
    if code is None:
        return []
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [
        (i if i < code.co_argcount else sys.maxsize, name, _PLAIN[annotation])
        for i, name in enumerate(named)
        if (annotation := f.__annotations__.get(name)) in _PLAIN
    ]
