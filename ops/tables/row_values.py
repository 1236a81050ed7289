"""Rows that begin with a value of their own: the ops between a hash table and its readers.

A new id reads its initial value, which depends on the id alone, and its row still holds what
another id left there. `table_rows` tells optimisers which rows are such, so that they update the
value that was read, and begin with new slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphflow.base.initial_numbers import truncated_normal
from graphflow.ir.op import FUNCTIONS, Cost, Op, Sharding, Tensor, register, sample
from graphflow.ir.spec import TensorSpec, as_dtype, equate, product, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.pointwise.select import where
from graphflow.ops.randomness.philox import philox
from graphflow.ops.sharding.rules import equation, letters

Array = np.ndarray[Any, Any]
_CHUNK = 1 << 16
"""Words that are drawn at once, so that intermediates fit a core's cache."""
_LOW = np.uint64(0xFFFFFFFF)


def _require_flags(what: str, flags: TensorSpec, ids: TensorSpec) -> None:
    """Refuse flags that are not one bool for each id."""
    require_kind(flags, "bool")
    for have, want in zip(flags.shape, ids.shape, strict=True):
        equate(have, want, f"{what}: {flags} for {ids}")


# Initial values ---------------------------------------------------------------------------------


def _words(ids: Array, number: int, table: tuple[int, int]) -> Array:
    """Return random words for each id, as uint32 (n, number): a function of id and table.

    Args:
        table: seed and stream of the table.
    """
    seed, of_table = table
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    bits, blocks = ids.astype(np.uint64)[:, None], np.arange(-(-number // 4), dtype=np.uint64)
    low, high = bits & _LOW, bits >> np.uint64(32)
    counter = (low, high, blocks[None], np.uint64(of_table & 0xFFFFFFFF))
    drawn = np.stack(np.broadcast_arrays(*philox(np, counter, key)), -1)
    return drawn.reshape(len(ids), -1)[:, :number].astype(np.uint32)


def _uniform(ids: Array, number: int, dtype: str, table: tuple[int, int]) -> Array:
    """Return numbers uniform on [0, 1) for each id: (n, number)."""
    if dtype == "float64":
        pairs = np.ascontiguousarray(_words(ids, 2 * number, table)).view(np.uint64)
        return (pairs >> np.uint64(11)) * 2.0**-53
    return (_words(ids, number, table) >> np.uint32(8)) * np.float32(2.0**-24)


def _draw(ids: Array, size: int, dtype: str, kind: str, table: tuple[int, int]) -> Array:
    """Return uniform numbers on [0, 1), or standard normal ones (Box & Muller): (n, size)."""
    if kind == "uniform":
        return _uniform(ids, size, dtype, table)
    if kind == "truncated_normal":
        return truncated_normal(_uniform(ids, size, dtype, table))
    pairs = _uniform(ids, size + size % 2, dtype, table).reshape(len(ids), -1, 2)
    radius = np.sqrt(np.log1p(-pairs[..., 0]) * -2)
    angle = pairs[..., 1] * pairs.dtype.type(2 * np.pi)
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
    return both.reshape(len(ids), -1)[:, :size]


def _draw_rows_into(
    xp: Any, out: Any, ids: Any, wanted: Any, size: int, dtype: str, kind: str, a: float, b: float,
    table: tuple[int, int],
) -> None:  # fmt: skip
    out[...] = 0
    rows, flat, at = out.reshape(-1, size), ids.reshape(-1), np.flatnonzero(wanted)
    if kind == "constant":
        rows[at] = a
        return
    wide = "float64" if dtype == "float64" else "float32"
    scale, first = (np.dtype(wide).type(x) for x in ((b - a, a) if kind == "uniform" else (b, a)))
    step = max(1, _CHUNK // max(1, size))
    for start in range(0, len(at), step):
        part = at[start : start + step]
        rows[part] = _draw(flat[part], size, wide, kind, table) * scale + first


def _draw_rows_kernel(xp: Any, ids: Any, wanted: Any, size: int, dtype: str, **how: Any) -> Any:
    out = np.empty((*ids.shape, size), dtype)
    _draw_rows_into(xp, out, ids, wanted, size, dtype, **how)
    return out


def _infer_draw_rows(
    ids: TensorSpec, wanted: TensorSpec, size: int, dtype: str, **attrs: Any
) -> TensorSpec:
    require_kind(ids, "int")
    _require_flags("draw_rows", wanted, ids)
    return TensorSpec((*ids.shape, size), as_dtype(dtype))


def _along_ids(*ranks: int) -> Any:
    """Return a sharding rule for an op that goes along its ids row by row."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        names = letters(min(s.rank for s in specs))
        return Sharding(equation([names + "." * r for r in ranks[:-1]], [names + "." * ranks[-1]]))

    return rule


_IDS, _FLAGS = spec("int64", (3,)), spec("bool", (3,))
_DRAW: dict[str, Any] = {"size": 5, "a": -1.0, "b": 2.0, "table": (7, 3)}

# The initial values of ids where they are wanted, else 0: a function of id and table alone. Its
# seed and stream are no attribute `stream`, which would make it random: other in each turn.
draw_rows: Op = register(
    Op(
        "draw_rows",
        infer=_infer_draw_rows,
        kernel=_draw_rows_kernel,
        into=_draw_rows_into,
        leading=lambda **attrs: (0, 1),
        sharding=_along_ids(0, 0, 1),
        cost=lambda ids, wanted, size, **attrs: Cost(
            flops=0, bytes=ids.nbytes + ids.size * size * 4
        ),
        samples=tuple(
            sample(_IDS, _FLAGS, dtype=dtype, kind=kind, **_DRAW)
            for dtype, kind in (
                ("float32", "uniform"), ("float64", "uniform"), ("float32", "normal"),
                ("float64", "normal"), ("float32", "constant"),
            )
        ),
        device_kinds=("cpu",),
    )
)  # fmt: skip


# Rows and what optimisers know of them ------------------------------------------------------------


class TableLookup(NamedTuple):
    """A lookup in a hash table as optimisers see it: the inputs of its `table_rows`.

    Attributes:
        rows: row numbers, int64 of any shape s.
        ids: the ids that they were found for, int64 of shape s.
        owners: a variable (rows,), the id whose values each row holds. Whoever sets a row sets it.
        fresh: bool of shape s: the row still holds the values of another id.
        initial: the values of fresh ids, (*s, size).
    """

    rows: Tensor
    ids: Tensor
    owners: Tensor
    fresh: Tensor
    initial: Tensor


def lookup_of(rows: Tensor) -> TableLookup | None:
    """Return the lookup that row numbers belong to; None if they are of no hash table."""
    if rows.node.op is not table_rows:
        return None
    _, ids, held, fresh, initial = rows.node.inputs
    return TableLookup(rows, ids, held.node.inputs[0], fresh, initial)


def _infer_table_rows(
    rows: TensorSpec, ids: TensorSpec, held: TensorSpec, fresh: TensorSpec, initial: TensorSpec
) -> TensorSpec:
    for each in (rows, ids, held):
        require_kind(each, "int")
    _require_flags("table_rows", fresh, rows)
    return rows


def _copy_into(xp: Any, out: Any, first: Any, *others: Any) -> None:
    xp.copyto(out, first)


# The row numbers `rows`. The other inputs are for optimisers that find these rows in a gradient:
# the ids, those whose values the rows hold, which of them differ, and the values of these ids.
table_rows: Op = register(
    Op(
        "table_rows",
        infer=_infer_table_rows,
        kernel=lambda xp, rows, *others: rows.copy(),
        into=_copy_into,
        sharding=_along_ids(0, 0, 0, 0, 1, 0),
        cost=lambda rows, *others: Cost(flops=0, bytes=rows.nbytes * 2),
        samples=(sample(_IDS, _IDS, _IDS, _FLAGS, spec("float32", (3, 2))),),
    )
)


def _infer_first_values(
    x: TensorSpec, fresh: TensorSpec, initial: TensorSpec, has_row: TensorSpec
) -> TensorSpec:
    _require_flags("first_values", has_row, fresh)
    require_kind(fresh, "bool")
    for have, want in zip(initial.shape, x.shape, strict=True):
        equate(have, want, f"first_values: {initial} for {x}")
    return x


def _first_values_into(xp: Any, out: Any, x: Any, fresh: Any, initial: Any, has_row: Any) -> None:
    xp.copyto(out, x)
    xp.copyto(out, initial, where=fresh[..., None])


def _first_values_vjp(
    g: Tensor, y: Tensor, x: Tensor, fresh: Tensor, initial: Tensor, has_row: Tensor
) -> tuple[Tensor, None, None, None]:
    return where(FUNCTIONS["expand_dims"](has_row, -1), g, 0), None, None, None


# Rows x of a table, with the initial value of fresh ids. The gradient of each row goes to the
# table: the optimiser updates a fresh row from its initial value. So the gradient is not that of
# `where`, and the samples, for finite differences, have no fresh row. It is 0 for ids without a
# row.
first_values: Op = register(
    Op(
        "first_values",
        infer=_infer_first_values,
        kernel=lambda xp, x, fresh, initial, has_row: xp.where(fresh[..., None], initial, x),
        into=_first_values_into,
        leading=lambda: (0, 1, 2, 3),
        vjp=_first_values_vjp,
        sharding=lambda x, fresh, initial, has_row: equation(
            [letters(x.rank), letters(x.rank - 1), letters(x.rank), letters(x.rank - 1)],
            [letters(x.rank)],
        ),
        cost=lambda x, fresh, initial, has_row: Cost(flops=product(x.shape)),
        samples=(
            sample(
                spec("float32", (3, 2)), _FLAGS, spec("float32", (3, 2)), _FLAGS, fixed=(2,),
                make=lambda xs: [xs[0], np.zeros_like(xs[1]), xs[2], np.ones_like(xs[3])],
            ),
        ),
    )
)  # fmt: skip
