"""Embedding: rows of a table, looked up by number.

The gradient of a lookup is a `take_grad` node: the rows and where they belong. Where an optimiser
takes it, only these rows of the table (and of the optimiser's slots) are read and written.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import kind
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.pointwise.arithmetic import not_equal
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import stop_gradient_unless
from graphflow.ops.tensors.take import as_indices, take


@function
def embedding(ids: Any, table: Any, padding_id: int | None = None) -> Tensor:
    """The rows of a table: ids of any shape, table (rows, …), result ids.shape + table.shape[1:].

    An id outside [-rows, rows) is an OpError in the step. A step of `SGD` without momentum, or of
    `Adagrad`, touches only the rows that occur; other optimisers do so with `sparse=True`.

    Args:
        padding_id: the row of this id is looked up, but has no gradient, whether ids count it
            from the front or from the end.

    Raises:
        DTypeError: ids are not ints, or the table is not float.
        ShapeError: the table has no rows, or no padding_id among them.
    """
    ids, table = as_indices(ids), as_tensor(table)
    if kind(ids.dtype) == "float" and kind(table.dtype) == "int":
        raise DTypeError("the table is given before the ids; give embedding(ids, table)")
    require_kind(ids.spec, "int")
    require_kind(table.spec, "float", "complex")
    if not table.ndim:
        raise ShapeError("the table is a scalar; it has one row for each id")
    rows = take(table, ids, 0)
    if padding_id is None:
        return rows
    n = table.shape[0]
    if isinstance(padding_id, bool) or not isinstance(padding_id, int) or padding_id < 0:
        raise ArgumentError(f"padding_id is an id, an int from 0, not {padding_id!r}")
    if isinstance(n, int) and padding_id >= n:
        raise ShapeError(f"padding_id {padding_id} is no row of a table of {n}")
    signed = astype(ids, "int64")  # of few bits, padding_id - n might have no number
    front, end = not_equal(signed, padding_id), not_equal(signed, padding_id - n)
    wanted = FUNCTIONS["logical_and"](front, end)
    wanted = FUNCTIONS["reshape"](wanted, (*ids.shape, *(1,) * (table.ndim - 1)))
    return stop_gradient_unless(wanted, rows)
