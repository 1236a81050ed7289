"""How ops that choose rows of tables are cut: of a table in pieces each shard gives or takes the
rows that it has, so that an embedding of a large vocabulary need not be together anywhere.
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
    """Places in a piece of a table, 0 for those outside; and which are inside.

    An index of nothing is an error at every shard.
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
    """A mask of indices as it broadcasts to what was taken by them."""
    shape = (*(1,) * before, *mask.shape, *(1,) * after)
    spread: Tensor = G["reshape"](mask, shape)
    return spread


def _letters_around(x: TensorSpec, indices: TensorSpec, axis: int) -> tuple[str, str, str, str]:
    """Letters before an axis, of the axis, behind it, and of the indices that choose along it."""
    names = letters(x.rank)
    return names[:axis], names[axis], names[axis + 1 :], letters(indices.rank, names)


def take_rule(x: TensorSpec, indices: TensorSpec, axis: int) -> Sharding:
    """take: of a table that is cut each shard gives the rows that it has, and zeros for others."""
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
    """take_grad: each shard adds up those rows that fall into its piece."""
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
    """scatter_add: each shard adds up those rows that fall into its piece."""
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
    """update_rows: each shard sets those rows that are in its piece; they come first there."""
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
    """take_along_axis and scatter_add_along_axis."""
    names = letters(specs[0].rank)
    chosen = names if len(specs) == 2 else without(names, (axis,))
    table = without(names, (axis,))
    held = [chosen] * (len(specs) - 1)
    return Sharding(equation([table, *held], [chosen if len(specs) == 2 else table]))


def one_hot_rule(indices: TensorSpec, depth: Size, dtype: str) -> Sharding:
    """one_hot: each shard has some of the classes."""
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
    """bincount."""
    return Sharding(equation([letters(x.rank)], ["."]))


def searchsorted_rule(table: TensorSpec, values: TensorSpec, side: str) -> Sharding:
    """searchsorted."""
    names = letters(values.rank)
    return Sharding(equation([".", names], [names]))


def flat_rows_rule(indices: TensorSpec, sizes: Any, batch_dims: int) -> Sharding:
    """flat_rows."""
    names = "." * batch_dims + letters(indices.rank)[batch_dims:-1]
    return Sharding(equation([names + "."], [names]))


def scatter_rows_rule(
    x: TensorSpec, indices: TensorSpec, updates: TensorSpec, reduction: str, axes: int = 1
) -> Sharding:
    """scatter_rows: rows are cut along what they hold."""
    names = letters(x.rank - axes)
    return Sharding(
        equation(
            ["." * axes + names, "." * indices.rank, "." * indices.rank + names],
            ["." * axes + names],
        )
    )
