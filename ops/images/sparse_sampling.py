"""Weighted sums of rows at computed indices, which sampling of images off the grid reduces to.

y[p] = Σ_t weight[p,t] · x[index[p,t]] is bilinear in weight and x. With its transpose and the inner
products of rows it makes a family in which the gradients of each op are the other two.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, register, sample
from graphflow.ir.spec import Size, TensorSpec, equate, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.sparse.scatter_rows import combine_rows, normalize_indices, take_into
from graphflow.ops.sharding import rules as sharding


def _require_operands(x: TensorSpec, index: TensorSpec, *others: TensorSpec) -> None:
    require_kind(x, "float")
    require_kind(index, "int")
    for other in (x, index, *others):
        if other.rank != 2:
            raise ShapeError(f"expected matrices, got {show_shape(other.shape)}")
    for other in others:
        if other.dtype != x.dtype:
            raise ArgumentError(f"{other.dtype} and {x.dtype} do not mix; convert with .astype")


def _equate_shapes(a: TensorSpec, b: TensorSpec) -> None:
    for have, want in zip(a.shape, b.shape, strict=True):
        equate(have, want, f"index {show_shape(a.shape)}, weight {show_shape(b.shape)}")


def _infer_rows(x: TensorSpec, index: TensorSpec, weight: TensorSpec) -> TensorSpec:
    _require_operands(x, index, weight)
    _equate_shapes(index, weight)
    return x.with_shape((index.shape[0], x.shape[1]))


def _infer_put(g: TensorSpec, index: TensorSpec, weight: TensorSpec, rows: Size) -> TensorSpec:
    _require_operands(g, index, weight)
    _equate_shapes(index, weight)
    equate(g.shape[0], index.shape[0], "rows of g and of index")
    return g.with_shape((rows, g.shape[1]))


def _infer_dot(g: TensorSpec, x: TensorSpec, index: TensorSpec) -> TensorSpec:
    _require_operands(g, index, x)
    equate(g.shape[0], index.shape[0], "rows of g and of index")
    equate(g.shape[1], x.shape[1], "columns of g and of x")
    return g.with_shape(index.shape)


def _rows_into(xp: Any, out: Any, x: Any, index: Any, weight: Any) -> None:
    index = normalize_indices(xp, index, x.shape[0])
    if not out.size or not index.shape[1]:
        out[...] = 0
        return
    taken = xp.empty(out.shape, out.dtype)
    for t in range(index.shape[1]):
        target = taken if t else out
        take_into(xp, target, x, index[:, t], 0)
        xp.multiply(target, weight[:, t, None], out=target)
        if t:
            xp.add(out, taken, out=out)


def _rows_kernel(xp: Any, x: Any, index: Any, weight: Any) -> Any:
    out = xp.empty((index.shape[0], x.shape[1]), x.dtype)
    _rows_into(xp, out, x, index, weight)
    return out


def _put_into(xp: Any, out: Any, g: Any, index: Any, weight: Any, rows: int) -> None:
    index = normalize_indices(xp, index, rows)
    out[...] = 0
    for t in range(index.shape[1]):
        combine_rows(xp, out, index[:, t], g * weight[:, t, None], "add")


def _put_kernel(xp: Any, g: Any, index: Any, weight: Any, rows: int) -> Any:
    out = xp.empty((rows, g.shape[1]), g.dtype)
    _put_into(xp, out, g, index, weight, rows)
    return out


def _dot_into(xp: Any, out: Any, g: Any, x: Any, index: Any) -> None:
    index = normalize_indices(xp, index, x.shape[0])
    if not out.size:
        return
    taken = xp.empty(g.shape, g.dtype)
    for t in range(index.shape[1]):
        if taken.size:
            take_into(xp, taken, x, index[:, t], 0)
        xp.multiply(taken, g, out=taken)
        out[:, t] = xp.sum(taken, axis=1)


def _dot_kernel(xp: Any, g: Any, x: Any, index: Any) -> Any:
    out = xp.empty(index.shape, g.dtype)
    _dot_into(xp, out, g, x, index)
    return out


def _cost(first: TensorSpec, *others: TensorSpec, rows: Size = 0) -> Cost:
    index = next(s for s in others if s.dtype.kind in "iu")
    return Cost(
        flops=index.size * first.shape[1] * 2,
        bytes=index.size * first.shape[1] * 3 * first.dtype.itemsize,
    )


_X, _Y = spec("float32", (3, 2)), spec("float32", (5, 2))
_INDEX, _WEIGHT = spec("int64", (5, 4)), spec("float32", (5, 4))

weighted_rows: Op = register(
    Op(
        "weighted_rows",
        infer=_infer_rows,
        kernel=_rows_kernel,
        into=_rows_into,
        vjp=lambda g, y, x, index, weight: (
            weighted_rows_put(g, index, weight, rows=x.shape[0]),
            None,
            weighted_rows_dot(g, x, index),
        ),
        batch=batching.columns(0),
        sharding=sharding.equation_rule(".c,n.,n.->nc", (0,)),
        cost=_cost,
        samples=(
            sample(_X, _INDEX, _WEIGHT),
            sample(_X, spec("int32", (2, 1)), spec("float32", (2, 1))),
        ),
    )
)


def _put_vjp(
    h: Tensor, y: Tensor, g: Tensor, index: Tensor, weight: Tensor, rows: Size
) -> tuple[Tensor, None, Tensor]:
    return weighted_rows(h, index, weight), None, weighted_rows_dot(g, h, index)


# For each of `rows` rows r: Σ of weight[p,t]·g[p] over all p, t with index r.
weighted_rows_put: Op = register(
    Op(
        "weighted_rows_put",
        infer=_infer_put,
        kernel=_put_kernel,
        into=_put_into,
        vjp=_put_vjp,
        batch=batching.columns(0),
        sharding=sharding.equation_rule("nc,n.,n.->.c", (0,)),
        cost=_cost,
        samples=(sample(_Y, _INDEX, _WEIGHT, rows=3), sample(_Y, _INDEX, _WEIGHT, rows=4)),
    )
)


def _dot_vjp(
    h: Tensor, y: Tensor, g: Tensor, x: Tensor, index: Tensor
) -> tuple[Tensor, Tensor, None]:
    rows = x.shape[0]
    return weighted_rows(x, index, h), weighted_rows_put(g, index, h, rows=rows), None


# g[p] · x[index[p,t]]
weighted_rows_dot: Op = register(
    Op(
        "weighted_rows_dot",
        infer=_infer_dot,
        kernel=_dot_kernel,
        into=_dot_into,
        vjp=_dot_vjp,
        sharding=sharding.equation_rule("nc,.c,n.->n."),
        cost=_cost,
        samples=(sample(_Y, _X, _INDEX),),
    )
)
