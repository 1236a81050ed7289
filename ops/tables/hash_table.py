"""Tables of any ids: a row for each id, found by hashing, without collisions. Public in `gf.nn`."""

from __future__ import annotations

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
from graphflow.ops.pointwise.select import stop_gradient_unless
from graphflow.ops.tables.hash_index import HashLayout, find, insert_ids
from graphflow.ops.tables.row_values import draw_rows, first_values, table_rows
from graphflow.ops.tensors.take import as_indices, take

NO_OWNER = np.iinfo(np.int64).min
"""The owner of a row that was never set."""


# The ops ----------------------------------------------------------------------------------------


def _layout(attrs: dict[str, Any]) -> HashLayout:
    return HashLayout(**{name: attrs[name] for name in ("capacity", "admit", "evict", "lifetime")})


def _infer_find(state: TensorSpec, ids: TensorSpec, **attrs: Any) -> tuple[TensorSpec, ...]:
    _require_state(state, ids, attrs)
    long, flags = np.dtype("int64"), np.dtype("bool")
    return TensorSpec(ids.shape, long), TensorSpec(ids.shape, flags), TensorSpec((), long)


def _require_state(state: TensorSpec, ids: TensorSpec, attrs: dict[str, Any]) -> None:
    require_kind(state, "int")
    require_kind(ids, "int")
    length = _layout(attrs).length
    equate(state.shape[0], length, f"a hash table of {attrs['capacity']} rows has {state}")


def _infer_insert(
    state: TensorSpec, ids: TensorSpec, entries: TensorSpec, evicted: TensorSpec, **attrs: Any
) -> TensorSpec:
    _require_state(state, ids, attrs)
    require_kind(entries, "int")
    require_kind(evicted, "int")
    return state


def _find_kernel(xp: Any, state: Any, ids: Any, insert: bool, **attrs: Any) -> tuple[Any, ...]:
    entries, fresh, evicted = find(state, ids, _layout(attrs), insert)
    return entries, fresh, np.asarray(evicted, np.int64)


def _insert_into(
    xp: Any, out: Any, state: Any, ids: Any, entries: Any, evicted: Any, **attrs: Any
) -> None:
    if out is not state:
        xp.copyto(out, state)
    insert_ids(out, ids, entries, int(evicted), _layout(attrs))


def _insert_kernel(xp: Any, state: Any, *others: Any, **attrs: Any) -> Any:
    out = xp.empty(state.shape, state.dtype)
    _insert_into(xp, out, state, *others, **attrs)
    return out


def _find_cost(state: TensorSpec, ids: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=ids.size * 100, bytes=ids.nbytes * 16)


_CALL: dict[str, Any] = {"capacity": 4, "admit": 1, "evict": True, "lifetime": None}
_STATE, _IDS = spec("int64", (HashLayout(4).length,)), spec("int64", (2, 2))


def _empty_state(arrays: list[Any]) -> list[Any]:
    """Return the arrays of a sample with an empty table; entries as `find` gives them."""
    state = np.full_like(arrays[0], -1)
    found = find(state, arrays[1], HashLayout(4), True)
    return [state, arrays[1], found.entries, np.asarray(found.evicted)][: len(arrays)]


# (state, ids) -> where the ids are: their entries, whether they read initial values, and how many
# ids lose their rows (see hash_index.py). With `insert` new ids get rows, which hash_insert writes.
hash_find: Op = register(
    Op(
        "hash_find",
        infer=_infer_find,
        kernel=_find_kernel,
        cost=_find_cost,
        samples=tuple(
            sample(_STATE, _IDS, insert=insert, make=_empty_state, **_CALL)
            for insert in (False, True)
        ),
        device_kinds=("cpu",),
    )
)

# The state after the ids got the entries that hash_find gave them. A commit changes these alone.
hash_insert: Op = register(
    Op(
        "hash_insert",
        infer=_infer_insert,
        kernel=_insert_kernel,
        into=_insert_into,
        cost=lambda state, ids, entries, evicted, **attrs: _find_cost(state, ids),
        samples=(sample(_STATE, _IDS, _IDS, spec("int64", ()), make=_empty_state, **_CALL),),
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
        evict: whose rows new ids get in a full table. "lru": the ids that were not seen for
            longest; "ttl:100": ids that were not seen in the last 100 training steps, which then
            read their initial value again; None: none.
        initial: the values of a new row, a `gf.init` initializer of shape (dim,); default: normal
            with standard deviation 0.05.

    Attributes:
        evicted: int64 scalar, how many ids lost their rows so far.
        stored: int64 scalar, how many ids have a row.

    A step with more new ids than rows for them raises `TableFullError`, which is an `OpError` and a
    `MemoryLimitError`, and changes nothing. Call the layer once in a training block, on all ids of
    a step, since its variables have one new value in a step.

    Variables: `weight` (capacity + 1, dim), whose last row stands for ids without a row; buffers
    `owners` (capacity + 1,), the id that each row was last trained for, and `state`: the ids, when
    they were last seen and how often, int64.
    """

    weight: Tensor
    owners: Tensor
    state: Tensor
    layout: HashLayout
    initial: Initializer

    def __init__(
        self, dim: int, capacity: int, admit: int = 1, evict: str | None = "lru",
        initial: Initializer | None = None, *, dtype: Any = "float32", name: str = "hash_table",
    ) -> None:  # fmt: skip
        require_sizes(self, dim=dim, capacity=capacity, admit=admit)
        with error_location("HashTable"):
            lifetime = _lifetime(evict)
            first = init.normal((dim,), dtype=dtype) if initial is None else initial
            if not isinstance(first, Initializer) or first.shape != (dim,):
                raise ArgumentError(
                    f"initial must be an initializer of shape ({dim},), such as "
                    f"gf.init.uniform(({dim},)), got {initial!r}"
                )
        layout = HashLayout(int(capacity), int(admit), evict == "lru", lifetime)
        set_attributes(self, layout=layout, initial=first.with_dtype(dtype))
        with self.scope(name):
            weight = parameter("weight", init.hashed_rows((layout.capacity + 1, int(dim)), dtype))
            state = init.full((layout.length,), -1, "int64")
            set_attributes(self, weight=weight, state=parameter("state", state, trainable=False))
            with origin_scope(weight.node, prefix_of(weight.node)):  # laid out as the rows are
                owners = init.full(weight.shape[:1], int(NO_OWNER), "int64")
                set_attributes(self, owners=parameter("owners", owners, trainable=False))

    @property
    def evicted(self) -> Tensor:
        """How many ids lost their rows so far: int64 scalar."""
        number: Tensor = self.state[2] + 1
        return number

    @property
    def stored(self) -> Tensor:
        """How many ids have a row: int64 scalar."""
        start = self.layout.length - 2 * self.layout.entries
        used = self.state[start : start + self.layout.capacity]
        number: Tensor = FUNCTIONS["sum"](astype(used >= 0, "int64"))
        return number

    def __call__(self, ids: Any) -> Tensor:
        ids, updates = as_indices(ids), current_updates()
        require_kind(ids.spec, "int")
        ids = astype(ids, "int64")
        if any(self.state in update.node.inputs[0].node.inputs for update in updates or ()):
            raise ArgumentError(
                "a HashTable is called once in a training block, since its variables have one new "
                "value in a step; look up all ids at once and take parts of the result"
            )
        layout, first = self.layout, self.initial
        attrs = {name: getattr(layout, name) for name in ("capacity", "admit", "evict", "lifetime")}
        entries, fresh, evicted = hash_find(self.state, ids, insert=updates is not None, **attrs)
        if updates is not None:
            new = hash_insert(self.state, ids, entries, evicted, **attrs)
            # fetched as None, so that no step copies the whole state
            updates.append(REGISTRY["group"](assign(self.state, new), name="store"))
        rows = FUNCTIONS["minimum"](entries, layout.capacity)
        held = take(self.owners, rows, 0)
        fresh = FUNCTIONS["logical_or"](fresh, FUNCTIONS["not_equal"](held, ids))
        initial = draw_rows(
            ids, fresh, size=self.weight.shape[1], dtype=self.weight.dtype.name, kind=first.kind,
            a=first.a, b=first.b, table=first.stream,
        )  # fmt: skip
        rows = table_rows(rows, ids, held, fresh, initial)
        values = first_values(take(self.weight, rows, 0), fresh, initial)
        has_row = FUNCTIONS["expand_dims"](entries < layout.capacity, -1)
        return stop_gradient_unless(has_row, values)


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
