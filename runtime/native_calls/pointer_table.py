"""Kernel calls, and the table of their pointers and sizes that native code reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Tensor
from graphflow.ops.kernels.jit.array_address import address, align_up
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.kernel_recording import KernelRecording, region, region_number
from graphflow.runtime.native_calls.gemm_epilogues import KernelAccess, MemoryRange
from graphflow.runtime.native_calls.integer_checks import IntegerCheck
from graphflow.runtime.native_calls.work_sharing import CallPart

RuntimeOperand = Tensor | tuple[str, int]
"""An operand whose address is known only at run time: a feed, a received tensor, or, in a loop, a
row that advances with the iterations."""
PointerSource = int | RuntimeOperand
"""A fixed address, or the operand that supplies it at run time."""


@dataclass(frozen=True)
class KernelCall:
    """A kernel and its arguments.

    Attributes:
        node: the node that it computes; of a region, the last one.
        pointers: pointers to operands, results, and scratch memory, in this order.
        nbytes: size of each; empty if unknown.
        first_written: index of the first pointer that is written to.
        recording: the calls that the kernel consists of, instead of one call of `task`. Their
            pointers are in regions: number 1 is scratch memory, `pointers` follow.
        scratch: the scratch memory of a recording.
        check: what a check of integers notes, if it is one.
    """

    node: Node
    task: KernelTask
    pointers: tuple[PointerSource, ...]
    nbytes: tuple[int, ...] = ()
    first_written: int = 0
    recording: KernelRecording | None = None
    scratch: Any = None
    check: IntegerCheck | None = None

    @property
    def access(self) -> KernelAccess:
        """The memory that it reads and writes, as far as it is known."""
        used = [
            MemoryRange(place if isinstance(place, int) else None, nbytes)
            for place, nbytes in zip(self.pointers, self.nbytes, strict=False)
        ]
        return KernelAccess(
            self.task, tuple(used[: self.first_written]), tuple(used[self.first_written :])
        )


class PointerTable:
    """The pointers and sizes of all parts of a segment's calls, while they are collected.

    Equal tasks share their sizes. Parts of a call share their pointers if these are equal.

    Attributes:
        recorded: number of a recorded call -> indices of each call's first pointer and first size.
    """

    def __init__(
        self, calls: Sequence[KernelCall], moving: dict[RuntimeOperand, list[int]]
    ) -> None:
        self._calls = calls
        self._moving = moving
        self._offsets: list[int] = []
        self._pointers: list[int] = []
        self._sizes: list[int] = [0]  # an empty array has no address
        self._places: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._metas: dict[Any, int] = {}
        self.recorded: dict[int, list[tuple[int, int]]] = {}

    def add(self, part: CallPart, scratch: int) -> None:
        """Append a part's pointers and sizes, unless they are there.

        Args:
            scratch: address of the scratch memory of all shares but the first.
        """
        call, key = self._calls[part.call], self._key(part)
        if call.recording is not None:
            self._add_recording(part.call)
            return
        if key not in self._places:
            self._places[key] = len(self._pointers)
            last = len(call.pointers) - 1
            for i, place in enumerate(call.pointers):
                offset = part.share.offsets[i] if i < len(part.share.offsets) else 0
                if call.task.scratch and i == last and part.scratch:
                    offset = 0
                    place = scratch + (part.scratch - 1) * align_up(call.task.scratch)
                if not isinstance(place, int):
                    self._moving.setdefault(place, []).append(len(self._pointers))
                    place = 0
                self._pointers.append(place + offset)
                self._offsets.append(offset)
        meta = self._meta(part)
        if meta not in self._metas:
            self._metas[meta] = len(self._sizes)
            self._sizes += part.share.sizes or call.task.sizes

    def _add_recording(self, number: int) -> None:
        """Append the pointers and sizes of a recorded kernel's calls, unless they are there."""
        call = self._calls[number]
        if number in self.recorded or call.recording is None:
            return
        places = self.recorded[number] = []
        known: dict[bytes, int] = {}
        at = len(self._pointers)
        for each in call.recording.calls():
            sizes = each.table[each.pointers :]
            meta = known.get(sizes.tobytes())
            if meta is None:
                meta = known[sizes.tobytes()] = len(self._sizes)
                self._sizes += sizes
            places.append((at, meta))
            at += each.pointers
        self._add_regions(call.recording.all_pointers, [0, address(call.scratch), *call.pointers])

    def _add_regions(
        self, pointers: np.ndarray[Any, Any], regions: Sequence[PointerSource]
    ) -> None:
        """Append pointers that lead to regions, by where these are."""
        numbers = region_number(pointers)
        offsets = pointers - region(numbers)
        for number, base in enumerate(regions):
            if not isinstance(base, int):
                seen = len(self._pointers) + np.flatnonzero(numbers == number)
                self._moving.setdefault(base, []).extend(seen.tolist())
        bases = np.array([base if isinstance(base, int) else 0 for base in regions], np.int64)
        self._pointers += (bases[numbers] + offsets).tolist()
        self._offsets += offsets.tolist()

    def places(self, part: CallPart) -> tuple[int, int]:
        """Return the indices of a part's first pointer and first size."""
        return self._places[self._key(part)], self._metas[self._meta(part)]

    def arrays(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the pointers, their offsets, and the sizes."""
        return (
            np.array(self._pointers, np.uint64),
            np.array(self._offsets, np.uint64),
            np.array(self._sizes, np.int64),
        )

    def _key(self, part: CallPart) -> tuple[int, int, tuple[int, ...]]:
        scratch = part.scratch if self._calls[part.call].task.scratch else 0
        return part.call, scratch, part.share.offsets

    def _meta(self, part: CallPart) -> Any:
        return part.share.sizes or id(self._calls[part.call].task)
