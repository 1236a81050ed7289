"""The tables of a window at one party: what a server's loop and a worker's loop do with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.frontend.concurrent_loops import Party, PartyChannel
from graphflow.ir.op import FUNCTIONS, Node, Tensor, origin_scope
from graphflow.parallel.served_tables.table_route import PulledRows, TableRoute, WorkingSet
from graphflow.parallel.servers.consistency import Rules, one_hot
from graphflow.parallel.servers.party_copy import PartyCopy

States = list[list[Tensor]]
"""For each table, the rows of its states that a server's loop carries."""


class ServerTables:
    """The tables at one server.

    Args:
        server: its number.
        rules: the rules of the window.
        routes: the route of each table.
        pieces: for each table, the server's pieces of its states.
        batches: for each placeholder of the batch that ids follow from, its micro-batches.
        outside: the values of other placeholders that ids follow from.
        copy: writes nodes on the server's device.
        relays: in a pool, for each other server, the channels by which the first server tells it
            the next micro-batch of each worker. At another server, its own channels only.
    """

    def __init__(
        self,
        server: int,
        rules: Rules,
        routes: Sequence[TableRoute],
        pieces: Sequence[Sequence[Tensor]],
        batches: Mapping[Node, Tensor],
        outside: Mapping[Node, Tensor],
        copy: PartyCopy,
        relays: Sequence[Sequence[PartyChannel]],
    ) -> None:
        self._server = server
        self._rules = rules
        self._routes = routes
        self._pieces = pieces
        self._batches = batches
        self._outside = outside
        self._copy = copy
        self._relays = relays
        self._opened: list[WorkingSet] = []

    def open(self) -> States:
        """Read the rows that the window uses; return what the loop carries."""
        self._opened = [
            route.open(self._server, own, self._select_feeds(self._batches, route),
                       self._select_feeds(self._outside, route), self._copy.write)
            for route, own in zip(self._routes, self._pieces, strict=True)
        ]  # fmt: skip
        return [rows.states for rows in self._opened]

    def first_answer(self, party: Party) -> None:
        """Send each worker the rows of its first micro-batch."""
        numbers = FUNCTIONS["arange"](self._rules.turns.workers, dtype="int32")
        for route, rows in zip(self._routes, self._opened, strict=True):
            route.answer_each(party, self._server, rows, numbers, None)

    def take(self, party: Party, which: Tensor) -> list[Tensor]:
        """Receive what a worker pushes of each table."""
        return [route.take(party, self._server, which) for route in self._routes]

    def update(
        self, states: States, micro: Tensor, sums: Sequence[Tensor], values: Mapping[Tensor, Tensor]
    ) -> States:
        """Return the rows after an update.

        Args:
            states: the rows before it.
            micro: the micro-batches of its pushes, int32 (M,).
            sums: for each table, what they pushed.
            values: the values of what updates read beside rows.
        """
        return [
            route.update(rows, micro, own, values, self._write_again)
            for route, rows, own in zip(self._routes, self._now(states), sums, strict=True)
        ]

    def answer(
        self, party: Party, states: States, light: Mapping[str, Any], which: Tensor, mask: Tensor
    ) -> None:
        """Send rows to the workers that are answered after a push.

        Args:
            party: the server.
            states: the rows.
            light: what the server's loop carries beside; of the first server of a pool, before the
                next micro-batch is dealt.
            which: the worker that has just pushed.
            mask: bool, (workers,): the workers that are answered.
        """
        rules, turns = self._rules, self._rules.turns
        if not self._routes or rules.rows_at_once:
            return
        rows = self._now(states)
        last = np.int32(turns.total - 1)
        if not rules.is_pool and rules.consistency != "async":
            numbers = np.arange(turns.workers, dtype=np.int32)
            numbers = FUNCTIONS["minimum"](
                light["clocks"] * np.int32(turns.workers) + numbers, last
            )
            for route, own in zip(self._routes, rows, strict=True):
                route.answer_each(party, self._server, own, numbers, mask)
            return
        if not rules.is_pool:
            self.answer_pusher(party, states, light, which)
            return
        number = self._next_number(party, light, which)
        for route, own in zip(self._routes, rows, strict=True):
            route.answer(party, self._server, own, number, mask)

    def answer_pusher(
        self, party: Party, states: States, light: Mapping[str, Any], which: Tensor
    ) -> None:
        """Send the worker that has just pushed the rows of its next turn, unless it has none; the
        arguments are those of `answer`."""
        turns = self._rules.turns
        clock = FUNCTIONS["take"](light["clocks"], which, 0)
        last = np.int32(turns.total - 1)
        number = FUNCTIONS["minimum"](clock * np.int32(turns.workers) + which, last)
        goes_on = light["clocks"] < np.int32(turns.each)
        mask = FUNCTIONS["logical_and"](one_hot(which, turns.workers), goes_on)
        for route, own in zip(self._routes, self._now(states), strict=True):
            route.answer(party, self._server, own, number, mask)

    def _next_number(self, party: Party, light: Mapping[str, Any], which: Tensor) -> Tensor:
        """Return the micro-batch that the worker takes next; it may be any if there is none."""
        if self._server:
            return party.merge(self._relays[0], which)[1]
        last = np.int32(self._rules.turns.total - 1)
        number: Tensor = FUNCTIONS["minimum"](light["dealt"], last)
        own = one_hot(which, self._rules.turns.workers)
        for channels in self._relays:
            party.send_where(channels, number, own)
        return number

    def results(self, states: States) -> list[WorkingSet]:
        """Return the working sets at the end of the window."""
        return self._now(states)

    def _now(self, states: States) -> list[WorkingSet]:
        return [
            rows._replace(states=own) for rows, own in zip(self._opened, states, strict=True)
        ]  # fmt: skip

    def _select_feeds(self, values: Mapping[Node, Tensor], route: TableRoute) -> dict[Node, Tensor]:
        return {node: values[node] for node in route.feeds if node in values}

    def _write_again(
        self, node: Node, inputs: tuple[Tensor, ...], more: Mapping[str, object]
    ) -> Node:
        with origin_scope(node, "", self._copy.device_of(node)):
            return self._copy.node(node, inputs, more)


class WorkerTables:
    """The tables in the turns of one worker.

    Args:
        worker: its number.
        routes: the route of each table.
        copy: writes nodes on the worker's device.
    """

    def __init__(self, worker: int, routes: Sequence[TableRoute], copy: PartyCopy) -> None:
        self._worker = worker
        self._routes = routes
        self._copy = copy

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of looked-up rows, in the step."""
        return [each.gradient for r in self._routes for each in r.table.update.lookups]

    def pull(self, party: Party, mapped: dict[Tensor, Tensor]) -> list[PulledRows]:
        """Receive the rows of a turn; `mapped` gets the results of lookups."""
        return [
            route.pull(party, self._worker, mapped, self._copy.write) for route in self._routes
        ]  # fmt: skip

    def push(
        self, party: Party, mapped: Mapping[Tensor, Tensor], pulled: Sequence[PulledRows]
    ) -> None:
        """Send the gradients of the rows of a turn."""
        for route, own in zip(self._routes, pulled, strict=True):
            route.push(party, self._worker, mapped, own)


__all__ = ["ServerTables", "States", "WorkerTables"]
