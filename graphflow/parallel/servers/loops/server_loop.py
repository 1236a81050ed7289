"""The loop of a server: it takes pushes in the order in which they come, updates, and answers.

    each update:  M pushes ─prepare, sum→ mean ─ServerUpdate.apply→ next values
    each push:    the workers that the rules choose are answered with the values

The loop carries the values of the server's variables. It stacks, for each push, the worker that it
came from and how many updates the worker's values lacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party, PartyChannel
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.parallel.served_tables.party_tables import ServerTables, States
from graphflow.parallel.served_tables.table_route import WorkingSet
from graphflow.parallel.servers.consistency import Rules, one_hot
from graphflow.parallel.servers.loops.bundles import Bundle
from graphflow.parallel.servers.loops.routes import PullRoute, PushRoute, Route
from graphflow.parallel.servers.loops.server_update import ServerUpdate
from graphflow.parallel.servers.step_cut import PushedTensor


class ServerPorts(NamedTuple):
    """The channels and routes between one server and all workers.

    Attributes:
        tickets: for each worker, the channel of the numbers of the micro-batches that it pushes.
        pushes: the route of each bundle of pushed tensors.
        fetched: the routes of what turns compute for fetches.
        pulls: the route of each bundle of variables that workers pull.
        numbers: for each worker, the channel of the next micro-batch, -1 for none; only of the
            first server of a pool. With backup workers: of the next round.
    """

    tickets: Sequence[PartyChannel]
    pushes: Mapping[Bundle[PushedTensor], PushRoute]
    fetched: Mapping[Tensor, PushRoute]
    pulls: Mapping[Bundle[Node], PullRoute]
    numbers: Sequence[PartyChannel]


class ServedResults(NamedTuple):
    """The results of a server's loop, after P pushes and U updates.

    Attributes:
        values: the variables' last values.
        order: the worker of each push, int32 (P,).
        staleness: the updates that each push's values lacked, int32 (P,).
        numbers: the micro-batch of each push, int32 (P,).
        fetched: what turns computed for fetches, (P, …), in the order of pushes.
        computed: what updates computed for fetches, (U, …).
        states: the last values of the states of routes and of the update, then the bytes of pulls
            that went through filters.
        rows: the rows of each table that the window used.
    """

    values: dict[Node, Tensor]
    order: Tensor
    staleness: Tensor
    numbers: Tensor
    fetched: list[Tensor]
    computed: list[Tensor]
    states: list[Tensor]
    rows: Sequence[WorkingSet] = ()


def make_tickets(loops: ConcurrentLoops, workers: int) -> list[PartyChannel]:
    """Return a channel of int32 numbers for each worker."""
    return [loops.channel((), "int32") for _ in range(workers)]


class ServerLoop:
    """The loop of one server.

    Args:
        rules: the rules of the window.
        update: the server's update.
        ports: its channels.
        values: the variables that it carries, with the tensors of their first values.
        outside: the values of what the update reads of the graph around the loops.
        order: the order of pushes to follow, int32 (P,), with -1 for any; None if it is fixed.
        tables: the tables.
    """

    def __init__(
        self,
        rules: Rules,
        update: ServerUpdate,
        ports: ServerPorts,
        values: Mapping[Node, Tensor],
        outside: Mapping[Node, Tensor],
        order: Tensor | None,
        tables: ServerTables,
    ) -> None:
        self._rules = rules
        self._tables = tables
        self._update = update
        self._ports = ports
        self._first = values
        self._outside = outside
        self._order = order
        self._pushes = [push for bundle in ports.pushes for push in bundle.items]
        self._states: list[Node] = [
            *(v for route in ports.pushes.values() for v in route.server_states()),
            *(v for route in ports.pulls.values() for v in route.server_states()),
            *update.first_state(),
        ]

    @property
    def states(self) -> Sequence[Node]:
        """The variables of the states of routes and of the update."""
        return self._states

    def __call__(self, party: Party) -> ServedResults:
        """Write the loop into a party."""
        rules, turns = self._rules, self._rules.turns
        rows = self._tables.open()
        light = self._first_light(party)
        light = self._send(party, light, self._first, None, np.int32(0))
        self._tables.first_answer(party)
        order: Any = self._order
        if order is None:
            order = np.tile(np.arange(turns.workers, dtype=np.int32), turns.each)
        wanted = FUNCTIONS["reshape"](order, (rules.updates, rules.aggregate))
        numbers = np.arange(rules.updates, dtype=np.int32)
        (values, rows, light), (pushed, computed) = party.scan(
            lambda state, x: self._turn(party, *state, *x),
            ([*self._first.values()], rows, light),
            (wanted, numbers),
        )
        flat = [
            FUNCTIONS["reshape"](each, (turns.total, *each.shape[2:]))
            for each in pushed
        ]  # fmt: skip
        which, staleness, micro, *fetched = flat
        last = dict(zip(self._first, values, strict=True))
        states = self._last_states(light)
        kept = self._tables.results(rows)
        return ServedResults(last, which, staleness, micro, fetched, computed, states, kept)

    def _last_states(self, light: Mapping[str, Any]) -> list[Tensor]:
        """Return the last values of the variables of states, then the bytes that were sent."""
        routes: list[Route] = [*self._ports.pushes.values(), *self._ports.pulls.values()]
        counts = [len(route.server_states()) for route in routes]
        counts.append(len(self._update.first_state()))
        every = (*light["pushes"], *light["pulls"], light["update"])
        last = [t for each, count in zip(every, counts, strict=True) for t in each[:count]]
        pulls = zip(self._ports.pulls.values(), light["pulls"], strict=True)
        return [*last, *(state[-1] for route, state in pulls if route.is_filtered)]

    def _first_light(self, party: Party) -> dict[str, Any]:
        """Return what the loop carries beside the values of variables, and may be sent between
        updates."""
        workers = self._rules.turns.workers

        light: dict[str, Any] = {
            "version": np.zeros(workers, np.int32),
            "clocks": np.zeros(workers, np.int32),
            "waiting": np.zeros(workers, np.bool_),
            "pushes": [route.open() for route in self._ports.pushes.values()],
            "pulls": [
                route.open(party, bundle.join([self._first[v] for v in bundle.items]))
                for bundle, route in self._ports.pulls.items()
            ],
            "update": [
                *(v.outputs[0] for v in self._update.first_state()),
                *self._update.open(self._first, workers),
            ],
        }
        if self._rules.is_pool and self._ports.numbers:
            light["dealt"] = np.int32(workers)
        return light

    def _turn(
        self,
        party: Party,
        values: list[Tensor],
        tables: States,
        light: Any,
        wanted: Tensor,
        number: Tensor,
    ) -> Any:
        """Take the pushes of one update, apply it, and answer."""
        held = dict(zip(self._first, values, strict=True))
        sums: list[Any] = []
        stacked: list[Tensor] = []
        before, at_once = self._rules.aggregate - 1, self._rules.rows_at_once
        if before:
            specs = [push.value.spec for push in self._pushes]
            zeros = [FUNCTIONS["zeros"](spec.shape, spec.dtype.name) for spec in specs]

            def take(state: Any, order: Tensor) -> Any:
                light, sums, moving = state
                light, pushed, row = self._take(party, light, order, number, held)
                light = self._answer(party, light, held, tables, row[0], number, is_update=False)
                moving, row = self._update_at_once(party, moving, light, row, held)
                return (light, [a + b for a, b in zip(sums, pushed, strict=True)], moving), row

            first = (light, zeros, tables if at_once else [])
            (light, sums, moving), stacked = party.scan(take, first, wanted[:before])
            tables = moving if at_once else tables
        light, pushed, row = self._take(party, light, wanted[before], number, held)
        if at_once:
            tables, row = self._update_at_once(party, tables, light, row, held)
        totals = [a + b for a, b in zip(sums, pushed, strict=True)] if before else pushed
        share = 1.0 / self._rules.aggregate
        means = {
            push: total * share if before else total
            for push, total in zip(self._pushes, totals, strict=True)
        }
        after, computed, read = self._update.apply(held, means, self._outside)
        rows = [FUNCTIONS["expand_dims"](each, 0) for each in row]
        if before:
            rows = [
                FUNCTIONS["concat"]([a, b], 0) for a, b in zip(stacked, rows, strict=True)
            ]  # fmt: skip
        kept = len(rows) - (0 if at_once else len(tables))
        if not at_once:
            tables = self._tables.update(tables, rows[2], rows[kept:], read)
        version = number + np.int32(1)
        light = self._answer(party, light, after, tables, row[0], version, is_update=True)
        return ([after[v] for v in self._first], tables, light), (rows[:kept], computed)

    def _update_at_once(
        self,
        party: Party,
        tables: States,
        light: Any,
        row: list[Tensor],
        held: Mapping[Node, Tensor],
    ) -> tuple[States, list[Tensor]]:
        """Update the rows of tables by one push, and answer its worker with rows.

        Returns:
            The rows, and what is stacked of the push.
        """
        if not tables:
            return tables, row
        kept = len(row) - len(tables)
        micro, *sums = [FUNCTIONS["expand_dims"](each, 0) for each in (row[2], *row[kept:])]
        read = self._update.read_rows(held, self._outside)
        tables = self._tables.update(tables, micro, sums, read)
        self._tables.answer_pusher(party, tables, light, row[0])
        return tables, row[:kept]

    def _take(
        self, party: Party, light: Any, wanted: Tensor, number: Tensor, held: Mapping[Node, Tensor]
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Take the next push.

        Returns:
            What the loop carries; what the push adds to the sums; and what is stacked: the worker,
            the staleness, the micro-batch, what it computed for fetches, and what it pushes of
            tables.
        """
        which, micro = party.merge(self._ports.tickets, wanted)
        pushed, states = [], []
        for (bundle, route), state in zip(self._ports.pushes.items(), light["pushes"], strict=True):
            message, state = route.take(party, which, state)
            for push, value in zip(bundle.items, bundle.split(message), strict=True):
                pushed.append(self._update.prepare(push, value, which, held, light["update"]))
            states.append(state)
        fetched = [route.take(party, which, [])[0] for route in self._ports.fetched.values()]
        own = one_hot(which, self._rules.turns.workers)
        staleness = number - FUNCTIONS["take"](light["version"], which, 0)
        light = {
            **light,
            "pushes": states,
            "clocks": light["clocks"] + FUNCTIONS["astype"](own, "int32"),
            "waiting": FUNCTIONS["logical_or"](light["waiting"], own),
        }
        sums = self._tables.take(party, which)
        return light, pushed, [which, staleness, micro, *fetched, *sums]

    def _answer(
        self,
        party: Party,
        light: Any,
        values: Mapping[Node, Tensor],
        tables: States,
        which: Tensor,
        version: Tensor,
        *,
        is_update: bool,
    ) -> Any:
        """Answer the workers that the rules choose after a push."""
        mask = self._rules.answers(light["clocks"], light["waiting"], which, is_update)
        if mask is None:
            return light
        self._tables.answer(party, tables, light, which, mask)
        waiting = FUNCTIONS["logical_and"](light["waiting"], FUNCTIONS["logical_not"](mask))
        light = {**light, "waiting": waiting}
        if self._ports.numbers:  # the queue of a pool
            left = light["dealt"] < self._rules.turns.total
            party.send_where(
                self._ports.numbers, FUNCTIONS["where"](left, light["dealt"], np.int32(-1)), mask
            )
            light = {**light, "dealt": light["dealt"] + np.int32(1)}
            mask = FUNCTIONS["logical_and"](mask, left)
        return self._send(party, light, values, mask, version)

    def _send(
        self,
        party: Party,
        light: Any,
        values: Mapping[Node, Tensor],
        mask: Tensor | None,
        version: Any,
    ) -> Any:
        """Send the values of variables to the workers of a mask, or to all."""
        states = []
        for (bundle, route), state in zip(self._ports.pulls.items(), light["pulls"], strict=True):
            message = bundle.join([values[variable] for variable in bundle.items])
            states.append(route.answer(party, message, mask, state))
        light = {**light, "pulls": states}
        if mask is None:
            return light
        noted = self._update.note_answer(mask, values, light["update"])
        now = FUNCTIONS["where"](mask, version, light["version"])
        return {**light, "update": noted, "version": now}


__all__ = ["ServedResults", "ServerLoop", "ServerPorts", "make_tickets"]
