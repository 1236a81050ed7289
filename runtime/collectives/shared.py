"""Exchanges through memory that all ranks see.

What travels goes through slots that stay in the processor's cache: a rank copies a chunk of its
tensor in, folds its share of everybody's chunk, and copies out what the others folded. While one
chunk is folded the next is copied in. Counters (`gate.py`) say how far each rank is; they only
grow, and every rank takes the same chunks in the same order.

A tensor of one small chunk needs less: all ranks copy theirs in as soon as they have it, and each
folds everything by itself, so that nobody waits for what another does after it.

Why nothing is overwritten that is still read: chunk s goes to slot s modulo `SLOTS`. A rank that
copies chunk s in has finished chunk s - 2, so all ranks have copied chunk s - 2 in, which each does
after it finished chunk s - 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphflow.ops.kernels.address import address
from graphflow.runtime.collectives.gate import LINE, Gates
from graphflow.runtime.collectives.pieces import Array, Collective

SLOTS = 4
CHUNK = 1 << 20
"""Bytes of a slot."""
SMALL = 1 << 19
"""Bytes of all ranks' tensors together, up to which each rank folds everything by itself."""

Wait = Callable[[Gates, int], None]
"""Returns when all ranks' counters have reached a value; raises if the step is given up."""


def is_small(what: Collective) -> bool:
    """Whether a collective goes in one chunk that each rank folds by itself."""
    return sum(map(sum, what.lengths)) * what.dtype.itemsize <= SMALL


@dataclass(frozen=True)
class _Cut:
    """How the pieces of a collective lie in slots.

    Attributes:
        pieces: of a slot.
        length: elements of a piece in a chunk, at most.
        chunks: how many there are.
    """

    pieces: int
    length: int
    chunks: int
    itemsize: int

    @staticmethod
    def of(what: Collective, nbytes: int) -> _Cut:
        """The cut for slots of so many bytes."""
        pieces = max(map(len, what.lengths))
        longest = max(map(max, what.lengths))
        room = (nbytes // pieces // LINE) * LINE // what.dtype.itemsize
        length = max(1, min(longest, room))
        return _Cut(pieces, length, max(1, -(-longest // length)), what.dtype.itemsize)

    @property
    def stride(self) -> int:
        """Bytes from a piece to the next."""
        return -(-self.length * self.itemsize // LINE) * LINE

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return self.pieces * self.stride


class Ground:
    """Memory for the exchanges of some ranks: two gates a rank, and its slots.

    Attributes:
        use: how many chunks each rank has taken part in.
    """

    def __init__(self, memory: Array, count: int, slot: int) -> None:
        self._gates = memory[: 2 * count * LINE]
        self._slots = memory[2 * count * LINE :]
        self._count = count
        self._slot = slot
        self.use = [0] * count

    @staticmethod
    def nbytes(count: int, slot: int) -> int:
        """Bytes that it takes."""
        return count * (2 * LINE + SLOTS * slot)

    @staticmethod
    def slot(what: Collective) -> int:
        """Bytes of a slot for a small collective, or for any that goes in chunks."""
        if not is_small(what):
            return Ground.slot_of_chunks(what.count)
        return _Cut.of(what, SMALL + what.count * what.count * LINE).nbytes

    @staticmethod
    def slot_of_chunks(count: int) -> int:
        """Bytes of a slot in which so many ranks have a piece each."""
        return max(CHUNK, count * LINE)

    def gates(self) -> tuple[Gates, Gates]:
        """Who has copied in, and who has folded: each thread takes its own."""
        half = self._count * LINE
        return Gates(self._gates[:half], self._count), Gates(self._gates[half:], self._count)

    def views(self, cut: _Cut, dtype: np.dtype[Any]) -> list[list[list[Array]]]:
        """By rank, slot and piece: arrays over the memory."""
        return [
            [
                [
                    self._slots[at : at + cut.length * cut.itemsize].view(dtype)
                    for piece in range(cut.pieces)
                    for at in [(rank * SLOTS + slot) * self._slot + piece * cut.stride]
                ]
                for slot in range(SLOTS)
            ]
            for rank in range(self._count)
        ]


def private(nbytes: int) -> Array:
    """Memory of this process alone, as a segment would be."""
    raw = np.zeros(nbytes + LINE, np.uint8)
    start = -address(raw) % LINE
    memory: Array = raw[start : start + nbytes]
    return memory


class Shared:
    """What a device does in one collective over shared memory, for the ranks that it has.

    Args:
        ranks: of this device.
    """

    def __init__(self, what: Collective, ranks: Sequence[int], ground: Ground) -> None:
        self.what = what
        self.ranks = tuple(ranks)
        self._ground = ground
        self._cut = _Cut.of(what, Ground.slot(what))
        self._views = ground.views(self._cut, what.dtype)
        self._arrived, self._folded = ground.gates()
        self._given: dict[int, list[Array]] = {}

    def offer(self, given: Mapping[int, Array | None]) -> None:
        """Copy the first chunk in; the others may use it from now on."""
        self._given = {rank: self.what.given(rank, x) for rank, x in given.items()}
        self._put(0)

    def small(self, results: Mapping[int, Array], wait: Wait) -> None:
        """Fold, or take, what all ranks have offered."""
        use = self._ground.use[self.ranks[0]]
        wait(self._arrived, use + 1)
        slot = use % SLOTS
        for rank in self.ranks:
            self._take(rank, results[rank], slot)
        self._done(1)

    def _take(self, rank: int, result: Array, slot: int) -> None:
        what = self.what
        targets = what.taken(rank, result)
        if what.reduces:
            mine = range(what.count) if what.kind == "all_reduce" else [rank]
            for share in mine:
                self._fold(share, slot, what.lengths[0][share], targets[share].reshape(-1))
            return
        for source, target in enumerate(targets):
            if target.size:
                piece = self._views[source][slot][0 if what.is_for_all else rank]
                target[...] = piece[: target.size].reshape(target.shape)

    def _fold(self, share: int, slot: int, size: int, out: Array) -> None:
        pieces = [own[slot][share][:size] for own in self._views]
        if size:
            self.what.combined(share, pieces, out)

    # In chunks ----------------------------------------------------------------------------------

    def run(self, results: Mapping[int, Array], wait: Wait) -> None:
        """All chunks, once the first one is offered."""
        what, cut = self.what, self._cut
        places = {rank: what.taken(rank, results[rank]) for rank in self.ranks}
        flat = {rank: [_flat(place) for place in own] for rank, own in places.items()}
        use = self._ground.use[self.ranks[0]]
        for chunk in range(cut.chunks):
            if chunk + 1 < cut.chunks:
                self._put(chunk + 1)
            wait(self._arrived, use + chunk + 1)
            span = slice(chunk * cut.length, (chunk + 1) * cut.length)
            slot = (use + chunk) % SLOTS
            if what.reduces:
                self._fold_own(flat, span, slot)
                for rank in self.ranks:
                    self._folded.tell(rank, use + chunk + 1)
                if what.kind == "reduce_scatter":
                    continue
                wait(self._folded, use + chunk + 1)
            for rank in self.ranks:
                self._out(rank, flat[rank], span, slot)
        self._done(cut.chunks)
        for rank, own in places.items():
            for place, made in zip(own, flat[rank], strict=True):
                if not np.shares_memory(place, made):
                    place[...] = made.reshape(place.shape)

    def _put(self, chunk: int) -> None:
        use, cut = self._ground.use[self.ranks[0]] + chunk, self._cut
        span = slice(chunk * cut.length, (chunk + 1) * cut.length)
        for rank in self.ranks:
            for target, piece in zip(
                self._views[rank][use % SLOTS], self._given[rank], strict=False
            ):
                part = piece[span]
                np.copyto(target[: part.size], part)
            self._arrived.tell(rank, use + 1)

    def _fold_own(self, flat: Mapping[int, list[Array]], span: slice, slot: int) -> None:
        """Fold the ranks' shares, and show them to the others."""
        for rank in self.ranks:
            out = flat[rank][rank][span]
            self._fold(rank, slot, out.size, out)
            if self.what.kind == "all_reduce":
                np.copyto(self._views[rank][slot][rank][: out.size], out)

    def _out(self, rank: int, targets: Sequence[Array], span: slice, slot: int) -> None:
        what = self.what
        for source, target in enumerate(targets):
            part = target[span]
            if what.kind == "all_reduce":
                if source == rank:
                    continue
                piece = self._views[source][slot][source]
            else:
                piece = self._views[source][slot][0 if what.is_for_all else rank]
            np.copyto(part, piece[: part.size])

    def _done(self, chunks: int) -> None:
        for rank in self.ranks:
            self._ground.use[rank] += chunks
        self._given = {}


def _flat(place: Array) -> Array:
    """A place in one row: itself, or an array that is copied there in the end."""
    if place.flags.c_contiguous:
        return place.reshape(-1)
    return np.empty(place.size, place.dtype)
