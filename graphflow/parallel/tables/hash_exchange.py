"""Lookups and updates of hash tables by the owners of their parts.

    place that looks up                        owner of some parts
    ids ─route_ids→ keys        ──keys──→      ─merge_ids→ the distinct ids that all ask for
                                               the lookup's own nodes, on its parts of the table
    ─place_rows→ a row for each id ←──rows──   ─read_rows→ the rows of each place
    gradients ─split_row_sums→ sums ─gradients→ ─merge_row_sums→ gradient, the optimiser's nodes

So an owner does what one device does with a batch of the distinct ids. It has the index of its
parts: it gives rows to new ids, takes them from others, and draws initial values by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, as_tensor, make_node
from graphflow.ir.spec import Size, minimum
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import SentTensor, ShardedTensor
from graphflow.parallel.mesh.row_ranges import RowRanges
from graphflow.parallel.tables.hash_lookups import HashLookup
from graphflow.parallel.tables.row_exchange import RowExchange
from graphflow.parallel.tables.row_routes import LookupRoutes, RowRoute
from graphflow.parallel.tables.row_updates import RowUpdate


@dataclass(frozen=True, eq=False)
class OwnedIds:
    """A lookup at the owner of some parts: that of the distinct ids that places ask for.

    Attributes:
        keys: the keys of each place, one after the other.
        inverse: the position of each key among the ids; -1 for padding.
        places: for the keys of each place, these positions from 1 on; 0 for padding.
        values: the values of the ids' rows; those of padding need not be computed.
        now: what stands at the owner for each tensor of the lookup.
    """

    keys: tuple[Tensor, ...]
    inverse: Tensor
    places: tuple[Tensor, ...]
    values: Tensor
    now: dict[Tensor, Tensor]


class HashExchange(RowExchange):
    """Writes the lookups and updates of tables, and those of hash tables."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        hashed = self._tables.hashed
        self._lookups = {node: lookup for lookup in hashed for node in lookup.nodes}
        self._by_rows = {lookup.rows: lookup for lookup in hashed}
        self._states = {lookup.table: lookup.state for lookup in hashed}

    def emit_lookup(self, node: Node) -> bool:
        """Write a node that looks up rows, or belongs to a lookup. Return False if it is no such
        node."""
        lookup = self._lookups.get(node)
        if lookup is None:
            return super().emit_lookup(node)
        if node is lookup.nodes[0]:
            self._complete_sums(node, [lookup.ids])
            values = lookup.values.node
            found = self._route(lookup.table, lookup.rows, values)
            self._emit_rows(values, lookup.table, found)
            self._emit_index(lookup, found)
        return True

    def _emit_index(self, lookup: HashLookup, found: LookupRoutes) -> None:
        """Record the new index of each owner, and the keys that copies of an owner get, too."""
        asked: dict[SentTensor, float] = {}
        owned = [self._owned_ids(lookup, place) for place in self._mesh.places]
        for owner, own in zip(self._mesh.places, owned, strict=True):
            axis = self._tables.axes[lookup.table]
            readers = self._mesh.group(owner, axis)
            for source, keys in zip(self._sources(found, owner), own.keys, strict=True):
                if source not in readers:
                    asked |= self._row_bytes(lookup.values.node, keys, source, owner)
        self._log(lookup.values.node, "keys", asked)
        if lookup.insert is not None:
            (new,) = lookup.insert.outputs
            layout = self._values[lookup.state.outputs[0]].layout
            shards = tuple(own.now[new] for own in owned)
            self._values[new] = ShardedTensor(new.spec, layout, shards)

    # Lookups --------------------------------------------------------------------------------------

    def _route(self, table: Node, ids: Tensor, cause: Node) -> LookupRoutes:
        lookup = self._by_rows.get(ids)
        return super()._route(table, ids if lookup is None else lookup.ids, cause)

    def _route_at(self, table: Node, ids: Tensor, place: Place, cause: Node) -> RowRoute:
        if table not in self._states:
            return super()._route_at(table, ids, place, cause)
        ranges = self._parts(table)
        count = ranges.count

        def build() -> RowRoute:
            owners = as_tensor(np.array(ranges.owners, np.int64))
            made = make_node(REGISTRY["route_ids"], (ids, owners), {"count": count})
            inverse, *others = made.outputs
            numbers, keys = others[:count], others[count:]
            sent = self._mark_used(table, ids, keys, numbers)
            return RowRoute(inverse, tuple(numbers), tuple(keys), tuple(sent))

        return self._build_once(cause, place, ("route", table, ids), build)

    def _most_keys(self, table: Node, ids: Tensor) -> tuple[Size, ...]:
        if table not in self._states:
            return super()._most_keys(table, ids)
        return (ids.size,) * self._parts(table).count

    def _read(self, node: Node, table: Node, owner: Place, keys: Tensor, ids: Tensor) -> Tensor:
        lookup = self._lookups.get(node)
        if lookup is None:
            return super()._read(node, table, owner, keys, ids)
        own = self._owned_ids(lookup, owner)
        asked = next(
            place for place, each in zip(own.places, own.keys, strict=True) if each is keys
        )
        return self._read_at(node, table, owner, own.values, asked, ids)

    def _sources(self, found: LookupRoutes, owner: Place) -> Sequence[Place]:
        """Return the places whose ids an owner looks up: with other ids each."""
        return self._mesh.group(owner, *found.batch_axes)

    def _owned_ids(self, lookup: HashLookup, owner: Place) -> OwnedIds:
        """Write a lookup's nodes at the owner of some parts."""
        found = self._route(lookup.table, lookup.rows, lookup.values.node)
        number = self._mesh.coordinate(owner, self._tables.axes[lookup.table])
        keys = tuple(
            self._keys(found, number, source, owner) for source in self._sources(found, owner)
        )

        def build() -> OwnedIds:
            ids, counts, inverse = make_node(REGISTRY["merge_ids"], keys, {}).outputs
            more = (counts, self._places(lookup.table, number))
            now = {lookup.ids: ids}
            for node in lookup.nodes:
                inputs = [now[t] if t in now else self._value_at(t, owner) for t in node.inputs]
                further = more if node in (lookup.nodes[0], lookup.insert) else ()
                made = make_node(node.op, (*inputs, *further), node.attrs, node.name)
                now.update(zip(node.outputs, made.outputs, strict=True))
                if lookup.fresh.node is node:  # nothing is drawn for padding
                    occurs = FUNCTIONS["greater"](counts, 0)
                    now[lookup.fresh] = FUNCTIONS["logical_and"](now[lookup.fresh], occurs)
            starts = accumulate((each.shape[0] for each in keys), initial=0)
            bounds = pairwise(starts)
            places = tuple(inverse[start:stop] + 1 for start, stop in bounds)
            used = make_node(REGISTRY["count_keys"], (counts,), {}).outputs[0]
            (values,) = self._mark_used(lookup.table, ids, [now[lookup.values]], [used])
            return OwnedIds(keys, inverse, places, values, now)

        shard = self._value_at(lookup.state.outputs[0], owner)
        return self._build_once(lookup.nodes[0], owner, ("ids", lookup, shard, *keys), build)

    # Updates --------------------------------------------------------------------------------------

    def _compute_rows(
        self,
        update: RowUpdate,
        keys: Sequence[Tensor],
        sums: Sequence[Sequence[Tensor]],
        shard: Tensor,
        owner: Place,
    ) -> dict[Tensor, Tensor]:
        lookup = self._by_rows.get(update.lookups[0].ids)
        if lookup is None:
            return super()._compute_rows(update, keys, sums, shard, owner)
        own, rest = self._owned_ids(lookup, owner), shard.shape[1:]
        rows, has_row = own.now[lookup.rows], own.now[lookup.has_row]
        count = rows.shape[0]
        starts = tuple(accumulate((each.shape[0] for each in own.keys[:-1]), initial=0))
        counts = [self._count(update.results[-1], each, owner) for each in own.places]
        inputs, place = (own.inverse, *counts, *sums[0]), {"starts": starts, "size": count}
        (total,) = make_node(REGISTRY["merge_row_sums"], inputs, place).outputs
        total = FUNCTIONS["where"](FUNCTIONS["expand_dims"](has_row, -1), total, 0)
        size = minimum(count, shard.shape[0])
        distinct = FUNCTIONS["unique_all"](rows, size)
        gradient = REGISTRY["take_grad"](total, distinct.inverse, shape=(size, *rest), axis=0)
        now = {
            update.rows: distinct.values,
            update.number: distinct.number,
            update.lookups[0].sums.outputs[0]: gradient,
        }
        for tensor, whole in update.firsts.items():
            now[tensor] = FUNCTIONS["take"](own.now[whole], distinct.indices, 0)
        return self._copy_update(update, now, size, owner)

    # Parts ----------------------------------------------------------------------------------------

    def _parts(self, table: Node) -> RowRanges:
        """Return the owners of a table's parts."""
        ranges = self._row_split(self._states[table]).ranges
        assert ranges is not None
        return ranges

    def _places(self, table: Node, owner: int) -> Tensor:
        """Return where in an owner's index each part is; -1 for those of others."""
        ranges = self._parts(table)
        own = np.array(ranges.owners) == owner
        return as_tensor(np.where(own, ranges.first_positions - ranges.starts[owner], -1))


__all__ = ["HashExchange", "OwnedIds"]
