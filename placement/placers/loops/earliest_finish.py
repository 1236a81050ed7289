"""The loop that builds a placement from the sources, each node to the device that finishes it
first.

Run through `loops`, as Python or compiled; see there. Tables of nodes or units by devices are flat:
`work[unit * d + device]`. Tensors are slots (`Problem.slots`).
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.compiled_loops.heaps import heap_pop, heap_push

LOOPS = ("earliest_finish",)
INF = float("inf")


def arrival_of(
    slot: int, at: int, d: int, contention: bool, slot_node: Any, slot_size: Any, latency: Any,
    bandwidth: Any, device: Any, finish: Any, link: Any, arrived: Any,
) -> float:  # fmt: skip
    """Return when a tensor is on a device; one that is there already does not travel again."""
    maker = slot_node[slot]
    source = device[maker]
    if source == at:
        return float(finish[maker])
    known = arrived[slot * d + at]
    if known != 0.0:
        return float(known) if known > 0.0 else 0.0
    leaves = finish[maker]
    if contention and link[source * d + at] > leaves:
        leaves = link[source * d + at]
    return float(leaves + latency[source * d + at] + slot_size[slot] / bandwidth[source * d + at])


def bytes_needed(
    v: int, at: int, d: int, counts_copies: bool, unit: Any, home: Any, memory: Any,
    transient: Any, in_start: Any, in_slot: Any, slot_node: Any, slot_size: Any, device: Any,
    arrived: Any,
) -> float:  # fmt: skip
    """Bytes that a node adds to a device."""
    need = transient[v] + (memory[unit[v]] if home[unit[v]] < 0 else 0.0)
    if counts_copies:
        for i in range(in_start[v], in_start[v + 1]):
            slot = in_slot[i]
            if device[slot_node[slot]] != at and arrived[slot * d + at] == 0.0:
                need += slot_size[slot]
    return float(need)


def choose_device(
    v: int, d: int, limited: bool, contention: bool, counts_copies: bool, unit: Any, prefer: Any,
    choices: Any, work: Any, memory: Any, transient: Any, capacity: Any, latency: Any,
    bandwidth: Any, in_start: Any, in_slot: Any, slot_node: Any, slot_size: Any, device: Any,
    finish: Any, home: Any, available: Any, promised: Any, used: Any, link: Any, arrived: Any,
    left: Any,
) -> int:  # fmt: skip
    """The device on which a node's unit would be done first, of those with room.

    Args:
        left: memory for d numbers.
    """
    u = unit[v]
    if home[u] >= 0:
        return int(home[u])
    count, only, roomiest = 0, -1, -1
    for at in range(d):
        if choices[u * d + at] != 0:
            count += 1
            only = at
    if count == 1:
        return only
    has_room = False
    if limited:
        for at in range(d):
            if choices[u * d + at] != 0:
                need = bytes_needed(
                    v, at, d, counts_copies, unit, home, memory, transient, in_start, in_slot,
                    slot_node, slot_size, device, arrived,
                )  # fmt: skip
                left[at] = capacity[at] - used[at] - need
                has_room = has_room or left[at] >= 0.0
                if roomiest < 0 or left[at] > left[roomiest]:
                    roomiest = at
        if not has_room:
            return roomiest
    liked = device[prefer[v]] if prefer[v] >= 0 else -1
    best, best_score = -1, INF
    for at in range(d):
        if choices[u * d + at] == 0 or (limited and left[at] < 0.0):
            continue
        begin = available[at]
        for i in range(in_start[v], in_start[v + 1]):
            comes = arrival_of(
                in_slot[i], at, d, contention, slot_node, slot_size, latency, bandwidth, device,
                finish, link, arrived,
            )  # fmt: skip
            begin = max(begin, comes)
        score = begin + promised[at] + work[u * d + at]
        if (
            best < 0
            or score < best_score * (1 - 1e-12)
            or (at == liked and score <= best_score * (1 + 1e-12))
        ):
            best, best_score = at, score
    return best


def earliest_finish(
    n: int, d: int, limited: bool, contention: bool, counts_copies: bool, priority: Any, unit: Any,
    prefer: Any, choices: Any, work: Any, memory: Any, transient: Any, capacity: Any,
    compute: Any, latency: Any, bandwidth: Any, in_start: Any, in_slot: Any, slot_node: Any,
    slot_size: Any, out_start: Any, read_start: Any, reader: Any, missing: Any, unread: Any,
    alive: Any, home: Any, available: Any, promised: Any, used: Any, link: Any, arrived: Any,
    left: Any, heap_key: Any, heap_item: Any, device: Any, finish: Any, order: Any,
) -> None:  # fmt: skip
    """Place ready nodes in order of least `priority`; see `construction.earliest_finish`.

    Args:
        choices: 1 where a unit may be.
        missing, unread, alive: tensors that each node waits for, readers that each tensor waits
            for, tensors of each node that are alive; counted down.
        home, available, promised, used, link: state of units, devices and pairs of devices.
        arrived: (slots·d) when each tensor came to each device where it was not made; 0 for never,
            negative for at 0.
        left, heap_key, heap_item: memory.
        device, finish, order: results.
    """
    size = 0
    for v in range(n):
        if missing[v] == 0:
            heap_push(heap_key, heap_item, 0, size, priority[v], v)
            size += 1
    for turn in range(n):
        v = heap_pop(heap_key, heap_item, 0, size)
        size -= 1
        order[turn] = v
        at = choose_device(
            v, d, limited, contention, counts_copies, unit, prefer, choices, work, memory,
            transient, capacity, latency, bandwidth, in_start, in_slot, slot_node, slot_size,
            device, finish, home, available, promised, used, link, arrived, left,
        )  # fmt: skip
        u, seconds = unit[v], compute[v * d + at]
        if limited:
            used[at] += bytes_needed(
                v, at, d, counts_copies, unit, home, memory, transient, in_start, in_slot,
                slot_node, slot_size, device, arrived,
            )  # fmt: skip
        if home[u] < 0:
            home[u] = at
            promised[at] += work[u * d + at]
        promised[at] = max(0.0, promised[at] - seconds)
        begin = available[at]
        for i in range(in_start[v], in_start[v + 1]):
            slot = in_slot[i]
            maker = slot_node[slot]
            source = device[maker]
            comes = arrival_of(
                slot, at, d, contention, slot_node, slot_size, latency, bandwidth, device, finish,
                link, arrived,
            )  # fmt: skip
            if source != at and arrived[slot * d + at] == 0.0:
                arrived[slot * d + at] = comes if comes > 0.0 else -1.0
                link[source * d + at] = comes - latency[source * d + at]
            begin = max(begin, comes)
            unread[slot] -= 1
            if limited and unread[slot] == 0:  # its last reader has been placed
                if counts_copies:
                    for p in range(d):
                        if arrived[slot * d + p] != 0.0:
                            used[p] -= slot_size[slot]
                alive[maker] -= 1
                if alive[maker] == 0:
                    used[source] -= transient[maker]
        if limited and out_start[v] == out_start[v + 1]:
            used[at] -= transient[v]
        device[v] = at
        available[at] = begin + seconds
        finish[v] = available[at]
        for slot in range(out_start[v], out_start[v + 1]):
            for e in range(read_start[slot], read_start[slot + 1]):
                to = reader[e]
                missing[to] -= 1
                if missing[to] == 0:
                    heap_push(heap_key, heap_item, 0, size, priority[to], to)
                    size += 1
