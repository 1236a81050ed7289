"""Events of the turns of a window, from the sends and waits of its parties.

A party computes whenever it neither sends nor waits. So windows are traced without a reading of the
clock in their turns beyond those around messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphflow.ir.graph import Graph
from graphflow.ops.communication.send_recv import RECEIVING_OPS, edges_of
from graphflow.ops.control_flow.concurrent import walk_parties
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.tracing.events import TraceEvent

_TURN = re.compile(r"(.*)/([0-9]+)/([TA])([0-9]+)")

_SEND = re.compile(r".*/[0-9]+/E[0-9]+")


class WindowEdge(NamedTuple):
    """An edge between two parties of a window.

    Attributes:
        window: name of the `concurrent` node.
        sender, receiver: the parties.
        servers: the parties of the window that are servers.
        is_pool: workers take their turns from one queue.
    """

    window: str
    sender: int
    receiver: int
    servers: tuple[int, ...]
    is_pool: bool


class TurnName(NamedTuple):
    """The name of a turn's event: window, party, "T" or "A", and number."""

    window: str
    party: int
    letter: str
    number: int


def turn_name(name: str) -> TurnName | None:
    """Return the parts of the name of a turn's event; None of other events."""
    found = _TURN.fullmatch(name)
    return found and TurnName(found[1], int(found[2]), found[3], int(found[4]))


def is_exchange(name: str) -> bool:
    """Return True if an event is a send of a party, by its name."""
    return _SEND.fullmatch(name) is not None


def window_edges(graph: Graph, partitions: Mapping[str, Partition]) -> dict[int, WindowEdge]:
    """Return the cut edges between parties of a graph's windows that have rules."""
    found: dict[int, WindowEdge] = {}
    for whole in graph.of_op("concurrent"):
        rules: TurnRules | None = whole.attrs.get("rules")
        if rules is None:
            continue
        name = graph.names[whole]
        senders: dict[int, int] = {}
        receivers: dict[int, int] = {}
        for part in partitions.values():
            for node in part.graph.of_op("concurrent"):
                if part.graph.names.get(node, node.name).partition("@")[0] == name:
                    for party, inner in walk_parties(node):
                        ends = receivers if inner.op.name in RECEIVING_OPS else senders
                        ends.update(dict.fromkeys(edges_of(inner), party))
        is_pool = rules.consistency == "pool"
        for edge in senders.keys() & receivers.keys():
            found[edge] = WindowEdge(name, senders[edge], receivers[edge], rules.servers, is_pool)
    return found


def add_turns(events: Iterable[TraceEvent], edges: Mapping[int, WindowEdge]) -> list[TraceEvent]:
    """Return events with those of turns and updates, and with sends named by their turn.

    Turns are named "window/1/T3": turn 3 of party 1. A is an update of a server, and E a send. A
    turn has a part before each message within it. The turns of a pool are numbered in the order in
    which they begin, over all workers.

    Args:
        edges: those between parties of windows with rules, by number.
    """
    found: list[TraceEvent] = []
    parties: dict[tuple[str, int], list[TraceEvent]] = {}
    for event in events:
        ends = edges.get(event.edge) if event.edge is not None else None
        if ends is None or event.kind not in ("send", "wait"):
            found.append(event)
            continue
        party = ends.sender if event.kind == "send" else ends.receiver
        parties.setdefault((ends.window, party), []).append(event)
    pools: dict[str, list[TraceEvent]] = {}
    for (window, party), mine in parties.items():
        mine.sort(key=lambda event: (event.start, event.end))
        some = edges[_edge(mine[0])]
        is_server = party in some.servers
        turns, messages = _named_parts(mine, edges, f"{window}/{party}", "A" if is_server else "T")
        if some.is_pool and not is_server:
            pools.setdefault(window, []).extend([*turns, *messages])
        else:
            found += [*turns, *messages]
    return [*found, *(event for mine in pools.values() for event in _number_pool(mine))]


def _number_pool(mine: Sequence[TraceEvent]) -> Iterable[TraceEvent]:
    """Yield the events of a pool's workers with the numbers of turns counted over all workers."""
    turns = sorted((e for e in mine if e.kind == "compute"), key=lambda event: event.start)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(e.name for e in turns))}
    for event in mine:
        whose, _, task = event.name.rpartition("/")
        number = numbers.get(f"{whose}/T{task[1:]}")
        is_part = event.kind in ("compute", "send") and number is not None
        yield replace(event, name=f"{whose}/{task[0]}{number}") if is_part else event


def _edge(event: TraceEvent) -> int:
    return -1 if event.edge is None else event.edge


def _named_parts(
    mine: Sequence[TraceEvent], edges: Mapping[int, WindowEdge], name: str, letter: str
) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Return the parts of a party's turns, and its messages, with sends named by their turn.

    All time between messages is computing, since nodes run as soon as what they read is there. A
    worker's turn begins with a wait after a send, and a server's update with a wait for a push.
    """
    turns: list[TraceEvent] = []
    messages: list[TraceEvent] = []
    number, before = -1, None
    for event in mine:
        if before is not None and number >= 0 and event.start > before.end:
            part = f"{name}/{letter}{number}"
            turns.append(TraceEvent(event.track, part, "compute", before.end, event.start))
        if event.kind == "wait":
            is_first = before is None or before.kind == "send"
            number += is_first or (
                letter == "A" and _sender(event, edges) != _sender(before, edges)
            )
            messages.append(event)
        else:
            messages.append(replace(event, name=f"{name}/E{max(number, 0)}"))
        before = event
    return turns, messages


def _sender(event: TraceEvent | None, edges: Mapping[int, WindowEdge]) -> int:
    return -1 if event is None or event.edge is None else edges[event.edge].sender


def without_windows(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return events without those of windows whose turns are among them."""
    parts = {(e.track, t.window) for e in events if (t := turn_name(e.name)) is not None}
    windows = {window for _, window in parts}
    return [
        event
        for event in events
        if event.kind != "compute" or event.name.partition("@")[0] not in windows
    ]
