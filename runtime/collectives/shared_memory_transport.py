"""Exchanges through memory that all ranks see.

A small tensor is copied into a slot as soon as its rank has it, and every rank folds everything by
itself: nobody waits for what another does after it.

A large one stays where it is, in memory that the others map: each rank folds its share straight
from all ranks' tensors into its own result, and takes the others' shares from theirs. So a number
is read and written as seldom as can be, and every rank writes to memory of its own only: whatever
a straggler of a failed step still does harms nobody. What lies in no cache is written past them.
Two ranks then add everything by themselves: they read the same numbers at about the same time,
which takes no longer than to fetch the other's half of the result.

Counters (`shared_counters.py`) say how far each rank is; they only grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.ir.graph import Graph, bind_attrs
from graphflow.ops.kernels.jit.array_address import address
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.shared_counters import COUNTER_BYTES, SharedCounters
from graphflow.runtime.transport import nontemporal_copy as bypass

SMALL_BYTES = 1 << 20
"""Bytes of all ranks' tensors together, up to which each rank folds everything by itself: what it
then does twice takes less than a thread that does it once beside the program (0.2 ms)."""

_SLOTS = 2
"""A rank that offers its next tensor but one has seen that the others offered the one between, so
they have read the one before."""

_STAGES = 3
"""Of a large exchange: tensors are there, shares are folded, all is read."""

_BLOCK_ELEMENTS = 1 << 15
"""Elements that are folded at once, so that what several ranks add to stays in the cache."""

Wait = Callable[[SharedCounters, int], None]
"""Returns when all ranks' counters have reached a value; raises if the step is given up."""


def is_small(what: Collective) -> bool:
    """Whether a collective goes through slots."""
    return sum(map(sum, what.lengths)) * what.dtype.itemsize <= SMALL_BYTES


def uses_mapped_tensors(what: Collective) -> bool:
    """Whether the tensors of a collective are large, and other workers map them where they are."""
    return not is_small(what) and len(set(what.workers)) > 1


def has_mapped_collectives(graph: Graph, bindings: Mapping[str, int]) -> bool:
    """Whether a program has such a collective."""
    starts = (bind_attrs(n.attrs, bindings) for n in graph.of_op("collective_start"))
    return any(map(uses_mapped_tensors, map(Collective.from_attrs, starts)))


def shared_bytes(what: Collective) -> int:
    """Bytes that the ranks of a collective have in common: gates, and slots if it is small."""
    gates = what.count * COUNTER_BYTES
    return gates + what.count * _SLOTS * _slot_bytes(what) if is_small(what) else gates * _STAGES


def private_memory(nbytes: int) -> Array:
    """Memory of this process alone, as a segment would be."""
    raw = np.zeros(nbytes + COUNTER_BYTES, np.uint8)
    start = -address(raw) % COUNTER_BYTES
    memory: Array = raw[start : start + nbytes]
    return memory


def _slot_bytes(what: Collective) -> int:
    """Bytes of a rank's slot: its pieces, one after the other."""
    longest = max(map(sum, what.lengths)) * what.dtype.itemsize
    return -(-longest // COUNTER_BYTES) * COUNTER_BYTES


_Job = tuple[int, list[Array], Array]
"""A share, what is folded (or the one that is copied), and where it goes."""


class SlotTransport:
    """What a device does in a small collective, for the ranks that it has.

    Args:
        ranks: of this device.
        memory: what `ground` asks for, the same for all ranks.
    """

    def __init__(self, what: Collective, ranks: Sequence[int], memory: Array) -> None:
        self.what = what
        self.ranks = tuple(ranks)
        self._published = SharedCounters(memory, what.count)
        self._use = 0
        self._folds_as_one = what.sends_same_to_all or (
            what.kind == "all_reduce" and what.is_uniform
        )
        slot, start = _slot_bytes(what), what.count * COUNTER_BYTES
        self._pieces = [
            [
                _consecutive_views(memory[at : at + slot], lengths, what.dtype)
                for which in range(_SLOTS)
                for at in [start + (rank * _SLOTS + which) * slot]
            ]
            for rank, lengths in enumerate(
                [(sum(each),) for each in what.lengths] if self._folds_as_one else what.lengths
            )
        ]
        self._jobs: dict[int, tuple[Array, list[list[_Job]]]] = {}

    def publish(self, given: Mapping[int, Array | None]) -> None:
        """Copy the tensors in; the others may use them from now on."""
        self._use += 1
        for rank, x in given.items():
            slots = self._pieces[rank][self._use % _SLOTS]
            if self._folds_as_one:
                if x is not None:
                    np.copyto(slots[0], x.reshape(-1))
            else:
                for target, piece in zip(slots, self.what.flat_pieces(rank, x), strict=True):
                    np.copyto(target, piece)
            self._published.publish(rank, self._use)

    def collect(self, results: Mapping[int, Array], wait: Wait) -> None:
        """Fold, or take, what all ranks have offered."""
        wait(self._published, self._use)
        which = self._use % _SLOTS
        for rank, result in results.items():
            known = self._jobs.get(rank)
            if known is None or known[0] is not result:
                known = self._jobs[rank] = (result, self._plan_jobs(rank, result))
            if not self.what.reduces:
                for _, pieces, target in known[1][which]:
                    np.copyto(target, pieces[0])
                continue
            with np.errstate(all="ignore"):
                for share, pieces, target in known[1][which]:
                    self.what.combine(share, pieces, target)

    def _plan_jobs(self, rank: int, result: Array) -> list[list[_Job]]:
        """What there is to do in each of the slots."""
        what, targets = self.what, self.what.output_views(rank, result)
        if what.kind == "all_reduce" and self._folds_as_one:
            targets = [result.reshape(-1)]
        jobs: list[list[_Job]] = []
        for which in range(_SLOTS):
            jobs.append([])
            for source, target in enumerate(targets):
                if what.reduces:
                    pieces = [own[which][source] for own in self._pieces]
                    place = target.reshape(-1)
                else:
                    piece = self._pieces[source][which][0 if what.sends_same_to_all else rank]
                    place, pieces = target, [piece[: target.size].reshape(target.shape)]
                if target.size:
                    jobs[-1].append((source, pieces, place))
        return jobs


def _consecutive_views(memory: Array, lengths: Sequence[int], dtype: np.dtype[Any]) -> list[Array]:
    """Arrays of these lengths, one after the other."""
    pieces, at = [], 0
    for length in lengths:
        end = at + length * dtype.itemsize
        pieces.append(memory[at:end].view(dtype))
        at = end
    return pieces


class MappedTransport:
    """What a device does in a large collective, for the ranks that it has.

    Args:
        memory: what `ground` asks for, the same for all ranks.
        xs, ys: tensors and results of all ranks, in memory that this process sees; it writes only
            to the results of its own.
    """

    def __init__(
        self,
        what: Collective,
        ranks: Sequence[int],
        memory: Array,
        xs: Sequence[Array],
        ys: Sequence[Array],
    ) -> None:
        self.what = what
        self.ranks = tuple(ranks)
        span = what.count * COUNTER_BYTES
        self._stage_counters = [
            SharedCounters(memory[i * span : (i + 1) * span], what.count) for i in range(_STAGES)
        ]
        self._bypasses_cache = bypass.exceeds_cache(sum(array.nbytes for array in (*xs, *ys)))
        self._add = _adder(what) if self._bypasses_cache else None
        self._folds_all_shares = what.kind == "all_reduce" and self._add is not None
        self._parts = [what.input_views(rank, x) for rank, x in enumerate(xs)]
        self._places = [what.output_views(rank, y) for rank, y in enumerate(ys)]
        self._use = 0

    def run(self, wait: Wait) -> None:
        """All of it."""
        self._use += 1
        what = self.what
        self._finish_stage(0, wait)
        if what.reduces:
            with np.errstate(all="ignore"):
                for rank in self.ranks:
                    for share in range(what.count) if self._folds_all_shares else (rank,):
                        self._fold(share, self._places[rank][share])
            self._finish_stage(1, wait)
        if what.kind == "reduce_scatter":
            return
        for rank in () if self._folds_all_shares else self.ranks:
            for source, place in enumerate(self._places[rank]):
                if what.kind != "all_reduce":
                    self._copy(place, self._parts[source][0 if what.sends_same_to_all else rank])
                elif source != rank:
                    self._copy(place, self._places[source][source])
        self._finish_stage(2, wait)

    def _copy(self, place: Array, found: Array) -> None:
        if not place.size:
            return
        if self._bypasses_cache and _are_contiguous(place, found):
            place, found = (array.reshape(-1).view(np.uint8) for array in (place, found))
            past = bypass.whole_blocks(place)
            bypass.copy(place[past], found[past], True)
            for edge in _edges(past):
                place[edge] = found[edge]
        else:
            place[...] = found

    def _fold(self, share: int, out: Array) -> None:
        pieces = [parts[share] for parts in self._parts]
        if self._add is not None and _are_contiguous(out, *pieces):
            out, one, other = (array.reshape(-1) for array in (out, *pieces))
            past = bypass.whole_blocks(out)
            swapped = self.what.order(share) == (1, 0)
            pair = (other, one) if swapped else (one, other)
            self._add(out[past], pair[0][past], pair[1][past])
            for edge in _edges(past):
                self.what.combine(share, [one[edge], other[edge]], out[edge])
            return
        if out.ndim > 1 or (self.what.count == 2 and self.what.working_dtype == self.what.dtype):
            if out.size:
                self.what.combine(share, pieces, out)
            return
        for start in range(0, out.size, _BLOCK_ELEMENTS):
            span = slice(start, start + _BLOCK_ELEMENTS)
            self.what.combine(share, [piece[span] for piece in pieces], out[span])

    def _finish_stage(self, stage: int, wait: Wait) -> None:
        for rank in self.ranks:
            self._stage_counters[stage].publish(rank, self._use)
        wait(self._stage_counters[stage], self._use)


def _adder(what: Collective) -> bypass.Sum | None:
    """What adds the tensors of two ranks past the caches, if that is all there is to do."""
    reduction = what.attrs.get("reduction")
    if what.count != 2 or reduction not in ("sum", "mean"):
        return None
    return bypass.make_adder(what.dtype.name, halved=reduction == "mean")


def _are_contiguous(*arrays: Array) -> bool:
    return all(array.flags.c_contiguous for array in arrays)


def _edges(inner: slice) -> tuple[slice, slice]:
    return slice(0, inner.start), slice(inner.stop, None)
