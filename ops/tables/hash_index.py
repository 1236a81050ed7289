"""The index of a hash table: from ids to entries, in one vector of int64.

The vector holds a header, the index, and for each entry its key, the step of its last use, and how
often its key appeared. An index position holds the number of an entry, or -1. An id is looked for
from the position that its hash gives, one position after the other, up to a -1 (open addressing).
Positions are not cleared when an entry gets another key: an entry counts as found only if it is in
use and its key is the id. If too few positions are left, the index is built anew.

The first `capacity` entries are rows of the table. If ids have to appear several times before they
get a row, as many more entries count the ids that wait.

Source: Knuth, The Art of Computer Programming 3, 6.4, algorithm L.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import TableFullError

Array = np.ndarray[Any, Any]
_HEADER = 5


@dataclass(frozen=True)
class HashLayout:
    """The sizes of a hash table, and when ids get and lose their rows.

    Attributes:
        capacity: rows of the table.
        admit: appearances from which on an id has a row.
        evict: True: a full table gives the rows that were not used for longest to new ids.
        lifetime: steps after whose end an unused id is forgotten; None: it never is.
    """

    capacity: int
    admit: int = 1
    evict: bool = True
    lifetime: int | None = None

    @property
    def entries(self) -> int:
        """The number of entries: rows, and ids that wait for a row."""
        return self.capacity * (1 if self.admit == 1 else 2)

    @property
    def positions(self) -> int:
        """The length of the index, a power of two; at most half of it is in use."""
        return 1 << max(2, (2 * self.entries - 1).bit_length())

    @property
    def length(self) -> int:
        """The length of the vector."""
        return _HEADER + self.positions + 3 * self.entries


class HashState(NamedTuple):
    """Views of the parts of the vector; a vector of -1 is an empty table.

    Attributes:
        header: each less 1: steps so far, index positions written since it was built, rows evicted
            so far, rows and waiting entries that were ever in use.
        positions: the entry at each position of the index, or -1.
        keys: the id of each entry.
        used: the step of the last use of each entry; -1 for a free entry.
        counts: appearances of each entry's id.
    """

    header: Array
    positions: Array
    keys: Array
    used: Array
    counts: Array


def view_state(vector: Array, layout: HashLayout) -> HashState:
    """Return views of the parts of a vector."""
    n, start = layout.entries, _HEADER + layout.positions
    parts = (vector[start + i * n : start + (i + 1) * n] for i in range(3))
    return HashState(vector[:_HEADER], vector[_HEADER:start], *parts)


class Found(NamedTuple):
    """The result of looking up ids.

    Attributes:
        entries: the entry of each id; one below `capacity` is a row. `layout.entries`: none.
        fresh: whether the id's value is its initial value: it has no row, or a new one.
        evicted: the number of ids that lost their rows.
    """

    entries: Array
    fresh: Array
    evicted: int


def find(vector: Array, ids: Array, layout: HashLayout, insert: bool) -> Found:
    """Look up ids; with `insert`, give new ids the entries that `insert_ids` will write.

    Rows are given in ascending order of the ids, first those that were never used, then those that
    were not used for longest, by number if equal. So the order of the ids changes nothing.

    Raises:
        TableFullError: more new ids than rows that may be given to them.
    """
    state = view_state(vector, layout)
    keys, inverse, count = np.unique(ids.reshape(-1), return_inverse=True, return_counts=True)
    entries, step = _probe(state, keys), int(state.header[0]) + 1
    is_row = (entries >= 0) & (entries < layout.capacity)
    expired = entries[:0]
    if layout.lifetime is not None:
        old = is_row & (state.used[entries] < step - layout.lifetime)
        expired, is_row = entries[old], is_row & ~old
        entries = np.where(old, -1, entries)
    fresh, evicted = ~is_row, 0
    if insert:
        if len(expired):
            state = state._replace(used=state.used.copy())
            state.used[expired] = -1
        seen = count + np.where(entries >= 0, state.counts[entries], 0)
        admitted = fresh & (seen >= layout.admit)
        waiting = (entries < 0) & ~admitted
        rows, evicted = _free_rows(state, layout, entries[is_row], int(admitted.sum()), step)
        waited = entries >= layout.capacity
        stay, left = entries[waited & ~admitted], entries[waited & admitted]
        free = _free_waiting(state, layout, stay, left, int(waiting.sum()), step)
        entries[admitted] = rows
        entries[np.flatnonzero(waiting)[: len(free)]] = free
    entries = np.where(entries < 0, layout.entries, entries)
    return Found(
        entries[inverse].reshape(ids.shape), fresh[inverse].reshape(ids.shape),
        evicted + len(expired),
    )  # fmt: skip


def insert_ids(vector: Array, ids: Array, entries: Array, evicted: int, layout: HashLayout) -> None:
    """Write what `find` decided to a vector, in place: keys, last use, counts, and the index."""
    state = view_state(vector, layout)
    keys, first, count = np.unique(ids.reshape(-1), return_index=True, return_counts=True)
    old, new = _probe(state, keys), entries.reshape(-1)[first]
    goes_on = (old >= layout.capacity) | ((old >= 0) & (old == new))
    count = count + np.where(goes_on, state.counts[old], 0)
    state.used[old[(old >= 0) & (old != new)]] = -1
    kept = new < layout.entries
    keys, new, old, count = keys[kept], new[kept], old[kept], count[kept]
    header = state.header
    state.keys[new], state.used[new], state.counts[new] = keys, header[0] + 1, count
    header[0] += 1
    header[2] += evicted
    rows, others = new[new < layout.capacity], new[new >= layout.capacity]
    header[3] = max(header[3], rows.max(initial=-1))
    header[4] = max(header[4], others.max(initial=-1) - layout.capacity)
    lost = old != new
    if 4 * (header[1] + 1 + lost.sum()) > 3 * layout.positions:
        state.positions[:] = -1
        new = np.flatnonzero(state.used >= 0)
        header[1], keys = -1, state.keys[new]
    else:
        keys, new = keys[lost], new[lost]
    header[1] += len(new)
    _write_positions(state.positions, keys, new)


def _probe(state: HashState, keys: Array) -> Array:
    """Return the entry of each of some distinct ids, or -1."""
    found = np.full(len(keys), -1, np.int64)
    mask = len(state.positions) - 1
    left, at = np.arange(len(keys)), _hash(keys) & mask
    while len(left):
        entries = state.positions[at]
        hit = (entries >= 0) & (state.keys[entries] == keys[left]) & (state.used[entries] >= 0)
        found[left[hit]] = entries[hit]
        more = (entries >= 0) & ~hit
        left, at = left[more], (at[more] + 1) & mask
    return found


def _write_positions(index: Array, keys: Array, entries: Array) -> None:
    """Write distinct entries to the first free positions of their keys."""
    at, mask = _hash(keys) & (len(index) - 1), len(index) - 1
    while len(entries):
        free = index[at] < 0
        index[at[free]] = entries[free]  # of several, one stays
        more = index[at] != entries
        entries, at = entries[more], (at[more] + 1) & mask


def _hash(keys: Array) -> Array:
    """Mix the bits of ids. Source: Steele, Lea & Flood, SplitMix, OOPSLA 2014."""
    bits = keys.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def _free_rows(
    state: HashState, layout: HashLayout, busy: Array, number: int, step: int
) -> tuple[Array, int]:
    """Return rows for new ids, and how many ids they are taken from; raises as `find`.

    Args:
        busy: rows that this step uses already.
    """
    begun = int(state.header[3]) + 1
    rows = np.arange(begun, min(begun + number, layout.capacity))
    if len(rows) == number:
        return rows, 0
    used = state.used[: layout.capacity].copy()
    used[busy] = used[rows] = step  # rows that may not be given away
    if layout.lifetime is not None:
        used[(used >= 0) & (used >= step - layout.lifetime)] = step
    elif not layout.evict:
        used[used >= 0] = step
    more = _least_used(used, number - len(rows), step)
    if len(rows) + len(more) < number:
        raise TableFullError(_describe_full(layout, len(busy), number, len(rows) + len(more)))
    return np.concatenate([rows, more]), int((used[more] >= 0).sum())


def _free_waiting(
    state: HashState, layout: HashLayout, busy: Array, left: Array, number: int, step: int
) -> Array:
    """Return entries for new ids that wait for a row, at most as many as there are.

    Args:
        busy: entries of ids that go on waiting.
        left: entries of ids that get a row.
    """
    begun = layout.capacity + int(state.header[4]) + 1
    free = np.arange(begun, min(begun + number, layout.entries))
    if len(free) == number:
        return free
    used = state.used[layout.capacity :].copy()
    used[left - layout.capacity] = -1
    used[busy - layout.capacity] = used[free - layout.capacity] = step
    more = _least_used(used, number - len(free), step) + layout.capacity
    return np.concatenate([free, more])


def _least_used(used: Array, number: int, step: int) -> Array:
    """Return the numbers of the least values below `step`, in their order."""
    number, low = min(number, int((used < step).sum())), int(used.min(initial=step))
    if not number:
        return np.zeros(0, np.int64)
    if step - low < 4 * len(used) + 65536:  # np.partition is slow for many equal values
        last = low + int(np.searchsorted(np.cumsum(np.bincount(used - low)), number))
    else:
        last = np.partition(used, number - 1)[number - 1]
    before = np.flatnonzero(used < last)
    ties = np.flatnonzero(used == last)[: number - len(before)]
    return np.concatenate([before[np.argsort(used[before], kind="stable")], ties])


def _describe_full(layout: HashLayout, busy: int, number: int, room: int) -> str:
    """Return the text of the error of a full table."""
    text = f"the table has {layout.capacity:,} rows; {number:,} new ids need one and {room:,} "
    if layout.lifetime is not None:
        text += f"are free or were not used in the last {layout.lifetime:,} steps"
        remedy = "a shorter lifetime"
    elif layout.evict:
        text += f"are not used by this step itself ({busy:,} are)"
        remedy = "a smaller batch"
    else:
        text, remedy = text + "are free", 'evict="lru"'
    return f"{text}; give the table a larger capacity, or {remedy}"
