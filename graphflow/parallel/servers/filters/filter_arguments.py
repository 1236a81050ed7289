"""The filters that a user gives to a parameter server, as one filter for each direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphflow.errors import ArgumentError, ShardingError
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.filters.chain import Chain
from graphflow.parallel.compression.filters.key_cache import KeyCache

DIRECTIONS = ("push", "pull")


def check_filters(given: Any, where: str) -> tuple[Filter | None, Filter | None]:
    """Return the filters of pushes and of pulls; None: tensors travel as they are.

    Args:
        given: a list of filters for both, or a list for each of "push" and "pull".
        where: the user's line, for errors.

    Raises:
        ShardingError: it is neither; filters do not go together; one cannot be on pulls.
    """
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in DIRECTIONS]
        if unknown:
            raise ShardingError(
                f"{where}: filters are for 'push' and 'pull', not for {unknown[0]!r}"
            )
        push, pull = (_join(given.get(name, ()), where) for name in DIRECTIONS)
    else:
        push = pull = _join(given, where)
    if pull is not None and (pull.only_gradients or pull.excludes_feedback):
        why = (
            "decides by gradients"
            if pull.only_gradients
            else "multiplies what it sends, so differences would grow"
        )
        raise ShardingError(
            f"{where}: {pull!r} {why}, and a pull sends the changes of variables; give it for "
            'pushes alone, filters={"push": [...]}'
        )
    return push, pull


def _join(given: Any, where: str) -> Filter | None:
    """Return one filter for a list of them; None for an empty one."""
    if not isinstance(given, list | tuple) or not all(isinstance(f, Filter) for f in given):
        raise ShardingError(
            f"{where}: filters must be a list of filters, such as [gf.parallel.FixedPoint(8)], or "
            f'{{"push": [...], "pull": [...]}}, not {given!r}'
        )
    for rule in given:
        if isinstance(rule, KeyCache):
            continue
        if type(rule).encode is Filter.encode:
            raise ShardingError(
                f"{where}: {rule!r} exchanges sums between replicas; a server needs a filter with "
                "encode and decode"
            )
    if len(given) < 2 and not any(isinstance(rule, KeyCache) for rule in given):
        return given[0] if given else None
    try:
        return Chain(given)
    except ArgumentError as error:
        raise ShardingError(f"{where}: filters: {error}") from None


__all__ = ["check_filters"]
