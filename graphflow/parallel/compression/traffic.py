"""Bytes that a filter sends. They follow from the shapes that it asks for, before anything runs."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from graphflow import init
from graphflow.errors import ShardingError
from graphflow.ir.op import REGISTRY, RandomStreams, Tensor, as_tensor, name_scope
from graphflow.ir.spec import Size, TensorSpec
from graphflow.optim.update_targets import wide_dtype
from graphflow.parallel.compression.exchange import draw_from, encode_kept, with_feedback
from graphflow.parallel.compression.filter import (
    AllToAll,
    Array,
    Filter,
    Sum,
    expected_bytes,
    require_stateless_receivers,
    used_rows_of,
)
from graphflow.parallel.compression.filters.key_cache import NO_CODE, omit_known_keys

FirstState = tuple[Array | init.Initializer, ...]


class Traffic(NamedTuple):
    """The bytes that one replica receives in an exchange of one tensor.

    Attributes:
        filtered: with the filter.
        plain: in an all-reduce of the tensor itself.
    """

    filtered: float
    plain: float

    @property
    def saves(self) -> bool:
        """True if the filter sends less."""
        return self.filtered < self.plain


class MessagePart(NamedTuple):
    """A part of a filter's message.

    Attributes:
        spec: its spec.
        rows: of its rows, how many are expected to travel; None: all of it travels.
    """

    spec: TensorSpec
    rows: int | None

    @property
    def is_ragged(self) -> bool:
        """True if only the rows in use travel."""
        return self.rows is not None

    @property
    def expected_bytes(self) -> int:
        """The bytes that are expected to travel."""
        first, *rest = (*map(int, self.spec.shape), 1)
        rows = first if self.rows is None else min(first, self.rows)
        return rows * prod(rest) * int(self.spec.dtype.itemsize)


def message_parts(rule: Filter, spec: TensorSpec) -> list[MessagePart]:
    """Return the parts of a filter's message for tensors of a spec.

    Raises:
        ArgumentError: the filter has no `encode`.
        ShardingError: see `traffic_of`.
    """
    with name_scope("traffic"), draw_from(RandomStreams()):
        wide = _placeholder(spec.shape, wide_dtype(spec.dtype))
        state = tuple(_placeholder(each.shape, each.dtype) for each in first_state(rule, spec))
        value = _placeholder(spec.shape, spec.dtype) if rule.reads_value else None
        parts, _ = encode_kept(rule, wide, state, value)
        if rule.cached is not None:
            parts, _ = omit_known_keys(rule.cached, parts, as_tensor(NO_CODE))
    found = []
    for part in parts:
        _nbytes(rule, part.spec)
        used = used_rows_of(part)
        found.append(MessagePart(part.spec, None if used is None else used[2]))
    return found


def first_state(rule: Filter, spec: TensorSpec) -> FirstState:
    """Return the first state of a replica for tensors of a spec: the residual, if there is
    feedback, and what the filter itself keeps."""
    wide = spec.with_dtype(wide_dtype(spec.dtype))
    residual = init.zeros(tuple(map(int, spec.shape)), wide.dtype)
    return (*[residual] * rule.feedback, *rule.initial(wide))


def traffic_of(rule: Filter, spec: TensorSpec, replicas: int) -> Traffic:
    """Return what a replica receives of a tensor, with the filter and without.

    Raises:
        ShardingError: the filter asks for parts whose size is not known, or changes a shape or
            dtype.
    """
    require_stateless_receivers(rule, "an exchange of replicas")
    plain = 2 * (replicas - 1) / replicas * _nbytes(rule, spec)
    with name_scope("traffic"), draw_from(RandomStreams()):
        tensor = _placeholder(spec.shape, spec.dtype)
        state = tuple(_placeholder(each.shape, each.dtype) for each in first_state(rule, spec))
        value = _placeholder(spec.shape, spec.dtype) if rule.reads_value else None
        filtered = _count_received(rule, tensor, state, replicas, value)
    return Traffic(filtered, plain)


def _count_received(
    rule: Filter,
    tensor: Tensor,
    state: tuple[Tensor, ...],
    replicas: int,
    value: Tensor | None,
) -> float:
    """Return the bytes that a replica receives, by running the filter's functions on a
    placeholder."""
    steps, filtered = with_feedback(rule, tensor, state, (0, replicas), None, value), 0.0
    others = replicas - 1
    try:
        request = next(steps)
        while True:
            entry = request.parts[0] if isinstance(request, AllToAll) else request.parts
            size = sum(min(_nbytes(rule, part.spec), expected_bytes(part)) for part in entry)
            sums = isinstance(request, Sum)
            filtered += size * (2 * others / replicas if sums else others)
            request = steps.send([entry] * (1 if sums else replicas))
    except StopIteration:
        return filtered


def _nbytes(rule: Filter, spec: TensorSpec) -> int:
    if not spec.is_concrete:
        raise ShardingError(
            f"{rule!r}: a part of its message has the spec {spec}, but parts must have sizes that "
            "are known before a step runs; send a fixed number of elements"
        )
    return int(prod(map(int, spec.shape))) * int(spec.dtype.itemsize)


def _placeholder(shape: tuple[Size, ...], dtype: Any) -> Tensor:
    tensor: Tensor = REGISTRY["placeholder"](
        shape=tuple(shape), dtype=np.dtype(dtype).name, name="x"
    )
    return tensor


__all__ = [
    "FirstState",
    "MessagePart",
    "Traffic",
    "first_state",
    "message_parts",
    "traffic_of",
]
