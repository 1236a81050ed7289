"""Executor: a partition -> a Program, straight-line Python over preallocated buffers.

Compiling fixes the sizes of symbols, plans one arena, binds every kernel to its buffers, and writes
two functions: `compute`, which changes no state, and `commit`, where assignments happen in place
once every partition has computed. A line of the generated code is one node, so a failure's line
number names the node and the user's line.

Elementwise nodes run as fused, generated kernels (`fusion.py`). With GRAPHFLOW_JIT=off in the
environment, a program runs each op's plain kernel instead and copies the result to its buffer: the
way to debug. The last bits of exp and its like may then differ.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import monotonic_ns
from typing import Any, Protocol, cast

import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import CheckError, GraphflowError, OpError, ProtocolError
from graphflow.graph import Body, bind_attrs, bodies
from graphflow.half import any_half
from graphflow.op import Node, Op, Tensor
from graphflow.ops.kernels.regions import Launch, address, enabled, kernel_of
from graphflow.runtime.backend import Backend, require_dtype
from graphflow.runtime.layout import Layout, plan_layout
from graphflow.runtime.loops import Carried, runner
from graphflow.runtime.memory import aligned
from graphflow.runtime.partition import Partition
from graphflow.spec import TensorSpec, nbytes

EDGE_BITS = 32
"""An edge's number takes these bits of its key; above it is how often it was used in the step."""

Span = tuple[str, str, int, int]
"""Track, name, start and end in nanoseconds of the monotonic clock."""


class Channel(Protocol):
    """Where a program's cut edges lead."""

    def send(self, step: int, edge: int, target: str, array: Any) -> None: ...

    def recv(self, step: int, edge: int) -> Any: ...

    def proceed(self, step: int, loop: str, done: int, of: str) -> None:
        """Raise if the step was given up; `loop` has done so many iterations (of so many)."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a program needs on its device."""

    arena: int
    constants: int
    variables: int
    feeds: int
    recvs: int

    @property
    def peak(self) -> int:
        return self.arena + self.constants + self.variables + self.feeds + self.recvs


class Program:
    """A partition compiled for concrete sizes of its symbols.

    Args:
        bindings: sizes of the symbols of the graph's shapes.
        variables: the device's state by variable name; buffers are shared with it.
    """

    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        variables: Mapping[str, Any],
        backend: Backend,
        channel: Channel,
    ) -> None:
        self.partition = partition
        self._backend = backend
        self._names = partition.graph.names
        self._layout = plan_layout(partition, bindings)
        self._fetched = tuple(partition.fetches)
        code = _Code(partition, bindings, self._layout, variables, backend, channel)
        self.memory = MemoryUse(
            arena=self._layout.arena.nbytes,
            constants=code.constant_bytes,
            variables=sum(int(v.nbytes) for v in code.variables.values()),
            feeds=code.feed_bytes,
            recvs=code.recv_bytes,
        )
        self._lines = code.lines
        self._code = code
        self._compute = code.function("compute", "feeds, step, draws", code.compute, code.results())
        self._commit = code.function("commit", "", code.commit, "None")

    @cached_property
    def _traced(self) -> Callable[..., Any]:
        code = self._code
        return code.function("traced", "feeds, step, draws, mark", code.traced(), code.results())

    def compute(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run the compute part; returns fetches, as arrays that the caller owns. Changes no state.

        Args:
            step: the key under which tensors are sent and received.
            draws: the step number that random ops draw from.

        Raises:
            OpError: a kernel failed; names the node and the user's line.
            GraphflowError: a wait was given up.
        """
        with self._backend.active(), np.errstate(all="ignore"):
            try:
                if spans is None:
                    values = self._compute(feeds, step, draws)
                else:
                    values = self._run_traced(feeds, step, draws, spans)
            except Exception as error:
                raise self._code.explained(error) from error
            return {
                name: self._backend.to_host(value)
                for name, value in zip(self._fetched, values, strict=True)
            }

    @property
    def commits(self) -> bool:
        """Whether there is anything to assign."""
        return bool(self._code.commit)

    def commit(self) -> None:
        """Run the assignments, in place."""
        if not self.commits:
            return
        with self._backend.active(), np.errstate(all="ignore"):
            self._commit()

    def free(self) -> None:
        """Let go of the buffers at once; the program does not run again."""
        self._code.scope.clear()  # its functions and itself refer to each other
        self.__dict__.pop("_traced", None)

    def _run_traced(
        self, feeds: Mapping[str, Any], step: int, draws: int, spans: list[Span]
    ) -> Any:
        start = monotonic_ns()

        def mark(line: int) -> None:
            nonlocal start
            self._backend.synchronize()
            end = monotonic_ns()
            for node, share in self._shares(self._lines[line]):
                here = min(start + round(share * (end - start)), end)
                spans.append((self.partition.device, self._names[node], start, here))
                start = here
            start = end

        return self._traced(feeds, step, draws, mark)

    def _shares(self, node: Node) -> Sequence[tuple[Node, float]]:
        """The nodes that a line runs, and about how much of its time is each one's."""
        fused = self._layout.regions.get(node)
        if fused is None or len(fused.nodes) == 1:
            return ((node, 1.0),)
        specs = self._layout.specs
        flops = [
            cast(int, n.op.cost(*(specs[t] for t in n.inputs), **n.attrs).flops) if n.op.cost else 1
            for n in fused.nodes
        ]
        return [(n, f / max(sum(flops), 1)) for n, f in zip(fused.nodes, flops, strict=True)]


class _Code:
    """Writes a program: a line of Python for each node, over names bound to buffers and kernels."""

    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        layout: Layout,
        variables: Mapping[str, Any],
        backend: Backend,
        channel: Channel,
        memory: Any = None,
        loops: _InLoops | None = None,
    ) -> None:
        self.partition = partition
        self.device = DeviceName.parse(partition.device)
        self.inside = loops is not None
        self.channel = channel
        self.loops = loops if loops is not None else _InLoops(channel)
        ends: Any = self.loops if self.inside else channel
        self.graph = partition.graph
        self.fetches = partition.fetches
        self.layout = layout
        self.backend = backend
        self.bindings = bindings
        self.plain = not enabled()
        self.scope: dict[str, Any] = {
            "send": ends.send, "recv": ends.recv, "asarray": backend.to_device,
            "copy": backend.xp.copy, "copyto": backend.xp.copyto, "kept": {},
        }  # fmt: skip
        self.names: dict[Tensor, str] = {}
        self.lines: list[Node] = []
        self.compute: list[str] = []
        self.commit: list[str] = []
        self.variables: dict[str, Any] = {}
        self.constant_bytes = 0
        self.feed_bytes = 0
        self.recv_bytes = 0
        self.assigned = {assign.inputs[0] for assign in layout.commits}
        if memory is None:
            memory = backend.empty(layout.arena.nbytes)
        for number, node in enumerate(self.graph.nodes):
            self._add(node, number, memory, variables)
        for assign in layout.commits:
            self._commit_line(assign)

    def _add(self, node: Node, number: int, memory: Any, variables: Mapping[str, Any]) -> None:
        names = [f"b{number}_{i}" for i in range(len(node.outputs))]
        for tensor, name in zip(node.outputs, names, strict=True):
            self.names[tensor] = name
            require_dtype(self.backend.xp, tensor.dtype)
        match node.op.name:
            case "constant":
                value = self.backend.to_device(node.attrs["value"])
                self.scope[names[0]] = value
                self.constant_bytes += int(value.nbytes)
            case "variable":
                self.scope[names[0]] = variables[node.name]
                self.variables[node.name] = variables[node.name]
            case "placeholder":
                self.feed_bytes += nbytes(self.layout.specs[node.outputs[0]])
                self.scope[f"f{number}"] = self.graph.names[node]
                self._line(node, f"{names[0]} = asarray(feeds[f{number}])")
            case "recv":
                self.recv_bytes += nbytes(self.layout.specs[node.outputs[0]])
                self.scope[f"k{number}"] = _Arrival(node, self.layout.specs[node.outputs[0]])
                edge = int(node.attrs["edge"])
                self._line(node, f"{names[0]} = asarray(k{number}(recv(step, {edge})))")
            case "send":
                self._send(node, number)
            case "assign":
                self.names[node.outputs[0]] = self.names[node.inputs[1]]
                self._stage(node, number, memory)
            case _ if node in self.layout.inner:
                self._bodies(node, number, names, memory)
            case _ if node in self.layout.regions:
                self._member(node, number, names, memory)
            case _:
                self._kernel(node, number, names, memory)

    def _send(self, node: Node, number: int) -> None:
        target = str(node.attrs["target"])
        value = self.names[node.inputs[0]]
        near = DeviceName.parse(target).worker == self.device.worker
        if self.inside:
            value = f"copy({value})"  # the next iteration writes its buffer
        elif near and self.layout.roots[node.inputs[0]] in self.assigned:
            value = f"copy({value})"  # handed over by reference, and its reader may commit after us
        self.scope[f"t{number}"] = target
        self._line(node, f"send(step, {int(node.attrs['edge'])}, t{number}, {value})")

    def _bodies(self, node: Node, number: int, names: list[str], memory: Any) -> None:
        """A line that runs a node of bodies, each a routine over its part of the node's memory."""
        inner = self.layout.inner[node]
        start = self.layout.arena.offsets[self.layout.scratch[node]]
        own = memory[start : start + inner.nbytes]
        routines = [
            _Routine(
                body,
                _Code(
                    part, self.bindings, layout, {}, self.backend, self.channel,
                    own[place : place + layout.arena.nbytes], self.loops,
                ),
            )
            for body, (part, layout), place in zip(
                bodies(node), inner.parts, inner.places, strict=True
            )
        ]  # fmt: skip
        for routine in routines:
            self.constant_bytes += routine.code.constant_bytes
        sets = []
        for which in range(2):
            at = [place + which * aligned(nbytes(spec)) for spec, place in inner.carried]
            sets.append(
                tuple(
                    own[a : a + nbytes(spec)].view(spec.dtype).reshape(spec.shape)
                    for a, (spec, _) in zip(at, inner.carried, strict=True)
                )
            )
        for tensor, name in zip(node.outputs, names, strict=True):
            self.scope[name] = self._buffer(tensor, memory)
        self.scope[f"k{number}"] = runner(
            node,
            bind_attrs(node.attrs, self.bindings),
            routines,
            Carried(*sets),
            self.backend.xp.copyto,
            self.channel.proceed if node.op.name in _LOOPS else _going_on,
        )
        outs = "".join(f"{name}, " for name in names)
        given = "".join(f"{self.names[t]}, " for t in node.inputs)
        self._line(node, f"k{number}(({outs}), {given}step=step, draws=draws)")

    def _member(self, node: Node, number: int, names: list[str], memory: Any) -> None:
        """A node of a region: its buffer, if it has one; the last one has the line that runs it."""
        fused = self.layout.regions[node]
        is_deferred = node in self.layout.deferred
        if any(node is result.node for result in fused.results):
            self.scope[names[0]] = (
                self.variables[self.layout.deferred[node].node.name]
                if is_deferred
                else self._buffer(node.outputs[0], memory)
            )
        if node is not fused.last:
            return
        arrays = [self._static(t) for t in (*fused.operands, *fused.results)]
        moving = [self.names[t] for t, a in zip(fused.operands, arrays, strict=False) if a is None]
        places = [None if a is None else address(a) for a in arrays]
        launch = Launch(kernel_of(fused.region), fused.sizes, places)
        self.scope[f"k{number}"] = launch.callable()
        if is_deferred:
            moving = [self._kept(node, name) for name in moving]
            self.commit.append(f"k{number}({', '.join(moving)})")
        else:
            self._line(node, f"k{number}({', '.join(moving)})")

    def _static(self, tensor: Tensor) -> Any:
        """The array of a tensor that lies in the same place in each step; None for others."""
        root = self.layout.roots[tensor]
        if root.node.op.name in ("placeholder", "recv"):
            return None
        array = self.scope[self.names[root]]
        spec = self.layout.specs[root]
        # A native function trusts its pointers.
        if array.shape != spec.shape or array.dtype != spec.dtype or not array.flags.c_contiguous:
            raise OpError(
                f"{root.name!r} (made at {root.node.location}) is {array.dtype}{array.shape} in "
                f"memory, but {spec} in the graph; do two variables have one name?"
            )
        return array

    def _kernel(self, node: Node, number: int, names: list[str], memory: Any) -> None:
        """A line that runs the node's kernel into its buffers, or an alias of its input."""
        inputs = [self.names[t] for t in node.inputs]
        if node.op.alias:
            self.scope[f"k{number}"] = _Reshape(self.layout.specs[node.outputs[0]].shape)
            self._line(node, f"{names[0]} = k{number}({inputs[0]})")
            return
        deferred = self.layout.deferred.get(node)
        if deferred is not None:
            inputs = [self._kept(node, name) for name in inputs]
        for tensor, name in zip(node.outputs, names, strict=True):
            if deferred is not None:
                self.scope[name] = self.variables[deferred.node.name]
            else:
                self.scope[name] = self._buffer(tensor, memory)
        attrs = bind_attrs(node.attrs, self.bindings)
        specs = [t.spec for t in node.inputs]
        half = not node.op.halves and any_half(specs)
        if node.op.ufunc is not None and not attrs and not self.plain and not half:
            self.scope[f"k{number}"] = getattr(self.backend.xp, node.op.ufunc)
            line = f"k{number}({', '.join(inputs)}, out={names[0]})"
        else:
            self.scope[f"k{number}"] = _into(node.op, self.backend.xp, specs, attrs, self.plain)
            out = names[0] if len(names) == 1 else f"({', '.join(names)})"
            step = ", step=draws" if node.op.random else ""
            line = f"k{number}({', '.join([out, *inputs])}{step})"
        if deferred is not None:
            self.commit.append(line)
        else:
            self._line(node, line)

    def _buffer(self, tensor: Tensor, memory: Any) -> Any:
        spec = self.layout.specs[tensor]
        offset = self.layout.offset(tensor)
        return memory[offset : offset + nbytes(spec)].view(spec.dtype).reshape(spec.shape)

    def _stage(self, node: Node, number: int, memory: Any) -> None:
        """Copy a value that is another variable's memory, which this step's commits may change."""
        if node in self.layout.staged:
            name = f"s{number}"
            self.scope[name] = self._buffer(node.outputs[0], memory)
            self._line(node, f"copyto({name}, {self.names[node.inputs[1]]})")
            self.names[node.outputs[0]] = name

    def _commit_line(self, assign: Node) -> None:
        variable = self.names[assign.inputs[0]]
        value = self.names[assign.outputs[0]]
        if assign.inputs[1].node not in self.layout.deferred:
            self.commit.append(f"copyto({variable}, {self._kept(assign, value)})")

    def _kept(self, node: Node, name: str) -> str:
        """A name that the commit part can use: feeds, recvs and aliases are local to the compute
        part."""
        if name in self.scope:
            return name
        self._line(node, f"kept[{name!r}] = {name}")
        return f"kept[{name!r}]"

    def _line(self, node: Node, line: str) -> None:
        self.compute.append(line)
        self.lines.append(node)

    def explained(self, error: Exception) -> Exception:
        """An error with the node of the failing line, unless it says already what went wrong."""
        if isinstance(error, GraphflowError) and not isinstance(error, CheckError):
            return error
        if isinstance(error, OpError) and error.explained:
            return error
        kind = CheckError if isinstance(error, CheckError) else OpError
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if f.filename in _OURS]
        if not lines or lines[0].lineno is None:
            return kind(f"a step failed on {self.device}: {error!r}")
        step = 2 if lines[0].filename == "<traced>" else 1
        node = self.lines[(lines[0].lineno - 2) // step]
        text = str(error) if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"
        shapes = ", ".join(str(self.layout.specs[t]) for t in node.inputs)
        told = kind(
            f"{node.op.name} {self.graph.names[node]!r} (made at {node.location}) failed on "
            f"{self.device}: {text}; its inputs are [{shapes}]"
        )
        told.explained = True
        return told

    def results(self) -> str:
        """The expression of the fetched values."""
        return "(" + "".join(f"{self.names[t]}, " for t in self.fetches.values()) + ")"

    def traced(self) -> list[str]:
        """The compute part with a time mark after each line."""
        return [x for i, line in enumerate(self.compute) for x in (line, f"mark({i})")]

    def function(
        self, name: str, arguments: str, lines: list[str], result: str
    ) -> Callable[..., Any]:
        source = "\n ".join([f"def {name}({arguments}):", *lines, f"return {result}"])
        # The text is made of our own identifiers only; nothing from a graph or the wire enters it.
        exec(compile(source, f"<{name}>", "exec"), self.scope)
        function: Callable[..., Any] = self.scope[name]
        return function


def _into(
    op: Op, xp: Any, inputs: Sequence[TensorSpec], attrs: Mapping[str, Any], plain: bool
) -> Callable[..., None]:
    """The kernel as a function (out, *arrays); `plain`: by way of a result of its own."""
    into = op.writer(inputs)
    if into is not None and not op.random and not plain:
        return partial(into, xp, **attrs) if attrs else partial(into, xp)

    def run(out: Any, *arrays: Any, step: int = 0) -> None:
        results = op.run(xp, arrays, attrs, step, plain=plain)
        outs = out if isinstance(out, tuple) else (out,)
        for buffer, result in zip(outs, results, strict=True):
            xp.copyto(buffer, result)

    return run


_LOOPS = ("scan", "while_loop")
_OURS = ("<compute>", "<traced>", "<routine>")


def _going_on(step: int, loop: str, done: int, of: str) -> None:
    """For what is no loop."""


class _Routine:
    """A body, compiled: arrays in, results out, which are good until it runs again."""

    def __init__(self, body: Body, code: _Code) -> None:
        names = code.graph.names
        self.code = code
        self._fed = [(i, names[n]) for i, n in enumerate(body.inputs) if n in names]
        self._run = code.function("routine", "feeds, step, draws", code.compute, code.results())

    def __call__(self, arrays: Sequence[Any], step: int, draws: int) -> Any:
        try:
            return self._run({name: arrays[i] for i, name in self._fed}, step, draws)
        except Exception as error:
            raise self.code.explained(error) from error


class _InLoops:
    """The channel inside bodies, which may run often in a step: what an edge carries is numbered.

    Both ends run the same iterations, so the n-th that is sent is the n-th that is received. The
    number stands above the edge's in its key.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._step = -1
        self._count: dict[int, int] = {}

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        self._channel.send(step, self._key(step, edge), target, array)

    def recv(self, step: int, edge: int) -> Any:
        return self._channel.recv(step, self._key(step, edge))

    def _key(self, step: int, edge: int) -> int:
        if step != self._step:
            self._step = step
            self._count.clear()
        number = self._count[edge] = self._count.get(edge, -1) + 1
        return edge | number << EDGE_BITS


class _Arrival:
    """A tensor that came over an edge, checked to be what the program was compiled for.

    Raises:
        ProtocolError: it is another one.
    """

    def __init__(self, recv: Node, spec: TensorSpec) -> None:
        self.recv = recv
        self.spec = spec
        self.shape = spec.shape
        self.dtype = spec.dtype

    def __call__(self, array: Any) -> Any:
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ProtocolError(
                f"edge {self.recv.attrs['edge']} from {self.recv.attrs['source']} brought "
                f"{array.dtype}{array.shape} for {self.recv.name.removeprefix('recv/')!r} (made at "
                f"{self.recv.location}), which is {self.spec}; do all workers run the same code?"
            )
        return array


class _Reshape:
    """An alias: the input's memory under another shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __call__(self, array: Any) -> Any:
        return array.reshape(self.shape)
