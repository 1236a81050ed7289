"""Binary heaps of (key, item) in flat arrays, for loops that are compiled (`loop_compiler.py`).

A heap is a range of two sequences that begins at `first`; the caller counts its entries. Entries
come out by key, then by item, as `heapq` orders pairs.

Source: Williams, Algorithm 232, CACM 7(6), 1964.
"""

from __future__ import annotations

from typing import Any


def heap_push(keys: Any, items: Any, first: int, size: int, key: float, item: int) -> None:
    """Add an entry to a heap of `size` entries."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        above = keys[first + parent]
        if above < key or (above == key and items[first + parent] <= item):
            break
        keys[first + at] = above
        items[first + at] = items[first + parent]
        at = parent
    keys[first + at] = key
    items[first + at] = item


def heap_pop(keys: Any, items: Any, first: int, size: int) -> int:
    """Remove the least of `size` entries, at least one; returns its item."""
    top = items[first]
    count = size - 1
    key, item = keys[first + count], items[first + count]
    at, child = 0, 1
    while child < count:
        below = keys[first + child]
        if child + 1 < count:
            other = keys[first + child + 1]
            if other < below or (
                other == below and items[first + child + 1] < items[first + child]
            ):
                child, below = child + 1, other
        if key < below or (key == below and item <= items[first + child]):
            break
        keys[first + at] = below
        items[first + at] = items[first + child]
        at, child = child, 2 * child + 1
    keys[first + at] = key
    items[first + at] = item
    return int(top)
