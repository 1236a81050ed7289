"""The loops of the local search: a sequence of nodes with wishes -> a schedule, and moves on both.

Run through `loops`, as Python or compiled; see there. A wish is a device, or -1: wherever the node
finishes first. Transfers under contention queue in the order of the sequence, which is close to
what the simulator does; whoever calls judges the result there.
"""

from __future__ import annotations

from typing import Any

LOOPS = ("evaluate", "critical", "shift", "wish", "search")
INF = float("inf")


def evaluate(
    n: int, d: int, sequence: Any, wishes: Any, cost: Any, latency: Any, bandwidth: Any,
    start: Any, node: Any, size: Any, tensor: Any, contention: bool, turn: int, seen: Any,
    arrived: Any, link: Any, way: Any, lane: Any, width: Any, until: Any, team: Any, home: Any,
    need: Any, capacity: Any, room: Any, last: Any, latest: Any, device: Any, begins: Any,
    finish: Any, cause: Any,
) -> float:  # fmt: skip
    """Makespan of a sequence with wishes; inf where persistent memory does not fit.

    `cause[v]` is the node for which v waited: an input, or the one before it on its device.
    """
    for p in range(d):
        last[p], latest[p], room[p] = 0.0, -1, capacity[p]
    for t in range(len(home)):
        home[t] = -1
    for q in range(len(link)):
        link[q] = 0.0
    for q in range(len(until)):
        until[q] = 0.0
    makespan = 0.0
    for k in range(n):
        v = sequence[k]
        only = wishes[v]
        mate = team[v]
        if mate >= 0 and home[mate] >= 0:
            only = home[mate]
        first, after = 0, d
        if only >= 0:
            first, after = only, only + 1
        least, at, from_, why = INF, -1, 0.0, -1
        for p in range(first, after):
            seconds = cost[v * d + p]
            if seconds == INF or (need[v] > 0.0 and only < 0 and room[p] < need[v]):
                continue
            ready, reason = last[p], latest[p]
            if ready + seconds >= least:
                continue
            for e in range(start[v], start[v + 1]):
                u = node[e]
                q = device[u]
                arrival = finish[u]
                if q != p:
                    if contention and seen[tensor[e] * d + p] == turn:
                        arrival = arrived[tensor[e] * d + p]
                    else:
                        if contention and link[q * d + p] > arrival:
                            arrival = link[q * d + p]
                        arrival = arrival + latency[q * d + p] + size[e] / bandwidth[q * d + p]
                if arrival > ready or (arrival == ready and reason < 0):
                    ready, reason = arrival, u
            if ready + seconds < least:
                least, at, from_, why = ready + seconds, p, ready, reason
        if at < 0:
            return INF
        if contention:
            for e in range(start[v], start[v + 1]):
                q = device[node[e]]
                slot = tensor[e] * d + at
                if q != at and seen[slot] != turn:
                    leaves = max(finish[node[e]], link[q * d + at])
                    moving = size[e] / bandwidth[q * d + at]
                    if len(way) > 0:  # shared links, too, carry one tensor after the other
                        for i in range(way[q * d + at], way[q * d + at + 1]):
                            leaves = max(leaves, until[lane[i]])
                        for i in range(way[q * d + at], way[q * d + at + 1]):
                            until[lane[i]] = leaves + size[e] / width[lane[i]]
                    link[q * d + at] = leaves + moving
                    arrived[slot], seen[slot] = leaves + latency[q * d + at] + moving, turn
                    if arrived[slot] > from_:
                        from_, why = arrived[slot], node[e]
            least = from_ + cost[v * d + at]
        if mate < 0 or home[mate] < 0:
            if need[v] > 0.0 and room[at] < need[v]:
                return INF
            room[at] -= need[v]
        if mate >= 0:
            home[mate] = at
        device[v], begins[v], finish[v], cause[v] = at, from_, least, why
        last[at], latest[at] = least, v
        makespan = max(makespan, least)
    return makespan


def critical(n: int, finish: Any, cause: Any, path: Any) -> int:
    """The nodes that end a schedule, each waiting for the next in `path`; how many they are."""
    v = 0
    for u in range(n):
        if finish[u] > finish[v]:
            v = u
    count = 0
    while v >= 0 and count < n:
        path[count] = v
        count += 1
        v = cause[v]
    return count


def shift(sequence: Any, position: Any, source: int, target: int) -> None:
    """Move what stands at `source` to `target`; what is between moves up."""
    v = sequence[source]
    step = 1 if target > source else -1
    i = source
    while i != target:
        sequence[i] = sequence[i + step]
        position[sequence[i]] = i
        i += step
    sequence[target] = v
    position[v] = target


def wish(v: int, p: int, wishes: Any, team: Any, team_start: Any, team_node: Any) -> None:
    """Wish v, and its team, onto p."""
    if team[v] < 0:
        wishes[v] = p
        return
    for i in range(team_start[team[v]], team_start[team[v] + 1]):
        wishes[team_node[i]] = p


def search(
    n: int, d: int, evaluations: int, seed: int, bound: float, roam: bool, sequence: Any,
    wishes: Any, best_device: Any, best_begins: Any, best_finish: Any, cost: Any, latency: Any,
    bandwidth: Any, start: Any, node: Any, size: Any, tensor: Any, contention: bool, seen: Any,
    arrived: Any, link: Any, way: Any, lane: Any, width: Any, until: Any, out_start: Any,
    out_node: Any, team: Any, team_start: Any,
    team_node: Any, home: Any, need: Any, capacity: Any, room: Any, last: Any, latest: Any,
    device: Any, begins: Any, finish: Any, cause: Any, position: Any, path: Any, current: Any,
    history: Any,
) -> float:  # fmt: skip
    """Late acceptance hill climbing (Burke & Bykov 2017) from a sequence and wishes; the best
    makespan, its devices, starts and ends.

    Moves: a node to another device, to another place in the sequence, both, or two nodes swap
    devices; three times in four the node is on the critical path. With `roam`, wishes may also be
    taken back. Stops at `bound`, or after so many evaluations.
    """
    for i in range(n):
        position[sequence[i]] = i
    value = evaluate(
        n, d, sequence, wishes, cost, latency, bandwidth, start, node, size, tensor, contention, 1,
        seen, arrived, link, way, lane, width, until, team, home, need, capacity, room, last,
        latest, device, begins, finish, cause,
    )  # fmt: skip
    best = value
    for v in range(n):
        best_device[v], best_begins[v], best_finish[v] = device[v], begins[v], finish[v]
        current[v] = device[v]
    length = critical(n, finish, cause, path) if value < INF else 0
    for i in range(len(history)):
        history[i] = value
    for turn in range(evaluations):
        if best <= bound:
            break
        seed = seed * 48271 % 2147483647
        v = seed // 8 % n
        if seed % 4 > 0 and length > 0:
            v = path[seed // 8 % length]
        seed = seed * 48271 % 2147483647
        kind = seed // 64 % 8
        old, other, other_old, source = wishes[v], -1, -1, -1
        changed = False
        if kind < 3:  # another device
            p = seed // 512 % d
            if roam and kind == 0:
                p = -1
            if p != old and (p < 0 or cost[v * d + p] < INF):
                wish(v, p, wishes, team, team_start, team_node)
                changed = True
        elif kind == 3:  # swap devices
            u = seed // 512 % n
            p, q = current[v], current[u]
            apart = team[v] < 0 or team[u] != team[v]
            if p != q and apart and cost[v * d + q] < INF and cost[u * d + p] < INF:
                other, other_old = u, wishes[u]
                wish(v, q, wishes, team, team_start, team_node)
                wish(u, p, wishes, team, team_start, team_node)
                changed = True
        if kind > 3 or kind == 2:  # another place
            low, high = 0, n - 1
            for e in range(start[v], start[v + 1]):
                low = max(low, position[node[e]] + 1)
            for e in range(out_start[v], out_start[v + 1]):
                high = min(high, position[out_node[e]] - 1)
            seed = seed * 48271 % 2147483647
            to = low + seed // 8 % (high - low + 1)
            if to != position[v]:
                source = position[v]
                shift(sequence, position, source, to)
                changed = True
        if not changed:
            continue
        fresh = evaluate(
            n, d, sequence, wishes, cost, latency, bandwidth, start, node, size, tensor,
            contention, turn + 2, seen, arrived, link, way, lane, width, until, team, home, need,
            capacity, room, last, latest, device, begins, finish, cause,
        )  # fmt: skip
        late = turn % len(history)
        if fresh < INF and (fresh <= value or fresh <= history[late]):
            value = fresh
            length = critical(n, finish, cause, path)
            for u in range(n):
                current[u] = device[u]
            if value < best:
                best = value
                for u in range(n):
                    best_device[u], best_begins[u], best_finish[u] = device[u], begins[u], finish[u]
        else:
            if source >= 0:
                shift(sequence, position, position[v], source)
            if kind < 4:
                wish(v, old, wishes, team, team_start, team_node)
            if other >= 0:
                wish(other, other_old, wishes, team, team_start, team_node)
        if value < history[late]:
            history[late] = value
    return float(best)
