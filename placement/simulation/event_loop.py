"""The event loop of the simulator as a loop over flat arrays, which runs as machine code.

It follows the rules of `simulator.execute` for links that no pairs share, and gives the same bits;
`shared_event_loop` has the others. Placers simulate large problems tens of times.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.compiled_loops.heaps import heap_pop, heap_push

LOOPS = ("run_events", "upward_ranks")


def run_events(
    n: int, d: int, contention: bool, device: Any, priority: Any, has_order: bool, order: Any,
    room: Any, compute: Any, latency: Any, bandwidth: Any, out_start: Any, out_size: Any,
    read_start: Any, reader: Any, missing: Any, ready_key: Any, ready_item: Any, ready_size: Any,
    event_key: Any, event_item: Any, is_busy: Any, is_touched: Any, place: Any, free: Any,
    seen: Any, came: Any, arrival: Any, start: Any, finish: Any, started: Any, finished: Any,
    ran: Any, moved: Any, moved_to: Any, left: Any, arrived: Any,
) -> int:  # fmt: skip
    """Run a device map; returns how many transfers there were.

    Args:
        order: the nodes of device p in their order, from `room[p]` on; unless `has_order`, an idle
            device takes its ready node of least `priority`.
        out_start, out_size, read_start, reader: `Problem.slots`.
        missing: tensors that each node waits for; counted down.
        ready_key, ready_item, ready_size: memory for the heap of each device, from `room[p]` on.
        event_key, event_item: memory for a heap of 2·n events; event v ends node v, event n + v
            brings the last input of node v.
        is_busy, is_touched, place, free, seen, came: zeros for each device, and for `free` (when a
            link is free again) each pair of them.
        arrival, start, finish, started, finished, ran: (n,) results; see `ExecutionResult`.
        moved, moved_to, left, arrived: for each transfer its slot, target, start and arrival.
    """
    tick, count, events, transfers, now = 0, 0, 0, 0, 0.0
    for v in range(n):
        if missing[v] == 0:
            p = device[v]
            heap_push(ready_key, ready_item, room[p], ready_size[p], priority[v], v)
            ready_size[p] += 1
    low, high = 0, d - 1  # where something may begin now
    for p in range(d):
        is_touched[p] = 1
    while True:
        for p in range(low, high + 1):
            if is_touched[p] == 0:
                continue
            is_touched[p] = 0
            if is_busy[p] != 0 or ready_size[p] == 0:
                continue
            v = ready_item[room[p]]
            if has_order:
                if order[room[p] + place[p]] != v:
                    continue
                place[p] += 1
            heap_pop(ready_key, ready_item, room[p], ready_size[p])
            ready_size[p] -= 1
            is_busy[p] = 1
            start[v], started[v] = now, tick
            tick += 1
            ran[count] = v
            count += 1
            heap_push(event_key, event_item, 0, events, now + compute[v * d + p], v)
            events += 1
        low, high = d, -1
        if events == 0:
            break
        now = event_key[0]
        while events > 0 and event_key[0] == now:
            code = heap_pop(event_key, event_item, 0, events)
            events -= 1
            v = code if code < n else code - n
            at = device[v]
            is_touched[at] = 1
            low, high = min(low, at), max(high, at)
            if code >= n:  # the last input of a node arrived
                heap_push(ready_key, ready_item, room[at], ready_size[at], priority[v], v)
                ready_size[at] += 1
                continue
            is_busy[at] = 0
            finish[v], finished[v] = now, tick
            tick += 1
            for slot in range(out_start[v], out_start[v + 1]):
                for e in range(read_start[slot], read_start[slot + 1]):
                    u = reader[e]
                    to = device[u]
                    comes = now
                    if to != at:
                        if seen[to] != slot + 1:  # a tensor travels once to a device
                            leaves, moving = now, out_size[slot] / bandwidth[at * d + to]
                            if contention:
                                leaves = max(now, free[at * d + to])
                                free[at * d + to] = leaves + moving
                            seen[to] = slot + 1
                            came[to] = leaves + latency[at * d + to] + moving
                            moved[transfers], moved_to[transfers] = slot, to
                            left[transfers], arrived[transfers] = leaves, came[to]
                            transfers += 1
                        comes = came[to]
                    arrival[u] = max(arrival[u], comes)
                    missing[u] -= 1
                    if missing[u] == 0:
                        if arrival[u] <= now:
                            heap_push(
                                ready_key, ready_item, room[to], ready_size[to], priority[u], u
                            )
                            ready_size[to] += 1
                            is_touched[to] = 1
                            low, high = min(low, to), max(high, to)
                        else:
                            heap_push(event_key, event_item, 0, events, arrival[u], n + u)
                            events += 1
    return transfers


def upward_ranks(
    n: int, d: int, device: Any, topological: Any, compute: Any, latency: Any, bandwidth: Any,
    out_start: Any, out_size: Any, read_start: Any, reader: Any, ranks: Any,
) -> None:  # fmt: skip
    """Write (n,) seconds from each node's start to the end of the step along its longest path."""
    for i in range(n - 1, -1, -1):
        v = topological[i]
        at = device[v]
        longest = 0.0
        for slot in range(out_start[v], out_start[v + 1]):
            for e in range(read_start[slot], read_start[slot + 1]):
                to = device[reader[e]]
                way = ranks[reader[e]]
                if to != at:
                    way += latency[at * d + to] + out_size[slot] / bandwidth[at * d + to]
                if way > longest:
                    longest = way
        ranks[v] = longest + compute[v * d + at]
