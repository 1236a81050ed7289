"""`gf.associative_scan`: running results of an associative function, as a tree of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.control_flow import require_function
from graphflow.frontend.pytree import Rebuild, flatten_values
from graphflow.frontend.tracing import check_arity
from graphflow.ir.op import FUNCTIONS, Tensor, error_location, function
from graphflow.ir.spec import show_distinctly, show_shape
from graphflow.ops.base.shape_rules import normalize_axis, require_int
from graphflow.transforms.vmap import vmap

_Merge = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""Combines rows with rows, all at once: the function of two elements over a first axis."""


@function
def associative_scan(
    f: Callable[[Any, Any], Any], xs: Any, *, axis: int = 0, reverse: bool = False
) -> Any:
    """Combine the slices of tensors up to each position by an associative function.

    The result equals `y[0] = x[0]`, `y[i] = f(y[i - 1], x[i])`, up to rounding. The calls of f form
    a tree: n slices take about 2·n calls in 2·log2(n) steps, each of which computes all of its
    calls at once. Use it where a device computes many calls as fast as one, as GPUs do if slices
    are small. `gf.scan` makes n - 1 calls one by one, in a native loop on CPUs, where it mostly is
    two to four times as fast. It is also better if f costs much (such as a product of large
    matrices), and the only one if f is not associative or n is a symbolic size.

    Args:
        f: (a, b) -> c, each a nest of slices like those of `xs`, without the axis. It must be
            associative: f(f(a, b), c) equals f(a, f(b, c)). It is mapped by `gf.vmap`.
        xs: a tensor or a nest of tensors of the same known size along the axis.
        axis: the axis of the slices.
        reverse: combine from the last slice to the first: `y[i] = f(y[i + 1], x[i])`.

    Returns:
        The y of all positions, in the nest, shapes and dtypes of xs.

    Raises:
        ArgumentError: f is no function, or returns another nest than that of its arguments; xs
            holds no tensor; reverse is no bool.
        ShapeError: axis is outside a tensor of xs; sizes along the axis differ, or one is symbolic;
            f changes shapes or dtypes.

    Source: Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990.
    """
    require_function(f, "f")
    if not isinstance(reverse, bool):
        raise ArgumentError(f"reverse must be True or False, got {reverse!r}")
    axis = require_int("axis", axis)
    tensors, nest = flatten_values(xs, "xs")
    axes = [normalize_axis(axis, x.ndim) for x in tensors]
    _require_one_size(tensors, axes)
    if tensors[0].shape[axes[0]] == 0:
        return nest(tensors)
    rows = [FUNCTIONS["moveaxis"](x, a, 0) for x, a in zip(tensors, axes, strict=True)]
    if reverse:
        rows = [FUNCTIONS["flip"](x, 0) for x in rows]
    rows = _scan_rows(_merge_of(f, nest), rows)
    if reverse:
        rows = [FUNCTIONS["flip"](x, 0) for x in rows]
    return nest([FUNCTIONS["moveaxis"](x, 0, a) for x, a in zip(rows, axes, strict=True)])


def _require_one_size(tensors: Sequence[Tensor], axes: Sequence[int]) -> None:
    """Raise an error unless all tensors have the same known size along their axis."""
    if not tensors:
        raise ArgumentError("xs holds no tensor; give a tensor or a nest of tensors")
    sizes = [x.shape[a] for x, a in zip(tensors, axes, strict=True)]
    for x, size in zip(tensors, sizes, strict=True):
        if not isinstance(size, int):
            raise ShapeError(
                f"the tree of calls takes a known number of slices, and {show_shape(x.shape)} has "
                f"{size} of them; give the placeholder a known size, or use gf.scan"
            )
        if size != sizes[0]:
            raise ShapeError(
                f"the tensors of xs have {sizes[0]} and {size} slices along the axis; "
                "all must have the same number"
            )


def _merge_of(f: Callable[[Any, Any], Any], nest: Rebuild) -> _Merge:
    """Return f over rows of flat tensors; it checks that f keeps nests, shapes and dtypes."""

    def keep_specs(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        pair = (nest(a), nest(b))
        check_arity(f, pair, getattr(f, "__name__", "f"))
        found, rebuild = flatten_values(f(*pair), "what f returns")
        numbers = range(len(a))
        if len(found) != len(a) or repr(rebuild(numbers)) != repr(nest(numbers)):
            raise ArgumentError(
                f"f takes the nest {nest(numbers)!r} and returns {rebuild(range(len(found)))!r} "
                "(numbers stand for tensors); return the nest of its arguments"
            )
        for i, (before, after) in enumerate(zip(a, found, strict=True)):
            if before.spec != after.spec:
                taken, given = show_distinctly(before.spec, after.spec)
                raise ShapeError(
                    f"f takes slices {taken} and returns {given} as tensor {i}; f combines two "
                    "slices, without the axis, to one of the same shape and dtype"
                )
        return found

    def locate(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        with error_location("associative_scan"):  # not vmap, which the user did not call
            return keep_specs(a, b)

    merge: _Merge = vmap(locate)
    return merge


def _scan_rows(merge: _Merge, rows: list[Tensor]) -> list[Tensor]:
    """Return the running results of rows: those of pairs of rows first, then those in between."""
    n = int(rows[0].shape[0])
    if n == 1:
        return rows
    pairs = merge([x[: n - 1 : 2] for x in rows], [x[1::2] for x in rows])
    odd = _scan_rows(merge, pairs)
    firsts = [x[:1] for x in rows]
    if n == 2:
        return [_concat([a, b]) for a, b in zip(firsts, odd, strict=True)]
    before = [x[: (n - 1) // 2] for x in odd]
    between = merge(before, [x[2::2] for x in rows])
    even = [_concat([a, b]) for a, b in zip(firsts, between, strict=True)]
    return [_interleave(a, b) for a, b in zip(even, odd, strict=True)]


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """Return rows of both in turn: even[0], odd[0], even[1] …; even may have one more."""
    m = int(odd.shape[0])
    both = FUNCTIONS["stack"]([even[:m], odd], 1)
    mixed: Tensor = FUNCTIONS["reshape"](both, (2 * m, *odd.shape[1:]))
    return mixed if even.shape[0] == m else _concat([mixed, even[m:]])


def _concat(parts: list[Tensor]) -> Tensor:
    result: Tensor = FUNCTIONS["concat"](parts, 0)
    return result


__all__ = ["associative_scan"]
