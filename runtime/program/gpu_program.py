"""A program on a GPU: a partition as steps over buffers at fixed places.

Each step starts the work of one node, or of a region as one CUDA kernel, on the device's stream.
What is fed or received lands in a place of its own, so nothing but a body's parameters ever moves,
and most steps can be captured (`cuda_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graphflow.errors import DeviceError, GraphflowError
from graphflow.ir.graph import bind_attrs, bodies
from graphflow.ir.half_precision import any_half
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.control_flow.control import call, scan
from graphflow.ops.kernels.cuda.region_kernels import CudaKernel, cuda_kernel, is_wide
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.runtime.collectives.exchanges import Member
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.gpu.cuda_graphs import Step, Steps
from graphflow.runtime.gpu.gpu_backend import GpuBackend
from graphflow.runtime.memory.backend import require_dtype
from graphflow.runtime.memory.memory_layout import Layout
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.body_loops import runner
from graphflow.runtime.program.generated_call_support import (
    LOOPS,
    Arrival,
    Channel,
    carried_buffers,
    explained,
    going_on,
    writing,
)
from graphflow.runtime.program.loop_edge_flow_control import InLoops
from graphflow.runtime.program.nonfinite_check import EVERY, RESULTS, Results, Watch
from graphflow.runtime.program.vendor_libraries import kernels_module, library_kernel

_MEETS_HOST = ("placeholder", "recv", "send", "collective_start", "collective_finish", "cond",
               "while_loop")  # fmt: skip
_KEEPS_PLANS = ("fft", "rfft", "irfft")  # CuPy lets go of the oldest, and of what they work in
_ENDS = ("send", "recv", "collective_start")
_LONGEST = 20_000
"""Nodes of all iterations of a loop that is captured."""


class GpuCode:
    """A program of a partition: its steps. See `code.Code`, whose twin it is.

    Args:
        memory: of the arena.
        loops: of the program of which this is a body.
    """

    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        layout: Layout,
        variables: Mapping[str, Any],
        backend: GpuBackend,
        channel: Channel,
        memory: Any,
        loops: InLoops | None = None,
    ) -> None:
        self.partition = partition
        self.graph = partition.graph
        self.layout = layout
        self.backend = backend
        self.bindings = bindings
        self.channel = channel
        self.inside = loops is not None
        self.loops = loops if loops is not None else InLoops(channel)
        self.plain = not is_jit_enabled()
        self._module = backend.xp if self.plain else kernels_module(backend)
        self.values: dict[Tensor, Any] = {}
        self.variables: dict[str, Any] = {}
        self._feeds: Mapping[str, Any] = {}
        self._members: dict[Tensor, tuple[Member, np.ndarray[Any, Any]]] = {}
        self._step = self._draws = 0
        self._compute: list[Step] = []
        self._commit: list[Step] = []
        if not self.inside:
            backend.compile([*_kernels(layout)])
        self.memory = memory
        every = partition.checks == EVERY
        watch = Watch(backend.xp, partition.device, layout.specs, self.inside) if every else None
        with backend.active():
            for node in self.graph.variables:
                value = variables[node.name]
                self.values[node.outputs[0]] = self.variables[node.name] = value
            for node in self.graph.nodes:
                self._add(node)
                if watch is not None and watch.watches(node):
                    self._look(node, watch.looking(node), watch.watches(node))
            if partition.checks == RESULTS and not self.inside:
                self._look_at_results()
            for assign in layout.commits if watch is None else ():
                self._assign(assign)
        self.steps = Steps(self._compute, backend, partition.device)
        self.commit_steps = Steps(self._commit, backend, partition.device)
        self._is_cut = any(n.op.name in _ENDS for n in self.graph.walk())

    # Nodes --------------------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        for tensor in node.outputs:
            require_dtype(self.backend.xp, tensor.dtype)
        match node.op.name:
            case "constant":
                self.values[node.outputs[0]] = self.backend.to_device(node.attrs["value"])
            case "placeholder":
                self._fed(node)
            case "recv":
                self._received(node)
            case "send":
                self._sent(node)
            case "collective_start":
                self._exchange(node)
            case "collective_finish":
                self._exchanged(node)
            case "assign":
                self._staged(node)
            case "variable" | "group":
                pass
            case _ if node.op.alias:
                self._alias(node)
            case _ if node in self.layout.inner:
                self._bodies(node)
            case _ if node in self.layout.regions:
                self._member(node)
            case _:
                self._kernel(node)

    def _start(self, node: Node, run: Callable[[], None]) -> None:
        self._compute.append(Step(node, run, is_steady(node, self.bindings)))

    def _look(self, node: Node, look: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """A step that looks whether tensors are finite; the device is waited for."""
        values = self.values
        self._compute.append(Step(node, lambda: look(*[values[t] for t in tensors]), steady=False))

    def _look_at_results(self) -> None:
        look = Results(self.backend.xp, self.partition, self.layout)
        if look.tensors:
            self._look(look.tensors[-1].node, look, look.tensors)

    def _fed(self, node: Node) -> None:
        tensor = node.outputs[0]
        spec = self.layout.specs[tensor]
        if self.inside:
            return  # a parameter: an array that each call brings
        inlet, name = self.backend.inlet(spec), self.graph.names[node]
        self.values[tensor] = inlet.buffer
        self._start(node, lambda: inlet(self._feeds[name]))

    def _received(self, node: Node) -> None:
        tensor = node.outputs[0]
        spec = self.layout.specs[tensor]
        inlet, arrival, edge = self.backend.inlet(spec), Arrival(node, spec), node.attrs["edge"]
        self.values[tensor] = inlet.buffer
        ends = self.loops if self.inside else self.channel
        if not self.inside:
            self._start(node, lambda: inlet(arrival(ends.recv(self._step, int(edge)))))
            return

        def receive() -> None:
            self.backend.begin()  # the iteration before has read it when this is reached
            inlet(arrival(ends.recv(self._step, int(edge))))

        self._start(node, receive)

    def _sent(self, node: Node) -> None:
        ends = self.loops if self.inside else self.channel
        edge, target, value = int(node.attrs["edge"]), str(node.attrs["target"]), node.inputs[0]
        self._start(node, lambda: ends.send(self._step, edge, target, self.values[value]))

    def _exchange(self, node: Node) -> None:
        """Take part in an exchange: by NCCL where all ranks can, else by way of the host's
        memory."""
        what = Collective.of(bind_attrs(node.attrs, self.bindings))
        rank, result = int(node.attrs["rank"]), what.result(int(node.attrs["rank"]))
        member = self.channel.member(what, f"{node.name.partition('/')[2]!r} at {node.location}")
        size = max(1, nbytes(result))
        member.use(self.backend)
        shared = self.channel.shared(size) if member.is_mapped else None
        memory = np.empty(size, np.uint8) if shared is None else shared
        landed: Any = memory[: nbytes(result)].view(result.dtype).reshape(result.shape)
        self._out(node.outputs[0])
        self._members[node.outputs[0]] = (member, landed)
        values, given, result_of = self.values, node.inputs, node.outputs[0]

        def start() -> None:
            if member.on_device:
                x = values[given[0]] if given else None
                member.start_on_device(self._step, x, values[result_of])
                return
            x = self.backend.to_host(values[given[0]]) if given else None
            member.start(self._step, rank, x, landed, fixed=False, meanwhile=True)

        self._start(node, start)

    def _exchanged(self, node: Node) -> None:
        started, tensor = node.inputs[0], node.outputs[0]
        member, landed = self._members[started]
        self.values[tensor] = self.values[started].reshape(self.layout.specs[tensor].shape)

        def finish() -> None:
            member.finish(self._step)
            if not member.direct:
                self.backend.write(self.values[started], landed)

        self._start(node, finish)

    def _alias(self, node: Node) -> None:
        """The input's memory under another shape: at once, or whenever that comes."""
        tensor, source = node.outputs[0], node.inputs[0]
        shape = self.layout.specs[tensor].shape
        if source in self.values:
            self.values[tensor] = self.values[source].reshape(shape)
            return

        def run() -> None:
            self.values[tensor] = self.values[source].reshape(shape)

        self._start(node, run)

    def _bodies(self, node: Node) -> None:
        """A node of bodies, each a routine over its part of the node's memory."""
        inner = self.layout.inner[node]
        start = self.layout.arena.offsets[self.layout.scratch[node]]
        own = self.memory[start : start + inner.nbytes]
        codes = [
            GpuCode(
                part, self.bindings, layout, {}, self.backend, self.channel,
                own[place : place + layout.arena.nbytes], self.loops,
            )
            for (part, layout), place in zip(inner.parts, inner.places, strict=True)
        ]  # fmt: skip
        routines = [
            _Routine(code, [body.inputs[i].outputs[0] for i in range(len(body.inputs))])
            for code, body in zip(codes, bodies(node), strict=True)
        ]
        outs = [self._buffer(t) for t in node.outputs]
        run = runner(
            node,
            bind_attrs(node.attrs, self.bindings),
            routines,
            carried_buffers(inner, own),
            self.backend.xp.copyto,
            self.channel.proceed if node.op.name in LOOPS else going_on,
        )
        inputs = node.inputs

        def step() -> None:
            given = [self.values[t] for t in inputs]
            run(outs, *given, step=self._step, draws=self._draws)

        self._start(node, step)

    # Kernels ------------------------------------------------------------------------------------

    def _member(self, node: Node) -> None:
        """A node of a region: its place, if it has one; the last one runs it."""
        fused = self.layout.regions[node]
        if any(node is result.node for result in fused.results):
            self._out(node.outputs[0])
        if node.op.refuse is not None:
            self._refusal(node)
        if node is not fused.last:
            return
        launch = self.backend.launcher(fused.region, fused.sizes)
        tensors = (*fused.operands, *fused.results)
        self._run(node, lambda: launch([self.values[t] for t in tensors]))

    def _refusal(self, node: Node) -> None:
        """A look for values that the op does not take: at what was fed, where that is it, since
        the device would have to be waited for."""
        refuse, attrs = node.op.refuse, bind_attrs(node.attrs, self.bindings)
        assert refuse is not None
        fed = {
            i: self.graph.names[self.layout.roots[t].node]
            for i, t in enumerate(node.inputs)
            if self.layout.roots[t].node.op.name == "placeholder" and not self.inside
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

        self._compute.append(Step(node, look, steady=False))

    def _kernel(self, node: Node) -> None:
        """The node's own kernel, into its buffers."""
        if node.op.refuse is not None:
            self._refusal(node)
        outs = [self._out(t) for t in node.outputs]
        attrs = bind_attrs(node.attrs, self.bindings)
        specs = [self.layout.specs[t] for t in node.inputs]
        half = not node.op.halves and any_half(specs)
        inputs, values = node.inputs, self.values
        kernel = None if self.plain else library_kernel(self.backend, node.op, specs, attrs)
        if kernel is None and node.op.ufunc is not None and not attrs and not (self.plain or half):
            ufunc = getattr(self.backend.xp, node.op.ufunc)
            self._run(node, lambda: ufunc(*[values[t] for t in inputs], out=outs[0]))
            return
        if kernel is None:
            kernel = writing(node.op, self._module, specs, attrs, self.plain)
        out = outs[0] if len(outs) == 1 else tuple(outs)
        if node.op.random:
            self._run(node, lambda: kernel(out, *[values[t] for t in inputs], step=self._draws))
        else:
            self._run(node, lambda: kernel(out, *[values[t] for t in inputs]))

    def _run(self, node: Node, run: Callable[[], Any]) -> None:
        if node in self.layout.deferred:
            self._commit.append(Step(node, run, is_steady(node, self.bindings)))
        else:
            self._start(node, run)

    # Memory -------------------------------------------------------------------------------------

    def _out(self, tensor: Tensor) -> Any:
        """Where a result goes: its buffer, or the variable that it updates."""
        deferred = self.layout.deferred.get(tensor.node)
        if deferred is not None:
            self.values[tensor] = self.values[deferred]
        else:
            self._buffer(tensor)
        return self.values[tensor]

    def _buffer(self, tensor: Tensor) -> Any:
        spec = self.layout.specs[tensor]
        start = self.layout.offset(tensor)
        memory = self.memory[start : start + nbytes(spec)]
        self.values[tensor] = memory.view(spec.dtype).reshape(spec.shape)
        return self.values[tensor]

    def _staged(self, node: Node) -> None:
        """What an assign assigns; a copy of it where this step's commits may change it."""
        tensor, value = node.outputs[0], node.inputs[1]
        if node not in self.layout.staged:
            self.values[tensor] = self.values[value]
            return
        buffer = self._buffer(tensor)
        self._start(node, lambda: self.backend.xp.copyto(buffer, self.values[value]))

    def _assign(self, assign: Node) -> None:
        if assign.inputs[1].node in self.layout.deferred:
            return
        variable, value = self.values[assign.inputs[0]], self.values[assign.outputs[0]]
        self._commit.append(
            Step(assign, lambda: self.backend.xp.copyto(variable, value), steady=True)
        )

    # Running ------------------------------------------------------------------------------------

    is_native = False

    @property
    def workspace(self) -> int:
        """Bytes that ops took for themselves, at most so far."""
        return self.backend.memory().pool

    @property
    def commits(self) -> bool:
        """Whether there is anything to assign."""
        return bool(self._commit)

    def computing(self) -> Callable[..., Any]:
        """The compute part: (feeds, step, draws) -> fetched arrays, which are there when the
        stream gets there."""
        fetched = tuple(self.partition.fetches.values())

        def compute(feeds: Mapping[str, Any], step: int, draws: int) -> Any:
            self._begin(feeds, step, draws)
            self.steps()
            if self._is_cut:  # what others were handed or hand over is theirs again now
                self.backend.synchronize()
            return tuple(self.values[t] for t in fetched)

        return compute

    def committing(self) -> Callable[[], None]:
        """The commit part. It starts the work; what comes later on the stream finds it done."""
        return self.commit_steps

    def traced(self) -> tuple[Callable[..., Any], list[Node]]:
        """The compute part, one step at a time, with a fourth argument that is told after each by
        its number; and the node of each."""
        fetched = tuple(self.partition.fetches.values())

        def run(feeds: Mapping[str, Any], step: int, draws: int, mark: Any) -> Any:
            self._begin(feeds, step, draws)
            for i in range(len(self._compute)):
                self.steps.one(i)
                mark(i)
            return tuple(self.values[t] for t in fetched)

        return run, [step.node for step in self._compute]

    def _begin(self, feeds: Mapping[str, Any], step: int, draws: int) -> None:
        self._feeds, self._step, self._draws = feeds, step, draws
        self.backend.begin()

    def routine(self, parameters: Sequence[Tensor], arrays: Sequence[Any], step: int, draws: int
    ) -> list[Any]:  # fmt: skip
        """As a body: results for parameters, good until it runs again."""
        self._step, self._draws = step, draws
        for tensor, array in zip(parameters, arrays, strict=True):
            self.values[tensor] = array
        for i in range(len(self._compute)):
            self.steps.one(i)
        return [self.values[t] for t in self.partition.fetches.values()]

    def release(self) -> None:
        """Let go of the buffers: the program does not run again."""
        with suppress(DeviceError):  # it has failed: what it held goes all the same
            self.backend.synchronize()
        if self._members:
            self.channel.close()
        self.values.clear()
        self._compute, self._commit = [], []
        self.steps.release()
        self.commit_steps.release()
        self.memory = None

    def explained(self, error: BaseException) -> Exception:
        """An error with the node of the failing step, unless it says already what went wrong. A
        device that is lost is told by whichever step comes next, which has no part in it."""
        if not isinstance(error, GraphflowError) and (lost := self.backend.lost()) is not None:
            return lost
        node = self.steps.failing or self.commit_steps.failing
        return explained(error, node, self.layout, self.partition)


class _Routine:
    """A body: arrays in, results out."""

    def __init__(self, code: GpuCode, parameters: Sequence[Tensor]) -> None:
        self._code = code
        self._parameters = parameters

    def __call__(self, arrays: Sequence[Any], step: int, draws: int) -> Any:
        try:
            return self._code.routine(self._parameters, arrays, step, draws)
        except Exception as error:
            raise self._code.explained(error) from error


def is_steady(node: Node, bindings: Mapping[str, int]) -> bool:
    """Whether a node's work is the same in each run: it does not meet the host, as far as its op
    says, and draws no random numbers."""
    op = node.op
    if op.name in (*_MEETS_HOST, *_KEEPS_PLANS):
        return False
    if not bodies(node):
        return op.pure and not op.random
    if op is scan:
        attrs = bind_attrs(node.attrs, bindings)
        size = int(attrs["length"]) * sum(1 for _ in attrs["body"].graph.walk())
        if attrs["counted"] or size > _LONGEST:
            return False
    elif op is not call:
        return False
    return all(
        is_steady(each, bindings)
        for body in bodies(node)
        for each in body.graph.nodes
        if each.op.name not in ("placeholder", "constant")
    )


def _kernels(layout: Layout) -> Iterator[CudaKernel]:
    """Of a program and its bodies."""
    for fused in dict.fromkeys(layout.regions.values()):
        yield cuda_kernel(fused.region, is_wide(fused.sizes))
    for inner in layout.inner.values():
        for _, body in inner.parts:
            yield from _kernels(body)
