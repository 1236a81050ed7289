"""The loop of a worker: it pulls variables, takes a micro-batch through the turn, and pushes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.frontend.concurrent_loops import Party
from graphflow.frontend.control_flow import call_numbered
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, device, origin_scope
from graphflow.ops.control_flow.control import fold_in
from graphflow.parallel.served_tables.party_tables import WorkerTables
from graphflow.parallel.served_tables.table_route import TableRoute
from graphflow.parallel.servers.consistency import Rules
from graphflow.parallel.servers.loops.routes import PushRoute, Route, State
from graphflow.parallel.servers.loops.server_loop import ServerPorts
from graphflow.parallel.servers.party_copy import PartyCopy
from graphflow.parallel.servers.step_cut import PushedTensor, stream_of

_LAST_KEY = 2**46
"""The largest number from which those of micro-batches are counted; steps have 48 bits."""


class WorkerLoop:
    """The loop of one worker.

    Args:
        rules: the rules of the window.
        worker: the number of the worker.
        nodes: the nodes of a turn, in order.
        ports: its channels to each server.
        batches: for each placeholder of the batch the micro-batches, (K, b, …); in a pool those of
            all workers, (K·W, b, …).
        outside: the values of other placeholders and variables that a turn reads.
        copy: writes nodes on the worker's device.
        key: the result of `draw_key` for the nodes.
        tables: the routes of tables.
    """

    def __init__(
        self,
        rules: Rules,
        worker: int,
        nodes: Sequence[Node],
        ports: Sequence[ServerPorts],
        batches: Mapping[Node, Tensor],
        outside: Mapping[Node, Tensor],
        copy: PartyCopy,
        key: Tensor | None,
        tables: Sequence[TableRoute] = (),
    ) -> None:
        self._rules = rules
        self._tables = WorkerTables(worker, tables, copy)
        self._worker = worker
        self._nodes = nodes
        self._ports = ports
        self._batches = batches
        self._outside = outside
        self._copy = copy
        self._key = key
        pulls: list[Route] = [route for port in ports for route in port.pulls.values()]
        pushes: list[Route] = [route for port in ports for route in port.pushes.values()]
        self._routes = (*pulls, *pushes)

    @property
    def states(self) -> list[Node]:
        """The variables of the states of routes."""
        return [v for route in self._routes for v in route.worker_states(self._worker)]

    def __call__(self, party: Party) -> list[Tensor]:
        """Write the loop into a party; return the last values of the states of routes, then the
        bytes of pushes that went through filters."""
        states = [route.begin(party, self._worker) for route in self._routes]
        turns = self._rules.turns
        if self._rules.deals_numbers:
            first = self._worker if self._rules.is_pool else 0
            _, states = party.while_loop(
                lambda state: state[0] >= 0,
                lambda state: self._take_next(party, *state),
                (np.int32(first), states),
            )
            return self._last_states(states)
        numbers = np.arange(self._worker, turns.total, turns.workers, dtype=np.int32)
        states, _ = party.scan(
            lambda state, x: (self._turn(party, state, x[0], x[1]), None),
            states,
            (numbers, [*self._batches.values()]),
        )
        return self._last_states(states)

    def _last_states(self, states: Sequence[State]) -> list[Tensor]:
        """Return the last values of the variables of states, then the bytes that were sent."""
        pairs = [*zip(self._routes, states, strict=True)]
        sent = [s[-1] for r, s in pairs if r.is_filtered and isinstance(r, PushRoute)]
        last = [t for r, s in pairs for t in s[: len(r.worker_states(self._worker))]]
        return [*last, *sent]

    def _take_next(self, party: Party, number: Tensor, states: list[State]) -> Any:
        """Take the micro-batch of a number, or of a round, through the turn; receive the next."""
        rows = [FUNCTIONS["take"](batch, number, 0) for batch in self._batches.values()]
        if self._rules.has_backups:
            number = number * np.int32(self._rules.turns.workers) + np.int32(self._worker)
        states = self._turn(party, states, number, rows)
        return party.receive(self._ports[0].numbers[self._worker]), states

    def _compute(self, number: Tensor, mapped: dict[Tensor, Tensor]) -> None:
        """Write the nodes of a turn, which draw the random numbers of their micro-batch."""
        if self._key is None:
            self._copy.write(self._nodes, mapped)
            return

        def write() -> list[Tensor]:
            inside = dict(mapped)
            self._copy.write(self._nodes, inside)
            return [inside[t] for t in outputs]

        wanted = [push.value for port in self._ports for b in port.pushes for push in b.items]
        wanted += [t for port in self._ports for t in port.fetched]
        wanted += self._tables.gradients
        outputs = [t for t in dict.fromkeys(wanted) if t not in mapped]
        with device(str(self._copy.device)):
            draws = self._key + FUNCTIONS["astype"](number, "int64")
            mapped |= zip(outputs, call_numbered(draws, write), strict=True)

    def _turn(
        self, party: Party, states: list[State], number: Tensor, rows: Sequence[Tensor]
    ) -> list[State]:
        """Write a turn."""
        left = iter(states)
        after: list[State] = []
        mapped = {node.outputs[0]: row for node, row in zip(self._batches, rows, strict=True)}
        mapped |= {node.outputs[0]: value for node, value in self._outside.items()}
        for port in self._ports:
            for variables, pull in port.pulls.items():
                message, state = pull.receive(party, self._worker, next(left))
                tensors = [variable.outputs[0] for variable in variables.items]
                mapped |= zip(tensors, variables.split(message), strict=True)
                after.append(state)
        pulled = self._tables.pull(party, mapped)
        self._compute(number, mapped)
        self._tables.push(party, mapped, pulled)
        for port in self._ports:
            for pushes, route in port.pushes.items():
                message = pushes.join([_pushed_value(push, mapped) for push in pushes.items])
                at = None
                if route.reads_value and (variable := pushes.items[0].variable) is not None:
                    at = mapped[variable.outputs[0]]
                after.append(route.send(party, self._worker, message, next(left), at))
            for tensor, route in port.fetched.items():
                route.send(party, self._worker, mapped[tensor], [])
            # Last, since a server that has the ticket waits for the push and takes no other one.
            party.send(port.tickets[self._worker], number)
        return after


def draw_key(nodes: Sequence[Node], device: DeviceName) -> Tensor | None:
    """Return a random number of the window from which the turns' random numbers follow, int64; None
    if nodes draw none.

    It follows from the first of their streams, so it is the same at all workers.
    """
    streams = (stream for node in nodes if (stream := stream_of(node)) is not None)
    first = next(streams, None)
    if first is None:
        return None
    seed, number = first
    with origin_scope(nodes[0], "turns/", device):
        key: Tensor = REGISTRY["random_integers"](
            shape=(), dtype="int64", low=0, last=_LAST_KEY, stream=(fold_in(seed, 0), number)
        )
    return key


def _pushed_value(push: PushedTensor, mapped: Mapping[Tensor, Tensor]) -> Tensor:
    """Return what a worker pushes."""
    value = mapped[push.value]
    if push.is_difference and push.variable is not None:
        value = value - mapped[push.variable.outputs[0]]
    return value


__all__ = ["WorkerLoop", "draw_key"]
