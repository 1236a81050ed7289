"""What an update of a variable reads and writes: it and its slots, whole or in some rows; and the
dtypes to compute in."""

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
    """What an update reads and writes: a variable and its slots, whole or in some rows.

    Args:
        rows: which, int64 (k,), different ones; None means all.
        number: how many of these are in use.

    Attributes:
        updates: assignments of slots so far.
        slots: those that were read, by name.
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
        """The part of a variable or slot."""
        chosen: Tensor = state if self.rows is None else FUNCTIONS["take"](state, self.rows, 0)
        return chosen

    def read(self, name: str, initial: float = 0.0) -> Tensor:
        """The part of a slot, a variable like the one to update that lives with it."""
        self.slots[name] = _slot(self.variable, name, initial)
        return self.part(self.slots[name])

    def write(self, name: str, value: Tensor) -> None:
        """Update a slot that was read."""
        self.updates.append(self.assign_part(self.slots[name], value))

    def assign_part(self, state: Tensor, value: Tensor) -> Tensor:
        """An assignment of the part."""
        if self.rows is not None:
            value = REGISTRY["update_rows"](state, self.rows, value, self.number)
        return assign(state, value)


Lookup = tuple[Tensor, Tensor]  # rows of a gradient, and their numbers


def lookups_of(gradient: Tensor, variable: Tensor) -> list[Lookup]:
    """The rows of which a gradient is the sum, in its order; empty if it is made of anything else.

    Gradients of several lookups are added from the left.
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
    """The different rows that occur, and the gradient of these: the same sums, in the same order,
    that the whole table would have."""
    n, rest = variable.shape[0], variable.shape[1:]
    ravel, reshape = FUNCTIONS["ravel_multi_index"], FUNCTIONS["reshape"]
    ids = [ravel([reshape(t, (t.size,))], (n,)) for _, t in lookups]  # checked, from the front
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


def _slot(variable: Tensor, name: str, value: float = 0.0) -> Tensor:
    """A variable like another, that lives with it."""
    shape = tuple(int(s) for s in variable.shape)
    initial = init.full(shape, value, wide_dtype(variable.dtype))
    return state_variable(f"{variable.node.name}/{name}", initial)


def state_variable(name: str, initial: init.Initializer) -> Tensor:
    """A variable of an optimiser's own."""
    tensor: Tensor = REGISTRY["variable"](
        initial=initial, trainable=False, shape=initial.shape, dtype=initial.dtype, named=False,
        name=name,
    )  # fmt: skip
    return tensor


def rate_for(rate: Rate, like: Tensor) -> Any:
    """A rate as it mixes with a variable: Python numbers are weak, tensors are converted."""
    return in_dtype_of(rate, like) if isinstance(rate, Tensor) else float(rate)


def descend(value: Tensor, rate: Rate, direction: Tensor) -> Tensor:
    """A value after a step of this rate against a direction."""
    end: Tensor = value - rate_for(rate, value) * direction
    return end


def in_dtype_of(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of another tensor."""
    same: Tensor = x if x.dtype == like.dtype else FUNCTIONS["astype"](x, like.dtype)
    return same


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to compute in for values of a dtype: at least float32."""
    return promote(dtype, np.dtype("float32"))


def sqrt(x: Tensor) -> Tensor:
    root: Tensor = FUNCTIONS["sqrt"](x)
    return root
