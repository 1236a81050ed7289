"""A Program: a partition compiled to straight-line Python over preallocated buffers.

Compiling fixes the sizes of symbols, plans one arena, binds every kernel to its buffers, and writes
two functions. `compute` changes no state. `commit` assigns variables in place, once every partition
has computed. A line of the generated code stands for one node, so the line number of a failure
leads to the node and to the user's line.

Elementwise nodes run as fused, generated kernels (`fusion.py`). With GRAPHFLOW_JIT=off in the
environment, a program runs each op's plain kernel instead and copies the result to its buffer, for
debugging. The last bits of exp and similar functions may then differ.
"""

from __future__ import annotations

import dis
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from time import monotonic_ns
from typing import Any

import numpy as np

from graphflow.base.process.gc_pause import without_collection
from graphflow.base.process.interrupts import is_interrupt
from graphflow.errors import DeviceOutOfMemory
from graphflow.ir.graph import bind_attrs
from graphflow.ir.op import Node
from graphflow.ops.kernels.jit.denormals import FlushDenormals
from graphflow.ops.kernels.jit.kept_layouts import DeviceLayouts
from graphflow.placement.calibration.roofline import work
from graphflow.runtime.collectives.shared_memory_rings import LoopRings
from graphflow.runtime.collectives.shared_memory_transport import has_mapped_collectives
from graphflow.runtime.diagnostics.crash_recorder import is_generated_code
from graphflow.runtime.memory.arenas import Arena, Arenas
from graphflow.runtime.memory.backend import CpuBackend, DeviceBackend
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.memory.memory_use import WorkspaceMeter, memory_use
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.code_generator import CpuCode
from graphflow.runtime.program.generated_call_support import EdgeChannel, out_of_memory_error
from graphflow.runtime.program.kernel_warmup import warm_up_kernels
from graphflow.runtime.program.span_recorder import Span, SpanRecorder, clock

MAX_LOOP_SPANS = 20_000
"""Sends and waits in loops that a traced step records on a device; the first ones count."""


class Program:
    """A partition compiled for concrete sizes of its symbols.

    Args:
        bindings: sizes of the symbols of the graph's shapes.
        variables: the device's state by variable name; the program uses its arrays.
        channel: sends and receives tensors of cut edges.
        arenas: the device's arenas, shared with its other programs; default: new ones.
        layouts: the layouts of its variables that kernels keep, shared likewise.

    Attributes:
        arena: the memory of its buffers, which other programs may share; None after `free`.
        memory: predicted use of memory.
        commits: whether it has assignments.
        commits_in_one_call: whether the commit part is one native call, which no interrupt splits.
        is_free: whether `free` was called.
    """

    @without_collection
    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        variables: Mapping[str, Any],
        backend: DeviceBackend,
        channel: EdgeChannel,
        arenas: Arenas | None = None,
        layouts: DeviceLayouts | None = None,
    ) -> None:
        self.partition = partition
        self._backend = backend
        self._channel = channel
        self._names = partition.graph.names
        self._bindings = bindings
        self._layout = plan_layout(partition, bindings)
        self._fetched = tuple(partition.fetches)
        self._layouts = layouts or DeviceLayouts()
        write = partial(CpuCode, layouts=self._layouts) if backend.xp is np else _gpu_code_class()
        self.memory = memory_use(partition, self._layout, bindings, backend.threads)
        try:
            if isinstance(backend, CpuBackend):
                backend.shared_scratch(self.memory.shared_scratch)  # once, for all kernels
            arena = (arenas or Arenas(backend)).reserve(
                self._layout.arena.nbytes, has_mapped_collectives(partition.graph, bindings)
            )
            if arena.segment is not None:
                channel.register_buffers(arena.segment)
            code = write(
                partition, bindings, self._layout, variables, backend, channel, arena.memory
            )
        except DeviceOutOfMemory as error:
            raise out_of_memory_error(error, self._layout, partition) from None
        self.arena: Arena | None = arena
        self._assigned = frozenset(a.inputs[0].node.name for a in self._layout.commits)
        self._measured_workspace = 0  # bytes; 0 until measured
        self._code = code
        self._compute = code.compile_compute()
        self._commit = code.compile_commit()
        self._to_hosts = backend.to_hosts
        owned = code.owned_results if isinstance(code, CpuCode) else []
        self._owned = owned if any(owned) else []  # [] for programs that copy all results
        self._is_native = code.is_native
        flushes = partition.flush_denormals and backend.xp is np
        self._flush = FlushDenormals() if flushes else None
        wakes = backend.team is not None and isinstance(code, CpuCode) and code.shares_work
        self._rouse = backend.team.rouse if backend.team is not None and wakes else None
        self.commits = code.commits
        self.commits_in_one_call = (
            isinstance(code, CpuCode) and code.is_native and len(code.commit.lines) == 1
        )
        self._shares: dict[Node, Sequence[tuple[Node, float]]] = {}  # of lines, see `_line_shares`
        self.is_free = False

    @property
    def peak(self) -> int:
        """Peak bytes on its device. The workspace of kernels is measured if the step was, else
        predicted."""
        measured = max(self._measured_workspace, self._code.workspace)
        return self.memory.resident + (measured or self.memory.workspace)

    @cached_property
    def _traced(self) -> tuple[Callable[..., Any], list[Node]]:
        return self._code.compile_traced()

    def compute(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run the compute part and return the fetches, as arrays that the caller owns.

        It changes no state.

        Args:
            step: the key under which tensors are sent and received.
            draws: the step number that random ops draw from.
            spans: collects the time of each node, if given.

        Raises:
            OpError: a kernel failed; names the node and the user's line.
            GraphflowError: the step was cancelled while the program waited.
        """
        return dict(zip(self._fetched, self.run(feeds, step, draws, spans), strict=True))

    def run(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span] | None = None
    ) -> list[np.ndarray[Any, Any]]:
        """Run the compute part as `compute` does, but return the fetches without their names."""
        if self._flush is not None:
            with self._flush:
                return self._run(feeds, step, draws, spans)
        return self._run(feeds, step, draws, spans)

    @property
    def direct(self) -> Callable[[Mapping[str, Any], int, int], list[np.ndarray[Any, Any]]]:
        """The function `run` for steps that are not traced, without what this program does not
        need."""
        if self._flush is not None or self._rouse is not None or not self._is_native:
            return self.run
        return partial(self._run_compute, spans=None)

    def _run(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span] | None
    ) -> list[np.ndarray[Any, Any]]:
        if self._rouse is not None:
            self._rouse()
        if self._is_native and spans is None:  # numpy and BLAS have no part in it
            return self._run_compute(feeds, step, draws, None)
        with self._backend.active(), np.errstate(all="ignore"):
            return self._run_compute(feeds, step, draws, spans)

    def _run_compute(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span] | None
    ) -> list[np.ndarray[Any, Any]]:
        try:
            if spans is None:
                values = self._compute(feeds, step, draws)
            else:
                values = self._run_traced(feeds, step, draws, spans)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise self._code.annotate_error(error) from error
        export = self._backend.export_result
        if export is not None or not self._owned:
            return self._to_hosts(values, export)
        return [
            value if owned else self._backend.to_host(value)
            for value, owned in zip(values, self._owned, strict=True)
        ]

    def commit(self, spans: list[Span] | None = None) -> None:
        """Run the assignments in place; `spans` collects each node's share of the time."""
        if not self.commits:
            return
        self._layouts.clear(self._assigned)
        if self._flush is not None:
            with self._flush:
                self._run_commit(spans)
        else:
            self._run_commit(spans)

    def _run_commit(self, spans: list[Span] | None) -> None:
        now = clock.get()
        start = now()
        if self._is_native:
            self._commit()
        else:
            with self._backend.active(), np.errstate(all="ignore"):
                self._commit()
        if spans is not None:
            self._backend.synchronize()
            spans += self._split_span(start, now(), self._commit_shares)

    def _split_span(self, start: int, end: int, shares: Sequence[tuple[Node, float]]) -> list[Span]:
        """Divide the time from `start` to `end` into consecutive spans, one for each node."""
        spans, at = [], start
        for node, share in shares:
            here = min(at + round(share * (end - start)), end)
            spans.append((self.partition.device, self._names[node], at, here))
            at = here
        return spans

    @cached_property
    def _commit_shares(self) -> Sequence[tuple[Node, float]]:
        """The nodes of the commit part, each with its estimated share of the time."""
        layout = self._layout
        late: dict[Node, None] = {}
        for node in layout.deferred:
            fused = layout.regions.get(node)
            late |= dict.fromkeys((node,) if fused is None else fused.nodes)
        late |= {a: None for a in layout.commits if a.inputs[1].node not in layout.deferred}
        return self._flop_shares(list(late))

    @property
    def rings(self) -> LoopRings:
        """The shared memory of its edges in loops."""
        return self._channel.rings

    def warm_up(self) -> None:
        """Run kernels that compile when they first run, such as convolutions, once on zeros."""
        if isinstance(self._code, CpuCode):
            with self._backend.active(), np.errstate(all="ignore"):
                warm_up_kernels(self._code)

    def forget_agreements(self) -> None:
        """Discard what was agreed with other workers; the next run agrees anew."""
        self._channel.forget_agreements()

    def free(self) -> None:
        """Release the buffers. The program cannot run again."""
        self.is_free = True
        self._code.release()
        self.arena = None
        self.__dict__.pop("_traced", None)

    def _run_traced(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span]
    ) -> Any:
        traced, nodes = self._traced
        meter = WorkspaceMeter() if tracemalloc.is_tracing() else None
        record = SpanRecorder(nodes, self._backend.synchronize, meter)

        left = MAX_LOOP_SPANS

        def inside(name: str, began: int) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                spans.append((self.partition.device, name, began, monotonic_ns()))

        try:
            with self._code.loops.report_waits(inside):
                return traced(feeds, step, draws, record)
        finally:
            if meter is not None:
                self._measured_workspace = max(self._measured_workspace, meter.peak)
            for node, start, end in record.node_times():
                spans += self._split_span(start, end, self._line_shares(node))

    def _line_shares(self, node: Node) -> Sequence[tuple[Node, float]]:
        """Return the nodes that a line runs, each with its estimated share of the time."""
        known = self._shares.get(node)
        if known is None:
            fused = self._layout.regions.get(node)
            known = ((node, 1.0),) if fused is None else self._flop_shares(fused.nodes)
            self._shares[node] = known
        return known

    def _flop_shares(self, nodes: Sequence[Node]) -> Sequence[tuple[Node, float]]:
        specs = self._layout.specs
        flops = [
            work(n.op, [specs[t] for t in n.inputs], [specs[t] for t in n.outputs],
                 bind_attrs(n.attrs, self._bindings)).flops
            for n in nodes
        ]  # fmt: skip
        return [(n, f / max(sum(flops), 1.0)) for n, f in zip(nodes, flops, strict=True)]


def _gpu_code_class() -> Any:
    """Return the GPU's counterpart of `CpuCode`, which is loaded only if a GPU is used."""
    from graphflow.runtime.program.gpu_program import GpuCode

    return GpuCode


def has_called_commit(error: BaseException) -> bool:
    """Return True if an interrupt came after the one native call of a commit part had begun.

    The interpreter raises between instructions, so the call has then run to its end. Whether it
    had begun follows from the instruction that the traceback points to.
    """
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "commit" and is_generated_code(code.co_filename):
            calls = [i.offset for i in dis.get_instructions(code) if "CALL" in i.opname]
            return trace.tb_lasti >= min(calls)
        trace = trace.tb_next
    return False
