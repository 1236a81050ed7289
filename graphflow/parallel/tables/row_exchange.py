"""Lookups and updates of tables by the owners of rows: keys, rows and gradients between places.

    place that looks up                          owner of some rows
    ids ─route_rows→ keys        ──keys──→       ─count_keys, read_rows→ rows
    ─place_rows→ a row for each id ←──rows──
    gradients ─split_row_sums→ sums ──gradients──→ ─merge_keys, merge_row_sums→ gradient
                                                 the optimiser's nodes, on the rows asked for

Distinct rows travel, once in each direction, and only the rows in use of a buffer do
(`used_rows`); the others are not computed either. Places that have the same ids, because the batch
is not split along the table's mesh axis, know each other's keys and gradients: then only rows
travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar

from graphflow.ir.op import REGISTRY, Node, Tensor, as_tensor, make_node
from graphflow.ir.spec import Size, minimum
from graphflow.ops.communication.send_recv import expected_rows
from graphflow.ops.tensors.table_rows import piece_sizes
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Layout, SentTensor, ShardedTensor, whole
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.tables.row_routes import LookupRoutes, RowRoute
from graphflow.parallel.tables.row_updates import RowLookup, RowUpdate
from graphflow.parallel.tables.table_choice import OwnedTables

Values = dict[Tensor, ShardedTensor]
_T = TypeVar("_T")


class RowExchange:
    """Writes the lookups and updates of tables for all places of a mesh.

    Args:
        resharder: converts between layouts, and records what travels.
        tables: the tables.
        values: the sharded tensor that stands for each tensor so far.
        preferred: the preferred layouts.
        complete_sums: completes partial sums that a node reads.
    """

    def __init__(
        self,
        resharder: Resharder,
        tables: OwnedTables,
        values: Values,
        preferred: Mapping[Tensor, Layout],
        complete_sums: Callable[[Node, Sequence[Tensor]], None],
    ) -> None:
        self._resharder = resharder
        self._mesh = resharder.mesh
        self._tables = tables
        self._values = values
        self._preferred = preferred
        self._complete_sums = complete_sums
        self._routes: dict[tuple[Node, Tensor], LookupRoutes] = {}
        self._made: dict[Hashable, Any] = {}

    def emit_lookup(self, node: Node) -> bool:
        """Write a node that looks up rows of a table. Return False if it is no such node."""
        if not self._tables.is_lookup(node):
            return False
        table, ids = node.inputs
        self._complete_sums(node, node.inputs)
        self._emit_rows(node, table.node, self._route(table.node, ids, node))
        return True

    def _emit_rows(self, node: Node, table: Node, found: LookupRoutes) -> None:
        """Write a node whose output has the row of each id."""
        sent: dict[SentTensor, float] = {}
        asked: dict[SentTensor, float] = {}
        shards = [
            self._look_up(node, table, found, place, asked, sent) for place in self._mesh.places
        ]
        self._log(node, "keys", asked)
        self._log(node, "rows", sent)
        rest = (WHOLE,) * (table.specs[0].rank - 1)
        layout = Layout((*found.ids.layout.dims, *rest))
        self._values[node.outputs[0]] = ShardedTensor(node.specs[0], layout, tuple(shards))

    # Lookups --------------------------------------------------------------------------------------

    def _route(self, table: Node, ids: Tensor, cause: Node) -> LookupRoutes:
        """Return the routes of some ids of a table, which a lookup and its gradient share."""
        found = self._routes.get((table, ids))
        if found is None:
            given = self._split_ids(ids, cause)
            routes = [
                self._route_at(table, given.shards[number], place, cause)
                for number, place in enumerate(self._mesh.places)
            ]
            found = self._routes[table, ids] = LookupRoutes(given, tuple(routes))
        return found

    def _split_ids(self, ids: Tensor, cause: Node) -> ShardedTensor:
        """Return ids that are split as they are, or as their rows are wanted."""
        value = self._values[ids]
        dims = value.layout.dims
        wanted = self._preferred.get(cause.outputs[0])
        if not any(dims) and cause.op.name == "take" and wanted is not None:
            dims = wanted.dims[: ids.ndim]
        plain = (d.is_contiguous and d.over is None for d in dims)
        layout = Layout(tuple(d if p else WHOLE for d, p in zip(dims, plain, strict=True)))
        return self._resharder.convert(value, layout, cause, user_name(ids.node))

    def _route_at(self, table: Node, ids: Tensor, place: Place, cause: Node) -> RowRoute:
        """Find the distinct rows that a place looks up."""
        starts = self._starts(table)
        sizes = self._most_keys(table, ids)
        ranges = self._row_split(table).ranges

        def build() -> RowRoute:
            attrs: dict[str, Any] = {"starts": starts, "sizes": sizes}
            inputs: tuple[Tensor, ...] = (ids,)
            if ranges is not None:
                inputs, attrs["width"] = (ids, as_tensor(ranges.first_positions)), ranges.width
            made = make_node(REGISTRY["route_rows"], inputs, attrs)
            inverse, *others = made.outputs
            numbers, keys = others[: len(sizes)], others[len(sizes) :]
            sent = self._mark_used(table, ids, keys, numbers)
            return RowRoute(inverse, tuple(numbers), tuple(keys), tuple(sent))

        return self._build_once(cause, place, ("route", table, ids), build)

    def _look_up(
        self, node: Node, table: Node, found: LookupRoutes, place: Place,
        asked: dict[SentTensor, float], sent: dict[SentTensor, float],
    ) -> Tensor:  # fmt: skip
        """Return the rows that a place looks up; records the keys and rows that travel."""
        axis, route = self._tables.axes[table], self._part_at(found.routes, place)
        parts = []
        for number, owner in enumerate(self._mesh.group(place, axis)):
            source = place if axis in found.batch_axes else owner
            keys = self._keys(found, number, source, owner)
            asking = self._part_at(found.ids.shards, source)
            used = self._read(node, table, owner, keys, asking)
            parts.append(used)
            if owner != place:
                sent |= self._row_bytes(node, used, owner, place)
            if source != owner:
                asked |= self._row_bytes(node, keys, source, owner)
        ids = self._part_at(found.ids.shards, place)

        def build() -> Tensor:
            inputs = (route.inverse, *route.numbers, *parts)
            rows = make_node(REGISTRY["place_rows"], inputs, {}, node.name).outputs[0]
            return _reshape(rows, (*ids.shape, *node.specs[0].shape[ids.ndim :]))

        return self._build_once(node, place, ("lookup", route, *parts), build)

    def _keys(self, found: LookupRoutes, number: int, source: Place, owner: Place) -> Tensor:
        """Return the keys of owner number `number` that a place has, as another place reads
        them."""
        route = self._part_at(found.routes, source)
        return route.keys[number] if source == owner else route.sent[number]

    def _read(self, node: Node, table: Node, owner: Place, keys: Tensor, ids: Tensor) -> Tensor:
        """Return the rows that keys, those of some ids, ask an owner for."""
        shard = self._part_at(self._values[table.outputs[0]].shards, owner)
        return self._read_at(node, table, owner, shard, keys, ids)

    def _read_at(
        self, node: Node, table: Node, owner: Place, shard: Tensor, keys: Tensor, ids: Tensor
    ) -> Tensor:
        """Return the rows of an owner's tensor that keys, those of some ids, ask for."""
        number = self._mesh.coordinate(owner, self._tables.axes[table])

        def build() -> Tensor:
            used = self._count(node, keys, owner)
            rows = make_node(REGISTRY["read_rows"], (shard, keys), {}).outputs[0]
            return self._mark_used(table, ids, [rows], [used], number)[0]

        return self._build_once(node, owner, ("read", shard, keys), build)

    def _count(self, cause: Node, keys: Tensor, owner: Place) -> Tensor:
        """Return the number of rows that keys ask an owner for."""

        def build() -> Tensor:
            number: Tensor = make_node(REGISTRY["count_keys"], (keys,), {}).outputs[0]
            return number

        return self._build_once(cause, owner, ("count", keys), build)

    # Updates --------------------------------------------------------------------------------------

    def emit_update(self, update: RowUpdate) -> None:
        """Write the update of a table and its slots: each owner that of its own rows."""
        gradients, sent = [], dict[SentTensor, float]()
        for lookup in update.lookups:
            self._complete_sums(lookup.sums, [lookup.gradient])
            gradients.append(self._gradient(update, lookup))
        for node in update.computed:
            self._complete_outside(node, update)
        shards: dict[Tensor, list[Tensor]] = {node.outputs[0]: [] for node in update.results}
        for place in self._mesh.places:
            results = self._update_at(update, gradients, place, sent)
            for tensor, shard in results.items():
                shards[tensor].append(shard)
        self._log(update.lookups[0].sums, "gradients", sent)
        for node in update.results:
            layout = self._values[node.inputs[0]].layout
            self._values[node.outputs[0]] = ShardedTensor(
                node.specs[0], layout, tuple(shards[node.outputs[0]])
            )

    def _gradient(self, update: RowUpdate, lookup: RowLookup) -> ShardedTensor:
        """Return the gradient of a lookup's rows, split as its ids are."""
        found = self._route(update.table, lookup.ids, lookup.sums)
        value, dims = self._values[lookup.gradient], found.ids.layout.dims
        layout = Layout((*dims, *(WHOLE,) * (value.spec.rank - len(dims))))
        name = user_name(lookup.gradient.node)
        return self._resharder.convert(value, layout, lookup.sums, name)

    def _complete_outside(self, node: Node, update: RowUpdate) -> None:
        """Make what an update reads besides rows, such as rates, whole at each place."""
        for tensor in node.inputs:
            if tensor.node in update.replaced or tensor not in self._values:
                continue
            if tensor.node in update.states:
                continue
            self._complete_sums(node, [tensor])
            value = self._values[tensor]
            target = whole(tensor.ndim)
            name = user_name(tensor.node)
            self._values[tensor] = self._resharder.convert(value, target, node, name)

    def _update_at(
        self,
        update: RowUpdate,
        gradients: Sequence[ShardedTensor],
        owner: Place,
        sent: dict[SentTensor, float],
    ) -> dict[Tensor, Tensor]:
        """Return the new values of an owner's shards."""
        keys: list[Tensor] = []
        sums: list[list[Tensor]] = []
        number = self._mesh.coordinate(owner, self._tables.axes[update.table])
        for lookup, gradient in zip(update.lookups, gradients, strict=True):
            found = self._route(update.table, lookup.ids, lookup.sums)
            own = []
            for source in self._mesh.group(owner, *found.batch_axes):
                part = self._sums_at(update, lookup, gradient, source)[number]
                keys.append(self._keys(found, number, source, owner))
                own.append(part)
                if source != owner:
                    sent |= self._row_bytes(lookup.sums, part, source, owner)
            sums.append(own)
        shard = self._part_at(self._values[update.table.outputs[0]].shards, owner)

        def build() -> dict[Tensor, Tensor]:
            return self._compute_rows(update, keys, sums, shard, owner)

        key = ("update", update, shard, *keys, *(t for own in sums for t in own))
        return self._build_once(update.results[-1], owner, key, build)

    def _sums_at(
        self, update: RowUpdate, lookup: RowLookup, gradient: ShardedTensor, place: Place
    ) -> list[Tensor]:
        """Return, for each owner, the sums of a place's gradients."""
        found = self._route(update.table, lookup.ids, lookup.sums)
        route, part = self._part_at(found.routes, place), self._part_at(gradient.shards, place)
        ids = self._part_at(found.ids.shards, place)

        def build() -> list[Tensor]:
            flat = _reshape(part, (ids.size, *part.shape[ids.ndim :]))
            sizes = self._most_keys(update.table, ids)
            inputs = (flat, route.inverse, *route.numbers)
            made = make_node(REGISTRY["split_row_sums"], inputs, {"sizes": sizes}).outputs
            return self._mark_used(update.table, ids, made, route.numbers)

        return self._build_once(lookup.sums, place, ("sums", route, part), build)

    def _compute_rows(
        self, update: RowUpdate, keys: Sequence[Tensor], sums: Sequence[Sequence[Tensor]],
        shard: Tensor, owner: Place,
    ) -> dict[Tensor, Tensor]:  # fmt: skip
        """Write an update's nodes on the distinct rows that an owner was asked for."""
        count: Size = sum((k.shape[0] for k in keys[1:]), keys[0].shape[0])
        size = minimum(count, shard.shape[0])
        merged = make_node(REGISTRY["merge_keys"], tuple(keys), {"size": size})
        rows, inverse, number = merged.outputs
        now: dict[Tensor, Tensor] = {update.rows: rows, update.number: number}
        counts = iter([self._count(update.results[-1], each, owner) for each in keys])
        starts = accumulate((each.shape[0] for each in keys), initial=0)
        for lookup, own in zip(update.lookups, sums, strict=True):
            inputs = (inverse, *islice(counts, len(own)), *own)
            place = {"starts": tuple(islice(starts, len(own))), "size": size}
            made = make_node(REGISTRY["merge_row_sums"], inputs, place)
            now[lookup.sums.outputs[0]] = made.outputs[0]
        return self._copy_update(update, now, size, owner)

    def _copy_update(
        self, update: RowUpdate, now: dict[Tensor, Tensor], size: Size, owner: Place
    ) -> dict[Tensor, Tensor]:
        """Write the nodes that compute an update's rows, of which there are at most `size`.

        Args:
            now: what stands at the owner for the tensors that the nodes read; they add their own.
        """
        for node in update.computed:
            given = [now[t] if t in now else self._value_at(t, owner) for t in node.inputs]
            attrs = node.attrs
            if node.op.name == "reshape":
                attrs = {"shape": (size, *node.attrs["shape"][1:])}
            made = make_node(node.op, tuple(given), attrs, node.name)
            now.update(zip(node.outputs, made.outputs, strict=True))
        return {node.outputs[0]: now[node.outputs[0]] for node in update.results}

    def _value_at(self, tensor: Tensor, place: Place) -> Tensor:
        """Return what stands at a place for a tensor that an update only reads."""
        value = self._values.get(tensor)
        return tensor if value is None else self._part_at(value.shards, place)

    # Places ---------------------------------------------------------------------------------------

    def _part_at(self, parts: Sequence[_T], place: Place) -> _T:
        return parts[self._mesh.index_of(place)]

    def _build_once(self, cause: Node, place: Place, key: Hashable, build: Callable[[], _T]) -> _T:
        """Build something at a place; once for places that share a device and inputs."""
        key = (self._resharder.device_index(cause, place), key)
        if key not in self._made:
            with self._resharder.on_device(place, cause):
                self._made[key] = build()
        found: _T = self._made[key]
        return found

    def _row_split(self, table: Node) -> AxisSplit:
        """Return how the rows of a table are split."""
        return self._values[table.outputs[0]].layout.dims[0]

    def _starts(self, table: Node) -> tuple[int, ...]:
        """Return the first row of each owner's piece, and the number of rows."""
        rows, axis = table.specs[0].shape[0], self._tables.axes[table]
        group = self._mesh.group(self._mesh.places[0], axis)
        split = self._row_split(table)
        starts = [int(self._resharder.partitioner.piece(rows, split, p).start) for p in group]
        return (*starts, int(rows))

    def _most_keys(self, table: Node, ids: Tensor) -> tuple[Size, ...]:
        """Return the most keys of each owner among some ids."""
        return piece_sizes(ids.size, self._starts(table))

    def _mark_used(
        self,
        table: Node,
        ids: Tensor,
        parts: Sequence[Tensor],
        numbers: Sequence[Tensor],
        first: int = 0,
    ) -> list[Tensor]:
        """Return tensors of which only the rows in use travel, given the number of these rows.

        Args:
            ids: the ids that look the rows up.
            first: the owner of the rows of the first part; others follow.
        """
        pieces = [stop - start for start, stop in pairwise(self._starts(table))]
        made = []
        for part, number, piece in zip(parts, numbers, pieces[first:], strict=False):
            attrs = {"lookups": ids.size, "rows": sum(pieces), "piece": piece}
            made.append(make_node(REGISTRY["used_rows"], (part, number), attrs).outputs[0])
        return made

    # Records --------------------------------------------------------------------------------------

    def _row_bytes(
        self, cause: Node, tensor: Tensor, source: Place, to: Place
    ) -> dict[SentTensor, float]:
        """Return the bytes of a tensor's rows in use that travel to a place, as far as expected."""
        most = self._resharder.sent_bytes([(source, tensor)], to, cause)
        guess, attrs = self._resharder.partitioner.guess, tensor.node.attrs
        rows = expected_rows(guess(attrs["lookups"]), attrs["rows"], attrs["piece"])
        width = math.prod(map(guess, tensor.shape[1:])) * tensor.spec.dtype.itemsize
        return dict.fromkeys(most, rows * width)

    def _log(self, cause: Node, kind: str, sent: Mapping[SentTensor, float]) -> None:
        axes = list(self._tables.axes.values())
        CommunicationLog(self._resharder, cause, user_name(cause))(kind, axes[:1], sent)


def _reshape(tensor: Tensor, shape: tuple[Size, ...]) -> Tensor:
    """Return a tensor in another shape; itself if it has that shape."""
    if tensor.shape == shape:
        return tensor
    made: Tensor = REGISTRY["reshape"](tensor, shape=shape)
    return made


__all__ = ["RowExchange"]
