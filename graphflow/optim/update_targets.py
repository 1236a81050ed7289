"""The variables, slots and rows that an update reads and writes; and the dtypes to compute in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor
from graphflow.ir.spec import Size, minimum, promote

Rate = float | Tensor


class Target:
    """The part of a variable and of its slots that an update reads and writes.

    Args:
        rows: distinct row numbers, int64 (k,); None for all rows.
        number: how many of these rows are in use.

    Attributes:
        updates: assignments of slots so far.
        slots: the slots that were read, by name.
    """

    def __init__(
        self, variable: Tensor, rows: Tensor | None = None, number: Tensor | None = None
    ) -> None:
        self.variable = variable
        self.rows = rows
        self.number = number
        self.updates: list[Tensor] = []
        self.slots: dict[str, Tensor] = {}

    def part(self, state: Tensor) -> Tensor:
        """Return the rows of a variable or slot."""
        chosen: Tensor = state if self.rows is None else FUNCTIONS["take"](state, self.rows, 0)
        return chosen

    def read(self, name: str, initial: float = 0.0, axes: int | None = None) -> Tensor:
        """Return the rows of a slot, a variable on the same device.

        Args:
            axes: the slot has the shape of the variable's first `axes` axes; None: of all.
        """
        self.slots[name] = _slot(self.variable, name, initial, axes)
        return self.part(self.slots[name])

    def write(self, name: str, value: Tensor) -> None:
        """Assign new values to a slot that was read."""
        self.updates.append(self.assign_part(self.slots[name], value))

    def assign_part(self, state: Tensor, value: Tensor) -> Tensor:
        """Return an assignment of the rows."""
        if self.rows is not None:
            value = REGISTRY["update_rows"](state, self.rows, value, self.number)
        return assign(state, value)


Lookup = tuple[Tensor, Tensor]  # rows of a gradient, and their row numbers


def lookups_of(gradient: Tensor, variable: Tensor) -> list[Lookup]:
    """Return the lookups whose gradients add up to this gradient, in its order; else [].

    Each one is a pair: rows of the gradient, and their numbers. Gradients of several lookups are
    added from the left.
    """
    found: list[Lookup] = []
    while True:
        node = gradient.node
        last = node.inputs[1].node if node.op is REGISTRY["add"] else node
        whole = last.specs[0] == variable.spec and gradient.spec == variable.spec
        if last.op is not REGISTRY["take_grad"] or last.attrs["axis"] or not whole:
            return []
        found.append((last.inputs[0], last.inputs[1]))
        if last is node:
            return found[::-1]
        gradient = node.inputs[0]


def row_target(variable: Tensor, lookups: Sequence[Lookup]) -> tuple[Target, Tensor]:
    """Return the distinct rows that occur, and their gradient.

    The sums and their order are those that the gradient of the whole table would have.
    """
    n, rest = variable.shape[0], variable.shape[1:]
    ravel, reshape = FUNCTIONS["ravel_multi_index"], FUNCTIONS["reshape"]
    ids = [
        ravel([reshape(t, (t.size,))], (n,)) for _, t in lookups
    ]  # checks bounds, and makes negative ids positive
    every = ids[0] if len(ids) == 1 else FUNCTIONS["concat"](ids)
    size = minimum(every.shape[0], n)
    found = FUNCTIONS["unique_all"](every, size)
    gradient: Tensor | None = None
    start: Size = 0
    for (rows, _), own in zip(lookups, ids, strict=True):
        places = found.inverse if len(ids) == 1 else found.inverse[start : start + own.shape[0]]
        start = start + own.shape[0]
        part = REGISTRY["take_grad"](
            reshape(rows, (own.shape[0], *rest)), places, shape=(size, *rest), axis=0
        )
        gradient = part if gradient is None else gradient + part
    assert gradient is not None
    return Target(variable, found.values, found.number), gradient


def _slot(variable: Tensor, name: str, value: float, axes: int | None) -> Tensor:
    """Return a new variable of the shape of another's first axes, on its device."""
    shape = tuple(int(s) for s in variable.shape[:axes])
    initial = init.full(shape, value, wide_dtype(variable.dtype))
    return state_variable(f"{variable.node.name}/{name}", initial)


def state_variable(name: str, initial: init.Initializer) -> Tensor:
    """Return a new variable that belongs to an optimiser."""
    tensor: Tensor = REGISTRY["variable"](
        initial=initial, trainable=False, shape=initial.shape, dtype=initial.dtype, named=False,
        name=name,
    )  # fmt: skip
    return tensor


def rate_for(rate: Rate, like: Tensor) -> Any:
    """Return a rate that keeps a variable's dtype: Python numbers are weak, tensors are
    converted."""
    return in_dtype_of(rate, like) if isinstance(rate, Tensor) else float(rate)


def descend(value: Tensor, rate: Rate, direction: Tensor) -> Tensor:
    """Return a value after a step of size `rate` against a direction."""
    end: Tensor = value - rate_for(rate, value) * direction
    return end


def in_dtype_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the dtype of another tensor."""
    same: Tensor = x if x.dtype == like.dtype else FUNCTIONS["astype"](x, like.dtype)
    return same


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in: at least float32."""
    return promote(dtype, np.dtype("float32"))


def sqrt(x: Tensor) -> Tensor:
    """Return the square root."""
    root: Tensor = FUNCTIONS["sqrt"](x)
    return root
