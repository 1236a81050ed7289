"""Fetched tensors that a program computes in memory that the caller then owns.

Other fetches are copied from the program's buffers when the step ends. For a large result of little
work, such as an elementwise one, the copy takes as long as the step.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from graphflow.ir.op import Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.communication.send_recv import SENDING_OPS
from graphflow.runtime.memory.backend import DeviceBackend, new_array
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.bodies.slot_results import (
    MIN_BYTES,
    last_tensors,
    writes_anywhere,
)
from graphflow.runtime.program.operand_table import OperandTable


def find_direct_results(partition: Partition, layout: MemoryLayout) -> dict[Tensor, None]:
    """Return, in order, the fetched tensors that each run can compute in memory of their own.

    No other fetch shares their memory, and nothing reads them after the compute section.
    """
    fetched = list(partition.fetches.values())
    count = Counter(layout.roots[t] for t in fetched)
    last = last_tensors(partition.graph, layout)
    read_later = _read_later(partition, layout)
    return {
        t: None
        for t in fetched
        if t in layout.blocks
        and nbytes(layout.specs[t]) >= MIN_BYTES
        and count[t] == 1
        and last[layout.blocks[t]] is t
        and t not in read_later
        and t.node not in layout.deferred
        and writes_anywhere(t, layout)
    }


def _read_later(partition: Partition, layout: MemoryLayout) -> set[Tensor]:
    """Return the tensors that the commit section, another device or a collective reads."""
    names = (*SENDING_OPS, "collective_start")
    late = [*layout.commits, *(n for n in partition.graph.nodes if n.op.name in names)]
    for node in layout.deferred:
        fused = layout.regions.get(node)
        late += [node] if fused is None else fused.nodes
    return {layout.roots[t] for node in late for t in node.inputs}


def take_memory(
    tensor: Tensor, layout: MemoryLayout, backend: DeviceBackend, operands: OperandTable
) -> str:
    """Return a line that takes new memory for a result before the nodes of a run."""
    operands.move(tensor)
    name = operands.names[tensor]
    operands.scope |= {
        f"k{name}": operands.feeds[tensor],
        f"n{name}": partial(new_array, backend, layout.specs[tensor]),
    }
    return f"{name} = k{name}(n{name}())"
