"""Tables of any ids: a row for each id, found by hashing, without collisions. Public in `gf.nn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.init import Initializer
from graphflow.ir.op import (
    FUNCTIONS,
    REGISTRY,
    Cost,
    Op,
    Tensor,
    error_location,
    origin_scope,
    prefix_of,
    register,
    sample,
)
from graphflow.ir.spec import TensorSpec, equate, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    parameter,
    require_sizes,
    set_attributes,
)
from graphflow.ops.networks.training_mode import current_updates
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tables.hash_index import EVICTED, Asked, HashLayout, find, insert_ids
from graphflow.ops.tables.row_values import draw_rows, first_values, table_rows
from graphflow.ops.tensors.take import as_indices, take

NO_OWNER = np.iinfo(np.int64).min
"""The owner of a row that was never set."""
PART_ROWS = 4096
"""The least rows of a part, unless the user says how many parts there are."""
MAX_PARTS = 64
"""The most parts, unless the user says how many there are."""


# The ops ----------------------------------------------------------------------------------------


LAYOUT = ("capacity", "admit", "evict", "lifetime", "parts")
"""The attributes of ops that are those of `HashLayout`."""


def _layout(attrs: dict[str, Any]) -> HashLayout:
    return HashLayout(**{name: attrs[name] for name in LAYOUT})


def _require_asked(state: TensorSpec, asked: Sequence[TensorSpec], attrs: dict[str, Any]) -> None:
    """Refuse a state of another table, and ids that are no ints."""
    for each in (state, *asked):
        require_kind(each, "int")
    length = _layout(attrs).shape[1]
    equate(state.shape[1], length, f"a hash table of {attrs['capacity']} rows has {state}")


def _infer_find(state: TensorSpec, *asked: TensorSpec, **attrs: Any) -> tuple[TensorSpec, ...]:
    _require_asked(state, asked, attrs)
    long, shape = np.dtype("int64"), asked[0].shape
    found, fresh = TensorSpec(shape, long), TensorSpec(shape, np.dtype("bool"))
    return found, found, fresh, TensorSpec(state.shape[:1], long)


def _infer_insert(
    state: TensorSpec, entries: TensorSpec, evicted: TensorSpec, *asked: TensorSpec, **attrs: Any
) -> TensorSpec:
    _require_asked(state, (entries, evicted, *asked), attrs)
    return state


def _find_kernel(xp: Any, state: Any, *asked: Any, insert: bool, **attrs: Any) -> tuple[Any, ...]:
    return tuple(find(state, Asked(*asked), _layout(attrs), insert))


def _insert_into(
    xp: Any, out: Any, state: Any, entries: Any, evicted: Any, *asked: Any, **attrs: Any
) -> None:
    if out is not state:
        xp.copyto(out, state)
    insert_ids(out, Asked(*asked), entries, evicted, _layout(attrs))


def _insert_kernel(xp: Any, state: Any, *others: Any, **attrs: Any) -> Any:
    out = xp.empty(state.shape, state.dtype)
    _insert_into(xp, out, state, *others, **attrs)
    return out


def _find_cost(state: TensorSpec, ids: TensorSpec, *others: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=ids.size * 100, bytes=ids.nbytes * 16)


_CALL: dict[str, Any] = {"capacity": 8, "admit": 1, "evict": True, "lifetime": None, "parts": 2}
_STATE, _IDS = spec("int64", HashLayout(8, parts=2).shape), spec("int64", (2, 2))
_PARTS = spec("int64", (2,))


def _empty_state(arrays: list[Any]) -> list[Any]:
    """Return the arrays of a sample of `hash_find` with an empty table."""
    state, ids, *others = arrays
    return [np.full_like(state, -1), ids, *(np.array([1, 0]) + 0 * x for x in others)]


def _new_entries(arrays: list[Any]) -> list[Any]:
    """Return the arrays of a sample of `hash_insert`: entries are as `find` gives them."""
    state, ids = np.full_like(arrays[0], -1), arrays[3]
    found = find(state, Asked(ids), HashLayout(8, parts=2), True)
    return [state, found.entries, found.evicted, ids]


# (state, ids) -> where the ids are: their rows and entries, whether they read initial values, and
# how many ids of each part lose their rows (see hash_index.py). With `insert` new ids get rows,
# which hash_insert writes. Two more inputs are for the owner of some parts: how often each id
# counts, and the places of parts in its state (see `Asked`).
hash_find: Op = register(
    Op(
        "hash_find",
        infer=_infer_find,
        kernel=_find_kernel,
        cost=_find_cost,
        samples=(
            sample(_STATE, _IDS, insert=False, make=_empty_state, **_CALL),
            sample(_STATE, _IDS, insert=True, make=_empty_state, **_CALL),
            sample(_STATE, _IDS, _IDS, _PARTS, insert=True, make=_empty_state, **_CALL),
        ),
        device_kinds=("cpu",),
    )
)

# (state, entries, evicted, ids) -> the state after the ids got the entries that hash_find gave
# them, with the same further inputs. A commit changes these entries alone.
hash_insert: Op = register(
    Op(
        "hash_insert",
        infer=_infer_insert,
        kernel=_insert_kernel,
        into=_insert_into,
        cost=lambda state, entries, evicted, ids, *others, **attrs: _find_cost(state, ids),
        samples=(sample(_STATE, _IDS, _PARTS, _IDS, make=_new_entries, **_CALL),),
        in_place=True,
        device_kinds=("cpu",),
    )
)


# The layer --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class HashTable(Layer):
    """A table with a row for each id that occurs: any ints of shape s to floats (*s, dim).

    In a `gf.nn.training` block, new ids get rows. The block's list collects the node that stores
    them; fetch it in the step that trains. A new id reads its initial value, and the
    optimiser updates the row from that value, with new slots. Initial values depend on the id, not
    on the order of ids or on the placement. Optimisers update the rows that a step looked up, and
    no others. Elsewhere, ids without a row read their initial value, and nothing is stored.

    Args:
        dim: elements of a row.
        capacity: most ids that have a row. Memory: a row of floats with its slots for each, and 40
            to 56 bytes of index, twice that with `admit` above 1.
        admit: appearances from which on an id has a row. Before, it reads its initial value and is
            not trained. As many ids as `capacity` are counted, those seen last.
        evict: whose rows new ids get in a full part. "lru": the ids that were not seen for
            longest; "ttl:100": ids that were not seen in the last 100 training steps, which then
            read their initial value again; None: none.
        initial: the values of a new row, a `gf.init` initializer of shape (dim,); default: normal
            with standard deviation 0.05.
        parts: the table consists of so many parts of `capacity / parts` rows, and a hash of an id
            says in which part it is. Strategies divide a table by whole parts, so no number
            depends on the workers. Default: one part for each 4,096 rows, at most 64. A part of
            16,000 rows is full when the table holds about 98 % of `capacity`, one of 4,000 at 96 %.

    Attributes:
        evicted: int64 scalar, how many ids lost their rows so far.
        stored: int64 scalar, how many ids have a row.

    A step with more new ids than a part has rows for them raises `TableFullError`, which is an
    `OpError` and a `MemoryLimitError`, and changes nothing. Call the layer once in a training
    block, on all ids of a step, since its variables have one new value in a step.

    Variables: `weight` (parts · (capacity / parts + 1), dim): each part has one more row at its
    end, for ids without a row; buffers `owners`, the id that each row was last trained for, and
    `state` (parts, …): the ids, when they were last seen and how often, int64.
    """

    weight: Tensor
    owners: Tensor
    index: Tensor
    layout: HashLayout
    initial: Initializer

    def __init__(
        self, dim: int, capacity: int, admit: int = 1, evict: str | None = "lru",
        initial: Initializer | None = None, *, parts: int | None = None, dtype: Any = "float32",
        name: str = "hash_table",
    ) -> None:  # fmt: skip
        require_sizes(self, dim=dim, capacity=capacity, admit=admit)
        if parts is not None:
            require_sizes(self, parts=parts)
        with error_location("HashTable"):
            lifetime = _lifetime(evict)
            first = init.normal((dim,), dtype=dtype) if initial is None else initial
            if not isinstance(first, Initializer) or first.shape != (dim,):
                raise ArgumentError(
                    f"initial must be an initializer of shape ({dim},), such as "
                    f"gf.init.uniform(({dim},)), got {initial!r}"
                )
            if parts is not None and parts > capacity:
                raise ArgumentError(f"parts must be at most the capacity, {capacity}, got {parts}")
        count = max(1, min(MAX_PARTS, capacity // PART_ROWS)) if parts is None else int(parts)
        layout = HashLayout(int(capacity), int(admit), evict == "lru", lifetime, count)
        set_attributes(self, layout=layout, initial=first.with_dtype(dtype))
        with self.scope(name):
            rows = layout.parts * (layout.rows + 1)
            weight = parameter("weight", init.hashed_rows((rows, int(dim)), dtype))
            state = init.full(layout.shape, -1, "int64")
            owners = init.full((rows,), int(NO_OWNER), "int64")
            with origin_scope(weight.node, prefix_of(weight.node)):  # laid out as the rows are
                set_attributes(
                    self, weight=weight, index=parameter("state", state, trainable=False),
                    owners=parameter("owners", owners, trainable=False),
                )  # fmt: skip

    @property
    def evicted(self) -> Tensor:
        """How many ids lost their rows so far: int64 scalar."""
        number: Tensor = FUNCTIONS["sum"](self.index[:, EVICTED] + 1)
        return number

    @property
    def stored(self) -> Tensor:
        """How many ids have a row: int64 scalar."""
        number: Tensor = FUNCTIONS["sum"](astype(self.index[:, self.layout.use] >= 0, "int64"))
        return number

    def __call__(self, ids: Any) -> Tensor:
        ids, updates = as_indices(ids), current_updates()
        require_kind(ids.spec, "int")
        ids = astype(ids, "int64")
        if any(self.index in update.node.inputs[0].node.inputs for update in updates or ()):
            raise ArgumentError(
                "a HashTable is called once in a training block, since its variables have one new "
                "value in a step; look up all ids at once and take parts of the result"
            )
        first, attrs = self.initial, {name: getattr(self.layout, name) for name in LAYOUT}
        rows, entries, fresh, evicted = hash_find(
            self.index, ids, insert=updates is not None, **attrs
        )
        if updates is not None:
            new = hash_insert(self.index, entries, evicted, ids, **attrs)
            # fetched as None, so that no step copies the whole state
            updates.append(REGISTRY["group"](assign(self.index, new), name="store"))
        held = take(self.owners, rows, 0)
        fresh = FUNCTIONS["logical_or"](fresh, FUNCTIONS["not_equal"](held, ids))
        initial = draw_rows(
            ids, fresh, size=self.weight.shape[1], dtype=self.weight.dtype.name, kind=first.kind,
            a=first.a, b=first.b, table=first.stream,
        )  # fmt: skip
        rows = table_rows(rows, ids, held, fresh, initial)
        has_row = FUNCTIONS["less"](entries, self.layout.rows)
        values: Tensor = first_values(take(self.weight, rows, 0), fresh, initial, has_row)
        return values


def _lifetime(evict: Any) -> int | None:
    """Return the steps after which an unused id is forgotten; None: it is not.

    Raises:
        ArgumentError: evict is no policy.
    """
    if evict is None or evict == "lru":
        return None
    kind, _, steps = evict.partition(":") if isinstance(evict, str) else ("", "", "")
    if kind == "ttl" and steps.isdecimal() and int(steps) > 0:
        return int(steps)
    raise ArgumentError(
        f'evict must be "lru", "ttl:<steps>" such as "ttl:1000", or None, got {evict!r}'
    )
