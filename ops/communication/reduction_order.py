"""The order in which the tensors of a collective are combined: fixed by algorithm, count and size.

An order is a rank, or a pair of orders whose values are combined, left with right. The kernels of
`collectives.py` and the exchanges of the runtime follow the same orders. So a sum has the same bits
on one device and on any number of them, whatever transport carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

Order = int | tuple["Order", "Order"]
"""A rank, or a pair of orders whose values are combined."""

ALGORITHMS = ("auto", "ring", "tree", "halving", "two_level", "direct")
REDUCTIONS = ("sum", "mean", "max", "min", "prod")

_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}
_FEW = 8  # up to so many ranks exchange directly
_SMALL = 1 << 18  # elements; below, the number of rounds costs more than the bytes


def resolve_algorithm(algorithm: str, count: int, size: int, hosts: Sequence[int] | None) -> str:
    """Return the algorithm that "auto" stands for.

    It follows from the numbers of ranks and elements, and from whether hosts are known, but never
    from the transport: bits must not depend on that.
    """
    if algorithm != "auto":
        return algorithm
    if hosts is not None and len(set(hosts)) > 1:
        return "two_level"
    if count <= _FEW:
        return "direct"
    return "halving" if size < _SMALL else "ring"


@cache
def order_of(algorithm: str, count: int, share: int, hosts: tuple[int, ...] | None = None) -> Order:
    """Return the order in which the elements of one share are combined (see `shares`).

    "direct" goes by rank. "tree" and "halving" go pairwise (neighbours, then pairs of neighbours).
    "ring" goes from the rank after the share's around to the share's own. "two_level" goes pairwise
    on each host and then over hosts, in the order of their first ranks.
    """
    ranks = range(count)
    if algorithm == "direct":
        return _chain(list(ranks))
    if algorithm == "ring":
        return _chain([(share + 1 + i) % count for i in ranks])
    if algorithm == "two_level":
        assert hosts is not None
        return _balanced_tree([_balanced_tree(members) for members in members_of(hosts)])
    return _balanced_tree(list(ranks))


def members_of(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _chain(orders: Sequence[Order]) -> Order:
    """Combine orders from left to right."""
    first, *rest = orders
    for each in rest:
        first = (first, each)
    return first


def _balanced_tree(orders: Sequence[Order]) -> Order:
    """Combine orders pairwise; the largest power of two of them comes first."""
    if len(orders) == 1:
        return orders[0]
    half = split_at(len(orders))
    return (_balanced_tree(orders[:half]), _balanced_tree(orders[half:]))


def split_at(count: int) -> int:
    """Return the largest power of two below a count of at least two."""
    return 1 << (count - 1).bit_length() - 1


def shares(size: int, count: int) -> list[int]:
    """Return a size in `count` parts that differ by at most one, the larger ones first."""
    each, more = divmod(size, count)
    return [each + (i < more) for i in range(count)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Return where parts of these sizes begin, and where the last one ends."""
    at = [0]
    for size in sizes:
        at.append(at[-1] + size)
    return at


def combine_function(reduction: str, xp: Any) -> Callable[..., Any]:
    """Return a function (a, b, out=) that combines two arrays; `out` may be either of them."""
    if reduction == "prod":
        return partial(_multiply, xp)
    ufunc: Callable[..., Any] = getattr(xp, _UFUNCS[reduction])
    return ufunc


def _multiply(xp: Any, a: Any, b: Any, out: Any) -> None:
    """Multiply in a fixed order of steps.

    Complex products are written out: numpy fuses their steps or not, depending on how memory
    overlaps, and the bits would differ.
    """
    if out.dtype.kind != "c":
        xp.multiply(a, b, out=out)
        return
    real = a.real * b.real - a.imag * b.imag
    imaginary = a.real * b.imag + a.imag * b.real
    out.real, out.imag = real, imaginary


def fold(
    order: Order,
    arrays: Sequence[Any],
    combine: Callable[..., Any],
    out: Any,
    scratch: Callable[[Any], Any],
) -> None:
    """Combine arrays in an order into `out`, which overlaps none of them.

    Args:
        order: the order.
        arrays: the arrays by rank.
        combine: see `combine_function`.
        out: the result.
        scratch: allocates a further array like the given one.
    """
    spine = []  # a chain is as long as there are ranks, too deep to recurse
    while not isinstance(order, int):
        order, right = order
        spine.append(right)
    value = arrays[order]
    if not spine:
        out[...] = value
    for right in reversed(spine):
        if isinstance(right, int):
            other = arrays[right]
        else:
            other = scratch(out)
            fold(right, arrays, combine, other, scratch)
        combine(value, other, out=out)
        value = out


def finish(reduction: str, count: int, out: Any) -> None:
    """Complete a combination: divide a sum to a mean."""
    if reduction == "mean":
        parts = out.reshape(-1)
        if parts.dtype.kind == "c":
            parts = parts.view(parts.real.dtype)
        parts /= count
