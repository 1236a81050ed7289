"""Feeds: convert a user's value for a placeholder or a variable to an array of its spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_checks import did_you_mean
from graphflow.base.array_conversion import NoArrayError, array_of, cast_in_range, is_foreign
from graphflow.errors import FeedError, GraphflowError
from graphflow.ir.op import Node, Tensor, user_location
from graphflow.ir.spec import (
    Size,
    TensorSpec,
    is_fresh,
    is_inexact,
    kind,
    limits,
    show_shape,
    sole_symbol,
)

PlaceholderGroups = Callable[[], Sequence[Iterable[Node]]]
"""Groups of placeholders that feeds may name; the first group with the name is used."""


def convert_feeds(feeds: Any, known: PlaceholderGroups = tuple) -> dict[Node, np.ndarray[Any, Any]]:
    """Convert a user's feeds to arrays by placeholder. A key may be a placeholder's name.

    Raises:
        FeedError: feeds are no dict; a key is no placeholder, or fed twice; a value does not
            convert.
    """
    if feeds is None:
        return {}
    if not isinstance(feeds, Mapping):
        first = feeds[0] if isinstance(feeds, list | tuple) and feeds else None
        several = isinstance(feeds, Iterator) or isinstance(first, Mapping)
        raise FeedError(
            f"feeds at {user_location()} are a dict from placeholders to values, not "
            f"{type(feeds).__name__}"
            + "; for many steps, each with feeds of its own: run(fetches, feeds, steps=n)"
            * several
        )
    result: dict[Node, np.ndarray[Any, Any]] = {}
    for key, value in feeds.items():
        node = _find_placeholder(key, known()) if isinstance(key, str) else as_placeholder(key)
        if node in result:
            raise FeedError(f"{_describe_node(node)} is fed twice, by itself and by its name")
        result[node] = convert(node, value)
    return result


def _find_placeholder(name: str, groups: Sequence[Iterable[Node]]) -> Node:
    """Return the placeholder of a name, from the first group that has it."""
    names: list[str] = []
    for group in groups:
        nodes = list(group)
        found = [node for node in nodes if node.name == name]
        if len(found) > 1:
            made = " and ".join(str(node.location) for node in found[:2])
            raise FeedError(
                f"feed {name!r} at {user_location()}: several placeholders have this name (made "
                f"at {made}); use the tensor itself as key"
            )
        if found:
            return found[0]
        names += [node.name for node in nodes]
    hint = did_you_mean(name, names) or (f"they have {', '.join(names[:8])};" if names else "")
    raise FeedError(
        f"feed {name!r} at {user_location()}: no placeholder of these fetches has this name; "
        f"{hint}{' ' if hint else ''}use the tensor itself as key"
    )


def as_placeholder(tensor: Any) -> Node:
    """Return the node of a placeholder.

    Raises:
        FeedError: the tensor is no placeholder.
    """
    if not isinstance(tensor, Tensor):
        raise FeedError(
            f"feed at {user_location()}: {tensor!r} is not a placeholder; use a tensor of "
            "gf.placeholder, or its name, as key"
        )
    if tensor.node.op.name != "placeholder":
        raise FeedError(
            f"feed {tensor.name!r} (made at {tensor.node.location}) is not a "
            f"placeholder but a {tensor.node.op.name}; only placeholders are fed"
        )
    return tensor.node


def convert(
    node: Node, value: Any, error: type[GraphflowError] = FeedError
) -> np.ndarray[Any, Any]:
    """Convert a value to an array of the node's dtype, and check its rank and known sizes.

    Conversions are those that numpy calls safe, and float64 to float32 (complex128 to complex64)
    unless a finite number would become infinite. Python numbers and lists also convert if every
    element keeps its value, so `[1, 2]` may be fed as float32.

    Raises:
        FeedError (or `error`): another dtype, rank or size; names the node, its line and both
            sides.
    """
    spec = node.specs[0]
    usual = type(value) is np.ndarray and value.dtype == spec.dtype
    array: np.ndarray[Any, Any] = value if usual else cast(node, value, error)
    if array.ndim != spec.rank or any(
        isinstance(want, int) and want != have
        for want, have in zip(spec.shape, array.shape, strict=True)
    ):
        raise error(
            f"{_describe_node(node)} has shape {_show_expected_shape(spec)}, the given value "
            f"{show_shape(array.shape)}; reshape one of them"
        )
    return array


def cast(node: Node, value: Any, error: type[GraphflowError]) -> np.ndarray[Any, Any]:
    """Convert a value to an array of the node's dtype, of any shape.

    Raises:
        error: the value is no array, or its dtype does not convert.
    """
    spec = node.specs[0]
    what = _describe_node(node)
    if isinstance(value, Tensor):
        raise error(f"{what} is given a symbolic tensor {value.name!r}; give an array")
    try:
        array = array_of(value)
    except NoArrayError as cause:
        raise error(f"{what} is given {cause}") from None
    if array.dtype != spec.dtype:
        plain = not is_foreign(value)
        if not _converts_safely(array, spec.dtype, plain):
            name = repr(spec.dtype.name)
            message = f"{what} is {spec.dtype}, the given value {array.dtype}"
            if array.dtype.kind not in "biufcV" or array.dtype.fields:
                raise error(f"{message}; give numbers that some dtype holds")
            converts = hasattr(value, "astype")  # torch's tensors and lists do not have it
            remedy = f"value.astype({name})" if converts else f"np.asarray(value, {name})"
            raise error(f"{message}, which does not convert safely; give {remedy}")
        try:
            array = cast_in_range(array, spec.dtype)
        except OverflowError as cause:
            raise error(
                f"{what} is {spec.dtype}, and the given value {cause}; scale it, clip it, or make "
                f"the {node.op.name} {array.dtype}"
            ) from None
    return array


def _describe_node(node: Node) -> str:
    return f"{node.op.name} {node.name!r} (made at {node.location})"


def _converts_safely(array: np.ndarray[Any, Any], dtype: np.dtype[Any], plain: bool) -> bool:
    if np.can_cast(array.dtype, dtype, "safe"):
        return True
    given = array.dtype.newbyteorder("=").name
    if given in _NARROWER and dtype.name in _NARROWER[given]:
        return True
    if plain and array.size == 0:
        return True  # numpy's dtype of an empty list means nothing
    if not plain or array.dtype.kind not in "biufcV" or array.dtype.kind == "b" != dtype.kind:
        return False
    if is_inexact(array.dtype):
        return kind(dtype) in ("complex", kind(array.dtype))
    if dtype.kind in "iu":
        low, high = limits(dtype)
        return bool((array >= low).all() and (array <= high).all())
    with np.errstate(over="ignore", invalid="ignore"):
        back = array.astype(dtype).real.astype(array.dtype)
    return is_inexact(dtype) and bool((back == array).all())


_NARROWER = {"float64": ("float32", "complex64"), "complex128": ("complex64",)}


def _show_expected_shape(spec: TensorSpec) -> str:
    """Write a placeholder's shape as the user did: fresh symbols are None."""
    sizes = ("None" if _is_open(size) else str(size) for size in spec.shape)
    return show_shape(tuple(sizes))


def _is_open(size: Size) -> bool:
    symbol = sole_symbol(size)
    return symbol is not None and is_fresh(symbol)
