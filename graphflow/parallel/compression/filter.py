"""Filter: how a replica's tensor becomes a smaller message, and messages become the sum again.

    tensor of each replica ─encode→ parts ─all-gather→ parts of all ─decode, add→ sum, everywhere

A user's own filter has `encode` and `decode`. A filter whose messages may be added on the way, such
as PowerSGD, has `reduce`, and asks for sums. The functions build graph nodes, so a filter is
compiled, placed and traced as the model is. `exchange.py` calls them for all replicas side by side.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow import init
from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor
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
    """

    feedback: bool = False

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
            state: the state, tensors like those of `initial`.
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


def _missing_error(rule: Filter, name: str) -> ArgumentError:
    return ArgumentError(
        f"{type(rule).__name__} has no {name}; a filter needs encode and decode, or reduce"
    )


__all__ = [
    "AllToAll",
    "Filter",
    "Gather",
    "Parts",
    "Reduced",
    "Reduction",
    "Request",
    "State",
    "Sum",
]
