"""Annotations of public functions as checks of argument values.

`kind_of(annotation)` returns the check for flags, numbers, words, paths, functions, classes of this
package, and lists and dicts of these. An annotation that allows more (`Any`, `Tensor`, a name that
is imported for type checkers only) has no check here: the function itself decides.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, get_args, get_origin

import numpy as np

REFUSED = object()
"""The result of `Kind.take` for a value of another kind."""


class Kind(NamedTuple):
    """The check of one annotation: its name in errors, and a function that converts a value.

    Attributes:
        words: the kind of values, such as "an int".
        take: converts a value for the function, or returns REFUSED.
    """

    words: str
    take: Callable[[Any], Any]


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a real number of Python or numpy; a flag and an array are none."""
    return isinstance(value, int | float | np.number) and not isinstance(
        value, bool | np.complexfloating
    )


def _to_flag(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    return bool(value) if isinstance(value, np.bool_) else REFUSED


def _to_integer(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return REFUSED
    return int(value)


def _to_number(value: Any) -> Any:
    if type(value) is int:
        return value
    if not is_number(value):
        return REFUSED
    if isinstance(value, int | np.integer):
        return int(value)
    number = value if type(value) is float else float(value)
    return REFUSED if number != number else number  # NaN is refused: no rate or size can be NaN


def _accept_instances(*kinds: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kinds) else REFUSED


_PLAIN = {
    "bool": Kind("True or False", _to_flag),
    "int": Kind("an int", _to_integer),
    "float": Kind("a number", _to_number),
    "str": Kind("a str", _accept_instances(str)),
    "None": Kind("None", _accept_instances(type(None))),
    "Callable": Kind("a function", lambda value: value if callable(value) else REFUSED),
    "PathLike": Kind("a path", _accept_instances(os.PathLike)),
    "Mapping": Kind("a dict", _accept_instances(Mapping)),
    "dict": Kind("a dict", _accept_instances(Mapping)),
}
_LISTS = ("Sequence", "list", "tuple")


def kind_of(annotation: Any, names: Mapping[str, Any]) -> Kind | None:
    """Return the check for an annotation, given as source text; None if it has none.

    Args:
        names: the globals of the function, in which the annotation's names are looked up.
    """
    if not isinstance(annotation, str):
        return None
    return _parse_kind(ast.parse(annotation, mode="eval").body, names)


def _parse_kind(node: ast.expr, names: Mapping[str, Any]) -> Kind | None:
    """Return the check for the syntax tree of an annotation."""
    match node:
        case ast.Constant(value=None):
            return _PLAIN["None"]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _kind_of_union(_parse_kind(left, names), _parse_kind(right, names))
        case ast.Name(id=name):
            return _PLAIN.get(name) or _kind_of_name(names.get(name))
        case ast.Attribute(attr="PathLike"):
            return _PLAIN["PathLike"]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            return _kind_of_list(inner, names)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return _kind_of_choice(ast.literal_eval(ast.Tuple([inner], ast.Load())))
        case ast.Subscript(value=value):
            return _parse_kind(value, names)
    return None


def _kind_of_union(first: Kind | None, other: Kind | None) -> Kind | None:
    """Return the check that accepts the values of either of two."""
    if first is None or other is None:
        return None

    def take(value: Any) -> Any:
        taken = first.take(value)
        return other.take(value) if taken is REFUSED else taken

    return Kind(f"{first.words} or {other.words}", take)


def _kind_of_name(found: Any) -> Kind | None:
    """Return the check for a name: an alias of Literal, or a class of this package.

    A tensor has none, since functions accept many values that they turn into tensors.
    """
    if get_origin(found) is Literal:
        return _kind_of_choice(get_args(found))
    if not isinstance(found, type) or not found.__module__.startswith("graphflow."):
        return None
    if found.__name__ == "Tensor" or getattr(found, "_is_protocol", False):
        return None
    return Kind(f"a {found.__name__}", _accept_instances(found))


def _kind_of_list(inner: ast.expr, names: Mapping[str, Any]) -> Kind:
    """Return the check for a list or tuple, and for its elements if the annotation names one kind.

    Numpy arrays and ranges count as lists.
    """
    item = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    alike = not isinstance(inner, ast.Tuple) or (
        len(inner.elts) == 2 and isinstance(inner.elts[1], ast.Constant)
    )
    kind = _parse_kind(item, names) if alike else None

    def take(value: Any) -> Any:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            return REFUSED
        if isinstance(value, np.ndarray) and not value.ndim:
            return REFUSED
        if kind is not None and any(kind.take(item) is REFUSED for item in value):
            return REFUSED
        return value

    return Kind("a list or tuple" + (f" (each {kind.words})" if kind else ""), take)


def _kind_of_choice(words: tuple[Any, ...]) -> Kind:
    """Return the check for a few allowed words.

    An alias such as `Literal[("a", "b")]` holds a tuple of words within the tuple.
    """
    among = words[0] if isinstance(words[0], tuple) else words
    return Kind(
        f"one of {', '.join(map(repr, among))}",
        lambda value: value if isinstance(value, str | int) and value in among else REFUSED,
    )
