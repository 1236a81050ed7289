"""Selection: the base of filters that send some of a tensor's numbers, and where they belong."""

from __future__ import annotations

from math import prod

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.ops.ordering.search import nonzero_places
from graphflow.parallel.compression.filter import Filter, Parts, mark_used


class Selection(Filter):
    """Base of filters whose message is some numbers of the tensor, and what tells their positions.

    The first part of a message is the numbers, as a vector. A `Chain` sends it through further
    filters.

    Attributes:
        others: the number of other parts.
        sends_positions: the first of these is the positions.
    """

    others: int = 1
    sends_positions: bool = True

    def numbers_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the first part, for tensors of a spec."""
        raise NotImplementedError


def size_of(spec: TensorSpec) -> int:
    """Return the number of a tensor's numbers."""
    return prod(map(int, spec.shape))


def position_dtype(size: int) -> str:
    """Return the smallest dtype that holds every position in a vector."""
    return "int16" if size <= 2**15 else "int32" if size <= 2**31 else "int64"


def take_marked(tensor: Tensor, marks: Tensor, share: float) -> Parts:
    """Return the message of the numbers that are marked: their values and positions, of which only
    as many travel as there are, and their number.

    Args:
        tensor: a tensor of n numbers.
        marks: a bool for each.
        share: the share that plans and reports expect.
    """
    size = size_of(tensor.spec)
    reshape, astype = FUNCTIONS["reshape"], FUNCTIONS["astype"]
    places, number = nonzero_places(reshape(marks, (-1,)), size)
    places = reshape(places, (-1,))
    chosen = FUNCTIONS["take"](reshape(tensor, (-1,)), places, 0)
    values = FUNCTIONS["where"](FUNCTIONS["arange"](size) < number, chosen, 0.0)
    expected = max(1, round(share * size))
    return (
        mark_used(values, number, expected),
        mark_used(astype(places, position_dtype(size)), number, expected),
        astype(number, position_dtype(size + 1)),
    )


def place_marked(parts: Parts, spec: TensorSpec) -> Tensor:
    """Return the tensor of a message of `take_marked`: zeros where nothing was marked."""
    values, places, number = parts
    size = size_of(spec)
    astype, where = FUNCTIONS["astype"], FUNCTIONS["where"]
    known = FUNCTIONS["arange"](size) < astype(number, "int64")
    there = where(known, astype(places, "int64"), size)  # the others go behind the end
    zeros = FUNCTIONS["zeros"]((size + 1,), spec.dtype)
    found = FUNCTIONS["scatter"](zeros, there, values, axis=0)
    tensor: Tensor = FUNCTIONS["reshape"](found[:size], spec.shape)
    return tensor


def check_number(
    name: str, what: str, value: object, least: float = 0.0, most: float = float("inf")
) -> float:
    """Return a filter's number as a float.

    Raises:
        ArgumentError: it is no number from `least` to `most`.
    """
    if not is_number(value) or not least <= value <= most:
        bounds = f"from {least:g}" + (f" to {most:g}" if most < float("inf") else "")
        raise ArgumentError(
            f"{name} at {user_location()}: {what} must be a number {bounds}, not {value!r}"
        )
    return float(value)


def check_share(name: str, what: str, value: object) -> float:
    """Return a filter's share as a float.

    Raises:
        ArgumentError: it is no number above 0, up to 1.
    """
    if not is_number(value) or not 0 < value <= 1:
        raise ArgumentError(
            f"{name} at {user_location()}: {what} must be above 0 and at most 1, not {value!r}"
        )
    return float(value)


__all__ = [
    "Selection",
    "check_number",
    "check_share",
    "place_marked",
    "position_dtype",
    "size_of",
    "take_marked",
]
