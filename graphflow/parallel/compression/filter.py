"""Filter: how a replica's tensor becomes a smaller message, and messages become the sum again.

    tensor of each replica ─encode→ parts ─all-gather→ parts of all ─decode, add→ sum, everywhere

A user's own filter has `encode` and `decode`. A filter whose messages may be added on the way, such
as PowerSGD, has `reduce`, and asks for sums. The functions build graph nodes, so a filter is
compiled, placed and traced as the model is. `exchange.py` calls them for all replicas side by side.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graphflow import init
from graphflow.errors import ArgumentError, ShardingError
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, make_node
from graphflow.ir.spec import TensorSpec

Array = np.ndarray[Any, Any]
Parts = tuple[Tensor, ...]
State = tuple[Tensor, ...]


class Gather(NamedTuple):
    """A request: send these parts to all replicas. The answer has the parts of each replica."""

    parts: Parts


class Sum(NamedTuple):
    """A request: add these parts over all replicas. The answer has one entry, the sums."""

    parts: Parts


class AllToAll(NamedTuple):
    """A request: send each entry to the replica of that number. Entries have parts of equal specs.
    The answer has the parts that each replica sent here."""

    parts: tuple[Parts, ...]


class CachedKeys(NamedTuple):
    """The positions in a message that a `KeyCache` leaves out if the receiver has them.

    Attributes:
        part: the index of the part, from the end of the message.
        share: the share of messages in which they are expected to travel.
    """

    part: int
    share: float


class Reduced(NamedTuple):
    """The end of an exchange at one replica.

    Attributes:
        total: the sum over replicas, in the shape and dtype of the tensor.
        sent: with feedback, what this replica contributed: the sum of `sent` over replicas is
            `total`. Without feedback it is not read.
        state: the replica's state for the next exchange.
    """

    total: Tensor
    sent: Tensor
    state: State


Request = Gather | Sum | AllToAll
Reduction = Generator[Request, Sequence[Parts], Reduced]


class Filter:
    """A rule by which replicas exchange a tensor in fewer bytes: the base of all filters.

    A subclass is a frozen dataclass with `encode` and `decode`. Check it by
    `gf.parallel.check_filter`.

    Attributes:
        feedback: what a replica did not send is kept, and added to its next tensor. Without
            feedback, what is sent must be right on average.
        reads_value: `encode` also gets the present value of the variable that the tensor is the
            gradient or the change of. It comes first in the state, and is not returned.
        only_gradients: the rule is one for gradients, not for changes of parameters.
        excludes_feedback: in a `Chain`, no other filter may have feedback.
        cached: the positions that a `KeyCache` in a `Chain` looks after; None without one.
    """

    feedback: bool = False
    reads_value: bool = False
    only_gradients: bool = False
    excludes_feedback: bool = False
    cached: CachedKeys | None = None

    def applies(self, spec: TensorSpec) -> bool:
        """Return False for tensors that the filter cannot compress. They travel as they are."""
        return True

    def initial(self, spec: TensorSpec) -> Sequence[Array | init.Initializer]:
        """Return the first state of each replica for tensors of a spec. Default: no state."""
        return ()

    def encode(self, tensor: Tensor, state: State) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the parts of a replica's message, and its next state.

        Args:
            tensor: the replica's tensor, at least float32. With feedback, the rest of the last
                exchange is in it already.
            state: the state, tensors like those of `initial`; with `reads_value` after the value of
                the variable, in the shape and dtype of the tensor.

        A part that `mark_used` returned is sent up to the rows in use, and its sender decodes it
        with what lies behind them.
        """
        raise ArgumentError(
            f"{type(self).__name__} has no encode; a filter needs encode and decode"
        )

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the tensor that a message stands for.

        Args:
            parts: the parts that `encode` returned, at any replica.
            spec: the shape and dtype of the tensor.
        """
        raise ArgumentError(
            f"{type(self).__name__} has no decode; a filter needs encode and decode"
        )

    def mark(self, parts: Parts, number: Tensor, expected: int) -> Parts:
        """Return the parts of a message of which only the first numbers of the tensor count.

        Default: all of it travels.

        Args:
            parts: the parts that `encode` returned for a vector.
            number: how many numbers at the front of the vector count, int64.
            expected: how many plans and reports expect.
        """
        return parts

    def reduce(self, tensor: Tensor, state: State, rank: int, count: int) -> Reduction:
        """Exchange a tensor with all replicas: a generator that yields requests.

        The default gathers the messages of all replicas, and each replica decodes and adds them.

        Args:
            tensor, state: see `encode`.
            rank: the number of the replica. What it asks for must not depend on it.
            count: the number of replicas.
        """
        parts, after = self.encode(tensor, state)
        every = yield Gather(tuple(parts))
        decoded = [self.decode(each, tensor.spec) for each in every]
        total = decoded[0]
        for each in decoded[1:]:
            total = total + each
        return Reduced(total, decoded[rank], tuple(after))


def reduce_by_pieces(rule: Filter, tensor: Tensor, state: State, count: int) -> Reduction:
    """Exchange a tensor with all replicas: each adds up one piece and sends its sum to all.

    Each receives 2 (count − 1) / count of the bytes of a message, as in an all-reduce.

    Args:
        rule: a filter without state.
        tensor, state: see `Filter.encode`.
        count: the number of replicas.
    """
    size = int(tensor.size)
    piece = -(-size // count)
    flat = FUNCTIONS["reshape"](tensor, (-1,))
    padded = FUNCTIONS["pad"](flat, [(0, piece * count - size)])
    like = tensor.spec.with_shape((piece,))
    pieces = [padded[k * piece : (k + 1) * piece] for k in range(count)]
    received = yield AllToAll(tuple(tuple(rule.encode(each, state)[0]) for each in pieces))
    own = sum((rule.decode(parts, like) for parts in received[1:]), rule.decode(received[0], like))
    sums = yield Gather(tuple(rule.encode(own, state)[0]))
    joined = FUNCTIONS["concat"]([rule.decode(parts, like) for parts in sums])
    total: Tensor = FUNCTIONS["reshape"](joined[:size], tensor.shape)
    return Reduced(total, tensor, state)


def mark_used(part: Tensor, number: Tensor, expected: int) -> Tensor:
    """Return a part of a message of which only the first `number` rows travel.

    Args:
        part: the part, of shape (most, …).
        number: how many of its rows are in use, an int64 of shape ().
        expected: how many rows plans and reports expect.
    """
    attrs = {"lookups": 1, "rows": 1, "piece": expected}
    return make_node(REGISTRY["used_rows"], (part, number), attrs).outputs[0]


def used_rows_of(part: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Return the tensor, the number of rows and the expected number behind a part that `mark_used`
    made; None if all of the part travels."""
    node = part.node
    if node.op.name != "used_rows":
        return None
    return node.inputs[0], node.inputs[1], node.attrs["piece"]


def expected_bytes(part: Tensor) -> int:
    """Return the bytes of a part that travel: of rows in use, as many as are expected."""
    used, shape = used_rows_of(part), [*map(int, part.shape)]
    if used is not None:
        shape[0] = min(shape[0], used[2])
    return prod(shape) * int(part.dtype.itemsize)


def require_stateless_receivers(rule: Filter, where: str) -> None:
    """Refuse a filter whose receivers have to remember messages.

    Raises:
        ShardingError: it is one.
    """
    if rule.cached is not None:
        raise ShardingError(
            f"{where}: {rule!r} has a KeyCache, which needs receivers that remember the positions "
            "of each sender, and replicas keep nothing of each other; leave it out, or use it in "
            "the filters of a ParameterServer"
        )


def require_rule_for_changes(rule: Filter, where: str) -> None:
    """Refuse a filter for gradients where changes of parameters travel, and one whose receivers
    have to remember messages.

    Raises:
        ShardingError: it is one.
    """
    require_stateless_receivers(rule, where)
    if rule.only_gradients:
        raise ShardingError(
            f"{where}: {rule!r} decides by gradients, and here changes of parameters travel; use "
            "it with Data, or another filter, such as Significant(0.05)"
        )


__all__ = [
    "AllToAll",
    "CachedKeys",
    "Filter",
    "Gather",
    "Parts",
    "Reduced",
    "Reduction",
    "Request",
    "State",
    "Sum",
    "expected_bytes",
    "mark_used",
    "reduce_by_pieces",
    "require_rule_for_changes",
    "require_stateless_receivers",
    "used_rows_of",
]
