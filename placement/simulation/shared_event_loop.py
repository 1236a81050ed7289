"""The event loop of the simulator where transfers share links, as a loop over flat arrays.

It follows `simulator.execute` and `link_contention`, and gives the same bits. Large problems run it
as machine code. A flow is a tensor on its way to one device.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.compiled_loops.heaps import heap_pop, heap_push


def fair_rates(
    count: int, crowd: Any, flow_pair: Any, bandwidth: Any, way_start: Any, way: Any, width: Any,
    rates: Any, is_open: Any, links: Any, users: Any, room: Any,
) -> None:  # fmt: skip
    """Write max-min fair rates of the flows on shared links, by filling the fullest link first.

    Args:
        links, users, room: memory for each shared link; `users` is zero before and after.
    """
    known = 0
    for i in range(count):
        rates[i], is_open[i] = 0.0, 1
        pair = flow_pair[crowd[i]]
        for w in range(way_start[pair], way_start[pair + 1]):
            if users[way[w]] == 0:
                links[known] = way[w]
                room[way[w]] = width[way[w]]
                known += 1
            users[way[w]] += 1
    left, least = count, 0.0
    while left > 0:
        tight, share = -1, 0.0
        for k in range(known):
            link = links[k]
            if users[link] > 0:
                each = room[link] / users[link]
                if tight < 0 or each < share:
                    tight, share = link, each
        least = max(least, share)
        has_limited = False
        for i in range(count):
            if is_open[i] != 0 and bandwidth[flow_pair[crowd[i]]] <= least:
                has_limited = True
        for i in range(count):
            if is_open[i] == 0:
                continue
            pair = flow_pair[crowd[i]]
            is_done = bandwidth[pair] <= least
            if not has_limited:
                for w in range(way_start[pair], way_start[pair + 1]):
                    is_done = is_done or way[w] == tight
            if is_done:
                is_open[i] = 0
                left -= 1
                rates[i] = min(bandwidth[pair], least)
                for w in range(way_start[pair], way_start[pair + 1]):
                    users[way[w]] -= 1
                    room[way[w]] = max(0.0, room[way[w]] - rates[i])


def run_shared_events(
    n: int, d: int, capacity: int, device: Any, priority: Any, has_order: bool, order: Any,
    first: Any, compute: Any, latency: Any, bandwidth: Any, out_start: Any, out_size: Any,
    read_start: Any, reader: Any, way_start: Any, way: Any, width: Any, missing: Any,
    ready_key: Any, ready_item: Any, ready_size: Any, event_key: Any, event_item: Any,
    entry_flow: Any, entry_turn: Any, is_busy: Any, is_touched: Any, place: Any, seen: Any,
    moving: Any, head: Any, tail: Any, behind: Any, flow_slot: Any, flow_pair: Any, flow_to: Any,
    flow_left: Any, flow_since: Any, flow_rate: Any, flow_turn: Any, is_fresh: Any, fresh: Any,
    crowd: Any, rates: Any, is_open: Any, links: Any, users: Any, room: Any, arrival: Any,
    start: Any, finish: Any, started: Any, finished: Any, ran: Any, flow_start: Any,
    flow_arrives: Any,
) -> int:  # fmt: skip
    """Run a device map; returns how many transfers there were, or -1 if memory is short.

    As `event_loop.run_events`, and:

    Args:
        capacity: how many ends of flows may be foreseen; the memory of events is as large.
        first: where the nodes and the heap of each device begin.
        way_start, way, width: the shared links of each pair of devices, and their bytes/s.
        entry_flow, entry_turn: what each foreseen end belongs to.
        moving, head, tail: the flow of each pair that moves, and those that wait, from 1 on.
        behind: the flow that waits behind each flow.
    """
    tick, count, events, flows, entries, freshly, crowded = 0, 0, 0, 0, 0, 0, 0
    has_changed, now = False, 0.0
    for v in range(n):
        if missing[v] == 0:
            p = device[v]
            heap_push(ready_key, ready_item, first[p], ready_size[p], priority[v], v)
            ready_size[p] += 1
    for p in range(d):
        is_touched[p] = 1
    while True:
        for p in range(d):
            if is_touched[p] == 0:
                continue
            is_touched[p] = 0
            if is_busy[p] != 0 or ready_size[p] == 0:
                continue
            v = ready_item[first[p]]
            if has_order:
                if order[first[p] + place[p]] != v:
                    continue
                place[p] += 1
            heap_pop(ready_key, ready_item, first[p], ready_size[p])
            ready_size[p] -= 1
            is_busy[p] = 1
            start[v], started[v] = now, tick
            tick += 1
            ran[count] = v
            count += 1
            heap_push(event_key, event_item, 0, events, now + compute[v * d + p], v)
            events += 1
        if has_changed:
            has_changed = False
            fair_rates(
                crowded, crowd, flow_pair, bandwidth, way_start, way, width, rates, is_open,
                links, users, room,
            )  # fmt: skip
            for i in range(crowded):
                f = crowd[i]
                if rates[i] != flow_rate[f]:
                    if now > flow_since[f]:
                        flow_left[f] = max(0.0, flow_left[f] - flow_rate[f] * (now - flow_since[f]))
                        flow_since[f] = now
                    flow_rate[f] = rates[i]
                    if is_fresh[f] == 0:
                        is_fresh[f] = 1
                        fresh[freshly] = f
                        freshly += 1
        for i in range(freshly):
            f = fresh[i]
            is_fresh[f] = 0
            flow_turn[f] += 1
            if entries == capacity:
                return -1
            entry_flow[entries], entry_turn[entries] = f, flow_turn[f]
            when = flow_since[f] + flow_left[f] / flow_rate[f]
            heap_push(event_key, event_item, 0, events, when, 2 * n + entries)
            events += 1
            entries += 1
        freshly = 0
        if events == 0:
            break
        now = event_key[0]
        while events > 0 and event_key[0] == now:
            code = heap_pop(event_key, event_item, 0, events)
            events -= 1
            if code < n:
                at = device[code]
                is_busy[at] = 0
                finish[code], finished[code] = now, tick
                tick += 1
                is_touched[at] = 1
                for slot in range(out_start[code], out_start[code + 1]):
                    for e in range(read_start[slot], read_start[slot + 1]):
                        u = reader[e]
                        if device[u] == at:
                            arrival[u] = max(arrival[u], now)
                            missing[u] -= 1
                            if missing[u] == 0 and arrival[u] <= now:
                                heap_push(
                                    ready_key, ready_item, first[at], ready_size[at], priority[u], u
                                )
                                ready_size[at] += 1
                            elif missing[u] == 0:
                                heap_push(event_key, event_item, 0, events, arrival[u], n + u)
                                events += 1
                    for e in range(read_start[slot], read_start[slot + 1]):
                        to = device[reader[e]]
                        if to == at or seen[to] == slot + 1:
                            continue
                        seen[to] = slot + 1
                        f = flows
                        flows += 1
                        pair = at * d + to
                        flow_slot[f], flow_pair[f], flow_to[f] = slot, pair, to
                        if moving[pair] != 0:
                            if head[pair] == 0:
                                head[pair] = f + 1
                            else:
                                behind[tail[pair] - 1] = f + 1
                            tail[pair] = f + 1
                            continue
                        moving[pair] = f + 1
                        flow_start[f], flow_since[f] = now, now
                        flow_left[f], flow_rate[f] = out_size[slot], bandwidth[pair]
                        is_fresh[f] = 1
                        fresh[freshly] = f
                        freshly += 1
                        if way_start[pair + 1] > way_start[pair]:
                            crowd[crowded] = f
                            crowded += 1
                            has_changed = True
                continue
            if code < 2 * n:  # the last input of a node arrived
                v = code - n
                at = device[v]
                heap_push(ready_key, ready_item, first[at], ready_size[at], priority[v], v)
                ready_size[at] += 1
                is_touched[at] = 1
                continue
            done = entry_flow[code - 2 * n]
            if flow_turn[done] != entry_turn[code - 2 * n]:
                continue
            pair, to = flow_pair[done], flow_to[done]
            moving[pair] = 0
            if way_start[pair + 1] > way_start[pair]:
                kept = 0
                for i in range(crowded):
                    if crowd[i] != done:
                        crowd[kept] = crowd[i]
                        kept += 1
                crowded = kept
                has_changed = True
            if head[pair] != 0:
                f = head[pair] - 1
                head[pair] = behind[f]
                moving[pair] = f + 1
                flow_start[f], flow_since[f] = now, now
                flow_left[f], flow_rate[f] = out_size[flow_slot[f]], bandwidth[pair]
                is_fresh[f] = 1
                fresh[freshly] = f
                freshly += 1
                if way_start[pair + 1] > way_start[pair]:
                    crowd[crowded] = f
                    crowded += 1
                    has_changed = True
            comes = now + latency[pair]
            flow_arrives[done] = comes
            slot = flow_slot[done]
            for e in range(read_start[slot], read_start[slot + 1]):
                u = reader[e]
                if device[u] == to:
                    arrival[u] = max(arrival[u], comes)
                    missing[u] -= 1
                    if missing[u] == 0 and arrival[u] <= now:
                        heap_push(ready_key, ready_item, first[to], ready_size[to], priority[u], u)
                        ready_size[to] += 1
                        is_touched[to] = 1
                    elif missing[u] == 0:
                        heap_push(event_key, event_item, 0, events, arrival[u], n + u)
                        events += 1
    return flows
