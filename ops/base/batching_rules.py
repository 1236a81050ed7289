"""Batching rules: how `gf.vmap` re-emits each op of a traced function for a whole batch.

A rule gets the op, its inputs, and a flag for each input that has the batch as a new first axis. It
builds nodes whose outputs all have that axis. A rule that returns NotImplemented, or an op without
a rule, makes `vmap` loop over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Tensor
from graphflow.ir.spec import Size
from graphflow.ir.spec import product as sizes_product

Rule = Callable[..., Any]


def batch_size(inputs: Sequence[Tensor], batched: Sequence[bool]) -> Size:
    """Return the size of the batch axis."""
    return next(x.shape[0] for x, has in zip(inputs, batched, strict=True) if has)


def add_batch_axis(x: Tensor, size: Size) -> Tensor:
    """Repeat x along a new first axis of the given size."""
    result: Tensor = FUNCTIONS["broadcast_to"](FUNCTIONS["expand_dims"](x, 0), (size, *x.shape))
    return result


def batch_all(inputs: Sequence[Tensor], batched: Sequence[bool]) -> list[Tensor]:
    """Give every input the batch axis."""
    size = batch_size(inputs, batched)
    return [x if has else add_batch_axis(x, size) for x, has in zip(inputs, batched, strict=True)]


def align_ranks(inputs: Sequence[Tensor], batched: Sequence[bool]) -> list[Tensor]:
    """Insert axes behind the batch axis, so that inputs broadcast as they did without it."""
    rank = max(x.ndim - has for x, has in zip(inputs, batched, strict=True))
    return [
        FUNCTIONS["expand_dims"](x, list(range(1, rank - x.ndim + 2)))
        if has and x.ndim <= rank
        else x
        for x, has in zip(inputs, batched, strict=True)
    ]


def elementwise(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Batch an op over broadcast inputs."""
    return op(*align_ranks(inputs, batched), **attrs)


def rows(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Batch an op that works on the last axes and takes any number of axes in front of them."""
    return op(*batch_all(inputs, batched), **attrs)


def along(*names: str) -> Rule:
    """Return the rule of ops along axes.

    Args:
        names: attributes that hold an axis or a tuple of axes; negative ones count from the end.
    """

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        moved = {name: shift_axis(attrs[name]) for name in names}
        return op(*batch_all(inputs, batched), **{**attrs, **moved})

    return rule


def shift_axis(axis: Any) -> Any:
    """Return an axis, or a tuple of axes, as counted behind the batch axis."""
    if isinstance(axis, tuple):
        return tuple(map(shift_axis, axis))
    return axis if axis < 0 else axis + 1


def merge_first_batch(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any
) -> Any:
    """Merge the batch axis with the first input's own batch axis, run the op, and split them again.

    The other inputs are shared by the whole batch. If one of them is batched, too, the loop runs.
    """
    if any(batched[1:]):
        return NotImplemented
    x, *others = inputs
    reshape = FUNCTIONS["reshape"]
    result = op(reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])), *others, **attrs)
    results = result if isinstance(result, tuple) else (result,)
    parted = tuple(reshape(y, (*x.shape[:2], *y.shape[1:])) for y in results)
    return parted if isinstance(result, tuple) else parted[0]


def merge_batches(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Merge the batch axis with every input's own first axis, run the op, and split them again."""
    wide = batch_all(inputs, batched)
    found = op(*(_merge_batch_into(x, 0) for x in wide), **attrs)
    size = wide[0].shape[0]
    if isinstance(found, tuple):
        return tuple(_split_batch_from(y, size, 0) for y in found)
    return _split_batch_from(found, size, 0)


def columns(*which: int) -> Rule:
    """Return the rule of ops that move whole rows: examples stand side by side as columns.

    Args:
        which: positions of the inputs that are matrices. The other inputs select rows; if one of
            them is batched, the loop runs.
    """

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        if any(has for i, has in enumerate(batched) if i not in which):
            return NotImplemented
        n = batch_size(inputs, batched)
        wide = [
            _merge_batch_into(x if has else add_batch_axis(x, n), 1) if i in which else x
            for i, (x, has) in enumerate(zip(inputs, batched, strict=True))
        ]
        return _split_batch_from(op(*wide, **attrs), n, 1)

    return rule


def trailing_axis(*which: int) -> Rule:
    """Return the rule of ops that take any axes behind the rows: the batch becomes the last axis.

    Only the inputs `which` may be batched, as for `columns`.
    """

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        if any(has for i, has in enumerate(batched) if i not in which):
            return NotImplemented
        moveaxis, n = FUNCTIONS["moveaxis"], batch_size(inputs, batched)
        wide = [
            moveaxis(x if has else add_batch_axis(x, n), 0, -1) if i in which else x
            for i, (x, has) in enumerate(zip(inputs, batched, strict=True))
        ]
        return moveaxis(op(*wide, **attrs), -1, 0)

    return rule


# Shapes and windows -----------------------------------------------------------------------------


def leading_size(name: str) -> Rule:
    """Return the rule of ops with one input whose attribute `name` holds a size for each axis."""

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        return op(*inputs, **{**attrs, name: (inputs[0].shape[0], *attrs[name])})

    return rule


def permute_dims(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], axes: Any) -> Any:
    """Batch `permute_dims`."""
    return op(*inputs, axes=(0, *shift_axis(tuple(axes))))


def broadcast_to(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], shape: Any) -> Any:
    """Batch `broadcast_to`."""
    (x,) = inputs
    wide = FUNCTIONS["expand_dims"](x, list(range(1, len(shape) - x.ndim + 2)))
    return op(wide, shape=(x.shape[0], *shape))


def slice_window(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], start: Any, size: Any, step: Any
) -> Any:
    """Batch `slice`."""
    (x,) = inputs
    return op(x, start=(0, *start), size=(x.shape[0], *size), step=(1, *step))


def pad(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], shape: Any, start: Any, step: Any,
    value: Any,
) -> Any:  # fmt: skip
    """Batch `pad`."""
    (x,) = inputs
    shape = (x.shape[0], *shape)
    return op(x, shape=shape, start=(0, *start), step=(1, *step), value=value)


# Products and reductions ------------------------------------------------------------------------


def matmul(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Batch `matmul`; a shared right matrix multiplies all rows of the batch in one product."""
    a, b = inputs
    flags = (attrs.get("transpose_a", False), attrs.get("transpose_b", False))
    if tuple(batched) == (True, False) and b.ndim == 2 and not flags[0]:
        return FUNCTIONS["matmul"](a, b, transpose_b=flags[1])
    return elementwise(op, inputs, batched, **attrs)


def first_index(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], axis: Any, keepdims: bool
) -> Any:
    """Batch `argmax` or `argmin`; without an axis they give the index in the flattened tensor."""
    (x,) = inputs
    if axis is not None:
        return op(x, axis=shift_axis(axis), keepdims=keepdims)
    y = op(FUNCTIONS["reshape"](x, (x.shape[0], -1)), axis=1, keepdims=False)
    return FUNCTIONS["reshape"](y, (x.shape[0], *(1,) * (x.ndim - 1))) if keepdims else y


# Indexing ---------------------------------------------------------------------------------------


def _spread_indices(indices: Tensor, before: Sequence[Size], after: Sequence[Size]) -> Tensor:
    """Repeat indices (n, …) as (n, *before, count, *after), once for each slice."""
    n, count = indices.shape[0], FUNCTIONS["reshape"](indices, (indices.shape[0], -1)).shape[1]
    thin = FUNCTIONS["reshape"](indices, (n, *(1,) * len(before), count, *(1,) * len(after)))
    spread: Tensor = FUNCTIONS["broadcast_to"](thin, (n, *before, count, *after))
    return spread


def take(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], axis: int) -> Any:
    """Batch `take`: whole slices if one input is shared, else single elements."""
    x, indices = inputs
    if not batched[1]:
        return op(x, indices, axis=axis + 1)
    if not batched[0]:
        return FUNCTIONS["moveaxis"](op(x, indices, axis=axis), axis, 0)
    before, after = x.shape[1 : axis + 1], x.shape[axis + 2 :]
    spread = _spread_indices(indices, before, after)
    flat = FUNCTIONS["take_along_axis"](x, spread, axis + 1)
    return FUNCTIONS["reshape"](flat, (x.shape[0], *before, *indices.shape[1:], *after))


def take_grad(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], shape: Any, axis: int
) -> Any:
    """Batch the gradient of `take`: add slices to zeros."""
    g, indices = inputs
    if not batched[1]:
        return op(g, indices, shape=(g.shape[0], *shape), axis=axis + 1)
    zeros = FUNCTIONS["zeros"]((indices.shape[0], *shape), dtype=g.dtype)
    return scatter_add(op, (zeros, indices, g), (True, True, batched[0]), axis=axis)


def scatter_add(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], axis: int) -> Any:
    """Batch `scatter_add`: whole slices if the indices are shared, else single elements."""
    if not batched[1]:
        n = batch_size(inputs, batched)
        x, updates = (
            t if has else add_batch_axis(t, n)
            for t, has in ((inputs[0], batched[0]), (inputs[2], batched[2]))
        )
        return op(x, inputs[1], updates, axis=axis + 1)
    x, indices, updates = batch_all(inputs, batched)
    before, after = x.shape[1 : axis + 1], x.shape[axis + 2 :]
    spread = _spread_indices(indices, before, after)
    return FUNCTIONS["scatter_add_along_axis"](
        x, spread, FUNCTIONS["reshape"](updates, spread.shape), axis + 1
    )


def flat_rows(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], sizes: Any, batch_dims: int
) -> Any:
    """Batch `flat_rows`: the batch goes behind the axes that indices and tensor share."""
    moveaxis = FUNCTIONS["moveaxis"]
    moved = moveaxis(inputs[0], 0, batch_dims)
    return moveaxis(op(moved, sizes=sizes, batch_dims=batch_dims), batch_dims, 0)


def flat_elements(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], shape: Any, axis: int
) -> Any:
    """Batch `flat_elements`: numbers count within the tensor of each example."""
    (indices,) = inputs
    n, size = indices.shape[0], sizes_product(shape)
    numbers = op(indices, shape=(n, *shape), axis=axis + 1)
    start = FUNCTIONS["reshape"](FUNCTIONS["arange"](n), (n, *(1,) * len(shape)))
    return numbers - start * size


# Normalisation and convolution ------------------------------------------------------------------


def affine_norm(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], axis: Any, along: Any, **attrs: Any
) -> Any:
    """Batch a norm with parameters; parameters of each example belong to the batch axis, too."""
    if any(batched[1:]):
        inputs, along = batch_all(inputs, batched), (0, *shift_axis(along))
    else:
        along = shift_axis(along)
    return op(*inputs, axis=shift_axis(axis), along=along, **attrs)


def _merge_batch_into(x: Tensor, axis: int) -> Tensor:
    """Move the batch axis in front of an axis (counted without it) and merge the two."""
    moved = FUNCTIONS["moveaxis"](x, 0, axis)
    shape = moved.shape
    one: Tensor = FUNCTIONS["reshape"](
        moved, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    )
    return one


def _split_batch_from(y: Tensor, n: Size, axis: int) -> Tensor:
    """Undo `_merge_batch_into`."""
    size = FUNCTIONS["reshape"]
    rest = y.shape[axis] // n
    parted: Tensor = FUNCTIONS["moveaxis"](
        size(y, (*y.shape[:axis], n, rest, *y.shape[axis + 1 :])), axis, 0
    )
    return parted


def channels(
    op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], channel: int, **attrs: Any
) -> Any:
    """Batch an op with parameters for each channel: each example has channels of its own."""
    n = batch_size(inputs, batched)
    wide = batch_all(inputs, batched)
    given = [
        _merge_batch_into(t, channel) if t.ndim == wide[0].ndim else FUNCTIONS["reshape"](t, (-1,))
        for t in wide
    ]
    found = op(*given, channel=channel, **attrs)
    if not isinstance(found, tuple):
        return _split_batch_from(found, n, channel)
    return (
        _split_batch_from(found[0], n, channel),
        *(_split_batch_from(y, n, 0) for y in found[1:]),
    )


def convolution(*axes: int, out: int) -> Rule:
    """Return the rule of convolutions: each example becomes a group of channels.

    Shared weights instead serve a batch that is merged with x's own batch axis.

    Args:
        axes: the channel axis of each input.
        out: the channel axis of the output.
    """

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        if not batched[1] and axes[1] == 0:  # weights
            return merge_first_batch(op, inputs, batched, **attrs)
        n = batch_size(inputs, batched)
        if not isinstance(n, int):
            return NotImplemented  # a kernel needs to know its number of groups
        wide = [
            _merge_batch_into(x, a) for x, a in zip(batch_all(inputs, batched), axes, strict=True)
        ]
        return _split_batch_from(op(*wide, **{**attrs, "groups": attrs["groups"] * n}), n, out)

    return rule


def rotate_pairs(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Batch `rotate_pairs`: angles of each example broadcast as shared ones do."""
    if not any(batched[1:]):
        return op(*inputs, **attrs)
    x, *angles = batch_all(inputs, batched)
    return op(x, *align_ranks((x, *angles), (True,) * 3)[1:], **attrs)


# Attention --------------------------------------------------------------------------------------


def attention(count: int, masks: bool = False) -> Rule:
    """Return the rule of attention ops.

    Args:
        count: number of leading inputs that all get the batch axis; masks follow and broadcast.
        masks: the output has the shape of the first mask.
    """

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        n = batch_size(inputs, batched)
        wide = [
            x if has else add_batch_axis(x, n)
            for x, has in zip(inputs[:count], batched[:count], strict=True)
        ]
        rank = max(x.ndim for x in wide)  # q's, with the batch
        rest = []
        for mask, has in zip(inputs[count:], batched[count:], strict=True):
            whole = add_batch_axis(mask, n) if masks and not has else mask
            if masks or has:
                whole = FUNCTIONS["expand_dims"](whole, list(range(1, rank - whole.ndim + 1)))
            rest.append(whole)
        found = op(*wide, *rest, **attrs)
        if masks:
            mask, has = inputs[count], batched[count]
            return FUNCTIONS["reshape"](found, (n, *mask.shape[has:]))
        return found

    return rule
