"""Emits the lines and native calls that compute a program's nodes, for CPUs.

A fused region or a node with a generated kernel becomes a native call. If its work is large,
threads share it, and it is a line of its own. Any other node is a line that calls the op's kernel.
Deferred updates of variables go to the commit section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphflow.ir.declarations.half_precision import has_half
from graphflow.ir.graph import bind_attrs
from graphflow.ir.op import Cost, Node, Tensor, owner_module
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.communication.rows_in_use import RowsInUse, aligned_inputs
from graphflow.ops.kernels.fusion.fusion import FusedRegion
from graphflow.ops.kernels.fusion.multi_tensor_updates import MultiTensorUpdate
from graphflow.ops.kernels.fusion.region_kernels import (
    THREADING_NANOSECONDS,
    KernelLaunch,
    is_jit_enabled,
    kernel_of,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import copy_task
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.kept_layouts import (
    DeviceLayouts,
    KeptLayouts,
    LayoutRefresh,
    ReservedLayouts,
)
from graphflow.ops.kernels.jit.kernel_recording import KernelRecording
from graphflow.runtime.memory.backend import CpuBackend, DeviceBackend
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.memory.recorded_kernels import RecordableKernel
from graphflow.runtime.native_calls.pointer_table import KernelCall, PointerSource
from graphflow.runtime.program.generated_call_support import (
    out_kernel,
)
from graphflow.runtime.program.operand_table import OperandTable
from graphflow.runtime.program.program_part import ProgramSection
from graphflow.runtime.program.value_checks import ValueChecks
from graphflow.runtime.transport.nontemporal_copy import bypasses_cache

_FLOPS_IN_A_NANOSECOND = 50.0
"""A rough rate of recorded kernels on one thread."""


_MOST_FIXED = 4096
"""Bytes of results without inputs that are computed once, and copied in each step."""


class KernelEmitter:
    """Adds the computation of nodes to a program's two sections.

    Args:
        operands: addresses and names of the program's tensors.
        scope: global names of the generated functions; kernels are added to it.
        compute, commit: the sections.
        rows_in_use: the tensors of which only some rows are computed.
        layouts: the layouts of variables that kernels keep.
        records: whether kernels that consist of native calls are recorded.

    Attributes:
        plain_kernel_nodes: nodes that are computed by their op's own kernel.
        refreshed_nodes: nodes whose only line in Python lays out weights, if these have changed.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        bindings: Mapping[str, int],
        backend: DeviceBackend,
        operands: OperandTable,
        scope: dict[str, Any],
        compute: ProgramSection,
        commit: ProgramSection,
        rows_in_use: RowsInUse,
        layouts: DeviceLayouts,
        records: bool = False,
    ) -> None:
        self._layouts = layouts
        self.plain_kernel_nodes: list[Node] = []
        self.refreshed_nodes: set[Node] = set()
        self._layout = layout
        self._bindings = bindings
        self._backend = backend
        self._operands = operands
        self._scope = scope
        self._compute = compute
        self._commit = commit
        self._rows_in_use = rows_in_use
        self._plain = not is_jit_enabled()
        self._records = records and not self._plain and isinstance(backend, CpuBackend)
        self._sweep_updates: list[tuple[Node, KernelTask, Sequence[PointerSource]]] = []
        self._recordings: dict[Any, KernelRecording | None] = {}
        self._sizes: dict[int, int] = {}  # id of a spec of the layout -> bytes
        self._checks = ValueChecks(
            layout, bindings, backend.xp, operands, scope, compute, native=self._records
        )

    def emit_region(self, node: Node, number: int) -> None:
        """Emit a node of a fused region; the region's last node emits the kernel."""
        fused = self._layout.regions[node]
        if node.op.refuse is not None:
            self._checks.emit(node, number)
        if node is not fused.last:
            return
        task = self._task_of(fused)
        part = self._commit if node in self._layout.deferred else self._compute
        tensors = (*fused.operands, *fused.results)
        used = self._region_rows(fused)
        places = [self._operands.pointer_source(t) for t in tensors]
        split = used is not None or self._is_split_over_threads(task)
        if part is self._commit and split and not task.scratch and _are_fixed(places):
            self._sweep_updates.append((node, task, places))
            return
        if used is None:
            self._emit_call(part, node, task, tensors, len(fused.results))
            return
        launch = KernelLaunch(
            kernel_of(fused.region),
            fused.sizes,
            [p if isinstance(p, int) else None for p in places],
            task,
        )
        self._scope[f"k{number}"] = launch
        moving = [
            self._operands.name(t)
            for t, p in zip(tensors, places, strict=True)
            if not isinstance(p, int)
        ]
        if part is self._commit:
            moving = [self.keep_for_commit(node, name) for name in moving]
        moving.append(f"rows=int({self._operands.name(used[0])}) * {used[1]}")
        part.add_line(node, f"k{number}({', '.join(moving)})")

    def _task_of(self, fused: FusedRegion) -> KernelTask:
        """Return a region's kernel; for large results in slots of shared memory one that writes
        past the caches."""
        least = min(self._nbytes(self._layout.specs[t]) for t in fused.results)
        if bypasses_cache(least) and all(t in self._operands.feeds for t in fused.results):
            return kernel_of(fused.region).streamed_task(fused.sizes) or fused.task
        return fused.task

    def emit_sweep(self) -> None:
        """Emit large updates of variables, and small ones with them, as one call for each thread.

        Each thread then updates its share of all variables, so threads meet once, not once for
        each variable.
        """
        if not self._sweep_updates:
            return
        small = [c for c in self._commit.calls if not c.task.scratch and _are_fixed(c.pointers)]
        taken = set(map(id, small))
        self._commit.calls = [c for c in self._commit.calls if id(c) not in taken]
        calls: list[Any] = [(task, places) for _, task, places in self._sweep_updates]
        calls += [(call.task, call.pointers) for call in small]
        self._scope["sweep"] = MultiTensorUpdate(calls, self._backend.threads)
        self._commit.add_line(self._sweep_updates[-1][0], "sweep()")

    def _is_split_over_threads(self, task: KernelTask) -> bool:
        """Return True if threads share the work of a task."""
        return task.nanoseconds > THREADING_NANOSECONDS and self._backend.threads > 1

    def _emit_call(
        self,
        part: ProgramSection,
        node: Node,
        task: KernelTask,
        tensors: Sequence[Tensor],
        results: int,
    ) -> None:
        """Add a native call of a task; the last `results` of the tensors are its results."""
        if not task.rows:
            return
        if task.order:
            order = [*task.order, *range(len(task.order), len(tensors))]
            tensors = [tensors[i] for i in order]
        places = [self._operands.pointer_source(t) for t in tensors]
        sizes = [self._nbytes(self._layout.specs[t]) for t in tensors]
        if task.scratch:
            places.append(
                self._operands.base_address + self._layout.arena.offsets[self._layout.scratch[node]]
            )
            sizes.append(task.scratch)
        part.add_calls(
            [KernelCall(node, task, tuple(places), tuple(sizes), len(tensors) - results)]
        )

    def _nbytes(self, spec: TensorSpec) -> int:
        """Return the bytes of a tensor. Most specs of a layout belong to many tensors."""
        known = self._sizes.get(id(spec))
        if known is None:
            known = self._sizes[id(spec)] = nbytes(spec)
        return known

    def emit_kernel(self, node: Node, number: int) -> None:
        """Emit the node's kernel, which writes to its buffers."""
        if not node.inputs and self._emit_fixed_value(node, number):
            return
        deferred = self._layout.deferred.get(node)
        task = self._layout.tasks.get(node)
        if task is not None and node.op.bounds is not None:
            short = any(t in self._rows_in_use for t in (*node.inputs, *node.outputs))
            if short or deferred is not None or not self._checks.emit_native(node):
                task = None
        split = task is not None and task.cut is None and self._is_split_over_threads(task)
        if task is not None and deferred is None and not split:
            tensors = (*node.inputs, *node.outputs)
            self._emit_call(self._compute, node, task, tensors, len(node.outputs))
            return
        kept = self._kept_layouts(node)
        if deferred is None and self._emit_recording(node, number, kept):
            return
        inputs = [self._operands.name(t, native=task is not None) for t in node.inputs]
        if deferred is not None:
            inputs = [self.keep_for_commit(node, name) for name in inputs]
        names = [self._operands.name(t) for t in node.outputs]
        slices = node.op.leading is not None or node.op.elementwise
        if task is None and deferred is None and slices:
            self._slice_rows(node, inputs, names)
        attrs = bind_attrs(node.attrs, self._bindings)
        specs = [t.spec for t in node.inputs]
        half = not node.op.halves and has_half(specs)
        if node.op.ufunc is not None and not attrs and not self._plain and not half:
            self._scope[f"k{number}"] = getattr(self._backend.xp, node.op.ufunc)
            line = f"k{number}({', '.join(inputs)}, out={names[0]})"
        else:
            self._scope[f"k{number}"] = out_kernel(
                node.op, self._backend.xp, specs, attrs, self._plain, kept
            )
            self.plain_kernel_nodes.append(node)
            out = _text_of_outputs(names)
            step = ", step=draws" if node.op.random else ""
            line = f"k{number}({', '.join([out, *inputs])}{step})"
        if deferred is not None:
            self._commit.add_line(node, line)
        else:
            self._compute.add_line(node, line)

    def _emit_fixed_value(self, node: Node, number: int) -> bool:
        """Compute a small result that is the same in every step, and emit a native copy of it;
        return False for others."""
        op, size = node.op, self._nbytes(self._layout.specs[node.outputs[0]])
        varies = op.random or not op.pure or owner_module(op) is not None
        if varies or not self._records or len(node.outputs) > 1 or not 0 < size <= _MOST_FIXED:
            return False
        (value,) = op.run(np, [], bind_attrs(node.attrs, self._bindings))
        value = self._scope[f"v{number}"] = np.ascontiguousarray(value)
        places = (address(value), self._operands.pointer_source(node.outputs[0]))
        self._compute.add_calls([KernelCall(node, copy_task(size), places, (size, size), 1)])
        return True

    def _emit_recording(self, node: Node, number: int, kept: KeptLayouts | None) -> bool:
        """Emit a kernel of several native calls as these calls; return False if there are none.

        A line before them lays out the weights if these have changed.
        """
        backend = self._backend
        if not (node.op.records and self._records):
            return False
        assert isinstance(backend, CpuBackend)
        kernel = RecordableKernel(node, self._layout, self._bindings, kept is not None)
        reserved = None if kept is None else ReservedLayouts(kept)
        recording = self._record_kernel(kernel, backend.threads, reserved)
        if recording is None or kernel.into is None:
            return False
        if kept is not None and reserved is not None:
            run = partial(kernel.into, np, kept=kept, **kernel.attrs)
            self._scope[f"l{number}"] = LayoutRefresh(kept, reserved.keys, run, backend.active)
            self.refreshed_nodes.add(node)
            out = _text_of_outputs([self._operands.name(t) for t in node.outputs])
            names = [self._operands.name(t) for t in node.inputs]
            self._compute.add_line(node, f"l{number}({', '.join([out, *names])})")
        tensors = (*node.inputs, *node.outputs)
        specs = [self._layout.specs[t] for t in tensors]
        given = specs[: len(node.inputs)]
        cost = node.op.cost(*given, **kernel.attrs) if node.op.cost else Cost(0)
        nanoseconds = float(cost.flops) / _FLOPS_IN_A_NANOSECOND
        call = KernelCall(
            node,
            KernelTask("", "", (), 1, nanoseconds),
            tuple(self._operands.pointer_source(t) for t in tensors),
            tuple(map(self._nbytes, specs)),
            len(node.inputs),
            recording,
            backend.shared_scratch(recording.scratch_nbytes),
        )
        self._compute.add_calls([call])
        return True

    def _record_kernel(
        self, kernel: RecordableKernel, threads: int, reserved: ReservedLayouts | None
    ) -> KernelRecording | None:
        """Return a kernel's calls; equal kernels share theirs, unless they keep layouts."""
        if reserved is not None or kernel.key is None:
            return kernel.record(threads, reserved)
        if kernel.key not in self._recordings:
            self._recordings[kernel.key] = kernel.record(threads, None)
        return self._recordings[kernel.key]

    def _kept_layouts(self, node: Node) -> KeptLayouts | None:
        """Return the place where a node's kernel keeps the layout of its weights; None if it keeps
        none."""
        if node not in self._layout.kept_weights:
            return None
        weights, _ = self._layout.kept_weights[node]
        if weights.node.op.name == "variable":
            return self._layouts.find(weights.node.name)
        return KeptLayouts()  # of a constant

    def _region_rows(self, fused: FusedRegion) -> tuple[Tensor, int] | None:
        """Return the number of rows in use of a region's results, and the units of its kernel for
        each row; None if it computes all rows."""
        number = self._rows_in_use.get(fused.results[0])
        if number is None or any(self._rows_in_use.get(t) is not number for t in fused.results):
            return None
        rows = [int(self._layout.specs[t].shape[0]) for t in fused.results]
        alike = rows.count(rows[0]) == len(rows) and all(axes[0] for axes in fused.result_axes)
        if fused.region.over == "columns" or not (alike and rows[0]):
            return None
        divides = not fused.sizes[0] % rows[0] and not fused.task.rows % rows[0]
        return (number, fused.task.rows // rows[0]) if divides else None

    def _slice_rows(self, node: Node, inputs: list[str], outputs: list[str]) -> None:
        """Let a line read and write only the rows in use of a node's inputs and outputs.

        Args:
            inputs, outputs: the names of the arrays; changed to those of views.
        """
        numbers = [self._rows_in_use.get(t) for t in node.outputs]
        for i, number in enumerate(numbers):
            if number is not None:
                outputs[i] += f"[: int({self._operands.name(number)})]"
        if numbers[0] is not None and all(number is numbers[0] for number in numbers):
            for i in aligned_inputs(node, self._layout.specs):
                inputs[i] += f"[: int({self._operands.name(numbers[0])})]"

    # The commit part ------------------------------------------------------------------------------

    def emit_staging_copy(self, node: Node) -> None:
        """Emit a copy of an assigned value that shares memory with a variable of this commit."""
        if node in self._layout.staged and not self._emit_native_copy(
            self._compute, node, node.inputs[1], node.outputs[0]
        ):
            value = self._operands.name(node.inputs[1])
            self._compute.add_line(node, f"copyto({self._operands.name(node.outputs[0])}, {value})")

    def emit_commit(self, assign: Node) -> None:
        """Emit the assignment of a variable, unless its update is deferred."""
        variable, value = assign.inputs[0], assign.outputs[0]
        if assign.inputs[1].node in self._layout.deferred:
            return
        if not self._emit_native_copy(self._commit, assign, value, variable):
            kept = self.keep_for_commit(assign, self._operands.name(value))
            self._commit.add_line(assign, f"copyto({self._operands.names[variable]}, {kept})")

    def _emit_native_copy(
        self, part: ProgramSection, node: Node, source: Tensor, target: Tensor
    ) -> bool:
        """Add a native copy of a tensor; return False if native calls are off."""
        size = nbytes(self._layout.specs[target])
        if self._plain or self._backend.xp is not np:
            return False
        places = (self._operands.pointer_source(source), self._operands.pointer_source(target))
        if size:
            part.add_calls([KernelCall(node, copy_task(size), places, (size, size), 1)])
        return True

    def keep_for_commit(self, node: Node, name: str) -> str:
        """Return an expression that the commit section can use for a name.

        Feeds, received tensors and their aliases are local to the compute section.
        """
        if name in self._scope:
            return name
        self._compute.add_line(node, f"kept[{name!r}] = {name}")
        return f"kept[{name!r}]"


def _are_fixed(places: Sequence[PointerSource]) -> bool:
    """Return True if all addresses are known before the program runs."""
    return all(isinstance(place, int) for place in places)


def _text_of_outputs(names: Sequence[str]) -> str:
    """Return the argument for the outputs of a kernel: an array, or a tuple of several."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
