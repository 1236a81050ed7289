"""Lossless: the same numbers, in fewer bytes."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, make_node
from graphflow.ir.spec import TensorSpec
from graphflow.ops.communication.byte_planes import HEAD
from graphflow.parallel.compression.filter import (
    Filter,
    Parts,
    Reduction,
    State,
    mark_used,
    reduce_by_pieces,
)
from graphflow.parallel.compression.filters.selection import check_share, size_of
from graphflow.parallel.mesh.count_arguments import set_frozen_fields

LEAST = 1024
"""The fewest numbers of a tensor for which codes save more than they take."""


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Lossless(Filter):
    """All numbers, to the bit, with their exponents in Huffman codes.

    Magnitudes of a tensor are alike, so exponents take 3 or 4 bits instead of 8. Mantissas travel
    as they are, unless many are 0. The size of a message follows from the data. Tensors of fewer
    than 1,024 numbers travel as they are.

    Args:
        share: the share of the bytes that plans and reports expect to travel.

    Raises:
        ArgumentError: share is outside of (0, 1].
    """

    share: float = 0.86

    def __post_init__(self) -> None:
        set_frozen_fields(self, share=check_share("Lossless", "share", self.share))

    def applies(self, spec: TensorSpec) -> bool:
        """Return True for real numbers, if there are enough."""
        return spec.dtype.kind == "f" and size_of(spec) >= LEAST

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return the bytes of all numbers, of which as many are in use as travel."""
        width = 8 * tensor.dtype.itemsize
        flat = FUNCTIONS["reshape"](tensor, (-1,))
        bits = FUNCTIONS["bitcast"](flat, f"uint{width}")
        turned = (bits << _bits(1, width)) | (bits >> _bits(width - 1, width))  # exponents first
        planes = tuple(
            FUNCTIONS["astype"](turned >> _bits(place, width), "uint8")
            for place in range(0, width, 8)
        )
        codes, number = make_node(REGISTRY["pack_planes"], planes, {}).outputs
        expected = HEAD * len(planes) + ceil(self.share * size_of(tensor.spec) * len(planes))
        return (mark_used(codes, number, expected),), state

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the numbers."""
        width = 8 * spec.dtype.itemsize
        planes = make_node(REGISTRY["unpack_planes"], parts, {"planes": width // 8}).outputs
        turned: Any = None
        for place, plane in enumerate(planes):
            own = FUNCTIONS["astype"](plane, f"uint{width}") << _bits(8 * place, width)
            turned = own if turned is None else turned | own
        bits = (turned >> _bits(1, width)) | (turned << _bits(width - 1, width))
        numbers = FUNCTIONS["bitcast"](bits, spec.dtype.name)
        tensor: Tensor = FUNCTIONS["reshape"](numbers, spec.shape)
        return tensor

    def reduce(self, tensor: Tensor, state: State, rank: int, count: int) -> Reduction:
        """Exchange all numbers. Of more than two replicas, each adds up one piece."""
        if count <= 2:
            return (yield from super().reduce(tensor, state, rank, count))
        return (yield from reduce_by_pieces(self, tensor, state, count))


def _bits(count: int, width: int) -> Any:
    """Return a number of bits in the dtype of what is shifted."""
    return np.dtype(f"uint{width}").type(count)


__all__ = ["Lossless"]
