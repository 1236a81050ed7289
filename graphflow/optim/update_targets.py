"""The variables, slots and rows that an update reads and writes; and the dtypes to compute in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.errors import VariableError
from graphflow.frontend.builders import assign
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor
from graphflow.ir.spec import Size, minimum, promote
from graphflow.ops.base.composite import widen
from graphflow.ops.tables.row_values import lookup_of
from graphflow.optim.schedules import RateSchedule
from graphflow.optim.state_variables import state_variable

Rate = float | Tensor | RateSchedule


class Target:
    """The part of a variable and of its slots that an update reads and writes.

    Args:
        rows: distinct row numbers, int64 (k,); None for all rows.
        number: how many of these rows are in use.
        fresh: bool (k,): these rows still hold what another id of a hash table left there.
        initial: (k, …): the values of fresh rows.

    Attributes:
        updates: assignments of slots so far.
        slots: the slots that were read, by name.
    """

    def __init__(
        self, variable: Tensor, rows: Tensor | None = None, number: Tensor | None = None,
        fresh: Tensor | None = None, initial: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.variable = variable
        self.rows = rows
        self.number = number
        self._fresh = fresh
        self._initial = initial
        self.updates: list[Tensor] = []
        self.slots: dict[str, Tensor] = {}

    def part(self, state: Tensor, initial: Any = None) -> Tensor:
        """Return the rows of a variable or slot.

        Args:
            initial: what a slot holds in rows that are fresh.
        """
        if self.rows is None:
            return state
        chosen: Tensor = FUNCTIONS["take"](state, self.rows, 0)
        if self._fresh is None:
            return chosen
        first = self._initial if state is self.variable else initial
        flags = FUNCTIONS["reshape"](self._fresh, (*self._fresh.shape, *(1,) * (chosen.ndim - 1)))
        part: Tensor = FUNCTIONS["where"](flags, first, chosen)
        return part

    def read(self, name: str, initial: float = 0.0, shape: Sequence[Size] | None = None) -> Tensor:
        """Return the rows of a slot, a variable on the same device.

        Args:
            shape: of the slot; None: that of the variable.
        """
        self.slots[name] = _slot(self.variable, name, initial, shape)
        return self.part(self.slots[name], initial)

    def write(self, name: str, value: Tensor) -> None:
        """Assign new values to a slot that was read."""
        self.updates.append(self.assign_part(self.slots[name], value))

    def assign_part(self, state: Tensor, value: Tensor) -> Tensor:
        """Return an assignment of the rows."""
        if self.rows is not None:
            value = REGISTRY["update_rows"](state, self.rows, value, self.number)
        return assign(state, value)


class ProximalTerm:
    """The gradient of γ/2·‖w − start‖², where `start` is the value at which a step begins.

    Attributes:
        starts: the values of variables, or of their rows, at which the step begins.
    """

    def __init__(self, gamma: Rate) -> None:
        self._gamma = gamma
        self.starts: list[Tensor] = []

    def add_to(self, gradient: Tensor, value: Tensor) -> Tensor:
        """Return a gradient with that of the term at `value`."""
        start = FUNCTIONS["stop_gradient"](value)
        self.starts.append(start)
        total: Tensor = gradient + rate_for(self._gamma, value) * (value - start)
        return total


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
    rest = variable.shape[1:]
    reshape = FUNCTIONS["reshape"]
    target, inverse, ids = _distinct_rows(variable, [places for _, places in lookups])
    assert target.rows is not None
    size = target.rows.shape[0]
    gradient: Tensor | None = None
    start: Size = 0
    for (rows, _), own in zip(lookups, ids, strict=True):
        places = inverse if len(ids) == 1 else inverse[start : start + own.shape[0]]
        start = start + own.shape[0]
        part = REGISTRY["take_grad"](
            reshape(rows, (own.shape[0], *rest)), places, shape=(size, *rest), axis=0
        )
        gradient = part if gradient is None else gradient + part
    assert gradient is not None
    return target, gradient


def hashed_target(variable: Tensor, gradient: Tensor) -> tuple[Target, Tensor]:
    """Return the distinct rows of a hash table that a gradient depends on, and its part for them.

    Raises:
        VariableError: the gradient depends on no lookup.
    """
    lookups = lookups_of(gradient, variable)
    if lookups and all(lookup_of(places) for _, places in lookups):
        return row_target(variable, lookups)
    of_table = [
        node.outputs[0]
        for node in Graph(gradient).nodes
        if (known := lookup_of(node.outputs[0])) and known.owners.node.origin is variable.node
    ]
    if not of_table:
        raise VariableError(
            f"the gradient of {variable!r} depends on no lookup of this hash table; call the table "
            "outside of gf.function and loops, or leave it out of `variables`"
        )
    target, _, _ = _distinct_rows(variable, of_table)
    return target, FUNCTIONS["take"](gradient, target.rows, 0)


def _distinct_rows(
    variable: Tensor, indices: Sequence[Tensor]
) -> tuple[Target, Tensor, list[Tensor]]:
    """Return a target of the distinct rows among indices, where each index lies among them, and
    the indices as lists, counted from the front."""
    n = variable.shape[0]
    ravel, reshape, concat = (FUNCTIONS[k] for k in ("ravel_multi_index", "reshape", "concat"))
    ids = [
        ravel([reshape(t, (t.size,))], (n,)) for t in indices
    ]  # checks bounds, and makes negative ids positive
    every = ids[0] if len(ids) == 1 else concat(ids)
    found = FUNCTIONS["unique_all"](every, minimum(every.shape[0], n))
    known = [lookup_of(t) for t in indices]
    if known[0] is None:
        return Target(variable, found.values, found.number), found.inverse, ids

    def distinct(name: str) -> Tensor:
        """Return an input of the lookups at the first index of each row."""
        parts = [getattr(lookup, name) for lookup in known]
        rest = parts[0].shape[indices[0].ndim :]
        flat = concat([reshape(p, (t.size, *rest)) for p, t in zip(parts, indices, strict=True)])
        chosen: Tensor = FUNCTIONS["take"](flat, found.indices, 0)
        return chosen

    fresh, initial = distinct("fresh"), distinct("initial")
    target = Target(variable, found.values, found.number, fresh, widen(initial))
    target.updates.append(target.assign_part(known[0].owners, distinct("ids")))
    return target, found.inverse, ids


def _slot(variable: Tensor, name: str, value: float, shape: Sequence[Size] | None) -> Tensor:
    """Return a new variable on the device of another, by default of its shape."""
    sizes = tuple(int(s) for s in (variable.shape if shape is None else shape))
    initial = init.full(sizes, value, wide_dtype(variable.dtype))
    return state_variable(f"{variable.node.name}/{name}", initial)


def rate_for(rate: Rate, like: Tensor) -> Any:
    """Return a rate that keeps a variable's dtype: Python numbers are weak, tensors are
    converted."""
    assert not isinstance(rate, RateSchedule), "minimize puts the rate of the step in its place"
    return in_dtype_of(rate, like) if isinstance(rate, Tensor) else float(rate)


def descend(value: Tensor, rate: Rate, direction: Tensor) -> Tensor:
    """Return a value after a step of size `rate` against a direction."""
    end: Tensor = value - rate_for(rate, value) * direction
    return end


def shrink(value: Tensor, rate: Rate, decay: float) -> Tensor:
    """Return a value after decay apart from the gradient, (1 − rate·decay)·value."""
    if not decay:
        return value
    decayed: Tensor = value * (1.0 - rate_for(rate, value) * decay)
    return decayed


def norm(x: Tensor) -> Tensor:
    """Return the 2-norm of all elements."""
    return sqrt(FUNCTIONS["sum"](x * x))


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
