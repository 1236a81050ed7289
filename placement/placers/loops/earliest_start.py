"""The loops of the list schedulers that go forward in time: whatever can start first, starts.

Run through `loops`, as Python or compiled; see there. Each device has two heaps of ready nodes:
late ones, whose inputs have yet to arrive, by arrival time, and those that can start now, by place.
So the earliest start over all ready nodes and devices is found in O(d), however many are ready.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.compiled_loops.heaps import heap_pop, heap_push
from graphflow.placement.placers.loops.input_arrivals import input_arrivals

LOOPS = ("is_usable", "earliest_start")
INF = float("inf")


def is_usable(
    v: int, p: int, device: Any, forced: Any, team: Any, home: Any, need: Any, room: Any
) -> bool:
    """Return True if v, not placed yet, may go to p: with its team, and within the room there."""
    if device[v] >= 0:
        return False
    if team[v] >= 0 and home[team[v]] >= 0:
        return bool(home[team[v]] == p)
    return bool(need[v] <= 0.0 or room[p] >= need[v] or forced[v] == p)


def earliest_start(
    n: int, d: int, by_finish: bool, place: Any, at_place: Any, cost: Any, latency: Any,
    bandwidth: Any, out_start: Any, out_node: Any, in_start: Any, in_node: Any, in_size: Any,
    team: Any, team_cost: Any, team_start: Any, team_node: Any, home: Any, need: Any, room: Any,
    missing: Any, options: Any, forced: Any, last: Any, ready: Any, late_key: Any, late_item: Any,
    lates: Any, now_key: Any, now_item: Any, nows: Any, device: Any, begins: Any, finish: Any,
) -> None:  # fmt: skip
    """The pair of ready node and device that can start first; of several nodes the one of least
    `place`, of several devices the one that finishes it first.

    With `by_finish` the pair only names the node: it goes where it finishes first. Teams, `need`
    and `room` as in `list_loops.insertion`.

    Args:
        late_key, late_item, lates: for each device, memory of 2·n entries for the heap of nodes
            that wait for inputs, by arrival time and place, and its size.
        now_key, now_item, nows: the same for nodes whose inputs have arrived, by place.
    """
    most = 2 * n  # a node enters a device's heaps when it is ready, and with its team or by force
    for v in range(n):
        if missing[v] == 0:
            for p in range(d):
                if cost[v * d + p] < INF:
                    heap_push(late_key, late_item, p * most, lates[p], 0.0, place[v])
                    lates[p] += 1
                    options[v] += 1
    for _ in range(n):
        chosen = -1
        while chosen < 0:
            first, least, to = INF, n, -1
            for p in range(d):
                base = p * most
                while lates[p] > 0 and late_key[base] <= last[p]:
                    top = heap_pop(late_key, late_item, base, lates[p])
                    lates[p] -= 1
                    heap_push(now_key, now_item, base, nows[p], 0.0, top)
                    nows[p] += 1
                while True:
                    if nows[p] > 0:
                        top, when = now_item[base], last[p]
                    elif lates[p] > 0:
                        top, when = late_item[base], late_key[base]
                    else:
                        break
                    v = at_place[top]
                    if is_usable(v, p, device, forced, team, home, need, room):
                        better = when < first or (when == first and top < least)
                        if when == first and top == least:
                            better = cost[v * d + p] < cost[v * d + to]
                        if better:
                            first, least, to = when, top, p
                        break
                    if nows[p] > 0:
                        heap_pop(now_key, now_item, base, nows[p])
                        nows[p] -= 1
                    else:
                        heap_pop(late_key, late_item, base, lates[p])
                        lates[p] -= 1
                    if device[v] < 0 and not (team[v] >= 0 and home[team[v]] >= 0):
                        options[v] -= 1
                        if options[v] == 0:  # no room anywhere: the roomiest
                            for q in range(d):
                                if cost[v * d + q] < INF and (
                                    forced[v] < 0 or room[q] > room[forced[v]]
                                ):
                                    forced[v] = q
                            q = forced[v]
                            heap_push(late_key, late_item, q * most, lates[q], last[q], top)
                            lates[q] += 1
            if to >= 0:
                chosen = at_place[least]
        v = chosen
        mate = team[v]
        input_arrivals(v, d, latency, bandwidth, in_start, in_node, in_size, device, finish, ready)
        if by_finish:
            soonest = INF
            for p in range(d):
                if cost[v * d + p] < INF and is_usable(
                    v, p, device, forced, team, home, need, room
                ):
                    end = (ready[p] if ready[p] > last[p] else last[p]) + cost[v * d + p]
                    if mate >= 0 and home[mate] < 0:
                        end += team_cost[mate * d + p] - cost[v * d + p]
                    if end < soonest:
                        soonest, to = end, p
        begins[v] = ready[to] if ready[to] > last[to] else last[to]
        device[v] = to
        last[to] = finish[v] = begins[v] + cost[v * d + to]
        if mate < 0 or home[mate] < 0:
            room[to] -= need[v]
        if mate >= 0 and home[mate] < 0:
            home[mate] = to
            for i in range(team_start[mate], team_start[mate + 1]):
                u = team_node[i]  # it may have left this device's heaps for want of room
                if device[u] < 0 and missing[u] == 0:
                    input_arrivals(
                        u, d, latency, bandwidth, in_start, in_node, in_size, device, finish, ready
                    )
                    heap_push(late_key, late_item, to * most, lates[to], ready[to], place[u])
                    lates[to] += 1
        for e in range(out_start[v], out_start[v + 1]):
            u = out_node[e]
            missing[u] -= 1
            if missing[u] == 0:
                input_arrivals(
                    u, d, latency, bandwidth, in_start, in_node, in_size, device, finish, ready
                )
                for p in range(d):
                    if cost[u * d + p] < INF:
                        heap_push(late_key, late_item, p * most, lates[p], ready[p], place[u])
                        lates[p] += 1
                        options[u] += 1
