"""The route of a table's rows between servers and workers, in the loops of a window.

    server, once a window   ids of all turns ─window_rows→ keys ─read_rows→ working set
    server, each answer     keys of the worker's next turn ─read_rows→ rows       ──rows──→
    worker, each turn       ids ─route_rows→ …; rows ─place_rows→ a row for each id
                            gradients ─split_row_sums→ sums                       ←──sums──
    server, each update     sums of M pushes ─merge_row_sums→ the optimiser's nodes on these rows

Servers and workers are fed the ids, so no keys travel. The working set is a state of the server's
loop, which updates it in place. The window ends by writing these rows to the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graphflow.frontend import control_flow
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party, PartyChannel
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, as_tensor, make_node
from graphflow.ir.spec import Size, minimum, substitute
from graphflow.ops.communication.send_recv import expected_rows
from graphflow.ops.tensors.table_rows import piece_sizes
from graphflow.parallel.mesh.row_ranges import RowRanges
from graphflow.parallel.served_tables.table_selection import ServedTable

WriteNodes = Callable[[Sequence[Node], dict[Tensor, Tensor]], None]
"""Writes nodes of the step in a party, given the tensors that stand for those of the step."""


class WorkingSet(NamedTuple):
    """The rows of a server's piece that a window uses.

    Attributes:
        keys: their keys in the piece, ascending and padded with 0.
        number: how many there are.
        turns: for each micro-batch, the keys of its rows in the working set, padded with 0.
        states: the rows of each of the table's states.
    """

    keys: Tensor
    number: Tensor
    turns: Tensor
    states: list[Tensor]


class PulledRows(NamedTuple):
    """The rows that a turn pulled: the position of each id among them, and each server's number."""

    inverse: Tensor
    numbers: Sequence[Tensor]


class TableRoute:
    """Carries rows of a table between all servers and workers.

    Args:
        loops: the loops of the window.
        table: the table.
        ranges: the servers of its rows.
        sizes: the sizes that stand for symbols of the step in a turn.
        turns: the number of micro-batches of a window.
        workers: the number of workers.
    """

    def __init__(
        self,
        loops: ConcurrentLoops,
        table: ServedTable,
        ranges: RowRanges,
        sizes: Mapping[str, Size],
        turns: int,
        workers: int,
    ) -> None:
        self.table = table
        self.ranges = ranges
        self.workers = workers
        self.lookups: Size = sum((substitute(ids.size, sizes) for ids in table.ids), 0)
        self._turns = turns
        self._sizes = sizes
        self._id_nodes = Graph(table.ids).nodes
        self.most = piece_sizes(self.lookups, ranges.starts)
        (spec,) = table.node.specs

        def channels(count: Size) -> tuple[PartyChannel, ...]:
            shape = (count, *spec.shape[1:])
            return tuple(loops.channel(shape, spec.dtype.name, ragged=True) for _ in range(workers))

        self._rows = [channels(count) for count in self.most]
        self._sums = [channels(count) for count in self.most]

    @property
    def feeds(self) -> list[Node]:
        """The placeholders that the ids follow from."""
        return [node for node in self._id_nodes if node.op.name == "placeholder"]

    def expected_bytes(self, server: int, guess: Callable[[Size], int]) -> int:
        """Return the bytes of a server's rows that a turn looks up, if all rows are equally likely.

        Args:
            server: the number of the server.
            guess: returns a number for a size.
        """
        (spec,) = self.table.node.specs
        rows = expected_rows(guess(self.lookups), self.ranges.rows, self.ranges.sizes[server])
        return round(rows * int(spec.nbytes) / self.ranges.rows)

    # The worker -----------------------------------------------------------------------------------

    def pull(
        self, party: Party, worker: int, mapped: dict[Tensor, Tensor], write: WriteNodes
    ) -> PulledRows:
        """Receive the rows of a turn; `mapped` gets the results of the lookups."""
        ids = self._flat_ids(mapped, write)
        starts = self.ranges.starts
        attrs = {"starts": starts, "sizes": self.most, "width": self.ranges.width}
        inverse, *others = make_node(REGISTRY["route_rows"], (ids, self._first()), attrs).outputs
        numbers = others[: len(self.most)]
        parts = [party.receive(channels[worker]) for channels in self._rows]
        made = make_node(REGISTRY["place_rows"], (inverse, *numbers, *parts), {})
        (rows,) = made.outputs
        start: Size = 0
        found: dict[Tensor, Tensor] = {}
        for own in self.table.ids:
            count = mapped[own].size
            found[own] = rows if len(self.table.ids) == 1 else rows[start : start + count]
            start = start + count
        for lookup in self.table.lookups:
            own = lookup.inputs[1]
            shape = (*mapped[own].shape, *self.table.node.specs[0].shape[1:])
            mapped[lookup.outputs[0]] = _reshape(found[own], shape)
        return PulledRows(inverse, numbers)

    def push(
        self, party: Party, worker: int, mapped: Mapping[Tensor, Tensor], pulled: PulledRows
    ) -> None:
        """Send the gradients of the rows of a turn, each row's added up."""
        rest = self.table.node.specs[0].shape[1:]
        known = {each.ids: mapped[each.gradient] for each in self.table.update.lookups}
        parts = []
        for ids in self.table.ids:
            count = mapped[ids].size
            gradient = known.get(ids)
            if gradient is None:  # a lookup whose gradient stops
                gradient = FUNCTIONS["zeros"]((count, *rest), self.table.node.specs[0].dtype.name)
            parts.append(_reshape(gradient, (count, *rest)))
        flat = parts[0] if len(parts) == 1 else FUNCTIONS["concat"](parts, 0)
        inputs = (flat, pulled.inverse, *pulled.numbers)
        sums = make_node(REGISTRY["split_row_sums"], inputs, {"sizes": self.most}).outputs
        for server, (part, number) in enumerate(zip(sums, pulled.numbers, strict=True)):
            party.send(self._sums[server][worker], self._mark_used(server, part, number))

    # The server -----------------------------------------------------------------------------------

    def open(
        self,
        server: int,
        pieces: Sequence[Tensor],
        batches: Mapping[Node, Tensor],
        outside: Mapping[Node, Tensor],
        write: WriteNodes,
    ) -> WorkingSet:
        """Read the rows of a server's piece that the window uses.

        Args:
            server: the number of the server.
            pieces: the server's pieces of the table's states.
            batches: for each placeholder of the batch its micro-batches, (turns, b, …).
            outside: the values of other placeholders that the ids follow from.
            write: writes nodes of the step at the server.
        """

        def turn(carry: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            values = [*zip(batches, rows, strict=True), *outside.items()]
            return carry, self._flat_ids({node.outputs[0]: t for node, t in values}, write)

        _, ids = control_flow.scan(turn, np.int32(0), [*batches.values()], length=self._turns)
        starts = self.ranges.starts
        start, stop = starts[server], starts[server + 1]
        most = minimum(self.lookups * self._turns, stop - start)
        attrs = {
            "start": start, "stop": stop, "rows": self.ranges.rows, "most": most,
            "width": self.ranges.width,
        }  # fmt: skip
        keys, number, turns = make_node(
            REGISTRY["window_rows"], (ids, self._first()), attrs
        ).outputs
        return WorkingSet(keys, number, turns, [REGISTRY["read_rows"](p, keys) for p in pieces])

    def answer(
        self, party: Party, server: int, rows: WorkingSet, number: Tensor, mask: Tensor | None
    ) -> None:
        """Send the rows of a micro-batch to the workers of a mask.

        Args:
            party: the server.
            server: its number.
            rows: the working set.
            number: the micro-batch, int32.
            mask: bool, (workers,).
        """
        chosen, used = self._rows_of_turn(rows, number)
        party.send_where(self._rows[server], self._mark_used(server, chosen, used), mask)

    def answer_each(
        self,
        party: Party,
        server: int,
        rows: WorkingSet,
        numbers: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Send each worker of a mask, or all, the rows of its own next micro-batch.

        Args:
            party: the server.
            server: its number.
            rows: the working set.
            numbers: the micro-batch of each worker, int32 (workers,).
            mask: bool, (workers,); None: all.
        """
        for worker, channel in enumerate(self._rows[server]):

            def send(worker: int = worker, channel: PartyChannel = channel) -> None:
                chosen, used = self._rows_of_turn(rows, FUNCTIONS["take"](numbers, worker, 0))
                party.send(channel, self._mark_used(server, chosen, used))

            if mask is None:
                send()
            else:
                party.cond(FUNCTIONS["take"](mask, worker, 0), send, lambda: None)

    def take(self, party: Party, server: int, which: Tensor) -> Tensor:
        """Receive the sums of gradients of the worker whose push comes next."""
        return party.merge(self._sums[server], which)[1]

    def update(
        self,
        rows: WorkingSet,
        micro: Tensor,
        sums: Tensor,
        values: Mapping[Tensor, Tensor],
        write: Callable[[Node, tuple[Tensor, ...], Mapping[str, object]], Node],
    ) -> list[Tensor]:
        """Return the states after an update.

        Args:
            rows: the working set, before it.
            micro: the micro-batches of its pushes, int32 (M,).
            sums: what they pushed, (M, most, …).
            values: the values of `ServedTable.outside`.
            write: writes a node of the step again, with other inputs and further attributes.
        """
        update = self.table.update
        places, number, gradient = self._gradient(rows, micro, sums)
        zeros = FUNCTIONS["zeros_like"](gradient)
        now = {**values, update.rows: places, update.number: number}
        now |= {each.sums.outputs[0]: zeros for each in update.lookups[1:]}
        now[update.lookups[0].sums.outputs[0]] = gradient
        now |= {s.outputs[0]: t for s, t in zip(self.table.states, rows.states, strict=True)}
        for node in update.computed:
            more: dict[str, object] = {}
            if node.op.name == "reshape":
                more = {"shape": (places.shape[0], *node.attrs["shape"][1:])}
            made = write(node, tuple(now[t] for t in node.inputs), more)
            now.update(zip(node.outputs, made.outputs, strict=True))
        return [now[node.outputs[0]] for node in update.results]

    def _gradient(
        self, rows: WorkingSet, micro: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct rows of some pushes in the working set, their number, and the mean
        gradient of each."""
        keys = FUNCTIONS["take"](rows.turns, micro, 0)
        count = int(micro.shape[0])
        if count == 1:
            places = FUNCTIONS["maximum"](FUNCTIONS["astype"](keys[0], "int64") - 1, 0)
            return places, REGISTRY["count_keys"](keys[0]), sums[0]
        each = [keys[i] for i in range(count)]
        size = minimum(sum((k.shape[0] for k in each), 0), rows.keys.shape[0])
        places, inverse, number = make_node(
            REGISTRY["merge_keys"], tuple(each), {"size": size}
        ).outputs
        parts = [sums[i] for i in range(count)]
        counts = [REGISTRY["count_keys"](own) for own in each]
        first = tuple(i * each[0].shape[0] for i in range(count))
        place = {"starts": first, "size": size}
        inputs = (inverse, *counts, *parts)
        total = make_node(REGISTRY["merge_row_sums"], inputs, place).outputs[0]
        return places, number, total * (1.0 / count)

    def _rows_of_turn(self, rows: WorkingSet, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table's rows of a micro-batch, padded, and their number."""
        keys = FUNCTIONS["take"](rows.turns, number, 0)
        return REGISTRY["read_rows"](rows.states[-1], keys), REGISTRY["count_keys"](keys)

    # Both -----------------------------------------------------------------------------------------

    def _flat_ids(self, mapped: dict[Tensor, Tensor], write: WriteNodes) -> Tensor:
        """Return the ids of a turn, one after the other, int64; `mapped` gets them as they are."""
        write(self._id_nodes, mapped)
        parts = [
            FUNCTIONS["astype"](_reshape(mapped[t], (mapped[t].size,)), "int64")
            for t in self.table.ids
        ]
        flat: Tensor = parts[0] if len(parts) == 1 else FUNCTIONS["concat"](parts, 0)
        return flat

    def _first(self) -> Tensor:
        return as_tensor(self.ranges.first_positions)

    def _mark_used(self, server: int, part: Tensor, number: Tensor) -> Tensor:
        """Return a tensor of which only the rows in use travel."""
        piece = self.ranges.sizes[server]
        attrs = {"lookups": self.lookups, "rows": self.ranges.rows, "piece": piece}
        marked: Tensor = make_node(REGISTRY["used_rows"], (part, number), attrs).outputs[0]
        return marked


def _reshape(tensor: Tensor, shape: tuple[Size, ...]) -> Tensor:
    """Return a tensor in another shape; itself if it has that shape."""
    if tensor.shape == shape:
        return tensor
    made: Tensor = REGISTRY["reshape"](tensor, shape=shape)
    return made


__all__ = ["PulledRows", "TableRoute", "WorkingSet"]
