"""The loop of a server with backup workers: a round takes the first M of W pushes.

A push of an earlier round is late. It is dropped, and its worker joins the present round at once.
So the number of pushes of a window is not known before; what is stacked has room for all.

Source: Chen et al., "Revisiting distributed synchronous SGD", arXiv:1604.00981.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.frontend.concurrent_loops import Party
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.parallel.servers.consistency import one_hot
from graphflow.parallel.servers.loops.server_loop import ServedResults, ServerLoop


class BackupServerLoop(ServerLoop):
    """The loop of a server that answers with the number of the round, -1 for none.

    In its results, places after the last push have -1 as worker, staleness and micro-batch.
    """

    def __call__(self, party: Party) -> ServedResults:
        """Write the loop into a party."""
        turns = self._rules.turns
        light = self._send(party, self._first_light(party), self._first, None, np.int32(0))
        none = np.full(turns.total, -1, np.int32)
        zeros = [
            FUNCTIONS["zeros"]((turns.total,), route.spec.dtype.name)
            for route in self._ports.fetched.values()
        ]
        (values, light, (_, rows)), computed = party.scan(
            lambda state, number: self._round(party, state, number),
            ([*self._first.values()], light, (np.int32(0), [none, none, none, *zeros])),
            np.arange(turns.each, dtype=np.int32),
        )
        party.send_where(self._ports.numbers, np.int32(-1))
        which, staleness, micro, *fetched = rows
        last = dict(zip(self._first, values, strict=True))
        return ServedResults(
            last, which, staleness, micro, fetched, computed, self._last_states(light)
        )

    def _round(self, party: Party, state: Any, number: Tensor) -> Any:
        """Take pushes until M are of this round, update, and answer those that wait."""
        values, light, log = state
        held = dict(zip(self._first, values, strict=True))
        specs = [push.value.spec for push in self._pushes]
        zeros = [FUNCTIONS["zeros"](spec.shape, spec.dtype.name) for spec in specs]
        _, light, sums, log = party.while_loop(
            lambda state: state[0] < np.int32(self._rules.aggregate),
            lambda state: self._take_one(party, state, number, held),
            (np.int32(0), light, zeros, log),
        )
        share = 1.0 / self._rules.aggregate
        means = {push: total * share for push, total in zip(self._pushes, sums, strict=True)}
        after, computed, _ = self._update.apply(held, means, self._outside)
        following = number + np.int32(1)
        goes_on = following < np.int32(self._rules.turns.each)
        mask = FUNCTIONS["logical_and"](light["waiting"], goes_on)
        light = self._tell(party, light, after, mask, following)
        return ([after[v] for v in self._first], light, log), computed

    def _take_one(
        self, party: Party, state: Any, number: Tensor, held: Mapping[Node, Tensor]
    ) -> Any:
        """Take the next push; add it to the sums if it is of this round, else answer its worker."""
        count, light, sums, (place, rows) = state
        wanted = FUNCTIONS["take"](self._order, place, 0)
        light, pushed, row = self._take(party, light, wanted, number, held)
        is_late = row[1] > np.int32(0)
        sums = [
            total + FUNCTIONS["where"](is_late, FUNCTIONS["zeros"](x.shape, x.dtype.name), x)
            for total, x in zip(sums, pushed, strict=True)
        ]
        here = FUNCTIONS["equal"](np.arange(self._rules.turns.total, dtype=np.int32), place)
        rows = [FUNCTIONS["where"](here, x, each) for x, each in zip(row, rows, strict=True)]
        own = one_hot(row[0], self._rules.turns.workers)
        light = self._tell(party, light, held, FUNCTIONS["logical_and"](own, is_late), number)
        count = count + FUNCTIONS["where"](is_late, np.int32(0), np.int32(1))
        return count, light, sums, (place + np.int32(1), rows)

    def _tell(
        self, party: Party, light: Any, values: Mapping[Node, Tensor], mask: Tensor, number: Tensor
    ) -> Any:
        """Answer the workers of a mask with the number of a round and the values."""
        waiting = FUNCTIONS["logical_and"](light["waiting"], FUNCTIONS["logical_not"](mask))
        party.send_where(self._ports.numbers, number, mask)
        return self._send(party, {**light, "waiting": waiting}, values, mask, number)


__all__ = ["BackupServerLoop"]
