"""PowerSGD: matrices of low rank, found by one step of power iteration in each exchange."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.compression.filter import (
    Array,
    Filter,
    Parts,
    Reduced,
    Reduction,
    State,
    Sum,
)
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class PowerSGD(Filter):
    """Two thin factors in place of each matrix, with error feedback.

    A tensor of shape (n, …) counts as a matrix M of n rows and m columns. Replicas add M Q, of
    shape (n, rank), and make its columns orthonormal: P. Then they add Mᵀ P, of shape (m, rank),
    which is the next Q. The sum is P Qᵀ. Both messages are linear in M, so they are all-reduced.
    Vectors travel as they are. A parameter server gets both factors of each worker's matrix.

    Args:
        rank: the number of columns of P and Q.

    Raises:
        ArgumentError: rank is no int of at least 1.

    Source: Vogels, Karimireddy & Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1.
    """

    rank: int
    feedback = True

    def __post_init__(self) -> None:
        count = as_count(self.rank)
        if count is None:
            raise ArgumentError(
                f"PowerSGD at {user_location()}: rank must be an int of at least 1, not "
                f"{self.rank!r}"
            )
        set_frozen_fields(self, rank=count)

    def applies(self, spec: TensorSpec) -> bool:
        """Return True for matrices that have more than `rank` rows and columns."""
        return spec.rank > 1 and self.rank < min(_matrix_shape(spec))

    def initial(self, spec: TensorSpec) -> Sequence[Array]:
        """Return Q: the same normal numbers at each replica."""
        columns = _matrix_shape(spec)[1]
        drawn = np.random.default_rng(columns).normal(size=(columns, self.rank))
        return (drawn.astype(spec.dtype),)

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return P and Mᵀ P of one matrix, for a single receiver."""
        matrix = FUNCTIONS["reshape"](tensor, _matrix_shape(tensor.spec))
        basis, _ = FUNCTIONS["qr"](matrix @ state[0])
        factor: Tensor = matrix.T @ basis
        return (basis, factor), (factor,)

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the product of the factors."""
        basis, factor = parts
        tensor: Tensor = FUNCTIONS["reshape"](basis @ factor.T, spec.shape)
        return tensor

    def reduce(self, tensor: Tensor, state: State, rank: int, count: int) -> Reduction:
        """Add M Q over replicas, then Mᵀ P."""
        matrix = FUNCTIONS["reshape"](tensor, _matrix_shape(tensor.spec))
        ((product,),) = yield Sum((matrix @ state[0],))
        basis, _ = FUNCTIONS["qr"](product)
        own = matrix.T @ basis
        ((total,),) = yield Sum((own,))
        back = [FUNCTIONS["reshape"](basis @ factor.T, tensor.shape) for factor in (total, own)]
        return Reduced(back[0], back[1], (total,))


def _matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Return the shape in which a tensor counts as a matrix."""
    rows, *rest = map(int, spec.shape)
    return rows, prod(rest)


__all__ = ["PowerSGD"]
