"""Memory of a partition's program: predicted from its layout, and measured while it runs.

The memory at fixed addresses follows from the layout: arena, variables, constants, feeds, received
tensors. So does the scratch memory of kernels (`scratch_use.py`). Kernels that are not generated
code allocate a workspace besides: float32 copies of 16-bit floats, and results that they cannot
write to a given buffer. `tracemalloc` measures the workspace.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping, Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.declarations.half_precision import has_half
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.ir.spec import evaluate, is_half, nbytes, product
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS, edges_of
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.placement.cost_model.memory_peaks import register_predictor
from graphflow.runtime.memory.memory_layout import MemoryLayout, plan_layout
from graphflow.runtime.memory.ring_sizes import slot_bytes, slot_count
from graphflow.runtime.memory.scratch_use import kept_bytes, shared_bytes
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition

_KERNELLESS_OPS = (
    *UNPLACED_OPS, "variable", "assign", *SENDING_OPS, *RECEIVING_OPS,
    "collective_start", "received_from",
)  # fmt: skip
"""Ops that run no kernel, so that they need no workspace."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a program needs on its device.

    Attributes:
        layouts: layouts of weights that kernels keep.
        shared_scratch: the scratch memory that native calls share; they run one at a time.
        kept_scratch: the scratch memory that kernels keep besides.
        workspace: the largest workspace of a kernel.
    """

    arena: int
    constants: int
    variables: int
    feeds: int
    recvs: int
    layouts: int = 0
    shared_scratch: int = 0
    kept_scratch: int = 0
    workspace: int = 0

    @property
    def scratch(self) -> int:
        """Bytes of scratch memory of kernels, which stay allocated between steps."""
        return self.shared_scratch + self.kept_scratch

    @property
    def resident(self) -> int:
        """Bytes that are occupied throughout a step."""
        fixed = self.arena + self.constants + self.variables + self.feeds + self.recvs
        return fixed + self.layouts + self.scratch

    @property
    def peak(self) -> int:
        """The most bytes that are occupied at once."""
        return self.resident + self.workspace


def memory_use(
    part: Partition, layout: MemoryLayout, bindings: Mapping[str, int], threads: int
) -> MemoryUse:
    """Predict the memory of a partition's program.

    Args:
        threads: of its device.
    """

    def total(op: str) -> int:
        return sum(nbytes(layout.specs[n.outputs[0]]) for n in part.graph.of_op(op))

    return MemoryUse(
        arena=layout.arena.nbytes,
        constants=_constants(part, layout),
        variables=total("variable"),
        feeds=total("placeholder"),
        recvs=total("recv") + _channel_bytes(part, layout),
        layouts=_kept_weights(layout),
        shared_scratch=shared_bytes(part, layout, bindings, threads),
        kept_scratch=kept_bytes(part, layout, bindings, threads),
        workspace=_workspace(part, layout),
    )


def _constants(part: Partition, layout: MemoryLayout) -> int:
    own = sum(int(n.attrs["value"].nbytes) for n in part.graph.of_op("constant"))
    return own + sum(
        _constants(*each) for inner in layout.body_layouts.values() for each in inner.parts
    )


def _kept_weights(layout: MemoryLayout) -> int:
    """Return the bytes of the layouts of weights; nodes with the same weights share one."""
    own = sum(size for _, size in set(layout.kept_weights.values()))
    return own + sum(
        _kept_weights(each) for inner in layout.body_layouts.values() for _, each in inner.parts
    )


def _channel_bytes(part: Partition, layout: MemoryLayout) -> int:
    """Return the bytes of the rings by which other workers send into bodies."""
    own = DeviceName.parse(part.device).worker
    total = 0
    for inner in layout.body_layouts.values():
        for body, body_layout in inner.parts:
            total += _channel_bytes(body, body_layout)
            for node in body.graph.nodes:
                if node.op.name in RECEIVING_OPS:
                    spec = body_layout.specs[node.outputs[0]]
                    sources = [DeviceName.parse(end).worker for end in edges_of(node).values()]
                    others = sum(worker != own for worker in sources)
                    total += others * slot_count(spec) * slot_bytes(spec)
    return total


def _workspace(part: Partition, layout: MemoryLayout) -> int:
    """Return the largest workspace of a line, bodies included: one line runs at a time."""
    most = max(
        (_workspace(*each) for i in layout.body_layouts.values() for each in i.parts),
        default=0,
    )
    for node in part.graph.nodes:
        native = node in layout.regions or node in layout.tasks or node in layout.body_layouts
        if not (native or node.op.alias or node.op.name in _KERNELLESS_OPS):
            most = max(most, kernel_workspace(node, layout))
    return most


def kernel_workspace(node: Node, layout: MemoryLayout) -> int:
    """Predict the bytes that a node's plain kernel allocates while it runs."""
    op = node.op
    inputs = [layout.specs[t] for t in node.inputs]
    outputs = [layout.specs[t] for t in node.outputs]
    # BLAS makes the product before it is added in place.
    added = op.native is not None and op.in_place
    total = 0
    if op.ufunc is None and (op.into is None or op.random or added):
        total += sum(map(nbytes, outputs))
    is_counted = op.records and is_jit_enabled()  # as scratch memory
    if not op.halves and has_half(inputs) and not is_counted:
        wide = [s for s in (*inputs, *outputs) if is_half(s.dtype)]
        total += sum(4 * evaluate(product(s.shape), {}) for s in wide)
    return total


def footprints(
    graph: Graph,
    devices: Mapping[Node, str],
    order: Sequence[Node],
    bindings: Mapping[str, int],
    threads: Mapping[str, int],
) -> dict[str, int]:
    """Predict the peak bytes of each device, from the layouts that its programs will have."""
    parts = partition(graph, devices, order, None, list(threads))
    peaks = dict.fromkeys(threads, 0)
    for name, part in parts.items():
        peaks[name] = memory_use(part, plan_layout(part, bindings), bindings, threads[name]).peak
    return peaks


register_predictor(footprints)


class WorkspaceMeter:
    """Measures the workspace of kernels while `tracemalloc` is on.

    Python traces the allocations of all threads. So if several devices of one process run at once,
    each also counts the allocations of the others.

    Attribute `peak`: the largest workspace so far, in bytes.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.restart()

    def restart(self) -> None:
        """Begin anew: whatever was allocated until now is no workspace."""
        self._base = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def record_line(self, node: Node) -> None:
        """Record that a line of the program is done.

        Memory that the line leaves allocated is not workspace: it is a feed or a received tensor,
        which `memory_use` counts by itself.
        """
        peak = tracemalloc.get_traced_memory()[1]
        if node.op.name not in _KERNELLESS_OPS:
            self.peak = max(self.peak, peak - self._base)
        self.restart()
