"""Parameter servers as graphs of parties: small, and complete enough to show every order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party
from graphflow.ir.op import Tensor
from graphflow.ops.control_flow.turn_rules import TurnRules

Disturb = Callable[[int, Any, Tensor], Tensor]
"""(party, turn, tensor) -> the tensor; party 0 is the server."""


def pass_through(party: int, turn: Any, x: Tensor) -> Tensor:
    return x


def server_and_workers(
    start: Any,
    turns: Sequence[int],
    order: Any = None,
    pins: Sequence[str] | None = None,
    disturb: Disturb = pass_through,
    rules: TurnRules | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A server with one worker for each number of turns; none waits for another worker.

    Returns:
        The last weights, the order in which pushes came, int32, and the last weights that each
        worker has seen.
    """
    start = gf.constant(start) if isinstance(start, np.ndarray) else start
    loops = ConcurrentLoops()
    shape, dtype = start.shape, start.dtype.name
    push = [loops.channel(shape, dtype) for _ in turns]
    pull = [loops.channel(shape, dtype) for _ in turns]
    total = sum(turns)
    wanted = np.full(total, -1, np.int32) if order is None else order

    def serve(party: Party) -> Any:
        party.send_where(pull, start)

        def turn(weights: Any, x: Any) -> Any:
            wanted, number = x
            which, gradient = party.merge(push, wanted)
            weights = weights - disturb(0, number, gradient)
            party.send_where(pull, weights, gf.equal(gf.arange(len(turns)), which))
            return weights, which

        return party.scan(turn, start, (wanted, np.arange(total, dtype=np.int32)))

    def work(k: int) -> Callable[[Party], Any]:
        def run(party: Party) -> Any:
            def turn(weights: Any, number: Any) -> Any:
                gradient = weights * weights * (0.125 * (k + 1))
                party.send(push[k], disturb(k + 1, number, gradient))
                return party.receive(pull[k]), None

            first = party.receive(pull[k])
            return party.scan(turn, first, np.arange(turns[k], dtype=np.int32))[0]

        return run

    where = pins or [""] * (len(turns) + 1)
    loops.add(serve, where[0])
    for k in range(len(turns)):
        loops.add(work(k), where[k + 1])
    (weights, came), *seen = loops.build(rules=rules or window_rules(turns))
    return weights, came, seen


def window_rules(turns: Sequence[int], **others: Any) -> TurnRules:
    """Rules of a window of party 0, the server, and a worker for each number of turns."""
    return TurnRules((0,), tuple(range(1, len(turns) + 1)), tuple(turns), **others)


def by_hand(start: Any, order: Sequence[int], count: int) -> Any:
    """What `server_and_workers` computes in an order, by one loop of numpy."""
    seen, weights = [start] * count, start
    for k in order:
        weights = weights - seen[k] * seen[k] * start.dtype.type(0.125 * (k + 1))
        seen[k] = weights
    return weights
