"""In which order the tensors of a collective are combined: fixed by algorithm, count and size.

An order is a rank, or a pair of orders whose values are combined, left with right. The kernels of
`collectives.py` and the exchanges of the runtime go by the same orders, so a sum has the same bits
on one device and over any number of them, whatever carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

Order = int | tuple["Order", "Order"]

ALGORITHMS = ("auto", "ring", "tree", "halving", "two_level", "direct")
REDUCTIONS = ("sum", "mean", "max", "min", "prod")

_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}
_FEW = 8  # ranks that exchange with each other directly
_SMALL = 1 << 18  # elements, below which the number of rounds counts more than the bytes


def resolve_algorithm(algorithm: str, count: int, size: int, hosts: Sequence[int] | None) -> str:
    """What "auto" stands for, by the number of ranks, of elements, and whether hosts are known:
    never by what carries the tensors."""
    if algorithm != "auto":
        return algorithm
    if hosts is not None and len(set(hosts)) > 1:
        return "two_level"
    if count <= _FEW:
        return "direct"
    return "halving" if size < _SMALL else "ring"


@cache
def order_of(algorithm: str, count: int, share: int, hosts: tuple[int, ...] | None = None) -> Order:
    """How the elements of one share (see `shares`) are combined.

    "direct" goes by rank, "tree" and "halving" pairwise (neighbours, then pairs of neighbours),
    "ring" from the rank after the share's around to its own, "two_level" pairwise on each host and
    then over hosts, in order of their first ranks.
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
    """The ranks on each host, hosts in order of their first ranks."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _chain(orders: Sequence[Order]) -> Order:
    first, *rest = orders
    for each in rest:
        first = (first, each)
    return first


def _balanced_tree(orders: Sequence[Order]) -> Order:
    """Pairwise; of a number that is no power of two, the largest such comes first."""
    if len(orders) == 1:
        return orders[0]
    half = split_at(len(orders))
    return (_balanced_tree(orders[:half]), _balanced_tree(orders[half:]))


def split_at(count: int) -> int:
    """The largest power of two that is less than a count of at least two."""
    return 1 << (count - 1).bit_length() - 1


def shares(size: int, count: int) -> list[int]:
    """A size in `count` parts that differ by one at most, the larger ones first."""
    each, more = divmod(size, count)
    return [each + (i < more) for i in range(count)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin, and where the last one ends."""
    at = [0]
    for size in sizes:
        at.append(at[-1] + size)
    return at


def combine_function(reduction: str, xp: Any) -> Callable[..., Any]:
    """What combines two arrays: (a, b, out=), where out may be either."""
    if reduction == "prod":
        return partial(_multiply, xp)
    ufunc: Callable[..., Any] = getattr(xp, _UFUNCS[reduction])
    return ufunc


def _multiply(xp: Any, a: Any, b: Any, out: Any) -> None:
    """Complex products are written out: numpy fuses their steps or not, as memory overlaps."""
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
        scratch: makes a further array like the given one.
    """
    spine = []  # chains may be as long as there are ranks: no recursion along them
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
    """What is left to do once everything is combined: a mean is a sum divided."""
    if reduction == "mean":
        parts = out.reshape(-1)
        if parts.dtype.kind == "c":
            parts = parts.view(parts.real.dtype)
        parts /= count
