"""Collectives through shared memory.

`SlotTransport`, for small tensors: a rank copies its tensor into a slot as soon as it has it, and
every rank combines all tensors by itself. No rank waits for work that another does afterwards.

`MappedTransport`, for large tensors: tensors stay where they are, and all ranks map them. Each rank
combines its share straight from all tensors into its own result, and copies the other shares from
the other results. So numbers are read and written as rarely as possible. A rank writes only to its
own memory, so a straggler of a failed step does no harm.

If the tensors exceed the caches, results are written past the caches. Two ranks then both add
everything: they read the same numbers at about the same time, which takes no longer than to copy
the other's half of the result.

Counters (`shared_counters.py`) publish how far each rank is.
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
"""Bytes of all tensors together, up to which every rank combines everything. The duplicate work
takes less than to hand the work to the queue's thread (0.2 ms)."""

_SLOTS = 2
"""Slots of a rank. A rank that publishes use n + 2 has seen that all others published use n + 1, so
they have read use n, whose slot it overwrites."""

_STAGES = 3
"""Stages of a mapped collective: tensors are ready, shares are combined, everything is read."""

_BLOCK_ELEMENTS = 1 << 15
"""Elements that are combined at once, so that partial results stay in the cache."""

Wait = Callable[[SharedCounters, int], None]
"""Returns when all ranks' counters have reached a value; raises if the step is cancelled."""


def is_small(collective: Collective) -> bool:
    """Return True if a collective uses slots."""
    return sum(map(sum, collective.lengths)) * collective.dtype.itemsize <= SMALL_BYTES


def uses_mapped_tensors(collective: Collective) -> bool:
    """Return True if a collective is large and other workers map its tensors."""
    return not is_small(collective) and len(set(collective.workers)) > 1


def has_mapped_collectives(graph: Graph, bindings: Mapping[str, int]) -> bool:
    """Return True if a program has a collective whose tensors other workers map."""
    starts = (bind_attrs(n.attrs, bindings) for n in graph.of_op("collective_start"))
    return any(map(uses_mapped_tensors, map(Collective.from_attrs, starts)))


def shared_bytes(collective: Collective) -> int:
    """Return the bytes of a collective's own shared memory: counters, and slots if it is small."""
    counter_bytes = collective.count * COUNTER_BYTES
    return (
        counter_bytes + collective.count * _SLOTS * _slot_bytes(collective)
        if is_small(collective)
        else counter_bytes * _STAGES
    )


def private_memory(nbytes: int) -> Array:
    """Return private memory, aligned and zeroed as a shared segment is."""
    raw = np.zeros(nbytes + COUNTER_BYTES, np.uint8)
    start = -address(raw) % COUNTER_BYTES
    memory: Array = raw[start : start + nbytes]
    return memory


def _slot_bytes(collective: Collective) -> int:
    """Return the bytes of a rank's slot, which holds its pieces one after the other."""
    longest = max(map(sum, collective.lengths)) * collective.dtype.itemsize
    return -(-longest // COUNTER_BYTES) * COUNTER_BYTES


_Job = tuple[int, list[Array], Array]
"""A share, the pieces to combine (or the piece to copy), and the array that gets the result."""


class SlotTransport:
    """A device's part in a small collective.

    Args:
        ranks: the device's ranks.
        memory: `shared_bytes` of shared memory, the same for all ranks.
    """

    def __init__(self, collective: Collective, ranks: Sequence[int], memory: Array) -> None:
        self.collective = collective
        self.ranks = tuple(ranks)
        self._published = SharedCounters(memory, collective.count)
        self._use = 0
        self._folds_as_one = collective.sends_same_to_all or (
            collective.kind == "all_reduce" and collective.is_uniform
        )
        slot, start = _slot_bytes(collective), collective.count * COUNTER_BYTES
        self._pieces = [
            [
                _consecutive_views(memory[at : at + slot], lengths, collective.dtype)
                for which in range(_SLOTS)
                for at in [start + (rank * _SLOTS + which) * slot]
            ]
            for rank, lengths in enumerate(
                [(sum(each),) for each in collective.lengths]
                if self._folds_as_one
                else collective.lengths
            )
        ]
        self._jobs: dict[int, tuple[Array, list[list[_Job]]]] = {}

    def publish(self, given: Mapping[int, Array | None]) -> None:
        """Copy the device's tensors into their slots and publish them."""
        self._use += 1
        for rank, x in given.items():
            slots = self._pieces[rank][self._use % _SLOTS]
            if self._folds_as_one:
                if x is not None:
                    np.copyto(slots[0], x.reshape(-1))
            else:
                for target, piece in zip(slots, self.collective.flat_pieces(rank, x), strict=True):
                    np.copyto(target, piece)
            self._published.publish(rank, self._use)

    def collect(self, results: Mapping[int, Array], wait: Wait) -> None:
        """Wait until all ranks have published, and combine or copy their tensors to `results`."""
        wait(self._published, self._use)
        which = self._use % _SLOTS
        for rank, result in results.items():
            known = self._jobs.get(rank)
            if known is None or known[0] is not result:
                known = self._jobs[rank] = (result, self._plan_jobs(rank, result))
            if not self.collective.reduces:
                for _, pieces, target in known[1][which]:
                    np.copyto(target, pieces[0])
                continue
            with np.errstate(all="ignore"):
                for share, pieces, target in known[1][which]:
                    self.collective.combine(share, pieces, target)

    def _plan_jobs(self, rank: int, result: Array) -> list[list[_Job]]:
        """Return the jobs of a rank's result, for each of the slots."""
        collective, targets = self.collective, self.collective.output_views(rank, result)
        if collective.kind == "all_reduce" and self._folds_as_one:
            targets = [result.reshape(-1)]
        jobs: list[list[_Job]] = []
        for which in range(_SLOTS):
            jobs.append([])
            for source, target in enumerate(targets):
                if collective.reduces:
                    pieces = [own[which][source] for own in self._pieces]
                    place = target.reshape(-1)
                else:
                    piece = self._pieces[source][which][0 if collective.sends_same_to_all else rank]
                    place, pieces = target, [piece[: target.size].reshape(target.shape)]
                if target.size:
                    jobs[-1].append((source, pieces, place))
        return jobs


def _consecutive_views(memory: Array, lengths: Sequence[int], dtype: np.dtype[Any]) -> list[Array]:
    """Return consecutive views of memory with these lengths, in elements."""
    pieces, at = [], 0
    for length in lengths:
        end = at + length * dtype.itemsize
        pieces.append(memory[at:end].view(dtype))
        at = end
    return pieces


class MappedTransport:
    """A device's part in a large collective.

    Args:
        ranks: the device's ranks.
        memory: `shared_bytes` of shared memory, the same for all ranks.
        xs, ys: mapped tensors and results of all ranks. The device writes only to results of its
            own ranks.
    """

    def __init__(
        self,
        collective: Collective,
        ranks: Sequence[int],
        memory: Array,
        xs: Sequence[Array],
        ys: Sequence[Array],
    ) -> None:
        self.collective = collective
        self.ranks = tuple(ranks)
        span = collective.count * COUNTER_BYTES
        self._stage_counters = [
            SharedCounters(memory[i * span : (i + 1) * span], collective.count)
            for i in range(_STAGES)
        ]
        self._bypasses_cache = bypass.exceeds_cache(sum(array.nbytes for array in (*xs, *ys)))
        self._add = _adder(collective) if self._bypasses_cache else None
        self._folds_all_shares = collective.kind == "all_reduce" and self._add is not None
        self._parts = [collective.input_views(rank, x) for rank, x in enumerate(xs)]
        self._places = [collective.output_views(rank, y) for rank, y in enumerate(ys)]
        self._use = 0

    def run(self, wait: Wait) -> None:
        """Run the collective."""
        self._use += 1
        collective = self.collective
        self._finish_stage(0, wait)
        if collective.reduces:
            with np.errstate(all="ignore"):
                for rank in self.ranks:
                    for share in range(collective.count) if self._folds_all_shares else (rank,):
                        self._fold(share, self._places[rank][share])
            self._finish_stage(1, wait)
        if collective.kind == "reduce_scatter":
            return
        for rank in () if self._folds_all_shares else self.ranks:
            for source, place in enumerate(self._places[rank]):
                if collective.kind != "all_reduce":
                    self._copy(
                        place, self._parts[source][0 if collective.sends_same_to_all else rank]
                    )
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
            swapped = self.collective.order(share) == (1, 0)
            pair = (other, one) if swapped else (one, other)
            self._add(out[past], pair[0][past], pair[1][past])
            for edge in _edges(past):
                self.collective.combine(share, [one[edge], other[edge]], out[edge])
            return
        if out.ndim > 1 or (
            self.collective.count == 2 and self.collective.working_dtype == self.collective.dtype
        ):
            if out.size:
                self.collective.combine(share, pieces, out)
            return
        for start in range(0, out.size, _BLOCK_ELEMENTS):
            span = slice(start, start + _BLOCK_ELEMENTS)
            self.collective.combine(share, [piece[span] for piece in pieces], out[span])

    def _finish_stage(self, stage: int, wait: Wait) -> None:
        for rank in self.ranks:
            self._stage_counters[stage].publish(rank, self._use)
        wait(self._stage_counters[stage], self._use)


def _adder(collective: Collective) -> bypass.Sum | None:
    """Return a function that adds two tensors past the caches; None for other collectives."""
    reduction = collective.attrs.get("reduction")
    if collective.count != 2 or reduction not in ("sum", "mean"):
        return None
    return bypass.make_adder(collective.dtype.name, halved=reduction == "mean")


def _are_contiguous(*arrays: Array) -> bool:
    return all(array.flags.c_contiguous for array in arrays)


def _edges(inner: slice) -> tuple[slice, slice]:
    return slice(0, inner.start), slice(inner.stop, None)
