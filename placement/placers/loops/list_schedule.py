"""The loops of the list schedulers with insertion: ranks, optimistic costs, orders, gaps.

Run through `loops`, as Python on lists or compiled on arrays; see there. Tables of nodes by devices
are flat: `cost[node * d + device]`, in seconds, inf where the node may not be. Edges are CSR.

Gaps of a device (idle times between nodes) are kept in time order in blocks of `BLOCK`, linked both
ways, each with its longest gap: finding the first gap that fits skips whole blocks.
"""

from __future__ import annotations

from typing import Any

from graphflow.placement.placers.loops.input_arrivals import input_arrivals

LOOPS = (
    "means",
    "upward",
    "downward",
    "optimistic",
    "fits_from",
    "fill",
    "append_gap",
    "insertion",
)
BLOCK = 32
INF = float("inf")


def means(n: int, d: int, cost: Any, mean: Any, shortest: Any) -> None:
    """Mean seconds of each node over its devices; the least seconds any node takes on a device."""
    for v in range(n):
        total, count = 0.0, 0
        for p in range(d):
            seconds = cost[v * d + p]
            if seconds < INF:
                total += seconds
                count += 1
                if seconds < shortest[p]:
                    shortest[p] = seconds
        mean[v] = total / count


def upward(topological: Any, mean: Any, start: Any, node: Any, seconds: Any, rank: Any) -> None:
    """rank[v] = mean[v] + the longest way on from v; `seconds` are those of leaving edges."""
    for i in range(len(topological) - 1, -1, -1):
        v = topological[i]
        longest = 0.0
        for e in range(start[v], start[v + 1]):
            way = seconds[e] + rank[node[e]]
            if way > longest:
                longest = way
        rank[v] = mean[v] + longest


def downward(topological: Any, mean: Any, start: Any, node: Any, seconds: Any, rank: Any) -> None:
    """rank[v] = the longest way to v, itself excluded; ranks must be zero before."""
    for i in range(len(topological)):
        v = topological[i]
        for e in range(start[v], start[v + 1]):
            way = rank[v] + mean[v] + seconds[e]
            if way > rank[node[e]]:
                rank[node[e]] = way


def optimistic(
    d: int, topological: Any, cost: Any, start: Any, node: Any, seconds: Any, table: Any, rank: Any
) -> None:
    """PEFT's optimistic cost table: the way on from v if v is on p and all else is ideal; zeros
    before. `rank` is its mean over the devices of v.
    """
    for i in range(len(topological) - 1, -1, -1):
        v = topological[i]
        for e in range(start[v], start[v + 1]):
            at = node[e] * d
            least = INF
            for p in range(d):
                if table[at + p] + cost[at + p] < least:
                    least = table[at + p] + cost[at + p]
            least += seconds[e]
            for p in range(d):
                way = table[at + p] + cost[at + p]
                if way > least:
                    way = least
                if way > table[v * d + p]:
                    table[v * d + p] = way
        total, count = 0.0, 0
        for p in range(d):
            if cost[v * d + p] < INF:
                total += table[v * d + p]
                count += 1
        rank[v] = total / count


def fits_from(
    seconds: float, ready: float, tail: int, opens: Any, shuts: Any, count: Any, longest: Any,
    before: Any, after: Any,
) -> int:  # fmt: skip
    """The first gap in which `seconds` fit at or after `ready`, or -1."""
    block, first = tail, -1
    while block >= 0:
        if shuts[block * BLOCK + count[block] - 1] < ready + seconds:
            break
        if longest[block] >= seconds:
            first = block
        block = before[block]
    while first >= 0:
        if longest[first] >= seconds:
            for i in range(first * BLOCK, first * BLOCK + count[first]):
                begin = opens[i] if opens[i] > ready else ready
                if begin + seconds <= shuts[i]:
                    return i
        first = after[first]
    return -1


def fill(
    at: int, p: int, begin: float, end: float, shortest: float, tail: Any, used: Any, opens: Any,
    shuts: Any, count: Any, longest: Any, before: Any, after: Any,
) -> None:  # fmt: skip
    """Put [begin, end] into gap `at` of device p: what remains on either side are gaps again."""
    block = at // BLOCK
    left, right = opens[at], shuts[at]
    keep_left = begin - left >= shortest
    keep_right = right - end >= shortest
    if keep_left and keep_right and left == right:
        keep_right = False
    last = block * BLOCK + count[block] - 1
    if keep_left and keep_right:
        if count[block] == BLOCK:  # split the block in halves
            fresh = used[0]
            used[0] += 1
            half = BLOCK // 2
            for i in range(half):
                opens[fresh * BLOCK + i] = opens[block * BLOCK + half + i]
                shuts[fresh * BLOCK + i] = shuts[block * BLOCK + half + i]
                longest[fresh] = max(
                    longest[fresh], shuts[fresh * BLOCK + i] - opens[fresh * BLOCK + i]
                )
            count[fresh] = count[block] = half
            before[fresh], after[fresh] = block, after[block]
            if after[block] >= 0:
                before[after[block]] = fresh
            else:
                tail[p] = fresh
            after[block] = fresh
            if at >= block * BLOCK + half:
                at += (fresh - block) * BLOCK - half
                longest[block] = 0.0
                for i in range(block * BLOCK, block * BLOCK + half):
                    longest[block] = max(longest[block], shuts[i] - opens[i])
                block = fresh
            last = block * BLOCK + count[block] - 1
        for i in range(last, at, -1):
            opens[i + 1], shuts[i + 1] = opens[i], shuts[i]
        shuts[at] = begin
        opens[at + 1], shuts[at + 1] = end, right
        count[block] += 1
    elif keep_left:
        shuts[at] = begin
    elif keep_right:
        opens[at] = end
    else:
        for i in range(at, last):
            opens[i], shuts[i] = opens[i + 1], shuts[i + 1]
        count[block] -= 1
        if count[block] == 0:
            if before[block] >= 0:
                after[before[block]] = after[block]
            if after[block] >= 0:
                before[after[block]] = before[block]
            else:
                tail[p] = before[block]
    longest[block] = 0.0
    for i in range(block * BLOCK, block * BLOCK + count[block]):
        longest[block] = max(longest[block], shuts[i] - opens[i])


def append_gap(
    p: int, begin: float, end: float, tail: Any, used: Any, opens: Any, shuts: Any, count: Any,
    longest: Any, before: Any, after: Any,
) -> None:  # fmt: skip
    """A gap after all others of device p."""
    block = tail[p]
    if block < 0 or count[block] == BLOCK:
        fresh = used[0]
        used[0] += 1
        before[fresh] = block
        if block >= 0:
            after[block] = fresh
        tail[p] = block = fresh
    at = block * BLOCK + count[block]
    opens[at], shuts[at] = begin, end
    count[block] += 1
    longest[block] = max(longest[block], end - begin)


def insertion(
    n: int, d: int, order: Any, cost: Any, latency: Any, bandwidth: Any, start: Any, node: Any,
    size: Any, biased: bool, bias: Any, fixed: Any, team: Any, team_cost: Any, home: Any, need: Any,
    room: Any, shortest: Any, tail: Any, used: Any, opens: Any, shuts: Any, count: Any,
    longest: Any, before: Any, after: Any, last: Any, ready: Any, device: Any, begins: Any,
    finish: Any,
) -> None:  # fmt: skip
    """Nodes in `order`, each into the first gap that holds it on the device of least finish + bias.

    `fixed` names a node's device or -1. A team (nodes that share a device) lives where its first
    node is put, the seconds of the others in the balance. `need` is what a node (the first of a
    team: the team) takes of its device's `room`; where no device has room, the roomiest.
    """
    for k in range(n):
        v = order[k]
        input_arrivals(v, d, latency, bandwidth, start, node, size, device, finish, ready)
        mate = team[v]
        only = fixed[v]
        if mate >= 0 and home[mate] >= 0:
            only = home[mate]
        elif need[v] > 0.0:
            fits, roomiest = False, -1
            for p in range(d):
                if cost[v * d + p] < INF:
                    fits = fits or room[p] >= need[v]
                    if roomiest < 0 or room[p] > room[roomiest]:
                        roomiest = p
            if not fits:
                only = roomiest
            elif only >= 0 and room[only] < need[v]:
                only = -1
        chosen, gap, begin, least = -1, -1, 0.0, INF
        row = cost[v * d : v * d + d]
        for p in range(d):
            seconds = row[p]
            if seconds == INF or (only >= 0 and p != only):
                continue
            if only < 0 and need[v] > 0.0 and room[p] < need[v]:
                continue
            extra = bias[v * d + p] if biased else 0.0
            if mate >= 0 and only < 0:
                extra += team_cost[mate * d + p] - seconds
            if chosen >= 0 and ready[p] + seconds + extra >= least:
                continue
            at, from_ = fits_from(
                seconds, ready[p], tail[p], opens, shuts, count, longest, before, after
            ), last[p]  # fmt: skip
            if at >= 0:
                from_ = opens[at]
            if from_ < ready[p]:
                from_ = ready[p]
            if chosen < 0 or from_ + seconds + extra < least:
                chosen, gap, begin, least = p, at, from_, from_ + seconds + extra
        p = chosen
        end = begin + cost[v * d + p]
        if gap >= 0:
            fill(
                gap, p, begin, end, shortest[p], tail, used, opens, shuts, count, longest, before,
                after,
            )  # fmt: skip
        else:
            if begin - last[p] >= shortest[p]:
                append_gap(
                    p, last[p], begin, tail, used, opens, shuts, count, longest, before, after
                )
            last[p] = end
        if mate < 0 or home[mate] < 0:
            room[p] -= need[v]
        if mate >= 0:
            home[mate] = p
        device[v], begins[v], finish[v] = p, begin, end
