"""Embedding: rows of a table, looked up by number. Public as `gf.nn.embedding`.

The gradient of a lookup is a `take_grad` node, which holds the rows and their numbers. An optimiser
that finds this node reads and writes only these rows of the table and of its own slots.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import kind
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.pointwise.comparison import not_equal
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import stop_gradient_unless
from graphflow.ops.tensors.take import as_indices, take


@function
def embedding(ids: Any, table: Any, padding_id: int | None = None) -> Tensor:
    """Return the rows of a table whose numbers are `ids`.

    An id outside [-rows, rows) is an OpError in the step. A step of `SGD` without momentum, or of
    `Adagrad`, changes only rows that occur; other optimisers do so with `sparse=True`.

    Args:
        ids: ints of any shape.
        table: floats or complex numbers (rows, …).
        padding_id: the row of this id gets no gradient, whether ids count it from the front or from
            the end.

    Returns:
        A tensor of shape ids.shape + table.shape[1:].

    Raises:
        DTypeError: ids are not ints, or the table is not float.
        ShapeError: the table is a scalar, or has no row padding_id.
        ArgumentError: padding_id is no int >= 0.
    """
    ids, table = as_indices(ids), as_tensor(table)
    if kind(ids.dtype) == "float" and kind(table.dtype) == "int":
        raise DTypeError("ids are floats and the table ints; give embedding(ids, table)")
    require_kind(ids.spec, "int")
    require_kind(table.spec, "float", "complex")
    if not table.ndim:
        raise ShapeError("expected a table of (rows, …), got a scalar")
    rows = take(table, ids, 0)
    if padding_id is None:
        return rows
    wanted = is_not_padding(ids, table, padding_id)
    wanted = FUNCTIONS["reshape"](wanted, (*ids.shape, *(1,) * (table.ndim - 1)))
    return stop_gradient_unless(wanted, rows)


def is_not_padding(ids: Tensor, table: Tensor, padding_id: int) -> Tensor:
    """Return False where an id is that of padding, counted from the front or from the end.

    Raises:
        ShapeError: the table has no row padding_id.
        ArgumentError: padding_id is no int >= 0.
    """
    n = table.shape[0]
    if isinstance(padding_id, bool) or not isinstance(padding_id, int) or padding_id < 0:
        raise ArgumentError(f"padding_id must be an id, an int from 0, got {padding_id!r}")
    if isinstance(n, int) and padding_id >= n:
        raise ShapeError(f"padding_id {padding_id} is no row of a table of {n}")
    signed = astype(ids, "int64")  # padding_id - n may not fit a dtype of few bits
    front, end = not_equal(signed, padding_id), not_equal(signed, padding_id - n)
    wanted: Tensor = FUNCTIONS["logical_and"](front, end)
    return wanted
