"""TopK: only the numbers of largest magnitude travel, with their positions."""

from __future__ import annotations

from math import ceil

from graphflow.base.argument_checks import check_flag, checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.compression.filter import Parts, State
from graphflow.parallel.compression.filters.selection import (
    Selection,
    check_share,
    position_dtype,
    size_of,
)
from graphflow.parallel.mesh.count_arguments import set_frozen_fields


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class TopK(Selection):
    """The numbers of largest magnitude of each tensor, and their positions.

    Args:
        share: the share of a tensor's numbers that travel, above 0 and up to 1; at least one does.
        feedback: add what did not travel to the next tensor. Without it, training stops short of
            the optimum.

    Raises:
        ArgumentError: share is outside of (0, 1].

    Source: Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    share: float
    feedback: bool = True

    def __post_init__(self) -> None:
        where = f"TopK at {user_location()}"
        share = check_share("TopK", "share", self.share)
        check_flag(f"{where}: feedback", self.feedback)
        set_frozen_fields(self, share=share)

    def _count(self, spec: TensorSpec) -> int:
        """Return how many numbers of a tensor travel."""
        size = size_of(spec)
        return min(size, ceil(self.share * size))

    def numbers_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the numbers that travel."""
        return spec.with_shape((self._count(spec),))

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return values and positions, both of shape (k,)."""
        size, count = size_of(tensor.spec), self._count(tensor.spec)
        flat = FUNCTIONS["reshape"](tensor, (-1,))
        _, places = FUNCTIONS["top_k"](abs(flat), count, sorted=False)
        values: Tensor = FUNCTIONS["take"](flat, places, 0)
        return (values, FUNCTIONS["astype"](places, position_dtype(size))), state

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the values at their positions, and zeros elsewhere."""
        values, places = parts
        size = size_of(spec)
        zeros = FUNCTIONS["zeros"]((size,), spec.dtype)
        found = FUNCTIONS["scatter"](zeros, FUNCTIONS["astype"](places, "int64"), values, axis=0)
        tensor: Tensor = FUNCTIONS["reshape"](found, spec.shape)
        return tensor


__all__ = ["TopK"]
