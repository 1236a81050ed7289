"""The index of a hash table: from ids to entries, in one matrix of int64.

An id belongs to one part of the table, which its hash names. Each part has a row of the matrix, and
gives and takes rows by itself. So parts may lie on several devices, and no number depends on it.

A row of the matrix holds a header, the index, and for each entry its key, the step of its last use,
and how often its key appeared. An index position holds the number of an entry, or -1. An id is
looked for from the position that its hash gives, one position after the other, up to a -1 (open
addressing). Positions are not cleared when an entry gets another key: an entry counts as found only
if it is in use and its key is the id. If too few positions are left, the index is built anew.

The first `rows` entries are rows of the table. If ids have to appear several times before they get
a row, as many more entries count the ids that wait.

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
        evict: True: a full part gives the rows that were not used for longest to new ids.
        lifetime: steps after whose end an unused id is forgotten; None: it never is.
        parts: the parts into which a hash divides the ids.
    """

    capacity: int
    admit: int = 1
    evict: bool = True
    lifetime: int | None = None
    parts: int = 1

    @property
    def rows(self) -> int:
        """The rows of a part."""
        return -(-self.capacity // self.parts)

    @property
    def entries(self) -> int:
        """The entries of a part: rows, and ids that wait for a row."""
        return self.rows * (1 if self.admit == 1 else 2)

    @property
    def positions(self) -> int:
        """The length of a part's index, a power of two; at most half of it is in use."""
        return 1 << max(2, (2 * self.entries - 1).bit_length())

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.parts, _HEADER + self.positions + 3 * self.entries

    @property
    def use(self) -> slice:
        """The columns that hold the last use of each row."""
        start = _HEADER + self.positions + self.entries
        return slice(start, start + self.rows)


class HashState(NamedTuple):
    """Views of the columns of the matrix, by part; a matrix of -1 is an empty table.

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


EVICTED = 2
"""The column of the header with the rows evicted so far, less 1."""


def view_state(matrix: Array, layout: HashLayout) -> HashState:
    """Return views of the columns of a matrix."""
    n, start = layout.entries, _HEADER + layout.positions
    columns = (matrix[:, start + i * n : start + (i + 1) * n] for i in range(3))
    return HashState(matrix[:, :_HEADER], matrix[:, _HEADER:start], *columns)


class Asked(NamedTuple):
    """The ids of a step.

    Attributes:
        ids: of any shape.
        counts: how often each occurrence counts, of the same shape; 0: not at all. None: once.
        places: the row of the matrix of each part, -1: elsewhere, (parts,); None: all in order.
    """

    ids: Array
    counts: Array | None = None
    places: Array | None = None


class Found(NamedTuple):
    """The result of looking up ids.

    Attributes:
        rows: the row of each id among the rows of all parts, each of which has one more row at its
            end, for ids without a row.
        entries: the entry of each id in its part; one below `rows` is a row. `entries`: none.
        fresh: whether the id's value is its initial value: it has no row, or a new one.
        evicted: the number of ids that lost their rows, by part.
    """

    rows: Array
    entries: Array
    fresh: Array
    evicted: Array


class _Distinct(NamedTuple):
    """Distinct ids, ascending, that count.

    Attributes:
        keys: the ids.
        parts: the row of the matrix of each.
        counts: how often each one occurs.
        places: where each one occurs first, or else which one each id is: the number of them for an
            id that does not count.
    """

    keys: Array
    parts: Array
    counts: Array
    places: Array


def _distinct(asked: Asked, layout: HashLayout, wants_first: bool) -> _Distinct:
    """Return the distinct ids, with the first place of each, or the number of each place."""
    flat = asked.ids.reshape(-1)
    if asked.counts is None:
        options: dict[str, Any] = {"return_index": wants_first, "return_inverse": not wants_first}
        keys, places, counts = np.unique(flat, return_counts=True, **options)
    else:
        keys, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, inverse, asked.counts.reshape(-1))
        kept = counts > 0
        numbers = np.where(kept, np.cumsum(kept) - 1, kept.sum())
        keys, counts = keys[kept], counts[kept]
        places = first[kept] if wants_first else numbers[inverse]
    parts = part_of(keys, layout.parts)
    if asked.places is not None:
        parts = asked.places[parts]
    return _Distinct(keys, parts, counts, places)


def find(matrix: Array, asked: Asked, layout: HashLayout, insert: bool) -> Found:
    """Look up ids; with `insert`, give new ids the entries that `insert_ids` will write.

    Rows are given in ascending order of the ids, first those that were never used, then those that
    were not used for longest, by number if equal. So the order of the ids changes nothing.

    Raises:
        TableFullError: more new ids than rows that may be given to them.
    """
    state = view_state(matrix, layout)
    distinct = _distinct(asked, layout, False)
    parts, entries = distinct.parts, _probe(state, distinct.parts, distinct.keys)
    step = state.header[parts, 0] + 1
    is_row = (entries >= 0) & (entries < layout.rows)
    expired = np.zeros(len(parts), bool)
    if layout.lifetime is not None:
        expired = is_row & (state.used[parts, entries] < step - layout.lifetime)
        is_row &= ~expired
    old, entries = entries, np.where(expired, -1, entries)
    fresh, evicted = ~is_row, np.bincount(parts[expired], minlength=len(matrix))
    if insert:
        seen = distinct.counts + np.where(entries >= 0, state.counts[parts, entries], 0)
        admitted = fresh & (seen >= layout.admit)
        waiting = (entries < 0) & ~admitted
        area = _Area(state.used[:, : layout.rows], state.header[:, 3] + 1, state.header[:, 0] + 1)
        busy, freed = (parts[is_row], old[is_row]), (parts[expired], old[expired])
        entries[admitted], lost = _allot(area, parts[admitted], busy, freed, layout)
        evicted = evicted + lost
        waited, begin = old >= layout.rows, layout.rows
        area = _Area(state.used[:, begin:], state.header[:, 4] + 1, state.header[:, 0] + 1)
        stay, left = ((parts[w], old[w] - begin) for w in (waited & ~admitted, waited & admitted))
        free, _ = _allot(area, parts[waiting], stay, left, None)
        entries[waiting] = np.where(free < 0, -1, free + begin)
    entries = np.append(np.where(entries < 0, layout.entries, entries), layout.entries)
    rows = np.append(parts, 0) * (layout.rows + 1) + np.minimum(entries, layout.rows)
    fresh, at = np.append(fresh, True), distinct.places.reshape(asked.ids.shape)
    return Found(rows[at], entries[at], fresh[at], evicted)


def insert_ids(
    matrix: Array, asked: Asked, entries: Array, evicted: Array, layout: HashLayout
) -> None:
    """Write what `find` decided to a matrix, in place: keys, last use, counts, and the index."""
    state = view_state(matrix, layout)
    keys, parts, count, first = _distinct(asked, layout, True)
    old, new = _probe(state, parts, keys), entries.reshape(-1)[first]
    goes_on = (old >= layout.rows) | ((old >= 0) & (old == new))
    count = count + np.where(goes_on, state.counts[parts, old], 0)
    left = (old >= 0) & (old != new)
    state.used[parts[left], old[left]] = -1
    kept = new < layout.entries
    keys, parts, new, old, count = (each[kept] for each in (keys, parts, new, old, count))
    header = state.header
    for column, values in ((state.keys, keys), (state.counts, count)):
        column[parts, new] = values
    state.used[parts, new] = header[parts, 0] + 1
    header[:, 0] += 1
    header[:, EVICTED] += evicted
    is_row = new < layout.rows
    np.maximum.at(header[:, 3], parts[is_row], new[is_row])
    np.maximum.at(header[:, 4], parts[~is_row], new[~is_row] - layout.rows)
    moved = old != new
    written = header[:, 1] + 1 + np.bincount(parts[moved], minlength=len(matrix))
    is_full = 4 * written > 3 * layout.positions
    for part in np.flatnonzero(is_full):
        live = np.flatnonzero(state.used[part] >= 0)
        state.positions[part] = -1
        written[part] = len(live)
        _write_positions(state.positions, np.full(len(live), part), state.keys[part, live], live)
    moved &= ~is_full[parts]
    header[:, 1] = written - 1
    _write_positions(state.positions, parts[moved], keys[moved], new[moved])


def _probe(state: HashState, parts: Array, keys: Array) -> Array:
    """Return the entry of each of some distinct ids, or -1."""
    found = np.full(len(keys), -1, np.int64)
    mask = state.positions.shape[1] - 1
    left, at = np.arange(len(keys)), _hash(keys) & mask
    while len(left):
        own = parts[left]
        entries = state.positions[own, at]
        hit = (entries >= 0) & (state.keys[own, entries] == keys[left])
        hit &= state.used[own, entries] >= 0
        found[left[hit]] = entries[hit]
        more = (entries >= 0) & ~hit
        left, at = left[more], (at[more] + 1) & mask
    return found


def _write_positions(index: Array, parts: Array, keys: Array, entries: Array) -> None:
    """Write distinct entries to the first free positions of their keys."""
    mask = index.shape[1] - 1
    at = _hash(keys) & mask
    while len(entries):
        free = index[parts, at] < 0
        index[parts[free], at[free]] = entries[free]  # of several, one stays
        more = index[parts, at] != entries
        entries, parts, at = entries[more], parts[more], (at[more] + 1) & mask


def _hash(keys: Array) -> Array:
    """Mix the bits of ids. Source: Steele, Lea & Flood, SplitMix, OOPSLA 2014."""
    bits = keys.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def part_of(ids: Array, parts: int) -> Array:
    """Return the part of each id. It takes other bits of the hash than the index."""
    if parts == 1:
        return np.zeros(ids.shape, np.int64)
    return (_hash(ids) >> 31) % parts


# Free entries -----------------------------------------------------------------------------------


class _Area(NamedTuple):
    """Some entries of each part.

    Attributes:
        used: the step of the last use of each, (parts, entries).
        begun: how many of them were ever in use, by part.
        step: the step that begins, by part.
    """

    used: Array
    begun: Array
    step: Array


_Places = tuple[Array, Array]  # parts, and places in the area


def _allot(
    area: _Area, parts: Array, busy: _Places, freed: _Places, layout: HashLayout | None
) -> tuple[Array, Array]:
    """Return a place in its part for each new id, -1 if there is none; and how many ids lose
    theirs, by part.

    Args:
        parts: the part of each new id.
        busy: places that this step uses already.
        freed: places that ids leave in this step.
        layout: whose policy to follow; None: any place may be given away.

    Raises:
        TableFullError: the layout forbids to leave new ids without a place.
    """
    found = area.begun[parts] + _rank(parts)
    lost = np.zeros(len(area.used), np.int64)
    over = found >= area.used.shape[1]
    for part in np.unique(parts[over]):
        used, step = area.used[part].copy(), int(area.step[part])
        used[freed[1][freed[0] == part]] = -1
        used[busy[1][busy[0] == part]] = step
        used[area.begun[part] :] = step
        limit = step
        if layout is not None and layout.lifetime is not None:
            limit = max(0, step - layout.lifetime)
        elif layout is not None and not layout.evict:
            limit = 0
        new = np.flatnonzero(over & (parts == part))
        more = _least_used(used, len(new), limit)
        found[new] = -1
        found[new[: len(more)]] = more
        lost[part] = int((used[more] >= 0).sum())
        if layout is not None and len(more) < len(new):
            number = int((parts == part).sum())
            room = number - len(new) + len(more)
            raise TableFullError(_describe_full(layout, int((busy[0] == part).sum()), number, room))
    return found, lost


def _rank(groups: Array) -> Array:
    """Return the number of each element among those of its group."""
    order = np.argsort(groups, kind="stable")
    ascending = groups[order]
    rank = np.empty(len(groups), np.int64)
    rank[order] = np.arange(len(groups)) - np.searchsorted(ascending, ascending)
    return rank


def _least_used(used: Array, number: int, limit: int) -> Array:
    """Return the numbers of the least values below `limit`, in their order."""
    number, low = min(number, int((used < limit).sum())), int(used.min(initial=limit))
    if not number:
        return np.zeros(0, np.int64)
    if int(used.max()) - low < 4 * len(used) + 65536:  # np.partition is slow for many equal values
        last = low + int(np.searchsorted(np.cumsum(np.bincount(used - low)), number))
    else:
        last = np.partition(used, number - 1)[number - 1]
    before = np.flatnonzero(used < last)
    ties = np.flatnonzero(used == last)[: number - len(before)]
    return np.concatenate([before[np.argsort(used[before], kind="stable")], ties])


def _describe_full(layout: HashLayout, busy: int, number: int, room: int) -> str:
    """Return the text of the error of a full table."""
    text = f"the table has {layout.capacity:,} rows; "
    if layout.parts > 1:
        text = f"one of {layout.parts} parts of the table has {layout.rows:,} rows; "
    text += f"{number:,} new ids need one and {room:,} "
    if layout.lifetime is not None:
        text += f"are free or were not used in the last {layout.lifetime:,} steps"
        remedy = "a shorter lifetime"
    elif layout.evict:
        text += f"are not used by this step itself ({busy:,} are)"
        remedy = "a smaller batch"
    else:
        text, remedy = text + "are free", 'evict="lru"'
    return f"{text}; give the table a larger capacity, or {remedy}"
