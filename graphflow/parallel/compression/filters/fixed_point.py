"""FixedPoint: numbers as integers of a few bits, rounded at random so that they are right on
average."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import TensorSpec, product
from graphflow.ops.randomness.random import uniform
from graphflow.parallel.compression.filter import (
    Filter,
    Parts,
    Reduction,
    State,
    mark_used,
    reduce_by_pieces,
)
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields

BITS = (2, 4, 8, 16)
"""The sizes of an integer. A byte or two hold a whole number of each."""


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class FixedPoint(Filter):
    """Integers of a few bits, times the largest magnitude of the tensor.

    Each number is rounded up or down at random, so that its expectation is the number itself. No
    residual is kept. The random numbers follow from the seed, the step and the element's index, as
    those of `gf.random` do. A tensor that is not finite stays so.

    Args:
        bits: 2, 4, 8 or 16 for each number: integers up to 2^(bits − 1) − 1, of either sign.

    Raises:
        ArgumentError: another number of bits.

    Source: Alistarh et al., "QSGD", NeurIPS 2017, with the scale of Wen et al., "TernGrad", 2017.
    """

    bits: int

    def __post_init__(self) -> None:
        bits = as_count(self.bits)
        if bits not in BITS:
            raise ArgumentError(
                f"FixedPoint at {user_location()}: bits must be one of "
                f"{', '.join(map(str, BITS))}, not {self.bits!r}"
            )
        set_frozen_fields(self, bits=bits)

    @property
    def _largest(self) -> int:
        """The largest integer."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return the packed integers, and the scale of shape ()."""
        largest = self._largest
        scale: Tensor = FUNCTIONS["max"](abs(tensor))
        divisor = FUNCTIONS["where"](scale > 0, scale, 1.0)  # NaN compares as False
        steps = tensor / divisor * float(largest)
        drawn = uniform(tensor.shape, dtype=tensor.dtype)
        rounded = FUNCTIONS["clip"](FUNCTIONS["floor"](steps + drawn), -largest, largest)
        return (self._pack(FUNCTIONS["reshape"](rounded, (-1,))), scale), state

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the integers times the scale."""
        packed, scale = parts
        steps = FUNCTIONS["reshape"](self._unpack(packed, int(product(spec.shape))), spec.shape)
        tensor: Tensor = FUNCTIONS["astype"](steps, spec.dtype) / float(self._largest) * scale
        return tensor

    def mark(self, parts: Parts, number: Tensor, expected: int) -> Parts:
        """Return the parts of which only the integers of the first numbers travel."""
        packed, scale = parts
        each = max(1, 8 // self.bits)
        return mark_used(packed, -(-number // each), -(-expected // each)), scale

    def reduce(self, tensor: Tensor, state: State, rank: int, count: int) -> Reduction:
        """Exchange integers with all replicas.

        Of two replicas each receives the other's. Of more, each adds up one piece of the tensor,
        rounds its sum, and sends that to all: 2 (count − 1) / count of the bytes, as in an
        all-reduce.
        """
        if count <= 2:
            return (yield from super().reduce(tensor, state, rank, count))
        return (yield from reduce_by_pieces(self, tensor, state, count))

    def _pack(self, rounded: Tensor) -> Tensor:
        """Return integers of a few bits, as int8, int16, or several in each uint8."""
        if self.bits >= 8:
            return _cast(rounded, f"int{self.bits}")
        each, count = 8 // self.bits, int(rounded.size)
        codes = FUNCTIONS["pad"](rounded + float(self._largest), [(0, -count % each)])
        columns = FUNCTIONS["reshape"](_cast(codes, "uint8"), (-1, each))
        packed: Any = None
        for place in range(each):
            column = columns[:, place] << np.uint8(place * self.bits)
            packed = column if packed is None else packed | column
        result: Tensor = packed
        return result

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return the integers from −largest to largest, shape (count,)."""
        if self.bits >= 8:
            return packed
        mask = np.uint8(2**self.bits - 1)
        columns = [
            (packed >> np.uint8(place * self.bits)) & mask for place in range(8 // self.bits)
        ]
        codes = FUNCTIONS["reshape"](FUNCTIONS["stack"](columns, axis=1), (-1,))
        steps: Tensor = _cast(codes[:count], "int8") - np.int8(self._largest)
        return steps


def _cast(x: Tensor, dtype: str) -> Tensor:
    cast: Tensor = FUNCTIONS["astype"](x, dtype)
    return cast


__all__ = ["FixedPoint"]
