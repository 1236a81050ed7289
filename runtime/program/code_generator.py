"""Code generation for CPUs: a partition -> straight-line Python over buffers at fixed addresses.

    nodes ─CpuCode→ lines (`program_part.py`) over operands (`operand_table.py`)
          ─ProgramSource→ Python functions

A line stands for one node, so the line number of a failure leads to the node and to the user's
line. Consecutive generated kernels are one line, a native call (`native_segments.py`), which cannot
fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.communication.rows_in_use import find_rows_in_use, has_counting_readers
from graphflow.ops.control_flow.control import call
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.kept_layouts import DeviceLayouts
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.memory.backend import CpuBackend, DeviceBackend, require_dtype
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.native_calls.native_segments import (
    FeedBinding,
    NativeSegment,
)
from graphflow.runtime.native_calls.work_sharing import WorkSharing
from graphflow.runtime.partitioning.check_modes import EVERY, RESULTS
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.bodies.body_routines import (
    CompiledBody,
    inline_body,
    make_node_runner,
)
from graphflow.runtime.program.bodies.loop_edge_flow_control import LoopEdgeChannel, copy_slot
from graphflow.runtime.program.bodies.native_loops import NativeBody
from graphflow.runtime.program.bodies.slot_results import find_slot_results
from graphflow.runtime.program.direct_results import find_direct_results, take_memory
from graphflow.runtime.program.generated_call_support import (
    EdgeChannel,
    annotate_error,
    body_results,
    compile_kernels,
    received_tensor_check,
)
from graphflow.runtime.program.kernel_emitter import KernelEmitter
from graphflow.runtime.program.nonfinite_check import NodeCheck, ResultCheck
from graphflow.runtime.program.operand_table import OperandTable
from graphflow.runtime.program.program_part import Line, ProgramSection
from graphflow.runtime.program.slot_emitter import SlotEmitter
from graphflow.runtime.program.source_text import ProgramSource

_EDGES = ("send", "recv")
_COPIED_FEED = 4096
"""Bytes of a feed that is copied."""


class CpuCode:
    """The lines of a partition's program, and the buffers and kernels that their names mean.

    Args:
        memory: the arena's bytes.
        loops: the edge channel of the enclosing program's bodies, if this is a body.
        keys: for a body, the key in `feeds` of each parameter.
        outside: for a body, the buffers of its results (`MemoryLayout.outside`).
        layouts: the layouts of variables that kernels keep; default: new ones.

    Attributes:
        compute, commit: the two sections of the program.
        scope: global names of the generated functions.
        body_codes: the code of the bodies that its nodes hold.
    """

    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        layout: MemoryLayout,
        variables: Mapping[str, Any],
        backend: DeviceBackend,
        channel: EdgeChannel,
        memory: Any,
        loops: LoopEdgeChannel | None = None,
        keys: Mapping[Node, int] | None = None,
        outside: Sequence[Any] = (),
        layouts: DeviceLayouts | None = None,
    ) -> None:
        self.partition = partition
        self.device = DeviceName.parse(partition.device)
        self.is_body = loops is not None
        self.channel = channel
        self.loops = loops or LoopEdgeChannel(channel, backend.xp.copy)
        ends: Any = self.loops if self.is_body else channel
        self.graph = partition.graph
        self.layout = layout
        self.backend = backend
        self.bindings = bindings
        self.plain = not is_jit_enabled()
        self.scope: dict[str, Any] = {
            "send": ends.send, "recv": ends.recv, "copy": backend.xp.copy,
            "send_where": self.loops.send_where, "recv_any": self.loops.recv_any,
            "received_from": self.loops.received_from, "free_slot": self.loops.free_slot,
            "copy_slot": copy_slot,
            "copyto": backend.xp.copyto, "kept": {},
        }  # fmt: skip
        self.numbers = {node: i for i, node in enumerate(self.graph.nodes)}
        sharing = None
        if isinstance(backend, CpuBackend) and backend.team and not (self.is_body or self.plain):
            sharing = WorkSharing(backend.team, backend.shared_scratch)
        self.compute = ProgramSection(sharing)
        self.commit = ProgramSection(sharing)
        self._dtypes: set[np.dtype[Any]] = set()  # that the backend supports
        self.variables: dict[str, Any] = {}
        self.body_codes: list[CpuCode] = []
        self.assigned = {assign.inputs[0] for assign in layout.commits}
        self._feeds: list[Line] = []
        self._keys = keys
        if not self.is_body:
            compile_kernels(layout)
        self.memory = memory
        self._operands = OperandTable(
            layout, backend, self.memory, self.scope, self.numbers, self.compute.add_line,
            outside,
        )  # fmt: skip
        self._kernels = KernelEmitter(
            layout, bindings, backend, self._operands, self.scope, self.compute, self.commit,
            {} if partition.checks else find_rows_in_use(self.graph, layout.specs),
            layouts or DeviceLayouts(),
            records=not self.is_body,
        )  # fmt: skip
        every = partition.checks == EVERY
        watch = (
            NodeCheck(backend.xp, partition.device, layout.specs, self.is_body) if every else None
        )
        moves = self.is_body and backend.xp is np and not partition.checks
        slots = SlotEmitter(
            find_slot_results(partition, layout) if moves else [], self._operands, self.scope,
            self._emit_line,
        )  # fmt: skip
        slots.emit_after(None)
        direct = not self.is_body and backend.xp is np
        self._direct_results = find_direct_results(partition, layout) if direct else {}
        self._opening = [
            take_memory(tensor, layout, backend, self._operands) for tensor in self._direct_results
        ]
        # Variables come first: a deferred update may write to a variable that comes after it.
        for node in sorted(self.graph.nodes, key=lambda n: n.op.name != "variable"):
            self._emit_node(node, variables)
            slots.emit_after(node)
            if watch is not None and watch.checked_outputs(node):
                self._emit_finite_check(node, watch.make_check(node), watch.checked_outputs(node))
        if partition.checks == RESULTS and not self.is_body:
            self._emit_result_check()
        slots.emit_copies()
        self.compute.flush()
        for assign in layout.commits if watch is None else ():
            self._kernels.emit_commit(assign)
        self._kernels.emit_sweep()
        self.commit.flush()
        self._bind_runtime_pointers()

    # Nodes --------------------------------------------------------------------------------------

    def _emit_node(self, node: Node, variables: Mapping[str, Any]) -> None:
        number = self.numbers[node]
        for spec in node.specs:
            if spec.dtype not in self._dtypes:
                require_dtype(self.backend.xp, spec.dtype)
                self._dtypes.add(spec.dtype)
        if node in self.layout.regions:  # most nodes are
            self._kernels.emit_region(node, number)
            return
        match node.op.name:
            case "constant":
                self._operands.bind(node.outputs[0], self.backend.to_device(node.attrs["value"]))
            case "variable":
                value = variables[node.name]
                self._operands.check_variable(node, value)
                self._operands.bind(node.outputs[0], value)
                self.variables[node.name] = value
            case "placeholder":
                self._emit_feed(node, number)
            case "recv" | "recv_any":
                self._emit_receive(node, number)
            case "received_from":
                which = self._operands.name(node.outputs[0])
                self._emit_line(node, f"{which}[...] = received_from({int(node.attrs['edge'])})")
            case "send":
                self._emit_send(node, number)
            case "send_where":
                self._emit_send_where(node, number)
            case "collective_start":
                self._emit_collective(node, number)
            case "collective_finish":
                member = f"m{self.numbers[node.inputs[0].node]}"
                self._emit_line(node, f"{member}.finish(step)")
            case "assign":
                self._kernels.emit_staging_copy(node)
            case "group":
                pass
            case _ if node.op.alias:
                pass  # becomes an array only if a line reads it
            case _ if node in self.layout.body_layouts:
                self._emit_bodies(node, number)
            case _:
                self._kernels.emit_kernel(node, number)

    def _emit_feed(self, node: Node, number: int) -> None:
        tensor = node.outputs[0]
        if tensor in self.layout.outside:  # a loop's state
            return
        spec = self.layout.specs[tensor]
        fed = FeedBinding(spec, self.backend.to_device)
        self.scope[f"k{number}"] = fed
        if self._keys is None and self.backend.xp is np and nbytes(spec) <= _COPIED_FEED:
            self._feeds.append(
                (node, self._operands.copy_feed(tensor, self.graph.names[node], fed))
            )
            return
        self._operands.feeds[tensor] = fed
        name = self._operands.names[tensor] = f"b{number}_0"
        if self._keys is None:
            self.scope[f"f{number}"] = self.graph.names[node]
            key = f"f{number}"
        else:
            key = str(self._keys[node])
        self._feeds.append((node, f"{name} = k{number}(feeds[{key}])"))

    def _emit_receive(self, node: Node, number: int) -> None:
        tensor = node.outputs[0]
        spec = self.layout.specs[tensor]
        fed = self._operands.feeds[tensor] = FeedBinding(spec, self.backend.to_device)
        self.scope[f"k{number}"] = fed
        short = not self.partition.checks and has_counting_readers(
            tensor, self.graph.consumers[node]
        )
        self.scope[f"a{number}"] = received_tensor_check(node, spec, short)
        name = self._operands.names[tensor] = f"b{number}_0"
        if node.op.name == "recv_any":
            self.scope[f"e{number}"] = tuple(map(int, node.attrs["edges"]))
            given = "".join(f", {self._operands.name(t)}" for t in node.inputs)
            call = f"recv_any(step, e{number}{given})"
        else:
            call = f"recv(step, {int(node.attrs['edge'])})"
        self._emit_line(node, f"{name} = k{number}(a{number}({call}))")

    def _emit_send(self, node: Node, number: int) -> None:
        target = str(node.attrs["target"])
        value = self._operands.name(node.inputs[0])
        near = DeviceName.parse(target).worker == self.device.worker
        # Within a worker a tensor is passed by reference. A variable's new value may be read by the
        # receiver's commit after our own. In a body the loops' channel copies what it has to.
        if not self.is_body and near and self.layout.roots[node.inputs[0]] in self.assigned:
            value = f"copy({value})"
        if len(node.inputs) > 1:  # a ragged edge
            value = f"{value}[: int({self._operands.name(node.inputs[1])})]"
        self.scope[f"t{number}"] = target
        self._emit_line(node, f"send(step, {int(node.attrs['edge'])}, t{number}, {value})")

    def _emit_send_where(self, node: Node, number: int) -> None:
        self.scope[f"e{number}"] = tuple(map(int, node.attrs["edges"]))
        self.scope[f"t{number}"] = tuple(map(str, node.attrs["targets"]))
        value, mask, *rows = (self._operands.name(t) for t in node.inputs)
        if rows:  # ragged edges
            value = f"{value}[: int({rows[0]})]"
        self._emit_line(node, f"send_where(step, e{number}, t{number}, {value}, {mask})")

    # Checks -------------------------------------------------------------------------------------

    def _emit_finite_check(
        self, node: Node, look: Callable[..., None], tensors: Sequence[Tensor]
    ) -> None:
        """Emit a line that checks whether tensors are finite."""
        names = [self._operands.name(t) for t in tensors]
        self.scope[f"w{self.numbers[node]}"] = look
        self._emit_line(node, f"w{self.numbers[node]}({', '.join(names)})")

    def _emit_result_check(self) -> None:
        look = ResultCheck(self.backend.xp, self.partition, self.layout)
        if look.tensors:
            self._emit_finite_check(look.tensors[-1].node, look, look.tensors)

    def _emit_collective(self, node: Node, number: int) -> None:
        """Emit the start of a collective, which proceeds while later lines run."""
        what = Collective.from_attrs(bind_attrs(node.attrs, self.bindings))
        name = f"{node.name.partition('/')[2]!r} (made at {node.location})"
        self.scope[f"m{number}"] = self.channel.join_collective(what, name)
        fixed = all(isinstance(self._operands.pointer_source(t), int) for t in node.inputs)
        given = self._operands.name(node.inputs[0]) if node.inputs else "None"
        result = self._operands.name(node.outputs[0])
        rank = int(node.attrs["rank"])
        following = islice(self.graph.nodes, number + 1, None)
        after = next((n.op.name for n in following if n.op.name != "collective_start"), "")
        self._emit_line(
            node,
            f"m{number}.start(step, {rank}, {given}, {result}, "
            f"fixed={fixed}, meanwhile={after != 'collective_finish'})",
        )

    # Bodies -------------------------------------------------------------------------------------

    def _emit_bodies(self, node: Node, number: int) -> None:
        """Emit a node that holds bodies, each over its part of the node's memory.

        Bodies that consist of generated kernels run as native calls, others as Python functions.
        """
        inner = self.layout.body_layouts[node]
        start = self.layout.arena.offsets[self.layout.scratch[node]]
        own = self.memory[start : start + inner.nbytes]
        outs = [self.scope[self._operands.name(t)] for t in node.outputs]
        results = body_results(node, self.layout, own, outs, self.backend.xp.copyto)
        codes = [
            CpuCode(
                part, self.bindings, layout, {}, self.backend, self.channel,
                own[place : place + layout.arena.nbytes], self.loops,
                {parameter: i for i, parameter in enumerate(body.inputs)}, each.buffers,
            )
            for body, (part, layout), place, each in zip(
                bodies(node), inner.parts, inner.offsets, results, strict=True
            )
        ]  # fmt: skip
        self.body_codes += codes  # keeps constants alive, whose addresses native calls use
        natives = [
            code.as_native_body(body) for body, code in zip(bodies(node), codes, strict=True)
        ]
        if node.op is call and natives[0] is not None:
            self.compute.add_calls(
                inline_body(node, natives[0], results[0], self._operands.pointer_source)
            )
            return
        self.scope[f"k{number}"] = make_node_runner(
            node,
            bind_attrs(node.attrs, self.bindings),
            natives,
            lambda: [
                CompiledBody(code.compile_compute("routine"), code.annotate_error) for code in codes
            ],
            results,
            self.channel,
        )
        given_outs = "".join(f"{self._operands.name(t)}, " for t in node.outputs)
        given = "".join(f"{self._operands.name(t)}, " for t in node.inputs)
        self._emit_line(node, f"k{number}(({given_outs}), {given}step=step, draws=draws)")

    def as_native_body(self, body: Body) -> NativeBody | None:
        """Return this body's code as native calls; None if it has lines of Python."""
        if not all(isinstance(line, NativeSegment) for line in self.compute.lines) or self.plain:
            return None
        if self.backend.xp is not np:
            return None
        return NativeBody(
            body,
            tuple(c for segment in self.compute.segments for c in segment.calls),
            tuple(self._operands.pointer_source(t) for t in body.outputs),
            tuple(nbytes(self.layout.specs[t]) for t in body.outputs),
        )

    # Source -------------------------------------------------------------------------------------

    def _bind_runtime_pointers(self) -> None:
        """Bind the pointers of native calls to feeds and received tensors.

        Those that the commit section reads are kept until then.
        """
        for part in (self.compute, self.commit):
            for segment in part.segments:
                for slot, which in segment.runtime_pointers.items():
                    assert isinstance(slot, Tensor)
                    if slot in self._operands.feeds:
                        self._operands.feeds[slot].bind(segment, which)
                    if part is self.commit:
                        self._kernels.keep_for_commit(slot.node, self._operands.names[slot])

    def _emit_line(self, node: Node, line: str) -> None:
        self.compute.add_line(node, line)

    @cached_property
    def _source(self) -> ProgramSource:
        names = [self._operands.name(t) for t in self.partition.fetches.values()]
        result = "(" + "".join(f"{name}, " for name in names) + ")"  # may emit lines for aliases
        lines = [*self._feeds, *self.compute.lines]
        return ProgramSource(self.scope, lines, self.commit.lines, result, self._opening)

    @property
    def plain_kernel_nodes(self) -> list[Node]:
        """Nodes that are computed by their op's own kernel."""
        return self._kernels.plain_kernel_nodes

    @property
    def is_native(self) -> bool:
        """Whether it consists of native calls, sends and receives only.

        A line that lays out weights enters the context of other kernels itself.
        """
        lines = (*self._source.lines[len(self._feeds) :], *self.commit.lines)
        refreshed = self._kernels.refreshed_nodes

        def is_native(line: Any) -> bool:
            if isinstance(line, NativeSegment):
                return True
            return isinstance(line, tuple) and (line[0].op.name in _EDGES or line[0] in refreshed)

        return self.backend.xp is np and all(map(is_native, lines))

    @property
    def owned_results(self) -> list[bool]:
        """For each fetch, whether the caller may keep the array that the compute section returns.

        Buffers of the program have to be copied.
        """
        return [t in self._direct_results for t in self.partition.fetches.values()]

    @property
    def shares_work(self) -> bool:
        """Whether threads share so much of its first native calls that they are woken for them."""
        return any(segment.shares_work for segment in self.compute.segments)

    def compile_compute(self, name: str = "compute") -> Callable[..., Any]:
        """Compile the compute section to a function (feeds, step, draws) -> fetched values."""
        return self._source.compile_compute(name)

    def compile_commit(self) -> Callable[[], None]:
        """Compile the commit section to a function."""
        return self._source.compile_commit()

    def compile_traced(self) -> tuple[Callable[..., Any], list[Node]]:
        """Compile the compute section for traced steps; see `ProgramSource.compile_traced`."""
        return self._source.compile_traced()

    def annotate_error(self, error: BaseException) -> Exception:
        """Return an error that names the node of the failing line; see `annotate_error`."""
        return annotate_error(error, self._source.failing_node(error), self.layout, self.partition)

    @property
    def commits(self) -> bool:
        """Whether the program has assignments."""
        return bool(self.commit.lines)

    @property
    def workspace(self) -> int:
        """Measured workspace in bytes; 0, because a CPU does not measure it."""
        return 0

    def release(self) -> None:
        """Release the buffers. The program cannot run again."""
        if not self.is_body:
            self.channel.close()
        self.scope.clear()  # breaks the reference cycle with its functions
