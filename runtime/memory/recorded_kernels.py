"""Kernels of several native calls: record their calls, or only count their scratch memory.

Both run a kernel on stand-ins for its arrays. So a recording takes the memory that was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import bind_attrs
from graphflow.ir.op import Node, Op
from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.codegen.region import freeze_attributes
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts, ReservedLayouts
from graphflow.ops.kernels.jit.kernel_recording import (
    ArrayStandIn,
    KernelRecording,
    NotRecordable,
    region,
)
from graphflow.ops.kernels.jit.shape_stand_ins import ShapeStandIn, SlotCount
from graphflow.runtime.memory.memory_layout import MemoryLayout

_MOST_COUNTS = 4096
"""Kernels whose scratch memory is remembered."""


@dataclass(frozen=True)
class KernelScratch:
    """Scratch memory of a kernel, in bytes.

    Attributes:
        recorded: of its recording; 0 if it has none, since it does more than native calls.
        slots: of each slot (`scratch_memory.py`), which the kernel takes if it is not recorded.
    """

    recorded: int
    slots: Mapping[str, int]


NO_SCRATCH = KernelScratch(0, {})


class RecordableKernel:
    """The kernel of a node whose op has the flag `records`.

    Args:
        is_kept: whether it keeps the layout of its weights.

    Attributes:
        attrs: the node's attributes, without symbols.
        into: the kernel (xp, out, *inputs); None if the op has none.
        key: equal for kernels of equal calls; None if an attribute is no plain value.
    """

    def __init__(
        self, node: Node, layout: MemoryLayout, bindings: Mapping[str, int], is_kept: bool = False
    ) -> None:
        op: Op = node.op
        tensors = (*node.inputs, *node.outputs)
        self._specs: Sequence[TensorSpec] = tuple(layout.specs[t] for t in tensors)
        self._inputs = len(node.inputs)
        self.attrs = bind_attrs(node.attrs, bindings)
        self.into: Callable[..., None] | None = op.into_for([t.spec for t in node.inputs])
        self._is_kept = is_kept
        plain = freeze_attributes(self.attrs)
        self.key = None if plain is None else (op.name, self._specs, plain, is_kept)

    def record(self, threads: int, reserved: ReservedLayouts | None) -> KernelRecording | None:
        """Return its calls; None if it does more than native calls.

        Args:
            reserved: the memory of the layouts that it keeps.
        """
        recording = KernelRecording(threads)
        try:
            self._run(recording, reserved)
        except NotRecordable:
            return None
        return recording

    def count_scratch(self, threads: int) -> KernelScratch:
        """Return its scratch memory on a number of threads. Nothing is compiled."""
        if self.key is None:
            return self._count(threads)
        known = _counts.get((self.key, threads))
        if known is None:
            known = self._count(threads)
            if len(_counts) >= _MOST_COUNTS:
                _counts.clear()
            _counts[self.key, threads] = known
        return known

    def _count(self, threads: int) -> KernelScratch:
        recording = KernelRecording(threads, keeps_calls=False)
        try:
            self._run(recording, self._reserve())
        except NotRecordable:
            return KernelScratch(0, self._count_slots(threads))
        return KernelScratch(recording.scratch_nbytes, recording.slots)

    def _count_slots(self, threads: int) -> Mapping[str, int]:
        """Return the slots of a kernel that runs as Python, as far as it can without elements."""
        count = SlotCount(threads)
        with suppress(NotRecordable):
            self._run(count, self._reserve(), ShapeStandIn)
        return count.slots

    def _reserve(self) -> ReservedLayouts | None:
        return ReservedLayouts(KeptLayouts()) if self._is_kept else None

    def _run(
        self,
        recording: KernelRecording,
        reserved: ReservedLayouts | None,
        stand_in: type[ArrayStandIn] = ArrayStandIn,
    ) -> None:
        into = self.into
        assert into is not None
        arrays = [
            stand_in(region(i + 2), [int(n) for n in s.shape], s.dtype)
            for i, s in enumerate(self._specs)
        ]
        inputs, outs = arrays[: self._inputs], arrays[self._inputs :]
        given = self.attrs if reserved is None else {**self.attrs, "kept": reserved}
        out = outs[0] if len(outs) == 1 else tuple(outs)
        recording.record(lambda: into(np, out, *inputs, **given))


_counts: dict[Any, KernelScratch] = {}
