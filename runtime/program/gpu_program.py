"""Programs on GPUs: a partition -> steps over buffers at fixed addresses.

Each step starts the work of one node, or of a fused region as one CUDA kernel, on the device's
stream. Feeds and received tensors are copied to buffers of their own, so only the parameters of
bodies change their address, and most steps can be captured in CUDA graphs (`cuda_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graphflow.errors import DeviceError, GraphflowError
from graphflow.ir.declarations.half_precision import has_half
from graphflow.ir.graph import bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.kernels.cuda.region_kernels import CudaKernel, cuda_kernel, is_wide
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.runtime.collectives.program_collectives import DeviceCollective
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.gpu.cuda_graphs import CapturedSteps, GpuStep
from graphflow.runtime.gpu.gpu_backend import GpuBackend
from graphflow.runtime.gpu.input_buffer import InputBuffer
from graphflow.runtime.memory.backend import require_dtype
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.partitioning.check_modes import EVERY, RESULTS
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.bodies.body_loops import make_body_runner
from graphflow.runtime.program.bodies.loop_edge_flow_control import LoopEdgeChannel
from graphflow.runtime.program.capture_rules import is_repeatable
from graphflow.runtime.program.generated_call_support import (
    LOOP_OPS,
    EdgeChannel,
    annotate_error,
    body_results,
    never_cancelled,
    out_kernel,
    received_tensor_check,
)
from graphflow.runtime.program.nonfinite_check import NodeCheck, ResultCheck
from graphflow.runtime.program.vendor_libraries import array_module, library_kernel

_EDGE_OPS = ("send", "recv", "collective_start")


class GpuCode:
    """The steps of a partition's program; the GPU's counterpart of `code_generator.CpuCode`.

    Args:
        memory: the arena's bytes.
        loops: the edge channel of the enclosing program's bodies, if this is a body.
    """

    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        layout: MemoryLayout,
        variables: Mapping[str, Any],
        backend: GpuBackend,
        channel: EdgeChannel,
        memory: Any,
        loops: LoopEdgeChannel | None = None,
        outside: Sequence[Any] = (),
    ) -> None:
        self.partition = partition
        self.graph = partition.graph
        self.layout = layout
        self.backend = backend
        self.bindings = bindings
        self.channel = channel
        self.is_body = loops is not None
        self.loops = loops if loops is not None else LoopEdgeChannel(channel)
        self.plain = not is_jit_enabled()
        self._module = backend.xp if self.plain else array_module(backend)
        self.values: dict[Tensor, Any] = {}
        self.variables: dict[str, Any] = {}
        self._feeds: Mapping[str, Any] = {}
        self._members: dict[Tensor, tuple[DeviceCollective, np.ndarray[Any, Any]]] = {}
        self._step = self._draws = 0
        self._compute: list[GpuStep] = []
        self._commit: list[GpuStep] = []
        if not self.is_body:
            backend.compile([*_cuda_kernels(layout)])
        self.memory = memory
        self._outside = outside
        every = partition.checks == EVERY
        watch = (
            NodeCheck(backend.xp, partition.device, layout.specs, self.is_body) if every else None
        )
        with backend.active():
            for node in self.graph.variables:
                value = variables[node.name]
                self.values[node.outputs[0]] = self.variables[node.name] = value
            for node in self.graph.nodes:
                self._add_node(node)
                if watch is not None and watch.checked_outputs(node):
                    self._add_finite_check(
                        node, watch.make_check(node), watch.checked_outputs(node)
                    )
            if partition.checks == RESULTS and not self.is_body:
                self._add_result_check()
            for assign in layout.commits if watch is None else ():
                self._add_commit(assign)
        self.steps = CapturedSteps(self._compute, backend, partition.device)
        self.commit_steps = CapturedSteps(self._commit, backend, partition.device)
        self._has_edges = any(n.op.name in _EDGE_OPS for n in self.graph.walk())

    # Nodes --------------------------------------------------------------------------------------

    def _add_node(self, node: Node) -> None:
        for tensor in node.outputs:
            require_dtype(self.backend.xp, tensor.dtype)
        match node.op.name:
            case "constant":
                self.values[node.outputs[0]] = self.backend.to_device(node.attrs["value"])
            case "placeholder":
                self._add_feed(node)
            case "recv":
                self._add_receive(node)
            case "send":
                self._add_send(node)
            case "collective_start":
                self._add_collective_start(node)
            case "collective_finish":
                self._add_collective_finish(node)
            case "assign":
                self._add_staging_copy(node)
            case "variable" | "group":
                pass
            case _ if node.op.alias:
                self._add_alias(node)
            case _ if node in self.layout.body_layouts:
                self._add_bodies(node)
            case _ if node in self.layout.regions:
                self._add_region(node)
            case _:
                self._add_kernel(node)

    def _add_step(self, node: Node, run: Callable[[], None]) -> None:
        self._compute.append(GpuStep(node, run, is_repeatable(node, self.bindings)))

    def _add_finite_check(
        self, node: Node, look: Callable[..., None], tensors: Sequence[Tensor]
    ) -> None:
        """Add a step that checks whether tensors are finite. It waits for the device."""
        values = self.values
        self._compute.append(
            GpuStep(node, lambda: look(*[values[t] for t in tensors]), is_repeatable=False)
        )

    def _add_result_check(self) -> None:
        look = ResultCheck(self.backend.xp, self.partition, self.layout)
        if look.tensors:
            self._add_finite_check(look.tensors[-1].node, look, look.tensors)

    def _add_feed(self, node: Node) -> None:
        tensor = node.outputs[0]
        spec = self.layout.specs[tensor]
        if self.is_body:  # each call supplies a parameter, except a loop's state
            if tensor in self.layout.outside:
                self._arena_buffer(tensor)
            return
        buffer, name = InputBuffer(self.backend, spec), self.graph.names[node]
        self.values[tensor] = buffer.array
        self._add_step(node, lambda: buffer(self._feeds[name]))

    def _add_receive(self, node: Node) -> None:
        tensor = node.outputs[0]
        spec = self.layout.specs[tensor]
        buffer, arrival, edge = (
            InputBuffer(self.backend, spec),
            received_tensor_check(node, spec),
            node.attrs["edge"],
        )
        self.values[tensor] = buffer.array
        ends = self.loops if self.is_body else self.channel
        if not self.is_body:
            self._add_step(node, lambda: buffer(arrival(ends.recv(self._step, int(edge)))))
            return

        def receive() -> None:
            self.backend.begin_step()  # later uploads wait for the last iteration's reads
            buffer(arrival(ends.recv(self._step, int(edge))))

        self._add_step(node, receive)

    def _add_send(self, node: Node) -> None:
        ends = self.loops if self.is_body else self.channel
        edge, target, value = int(node.attrs["edge"]), str(node.attrs["target"]), node.inputs[0]
        if len(node.inputs) == 1:
            self._add_step(node, lambda: ends.send(self._step, edge, target, self.values[value]))
            return
        number = node.inputs[1]

        def send_rows() -> None:
            rows = self.values[value][: int(self.values[number])]
            ends.send(self._step, edge, target, rows)

        self._add_step(node, send_rows)

    def _add_collective_start(self, node: Node) -> None:
        """Add the start of a collective: by NCCL if all ranks can, else through the host."""
        what = Collective.from_attrs(bind_attrs(node.attrs, self.bindings))
        rank, result = int(node.attrs["rank"]), what.result_spec(int(node.attrs["rank"]))
        member = self.channel.join_collective(
            what, f"{node.name.partition('/')[2]!r} at {node.location}"
        )
        size = max(1, nbytes(result))
        member.use_gpu(self.backend)
        shared = self.channel.shared_memory(size) if member.uses_mapped_tensors else None
        memory = np.empty(size, np.uint8) if shared is None else shared
        landed: Any = memory[: nbytes(result)].view(result.dtype).reshape(result.shape)
        self._result_buffer(node.outputs[0])
        self._members[node.outputs[0]] = (member, landed)
        values, given, result_of = self.values, node.inputs, node.outputs[0]

        def start() -> None:
            if member.can_run_on_device:
                x = values[given[0]] if given else None
                member.start_on_device(self._step, x, values[result_of])
                return
            x = self.backend.to_host(values[given[0]]) if given else None
            member.start(self._step, rank, x, landed, fixed=False, meanwhile=True)

        self._add_step(node, start)

    def _add_collective_finish(self, node: Node) -> None:
        started, tensor = node.inputs[0], node.outputs[0]
        member, landed = self._members[started]
        self.values[tensor] = self.values[started].reshape(self.layout.specs[tensor].shape)

        def finish() -> None:
            member.finish(self._step)
            if not member.is_on_device:
                self.backend.write(self.values[started], landed)

        self._add_step(node, finish)

    def _add_alias(self, node: Node) -> None:
        """Reshape the input now if its address is fixed, else in a step."""
        tensor, source = node.outputs[0], node.inputs[0]
        shape = self.layout.specs[tensor].shape
        if source in self.values:
            self.values[tensor] = self.values[source].reshape(shape)
            return

        def run() -> None:
            self.values[tensor] = self.values[source].reshape(shape)

        self._add_step(node, run)

    def _add_bodies(self, node: Node) -> None:
        """Add a node that holds bodies, each over its part of the node's memory."""
        inner = self.layout.body_layouts[node]
        start = self.layout.arena.offsets[self.layout.scratch[node]]
        own = self.memory[start : start + inner.nbytes]
        outs = [self._arena_buffer(t) for t in node.outputs]
        results = body_results(node, self.layout, own, outs, self.backend.xp.copyto)
        codes = [
            GpuCode(
                part, self.bindings, layout, {}, self.backend, self.channel,
                own[place : place + layout.arena.nbytes], self.loops, each.buffers,
            )
            for (part, layout), place, each in zip(
                inner.parts, inner.offsets, results, strict=True
            )
        ]  # fmt: skip
        routines = [
            _GpuBody(code, [body.inputs[i].outputs[0] for i in range(len(body.inputs))])
            for code, body in zip(codes, bodies(node), strict=True)
        ]
        run = make_body_runner(
            node,
            bind_attrs(node.attrs, self.bindings),
            routines,
            results,
            self.channel.check_cancelled if node.op.name in LOOP_OPS else never_cancelled,
        )
        inputs = node.inputs

        def step() -> None:
            given = [self.values[t] for t in inputs]
            run(outs, *given, step=self._step, draws=self._draws)

        self._add_step(node, step)

    # Kernels ------------------------------------------------------------------------------------

    def _add_region(self, node: Node) -> None:
        """Add a node of a fused region: its result's buffer; the last node adds the kernel."""
        fused = self.layout.regions[node]
        if any(node is result.node for result in fused.results):
            self._result_buffer(node.outputs[0])
        if node.op.refuse is not None:
            self._add_value_check(node)
        if node is not fused.last:
            return
        launch = self.backend.make_launcher(fused.region, fused.sizes)
        tensors = (*fused.operands, *fused.results)
        self._add_kernel_step(node, lambda: launch([self.values[t] for t in tensors]))

    def _add_value_check(self, node: Node) -> None:
        """Add a step that refuses values that the op does not accept.

        If all these values are feeds, the host's arrays are checked: a look at the device's would
        have to wait for it.
        """
        refuse, attrs = node.op.refuse, bind_attrs(node.attrs, self.bindings)
        assert refuse is not None
        fed = {
            i: self.graph.names[self.layout.roots[t].node]
            for i, t in enumerate(node.inputs)
            if self.layout.roots[t].node.op.name == "placeholder" and not self.is_body
        }
        looked_at = [i for i, t in enumerate(node.inputs) if t.dtype.kind != "f"]
        shapes = [self.layout.specs[t] for t in node.inputs]
        sizes: list[Any] = [s.shape for s in shapes]

        def look() -> None:
            if all(i in fed for i in looked_at):
                xp: Any = np
                given = {i: np.asarray(self._feeds[fed[i]]).reshape(sizes[i]) for i in looked_at}
            else:
                xp = self.backend.xp
                given = {i: self.values[node.inputs[i]] for i in looked_at}
            refuse(xp, *[given.get(i, spec) for i, spec in enumerate(shapes)], **attrs)

        self._compute.append(GpuStep(node, look, is_repeatable=False))

    def _add_kernel(self, node: Node) -> None:
        """Add the node's own kernel, which writes to its buffers."""
        if node.op.refuse is not None:
            self._add_value_check(node)
        outs = [self._result_buffer(t) for t in node.outputs]
        attrs = bind_attrs(node.attrs, self.bindings)
        specs = [self.layout.specs[t] for t in node.inputs]
        half = not node.op.halves and has_half(specs)
        inputs, values = node.inputs, self.values
        kernel = None if self.plain else library_kernel(self.backend, node.op, specs, attrs)
        if kernel is None and node.op.ufunc is not None and not attrs and not (self.plain or half):
            ufunc = getattr(self.backend.xp, node.op.ufunc)
            self._add_kernel_step(node, lambda: ufunc(*[values[t] for t in inputs], out=outs[0]))
            return
        if kernel is None:
            kernel = out_kernel(node.op, self._module, specs, attrs, self.plain)
        out = outs[0] if len(outs) == 1 else tuple(outs)
        if node.op.random:
            self._add_kernel_step(
                node, lambda: kernel(out, *[values[t] for t in inputs], step=self._draws)
            )
        else:
            self._add_kernel_step(node, lambda: kernel(out, *[values[t] for t in inputs]))

    def _add_kernel_step(self, node: Node, run: Callable[[], Any]) -> None:
        if node in self.layout.deferred:
            self._commit.append(GpuStep(node, run, is_repeatable(node, self.bindings)))
        else:
            self._add_step(node, run)

    # Memory -------------------------------------------------------------------------------------

    def _result_buffer(self, tensor: Tensor) -> Any:
        """Return the array that a result is written to: its buffer, or its deferred variable."""
        deferred = self.layout.deferred.get(tensor.node)
        if deferred is not None:
            self.values[tensor] = self.values[deferred]
        else:
            self._arena_buffer(tensor)
        return self.values[tensor]

    def _arena_buffer(self, tensor: Tensor) -> Any:
        spec = self.layout.specs[tensor]
        number = self.layout.outside.get(self.layout.roots[tensor])
        if number is not None:
            buffer = self._outside[number]  # the same array, since kernels in place compare it
            self.values[tensor] = (
                buffer if buffer.shape == spec.shape else buffer.reshape(spec.shape)
            )
            return self.values[tensor]
        start = self.layout.offset(tensor)
        memory = self.memory[start : start + nbytes(spec)]
        self.values[tensor] = memory.view(spec.dtype).reshape(spec.shape)
        return self.values[tensor]

    def _add_staging_copy(self, node: Node) -> None:
        """Bind an assigned value; copy it if it shares memory with a variable of the commit."""
        tensor, value = node.outputs[0], node.inputs[1]
        if node not in self.layout.staged:
            self.values[tensor] = self.values[value]
            return
        buffer = self._arena_buffer(tensor)
        self._add_step(node, lambda: self.backend.xp.copyto(buffer, self.values[value]))

    def _add_commit(self, assign: Node) -> None:
        if assign.inputs[1].node in self.layout.deferred:
            return
        variable, value = self.values[assign.inputs[0]], self.values[assign.outputs[0]]
        self._commit.append(
            GpuStep(assign, lambda: self.backend.xp.copyto(variable, value), is_repeatable=True)
        )

    # Running ------------------------------------------------------------------------------------

    is_native = False

    @property
    def workspace(self) -> int:
        """The most bytes that ops have allocated for themselves so far."""
        return self.backend.memory_usage().pool

    @property
    def commits(self) -> bool:
        """Whether the program has assignments."""
        return bool(self._commit)

    def compile_compute(self) -> Callable[..., Any]:
        """Return the compute part as a function (feeds, step, draws) -> fetched arrays.

        The arrays are valid once the stream has reached this point.
        """
        fetched = tuple(self.partition.fetches.values())

        def compute(feeds: Mapping[str, Any], step: int, draws: int) -> Any:
            self._begin(feeds, step, draws)
            self.steps()
            if self._has_edges:  # other devices may reuse what they sent, and read what we sent
                self.backend.synchronize()
            return tuple(self.values[t] for t in fetched)

        return compute

    def compile_commit(self) -> Callable[[], None]:
        """Return the commit part. It only starts work, which precedes later work on the stream."""
        return self.commit_steps

    def compile_traced(self) -> tuple[Callable[..., Any], list[Node]]:
        """Return the compute part, one step at a time, for traced steps; and the node of each step.

        The function calls its fourth argument, `mark`, with the number of each step after it.
        """
        fetched = tuple(self.partition.fetches.values())

        def run(feeds: Mapping[str, Any], step: int, draws: int, mark: Any) -> Any:
            self._begin(feeds, step, draws)
            for i in range(len(self._compute)):
                self.steps.run_step(i)
                mark(i)
            return tuple(self.values[t] for t in fetched)

        return run, [step.node for step in self._compute]

    def _begin(self, feeds: Mapping[str, Any], step: int, draws: int) -> None:
        self._feeds, self._step, self._draws = feeds, step, draws
        self.backend.begin_step()

    def run_body(self, parameters: Sequence[Tensor], arrays: Sequence[Any], step: int, draws: int
    ) -> list[Any]:  # fmt: skip
        """Run as a body; the results are valid until it runs again."""
        self._step, self._draws = step, draws
        for tensor, array in zip(parameters, arrays, strict=True):
            self.values[tensor] = array
        for i in range(len(self._compute)):
            self.steps.run_step(i)
        return [self.values[t] for t in self.partition.fetches.values()]

    def release(self) -> None:
        """Release the buffers. The program cannot run again."""
        with suppress(DeviceError):  # a device that failed: release its buffers all the same
            self.backend.synchronize()
        if self._members:
            self.channel.close()
        self.values.clear()
        self._compute, self._commit = [], []
        self.steps.release()
        self.commit_steps.release()
        self.memory = None

    def annotate_error(self, error: BaseException) -> Exception:
        """Return an error that names the node of the failing step; see `annotate_error`.

        A lost device is reported instead of the node: any later step fails then, whichever caused
        it.
        """
        if (
            not isinstance(error, GraphflowError)
            and (lost := self.backend.lost_error()) is not None
        ):
            return lost
        node = self.steps.failing or self.commit_steps.failing
        return annotate_error(error, node, self.layout, self.partition)


class _GpuBody:
    """A body as a function of arrays."""

    def __init__(self, code: GpuCode, parameters: Sequence[Tensor]) -> None:
        self._code = code
        self._parameters = parameters

    def __call__(self, arrays: Sequence[Any], step: int, draws: int) -> Any:
        try:
            return self._code.run_body(self._parameters, arrays, step, draws)
        except Exception as error:
            raise self._code.annotate_error(error) from error


def _cuda_kernels(layout: MemoryLayout) -> Iterator[CudaKernel]:
    """Yield the CUDA kernels of a program and its bodies."""
    for fused in dict.fromkeys(layout.regions.values()):
        yield cuda_kernel(fused.region, is_wide(fused.sizes))
    for inner in layout.body_layouts.values():
        for _, body in inner.parts:
            yield from _cuda_kernels(body)
