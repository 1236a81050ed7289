"""The op that reads rows of a batch where it runs, instead of the client, who sends a position.

    placeholder x (64, 784) ─bind→ read_data(position, placeholder (64, 784, 0)) of the same shape

The second input has no bytes. It tells the op how many rows there are, and a strategy how to divide
them. Strategies that cut the feeds of a step into turns, in which an op does not know its place in
the batch, need a third input: the numbers of the rows in the batch, int32.

The op holds a description of the dataset as JSON, which the worker opens once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, Sharding, register, sample
from graphflow.ir.spec import Size, TensorSpec, as_dtype, spec
from graphflow.ops.sharding.rules import ShardView, make


def _infer(
    position: TensorSpec, rows: TensorSpec, *numbers: TensorSpec, data: str, column: str,
    dtype: str, first: Size,
) -> TensorSpec:  # fmt: skip
    if position.rank != 1 or position.dtype != np.int64:
        raise ShapeError(f"a position is int64 of shape (2,), not {position}")
    if rows.rank < 2 or rows.shape[-1] != 0:
        raise ShapeError(f"the shape of rows comes as an empty array (n, …, 0), not {rows}")
    return TensorSpec(rows.shape[:-1], as_dtype(dtype))


def _read(
    position: Any, rows: Any, *numbers: Any, data: str, column: str, dtype: str, first: int
) -> Any:
    from graphflow.data.row_reader import read_rows

    shape = rows.shape[:-1]
    if not len(rows):
        return np.empty(shape, dtype)
    at, chosen = (int(position[0]), int(position[1])), np.dtype(dtype)
    if not numbers:
        return read_rows(data, at, first, shape, column, chosen)
    low, high = int(numbers[0].min()), int(numbers[0].max()) + 1
    found = read_rows(data, at, low, (high - low, *shape[1:]), column, chosen)
    return found[numbers[0] - low]


def _kernel(xp: Any, position: Any, rows: Any, *numbers: Any, **attrs: Any) -> Any:
    return np.array(_read(position, rows, *numbers, **attrs))


def _read_into(xp: Any, out: Any, position: Any, rows: Any, *numbers: Any, **attrs: Any) -> None:
    np.copyto(out, _read(position, rows, *numbers, **attrs))


def _divide_rows(
    position: TensorSpec, rows: TensorSpec, *numbers: TensorSpec, **attrs: Any
) -> Sharding:
    """Divide the rows. Later shards begin at a later row of the batch."""
    whole = "." * (rows.rank - 2)
    inputs = f".,a{whole}." + ",a" * len(numbers)
    return Sharding(f"{inputs}->a{whole}", build=None if numbers else _build)


def _build(op: Op, cut: ShardView, position: Any, rows: Any, **attrs: Any) -> Any:
    return make(op, position, rows, **{**attrs, "first": attrs["first"] + cut.start["a"]})


read_data: Op = register(
    Op(
        "read_data",
        infer=_infer,
        kernel=_kernel,
        into=_read_into,
        vjp=lambda g, y, *inputs, **attrs: (None,) * len(inputs),
        sharding=_divide_rows,
        cost=lambda *inputs, **attrs: Cost(flops=0),
        samples=(
            sample(
                spec("int64", (2,)), spec("int8", (0, 3, 0)), data="{}", column="x",
                dtype="float32", first=0,
            ),
            sample(
                spec("int64", (2,)), spec("int8", (0, 3, 0)), spec("int32", (0,)), data="{}",
                column="x", dtype="float32", first=0,
            ),
        ),
        pure=False,
        device_kinds=("cpu",),
    )
)  # fmt: skip

__all__ = ["read_data"]
