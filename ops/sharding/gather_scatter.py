"""Sharding rules of ops that choose rows of tables: each shard reads or writes the rows that it
has.

So an embedding of a large vocabulary need not be whole on any device.
"""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Sharding, Tensor
from graphflow.ir.spec import Shape, Size, TensorSpec
from graphflow.ops.sharding.rules import ShardView, equation, letters, make, without

G = FUNCTIONS


def _local_indices(
    indices: Tensor, start: Size, size: Size, total: Size, negative: bool = True
) -> tuple[Tensor, Tensor]:
    """Return indices into a shard's rows, 0 for rows of other shards; and a mask of the shard's
    own.

    An index outside of the whole table is an error at every shard.
    """
    indices = G["astype"](indices, "int64")
    begin, count, every = (G["size_of"](size=n, dtype="int64") for n in (start, size, total))
    low = -every if negative else G["size_of"](size=0, dtype="int64")
    within = G["logical_and"](indices >= low, indices < every)
    indices = G["check"](indices, within, message=f"an index is outside of [0, {total})")
    if negative:
        indices = G["where"](indices < 0, indices + every, indices)
    places = indices - begin
    inside = G["logical_and"](places >= 0, places < count)
    return G["where"](inside, places, G["zeros_like"](places)), inside


def _broadcast_mask(mask: Tensor, before: int, after: int) -> Tensor:
    """Reshape a mask of indices so that it broadcasts to the rows that they choose."""
    shape = (*(1,) * before, *mask.shape, *(1,) * after)
    spread: Tensor = G["reshape"](mask, shape)
    return spread


def _letters_around(x: TensorSpec, indices: TensorSpec, axis: int) -> tuple[str, str, str, str]:
    """Return the letters before an axis, of the axis, behind it, and of the indices along it."""
    names = letters(x.rank)
    return names[:axis], names[axis], names[axis + 1 :], letters(indices.rank, names)


def take_rule(x: TensorSpec, indices: TensorSpec, axis: int) -> Sharding:
    """Split take. Each shard gives the rows that it has, and zeros for others."""
    before, own, after, names = _letters_around(x, indices, axis)
    if x.dtype.kind == "b":
        own = "."

    def build(op: Op, cut: ShardView, x: Tensor, indices: Tensor, axis: int) -> Any:
        if not cut.is_split(own):
            return make(op, x, indices, axis=axis)
        places, inside = _local_indices(indices, cut.start[own], cut.size[own], cut.total[own])
        rows = make(op, x, places, axis=axis)
        mask = _broadcast_mask(inside, len(before), len(after))
        return G["where"](mask, rows, G["zeros_like"](rows))

    text = equation([before + own + after, names], [before + names + after])
    return Sharding(text, linear=((0,),), build=build)


def take_grad_rule(g: TensorSpec, indices: TensorSpec, shape: Shape, axis: int) -> Sharding:
    """Split take_grad. Each shard sums the rows that belong to its piece."""
    whole = TensorSpec(shape, g.dtype)
    before, own, after, names = _letters_around(whole, indices, axis)

    def build(op: Op, cut: ShardView, g: Tensor, indices: Tensor, shape: Shape, axis: int) -> Any:
        shape = cut.shapes[0]
        if not cut.is_split(own):
            return make(op, g, indices, shape=shape, axis=axis)
        places, inside = _local_indices(indices, cut.start[own], cut.size[own], cut.total[own])
        mask = _broadcast_mask(inside, len(before), len(after))
        rows = G["where"](mask, g, G["zeros_like"](g))
        return make(op, rows, places, shape=shape, axis=axis)

    text = equation([before + names + after, names], [before + own + after])
    return Sharding(text, linear=((0,),), build=build)


def scatter_add_rule(
    x: TensorSpec, indices: TensorSpec, updates: TensorSpec, axis: int
) -> Sharding:
    """Split scatter_add. Each shard adds the rows that belong to its piece."""
    before, own, after, _ = _letters_around(x, indices, axis)
    held = "." * indices.rank

    def build(
        op: Op, cut: ShardView, x: Tensor, indices: Tensor, updates: Tensor, axis: int
    ) -> Any:
        if not cut.is_split(own):
            return make(op, x, indices, updates, axis=axis)
        places, inside = _local_indices(indices, cut.start[own], cut.size[own], cut.total[own])
        mask = _broadcast_mask(inside, len(before), len(after))
        rows = G["where"](mask, updates, G["zeros_like"](updates))
        return make(op, x, places, rows, axis=axis)

    text = equation([before + own + after, held, before + held + after], [before + own + after])
    return Sharding(text, linear=((0, 2),), build=build)


def update_rows_rule(
    x: TensorSpec, rows: TensorSpec, updates: TensorSpec, number: TensorSpec
) -> Sharding:
    """Split update_rows. Each shard sets the rows of its piece, which it moves to the front."""
    names = letters(x.rank)
    own = names[0]

    def build(
        op: Op, cut: ShardView, x: Tensor, rows: Tensor, updates: Tensor, number: Tensor
    ) -> Any:
        if not cut.is_split(own):
            return make(op, x, rows, updates, number)
        begin, size = (G["size_of"](size=n, dtype="int64") for n in (cut.start[own], cut.size[own]))
        places = G["astype"](rows, "int64") - begin
        inside = G["logical_and"](places >= 0, places < size)
        used = G["arange"](rows.shape[0]) < G["astype"](number, "int64")
        mine = G["logical_and"](inside, used)
        first = G["argsort"](G["astype"](G["logical_not"](mine), "int64"))
        chosen = G["take"](places, first, 0), G["take"](updates, first, 0)
        return make(op, x, *chosen, G["sum"](G["astype"](mine, "int64")))

    return Sharding(equation([names, ".", "." + names[1:], ""], [names]), build=build)


def take_along_axis_rule(*specs: TensorSpec, axis: int) -> Sharding:
    """Split take_along_axis and scatter_add_along_axis along all other axes."""
    names = letters(specs[0].rank)
    chosen = names if len(specs) == 2 else without(names, (axis,))
    table = without(names, (axis,))
    held = [chosen] * (len(specs) - 1)
    return Sharding(equation([table, *held], [chosen if len(specs) == 2 else table]))


def one_hot_rule(indices: TensorSpec, depth: Size, dtype: str) -> Sharding:
    """Split one_hot along the indices, and along the classes."""
    names = letters(indices.rank)
    own = letters(1, names)

    def build(op: Op, cut: ShardView, indices: Tensor, depth: Size, dtype: str) -> Any:
        if not cut.is_split(own):
            return make(op, indices, depth=depth, dtype=dtype)
        wide = G["astype"](indices, "int64")
        every = G["size_of"](size=depth, dtype="int64")
        within = G["logical_and"](wide >= 0, wide < every)
        wide = G["check"](wide, within, message=f"a class is outside of [0, {depth})")
        place = G["arange"](cut.size[own]) + G["size_of"](size=cut.start[own], dtype="int64")
        return G["astype"](G["equal"](G["expand_dims"](wide, -1), place), dtype)

    return Sharding(equation([names], [names + own]), build=build)


def bincount_rule(x: TensorSpec, size: Size) -> Sharding:
    """Leave bincount whole."""
    return Sharding(equation([letters(x.rank)], ["."]))


def searchsorted_rule(table: TensorSpec, values: TensorSpec, side: str) -> Sharding:
    """Split searchsorted along the values."""
    names = letters(values.rank)
    return Sharding(equation([".", names], [names]))


def flat_rows_rule(indices: TensorSpec, sizes: Any, batch_dims: int) -> Sharding:
    """Split flat_rows along the axes of the indices."""
    names = "." * batch_dims + letters(indices.rank)[batch_dims:-1]
    return Sharding(equation([names + "."], [names]))


def scatter_rows_rule(
    x: TensorSpec, indices: TensorSpec, updates: TensorSpec, reduction: str, axes: int = 1
) -> Sharding:
    """Split scatter_rows along the axes within a row."""
    names = letters(x.rank - axes)
    return Sharding(
        equation(
            ["." * axes + names, "." * indices.rank, "." * indices.rank + names],
            ["." * axes + names],
        )
    )
