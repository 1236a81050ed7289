"""The exchange: a filter runs for several tensors at all replicas, and what they ask for travels
together.

    reduce() of each tensor and replica ─requests→ one row for each dtype ─collective→ answers

All replicas ask alike, since a request depends on shapes only. So the requests of one round make
one collective for each kind and dtype, however many tensors there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.op import FUNCTIONS, RandomStreams, Tensor, current_scope
from graphflow.ir.spec import TensorSpec
from graphflow.optim.update_targets import in_dtype_of, wide_dtype
from graphflow.parallel.compression.filter import (
    AllToAll,
    Filter,
    Gather,
    Parts,
    Reduced,
    Reduction,
    Request,
    State,
    Sum,
    used_rows_of,
)
from graphflow.parallel.resharding.collectives import all_gather, all_reduce, all_to_all
from graphflow.parallel.resharding.local_ops import slice_axis

_Key = tuple[int, int]
"""The number of a tensor, and of a replica."""


class FilteredSum(NamedTuple):
    """The result of an exchange at one replica: the sum, and the state for the next exchange."""

    total: Tensor
    state: State


@dataclass(frozen=True)
class Sites:
    """Scopes for the nodes of an exchange.

    Attributes:
        at: a scope whose nodes are at a replica.
        across: a scope whose nodes each lie where their own input is.
        log: called with the name of each collective, and its result at each replica.
        log_rows: called with a part of each replica's message of which only rows in use travel, and
            the replica that receives it; None: all others do.
    """

    at: Callable[[int], AbstractContextManager[Any]]
    across: Callable[[], AbstractContextManager[Any]]
    log: Callable[[str, Sequence[Tensor]], None]
    log_rows: Callable[[Sequence[Tensor], int | None], None]


def exchange_sums(
    rule: Filter,
    tensors: Sequence[Sequence[Tensor]],
    states: Sequence[Sequence[State]],
    sites: Sites,
    stream: tuple[int, ...],
    scales: Sequence[Tensor] | None = None,
    values: Sequence[Sequence[Tensor]] | None = None,
) -> list[list[FilteredSum]]:
    """Return the sums of several tensors over replicas, for each tensor and replica.

    Args:
        rule: the filter.
        tensors: for each tensor, what each replica has of it.
        states: for each of them, its state. With feedback, the residual comes first.
        sites: where nodes are built.
        stream: numbers that no other exchange of a step has, for random numbers.
        scales: for each replica, the number by which its tensors are multiplied (see
            `gf.optim.LossScaling`). Residuals are those of the tensors without it.
        values: for each tensor, what each replica has of its variable, if the filter reads it.

    Raises:
        ShardingError: the filter changes a shape or a dtype.
    """
    runs: dict[_Key, Reduction] = {}
    streams: dict[_Key, RandomStreams] = {}
    done: dict[_Key, Reduced] = {}
    for i, (each, own) in enumerate(zip(tensors, states, strict=True)):
        for rank, (tensor, state) in enumerate(zip(each, own, strict=True)):
            scale = None if scales is None else scales[rank]
            value = None if values is None else values[i][rank]
            runs[i, rank] = with_feedback(rule, tensor, state, (rank, len(each)), scale, value)
            streams[i, rank] = RandomStreams(seed_of(stream, i, rank))
    answers: dict[_Key, Any] = dict.fromkeys(runs)
    while answers:
        requests: dict[_Key, Request] = {}
        for key, answer in answers.items():
            with sites.at(key[1]), draw_from(streams[key]):
                try:
                    requests[key] = runs[key].send(answer)
                except StopIteration as end:
                    done[key] = end.value
        answers = _answer(requests, len(tensors[0]), sites)
    return [
        [FilteredSum(done[i, k].total, done[i, k].state) for k in range(len(each))]
        for i, each in enumerate(tensors)
    ]


def with_feedback(
    rule: Filter,
    tensor: Tensor,
    state: State,
    replica: tuple[int, int],
    scale: Tensor | None = None,
    value: Tensor | None = None,
) -> Reduction:
    """Run a filter on a tensor, in at least float32, and keep what was not sent for the next.

    Args:
        rule, tensor, state: the filter, a replica's tensor, and its state.
        replica: the number of the replica, and the number of replicas.
        scale: see `exchange_sums`.
        value: the variable's value, if the filter reads it.
    """
    wide: Tensor = tensor
    if wide_dtype(tensor.dtype) != tensor.dtype:
        wide = FUNCTIONS["astype"](tensor, wide_dtype(tensor.dtype))
    if scale is not None:
        wide = wide / in_dtype_of(scale, wide)
    given = state
    if rule.feedback:
        residual, *others = state
        wide, given = wide + residual, tuple(others)
    read = given_state(rule, wide, given, value)
    reduced = yield from rule.reduce(wide, read, *replica)
    check_specs(rule, "the sum", [reduced.total], [wide.spec])
    check_specs(rule, "the next state", reduced.state, [each.spec for each in given])
    after = reduced.state
    if rule.feedback:
        after = (wide - reduced.sent, *after)
    total = reduced.total
    if scale is not None:
        total = total * in_dtype_of(scale, total)
    return Reduced(in_dtype_of(total, tensor), reduced.sent, after)


def encode_kept(
    rule: Filter, tensor: Tensor, state: State, value: Tensor | None = None
) -> tuple[Parts, State]:
    """Return the message of a tensor, for one receiver, and the next state.

    Args:
        rule, tensor, state, value: see `with_feedback`.

    Raises:
        ShardingError: the filter changes a shape or a dtype.
    """
    wide: Tensor = tensor
    if wide_dtype(tensor.dtype) != tensor.dtype:
        wide = FUNCTIONS["astype"](tensor, wide_dtype(tensor.dtype))
    given = state
    if rule.feedback:
        residual, *others = state
        wide, given = wide + residual, tuple(others)
    parts, after = rule.encode(wide, given_state(rule, wide, given, value))
    check_specs(rule, "the next state", after, [each.spec for each in given])
    if not rule.feedback:
        return tuple(parts), tuple(after)
    sent = rule.decode(tuple(parts), wide.spec)
    check_specs(rule, "what is decoded", [sent], [wide.spec])
    return tuple(parts), (wide - sent, *after)


def given_state(rule: Filter, tensor: Tensor, state: State, value: Tensor | None) -> State:
    """Return the state that a filter's functions get, behind the variable's value if they read
    it."""
    if not rule.reads_value:
        return state
    assert value is not None
    return (in_dtype_of(value, tensor), *state)


def check_specs(
    rule: Filter, what: str, found: Sequence[Tensor], wanted: Sequence[TensorSpec]
) -> None:
    """Refuse tensors of a filter that have other specs than they must.

    Raises:
        ShardingError: their number, a shape or a dtype is wrong.
    """
    specs = [getattr(each, "spec", each) for each in found]
    if specs != list(wanted):
        raise ShardingError(
            f"{rule!r}: {what} must have the specs {_show(wanted)}, not {_show(specs)}; encode and "
            "decode may change neither shape nor dtype"
        )


def _show(specs: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, specs)) + ")"


# Requests ---------------------------------------------------------------------------------------


def _answer(
    requests: Mapping[_Key, Request], count: int, sites: Sites
) -> dict[_Key, Sequence[Parts]]:
    """Return the answer to each request, from one collective for each kind and dtype."""
    rows: dict[tuple[type, str], list[tuple[int, int]]] = {}
    found: dict[tuple[_Key, int, int], Tensor] = {}  # by key, entry of the answer, and part
    for (i, rank), request in requests.items():
        if rank == 0:
            for p, part in enumerate(_entries(request)[0]):
                if used_rows_of(part):
                    for e in range(len(_entries(request))):
                        each = [_entries(requests[i, k])[e][p] for k in range(count)]
                        to = e if isinstance(request, AllToAll) else None
                        sites.log_rows(each, to)
                        found |= {
                            ((i, k), sender, p): sent
                            for k in (range(count) if to is None else (to,))
                            for sender, sent in enumerate(each)
                        }
                else:
                    rows.setdefault((type(request), part.dtype.name), []).append((i, p))
    for (kind, _), parts in rows.items():
        own = []
        for rank in range(count):
            entries = [_entries(requests[i, rank]) for i, _ in parts]
            own.append(
                [
                    [e[k][p] for e, (_, p) in zip(entries, parts, strict=True)]
                    for k in range(len(entries[0]))
                ]
            )
        for rank, answer in enumerate(_exchange_rows(kind, own, sites)):
            for e, entry in enumerate(answer):
                for (i, p), part in zip(parts, entry, strict=True):
                    found[(i, rank), e, p] = part
    answers: dict[_Key, Sequence[Parts]] = {}
    for key, request in requests.items():
        number = 1 if isinstance(request, Sum) else count
        answers[key] = [
            tuple(found[key, e, p] for p in range(len(_entries(request)[0]))) for e in range(number)
        ]
    return answers


def _entries(request: Request) -> Sequence[Parts]:
    """Return the parts for each replica; one entry if all replicas get the same."""
    return request.parts if isinstance(request, AllToAll) else (request.parts,)


def _exchange_rows(
    kind: type, own: Sequence[Sequence[Sequence[Tensor]]], sites: Sites
) -> list[list[list[Tensor]]]:
    """Return the parts of each entry of the answers at each replica, by one collective.

    Args:
        kind: the class of the requests.
        own: the parts of each entry of the requests, for each replica.
        sites: where nodes are built.
    """
    rows = _pack_rows([[part for entry in entries for part in entry] for entries in own], sites)
    with sites.across():
        made = _COLLECTIVES[kind](rows)
    sites.log(_NAMES[kind], made)
    like = own[0][0]
    size = sum(map(_size_of, like))
    number = 1 if kind is Sum else len(own)
    found = []
    for rank, row in enumerate(made):
        with sites.at(rank):
            found.append([unpack_row(row, k * size, like) for k in range(number)])
    return found


_COLLECTIVES: dict[type, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    Gather: all_gather, Sum: all_reduce, AllToAll: all_to_all,
}  # fmt: skip
"""The collective of each request. Rows are flat."""
_NAMES = {Gather: "all-gather", Sum: "all-reduce", AllToAll: "all-to-all"}
"""The collectives as reports name them."""


def _pack_rows(own: Sequence[Sequence[Tensor]], sites: Sites) -> list[Tensor]:
    """Return one row for each replica: its parts, flat and one after the other."""
    rows = []
    for rank, parts in enumerate(own):
        with sites.at(rank):
            flat = [FUNCTIONS["reshape"](part, (-1,)) for part in parts]
            rows.append(flat[0] if len(flat) == 1 else FUNCTIONS["concat"](flat))
    return rows


def unpack_row(row: Tensor, start: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a row from an element on, in the shapes of others."""
    sizes = [_size_of(part) for part in like]
    starts = accumulate(sizes, initial=start)
    return [
        FUNCTIONS["reshape"](slice_axis(row, 0, begin, size), part.shape)
        for begin, size, part in zip(starts, sizes, like, strict=False)
    ]


def _size_of(tensor: Tensor) -> int:
    return prod(map(int, tensor.shape))


# Random numbers ---------------------------------------------------------------------------------


def seed_of(stream: tuple[int, ...], i: int, rank: int) -> int:
    """Return a seed for one tensor of one replica. It is the same whenever the graph is written."""
    text = repr((*stream, i, rank)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@contextmanager
def draw_from(streams: RandomStreams) -> Iterator[None]:
    """Let random nodes of the block take their streams from `streams`."""
    token = current_scope.set(current_scope.get()._replace(streams=streams))
    try:
        yield
    finally:
        current_scope.reset(token)


__all__ = [
    "FilteredSum",
    "Sites",
    "check_specs",
    "draw_from",
    "encode_kept",
    "exchange_sums",
    "given_state",
    "seed_of",
    "unpack_row",
    "with_feedback",
]
