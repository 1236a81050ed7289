"""Code: writes a partition as straight-line Python over buffers at fixed places.

A line is one node, so a failure's line number names the node and the user's line; generated kernels
that stand together are one line, a native call (`segments.py`), which cannot fail. A buffer becomes
an array only where a line of Python reads it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import OpError
from graphflow.graph import Body, bind_attrs, bodies
from graphflow.half import any_half
from graphflow.op import Node, Tensor
from graphflow.ops.control import call
from graphflow.ops.kernels.driver import copy_task
from graphflow.ops.kernels.native import Task
from graphflow.ops.kernels.regions import SHARED, Launch, address, enabled, kernel_of
from graphflow.ops.kernels.sweeps import Sweep
from graphflow.runtime.backend import Backend, require_dtype
from graphflow.runtime.layout import Layout
from graphflow.runtime.lines import (
    LOOPS,
    Arrival,
    Channel,
    InLoops,
    Reshaped,
    carried_buffers,
    compile_ahead,
    explained,
    going_on,
    writing,
)
from graphflow.runtime.loops import runner
from graphflow.runtime.native_loops import NativeBody, native_runner
from graphflow.runtime.partition import Partition
from graphflow.runtime.segments import LONGEST, Call, Fed, Place, Segment
from graphflow.runtime.wide import Strands, groups
from graphflow.spec import nbytes

_COMING = ("placeholder", "recv")
"""Ops whose value is elsewhere in each step."""
_OURS = ("<compute>", "<traced>", "<routine>")
_Line = tuple[Node, str] | Segment | Strands


class _Part:
    """The compute or the commit part while it is written: lines, and the calls of the next one."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.lines: list[_Line] = []
        self.calls: list[Call] = []
        self.work = 0.0

    def add(self, calls: Sequence[Call]) -> None:
        self.calls += calls
        self.work += sum(call.task.nanoseconds for call in calls)
        if self.work > LONGEST and not self.calls[-1].task.blocks:  # what follows goes with it
            self.flush()

    def line(self, node: Node, text: str) -> None:
        self.flush()
        self.lines.append((node, text))

    def flush(self) -> None:
        if self.calls:
            for strands in groups(self.calls, self._threads):
                self.lines.append(Segment(strands[0]) if len(strands) == 1 else Strands(strands))
            self.calls, self.work = [], 0.0

    @property
    def segments(self) -> list[Segment]:
        """All of them, also those that run beside each other."""
        result: list[Segment] = []
        for line in self.lines:
            if isinstance(line, Strands):
                result += line.segments
            elif isinstance(line, Segment):
                result.append(line)
        return result


class Code:
    """A program of a partition: its lines, over names bound to buffers and kernels.

    Args:
        memory: of the arena; where there is none, it is taken from the backend.
        loops: of the program of which this is a body.
        keys: of a body: what its parameters are fed by.

    Attributes:
        alone: nodes that their ops' own kernels compute.
        codes: of the bodies that its nodes hold.
    """

    def __init__(
        self,
        partition: Partition,
        bindings: Mapping[str, int],
        layout: Layout,
        variables: Mapping[str, Any],
        backend: Backend,
        channel: Channel,
        memory: Any = None,
        loops: InLoops | None = None,
        keys: Mapping[Node, int] | None = None,
    ) -> None:
        self.partition = partition
        self.device = DeviceName.parse(partition.device)
        self.inside = loops is not None
        self.channel = channel
        self.loops = loops if loops is not None else InLoops(channel)
        ends: Any = self.loops if self.inside else channel
        self.graph = partition.graph
        self.layout = layout
        self.backend = backend
        self.bindings = bindings
        self.plain = not enabled()
        self.scope: dict[str, Any] = {
            "send": ends.send, "recv": ends.recv, "copy": backend.xp.copy,
            "copyto": backend.xp.copyto, "kept": {},
        }  # fmt: skip
        self.names: dict[Tensor, str] = {}
        self.numbers = {node: i for i, node in enumerate(self.graph.nodes)}
        threads = 1 if self.inside else backend.threads
        self.compute = _Part(threads)
        self.commit = _Part(threads)
        self._swept: list[tuple[Node, Task, Sequence[Place]]] = []
        self.variables: dict[str, Any] = {}
        self.alone: list[Node] = []
        self.codes: list[Code] = []
        self.constant_bytes = 0
        self.feed_bytes = 0
        self.recv_bytes = 0
        self.assigned = {assign.inputs[0] for assign in layout.commits}
        self._fed: dict[Tensor, Fed] = {}
        self._feeds: list[_Line] = []
        self._keys = keys
        self._places: dict[Tensor, int] = {}
        if not self.inside:
            compile_ahead(layout)
        self.memory = backend.empty(layout.arena.nbytes) if memory is None else memory
        self._base = address(self.memory) if backend.xp is np else 0
        # An update may write straight to a variable that is made after it: variables come first.
        for node in sorted(self.graph.nodes, key=lambda n: n.op.name != "variable"):
            self._add(node, variables)
        self.compute.flush()
        for assign in layout.commits:
            self._commit_line(assign)
        self._sweep()
        self.commit.flush()
        self._lead()

    # Nodes --------------------------------------------------------------------------------------

    def _add(self, node: Node, variables: Mapping[str, Any]) -> None:
        number = self.numbers[node]
        for tensor in node.outputs:
            require_dtype(self.backend.xp, tensor.dtype)
        match node.op.name:
            case "constant":
                value = self.backend.to_device(node.attrs["value"])
                self._bind(node.outputs[0], value)
                self.constant_bytes += int(value.nbytes)
            case "variable":
                value = variables[node.name]
                self._checked(node, value)
                self._bind(node.outputs[0], value)
                self.variables[node.name] = value
            case "placeholder":
                self.feed_bytes += nbytes(self.layout.specs[node.outputs[0]])
                self._feed(node, number)
            case "recv":
                self._receive(node, number)
            case "send":
                self._send(node, number)
            case "assign":
                self._stage(node, number)
            case "group":
                pass
            case _ if node.op.alias:
                pass  # an array where a line reads it
            case _ if node in self.layout.inner:
                self._bodies(node, number)
            case _ if node in self.layout.regions:
                self._member(node, number)
            case _:
                self._kernel(node, number)

    def _bind(self, tensor: Tensor, value: Any) -> str:
        """Name an array that stays where it is."""
        name = f"b{self.numbers[tensor.node]}_{tensor.index}"
        self.scope[name] = value
        self.names[tensor] = name
        return name

    def _feed(self, node: Node, number: int) -> None:
        tensor = node.outputs[0]
        fed = self._fed[tensor] = Fed(self.layout.specs[tensor], self.backend.to_device)
        self.scope[f"k{number}"] = fed
        name = self.names[tensor] = f"b{number}_0"
        if self._keys is None:
            self.scope[f"f{number}"] = self.graph.names[node]
            key = f"f{number}"
        else:
            key = str(self._keys[node])
        self._feeds.append((node, f"{name} = k{number}(feeds[{key}])"))

    def _receive(self, node: Node, number: int) -> None:
        tensor = node.outputs[0]
        spec = self.layout.specs[tensor]
        self.recv_bytes += nbytes(spec)
        fed = self._fed[tensor] = Fed(spec, self.backend.to_device)
        self.scope[f"k{number}"] = fed
        self.scope[f"a{number}"] = Arrival(node, spec)
        name = self.names[tensor] = f"b{number}_0"
        edge = int(node.attrs["edge"])
        self._line(node, f"{name} = k{number}(a{number}(recv(step, {edge})))")

    def _send(self, node: Node, number: int) -> None:
        target = str(node.attrs["target"])
        value = self._name(node.inputs[0])
        near = DeviceName.parse(target).worker == self.device.worker
        if self.inside:
            value = f"copy({value})"  # the next iteration writes its buffer
        elif near and self.layout.roots[node.inputs[0]] in self.assigned:
            value = f"copy({value})"  # handed over by reference, and its reader may commit after us
        self.scope[f"t{number}"] = target
        self._line(node, f"send(step, {int(node.attrs['edge'])}, t{number}, {value})")

    # Bodies -------------------------------------------------------------------------------------

    def _bodies(self, node: Node, number: int) -> None:
        """A node of bodies, each over its part of the node's memory: where they are generated
        kernels throughout, as native calls; else as a line that runs routines."""
        inner = self.layout.inner[node]
        start = self.layout.arena.offsets[self.layout.scratch[node]]
        own = self.memory[start : start + inner.nbytes]
        codes = [
            Code(
                part, self.bindings, layout, {}, self.backend, self.channel,
                own[place : place + layout.arena.nbytes], self.loops,
                {parameter: i for i, parameter in enumerate(body.inputs)},
            )
            for body, (part, layout), place in zip(
                bodies(node), inner.parts, inner.places, strict=True
            )
        ]  # fmt: skip
        for code in codes:
            self.constant_bytes += code.constant_bytes
        self.codes += codes  # native calls have the addresses of their constants
        natives = [code.native(body) for body, code in zip(bodies(node), codes, strict=True)]
        if node.op is call and natives[0] is not None:
            self._inlined(node, natives[0])
            return
        carried = carried_buffers(inner, own)
        attrs = bind_attrs(node.attrs, self.bindings)
        copyto = self.backend.xp.copyto
        proceed = self.channel.proceed if node.op.name in LOOPS else going_on
        known = [native for native in natives if native is not None]
        if node.op.name in LOOPS and len(known) == len(natives):
            run = native_runner(node, attrs, known, carried, copyto, proceed)
        else:
            routines = [_Routine(code) for code in codes]
            run = runner(node, attrs, routines, carried, copyto, proceed)
        self.scope[f"k{number}"] = run
        outs = "".join(f"{self._name(t)}, " for t in node.outputs)
        given = "".join(f"{self._name(t)}, " for t in node.inputs)
        self._line(node, f"k{number}(({outs}), {given}step=step, draws=draws)")

    def _inlined(self, node: Node, body: NativeBody) -> None:
        """The calls of a body with what it is called with in place of its parameters."""
        given = {
            parameter.outputs[0]: self._place(tensor)
            for parameter, tensor in zip(body.body.inputs, node.inputs, strict=True)
        }

        def placed(place: Place) -> Place:
            return place if isinstance(place, int) else given[place]  # type: ignore[index]

        calls = [
            Call(node, each.task, tuple(placed(p) for p in each.places)) for each in body.calls
        ]
        calls += [
            Call(node, copy_task(size), (placed(source), self._place(tensor)))
            for tensor, source, size in zip(node.outputs, body.results, body.nbytes, strict=True)
        ]
        self.compute.add([each for each in calls if each.task.rows])

    def native(self, body: Body) -> NativeBody | None:
        """This code, of a body, as calls; None where it has lines of Python."""
        if not all(isinstance(line, Segment) for line in self.compute.lines) or self.plain:
            return None
        if self.backend.xp is not np:
            return None
        return NativeBody(
            body,
            tuple(c for segment in self.compute.segments for c in segment.calls),
            tuple(self._place(t) for t in body.outputs),
            tuple(nbytes(self.layout.specs[t]) for t in body.outputs),
        )

    # Kernels ------------------------------------------------------------------------------------

    def _member(self, node: Node, number: int) -> None:
        """A node of a region: the last one stands for all."""
        fused = self.layout.regions[node]
        if node.op.refuse is not None:
            self._refusal(node, number)
        if node is not fused.last:
            return
        task = kernel_of(fused.region).task(fused.sizes)
        part = self.commit if node in self.layout.deferred else self.compute
        tensors = (*fused.operands, *fused.results)
        if not self._is_shared(task):
            self._call(part, node, task, tensors, len(fused.results))
            return
        places = [self._place(t) for t in tensors]
        if part is self.commit and not task.scratch and _stays(places):
            self._swept.append((node, task, places))
            return
        launch = Launch(
            kernel_of(fused.region),
            fused.sizes,
            [p if isinstance(p, int) else None for p in places],
        )
        self.scope[f"k{number}"] = launch.callable()
        moving = [
            self._name(t) for t, p in zip(tensors, places, strict=True) if not isinstance(p, int)
        ]
        if part is self.commit:
            moving = [self._kept(node, name) for name in moving]
        part.line(node, f"k{number}({', '.join(moving)})")

    def _sweep(self) -> None:
        """The updates of variables that are worth sharing, as one call a thread, together with
        the small ones."""
        if not self._swept:
            return
        small = [c for c in self.commit.calls if not c.task.scratch and _stays(c.places)]
        self.commit.calls = [c for c in self.commit.calls if c not in small]
        calls: list[Any] = [(task, places) for _, task, places in self._swept]
        calls += [(call.task, call.places) for call in small]
        self.scope["sweep"] = Sweep(calls, self.backend.threads)
        self.commit.line(self._swept[-1][0], "sweep()")

    def _refusal(self, node: Node, number: int) -> None:
        """A line that looks for values that the op does not take: labels that are no class."""
        assert node.op.refuse is not None
        attrs = bind_attrs(node.attrs, self.bindings)
        arrays = []
        for i, tensor in enumerate(node.inputs):
            if tensor.dtype.kind == "f":  # what counts is its shape
                self.scope[f"c{number}_{i}"] = self.layout.specs[tensor]
                arrays.append(f"c{number}_{i}")
            else:
                arrays.append(self._name(tensor))
        self.scope[f"c{number}"] = partial(node.op.refuse, self.backend.xp, **attrs)
        self._line(node, f"c{number}({', '.join(arrays)})")

    def _is_shared(self, task: Task) -> bool:
        """Whether threads share the work of a task."""
        return task.nanoseconds > SHARED and self.backend.threads > 1

    def _call(
        self, part: _Part, node: Node, task: Task, tensors: Sequence[Tensor], results: int
    ) -> None:
        """A call of a task with operands and, last of them, so many results."""
        if not task.rows:
            return
        order = [*task.order, *range(len(task.order), len(tensors))]
        tensors = [tensors[i] for i in order]
        places = [self._place(t) for t in tensors]
        sizes = [nbytes(self.layout.specs[t]) for t in tensors]
        if task.scratch:
            places.append(self._base + self.layout.arena.offsets[self.layout.scratch[node]])
            sizes.append(task.scratch)
        part.add([Call(node, task, tuple(places), tuple(sizes), len(tensors) - results)])

    def _kernel(self, node: Node, number: int) -> None:
        """A line that runs the node's kernel into its buffers."""
        deferred = self.layout.deferred.get(node)
        task = self.layout.tasks.get(node)
        if task is not None and deferred is None and not self._is_shared(task):
            tensors = (*node.inputs, *node.outputs)
            self._call(self.compute, node, task, tensors, len(node.outputs))
            return
        inputs = [self._name(t, native=task is not None) for t in node.inputs]
        if deferred is not None:
            inputs = [self._kept(node, name) for name in inputs]
        names = [self._name(t) for t in node.outputs]
        attrs = bind_attrs(node.attrs, self.bindings)
        specs = [t.spec for t in node.inputs]
        half = not node.op.halves and any_half(specs)
        if node.op.ufunc is not None and not attrs and not self.plain and not half:
            self.scope[f"k{number}"] = getattr(self.backend.xp, node.op.ufunc)
            line = f"k{number}({', '.join(inputs)}, out={names[0]})"
        else:
            self.scope[f"k{number}"] = writing(node.op, self.backend.xp, specs, attrs, self.plain)
            self.alone.append(node)
            out = names[0] if len(names) == 1 else f"({', '.join(names)})"
            step = ", step=draws" if node.op.random else ""
            line = f"k{number}({', '.join([out, *inputs])}{step})"
        if deferred is not None:
            self.commit.line(node, line)
        else:
            self._line(node, line)

    # Memory -------------------------------------------------------------------------------------

    def _place(self, tensor: Tensor) -> Place:
        """Where a tensor is: an address, or what will say it."""
        deferred = self.layout.deferred.get(tensor.node)
        if deferred is not None:
            tensor = deferred
        root = tensor if tensor in self.layout.blocks else self.layout.roots[tensor]
        kind = root.node.op.name
        if kind in _COMING:
            return root
        if kind in ("constant", "variable"):
            place = self._places.get(root)
            if place is None:
                place = self._places[root] = address(self.scope[self.names[root]])
            return place
        return self._base + self.layout.offset(root)

    def _name(self, tensor: Tensor, native: bool = False) -> str:
        """The name of an array, for a line of Python that reads it; `native`: by a generated kernel
        that threads share, for which it may be anywhere."""
        deferred = self.layout.deferred.get(tensor.node)
        if deferred is not None:
            return self.names[deferred]
        root = tensor if tensor in self.layout.blocks else self.layout.roots[tensor]
        if root in self._fed and not native:
            self._fed[root].read = True
        known = self.names.get(tensor)
        if known is not None:
            return known
        if tensor.node.op.name == "assign" and tensor not in self.layout.blocks:
            return self._name(tensor.node.inputs[1], native)
        shape = self.layout.specs[tensor].shape
        kind = root.node.op.name
        if kind in ("constant", "variable"):
            return self._bind(tensor, self.scope[self.names[root]].reshape(shape))
        if kind in _COMING:
            number = self.numbers[tensor.node]
            self.scope[f"k{number}"] = Reshaped(shape)
            name = self.names[tensor] = f"b{number}_0"
            self._line(tensor.node, f"{name} = k{number}({self.names[root]})")
            return name
        return self._bind(tensor, self._buffer(tensor))

    def _buffer(self, tensor: Tensor) -> Any:
        spec = self.layout.specs[tensor]
        offset = self.layout.offset(tensor)
        return self.memory[offset : offset + nbytes(spec)].view(spec.dtype).reshape(spec.shape)

    def _checked(self, node: Node, array: Any) -> None:
        """A native function trusts its pointers, so a variable must be what the graph says."""
        spec = self.layout.specs[node.outputs[0]]
        if array.shape != spec.shape or array.dtype != spec.dtype or not array.flags.c_contiguous:
            raise OpError(
                f"{node.name!r} (made at {node.location}) is {array.dtype}{array.shape} in "
                f"memory, but {spec} in the graph; do two variables have one name?"
            )

    # The commit part ------------------------------------------------------------------------------

    def _stage(self, node: Node, number: int) -> None:
        """Copy a value that is another variable's memory, which this step's commits may change."""
        if node in self.layout.staged and not self._copied(
            self.compute, node, node.inputs[1], node.outputs[0]
        ):
            value = self._name(node.inputs[1])
            self._line(node, f"copyto({self._name(node.outputs[0])}, {value})")

    def _commit_line(self, assign: Node) -> None:
        variable, value = assign.inputs[0], assign.outputs[0]
        if assign.inputs[1].node in self.layout.deferred:
            return
        if not self._copied(self.commit, assign, value, variable):
            kept = self._kept(assign, self._name(value))
            self.commit.line(assign, f"copyto({self.names[variable]}, {kept})")

    def _copied(self, part: _Part, node: Node, source: Tensor, target: Tensor) -> bool:
        """Whether a value is copied as generated kernels are run."""
        size = nbytes(self.layout.specs[target])
        if self.plain or self.backend.xp is not np:
            return False
        places = (self._place(source), self._place(target))
        if size:
            part.add([Call(node, copy_task(size), places, (size, size), 1)])
        return True

    def _kept(self, node: Node, name: str) -> str:
        """A name that the commit part can use: feeds, recvs and their aliases are local to the
        compute part."""
        if name in self.scope:
            return name
        self._line(node, f"kept[{name!r}] = {name}")
        return f"kept[{name!r}]"

    def _lead(self) -> None:
        """Let pointers lead to what comes; what the commit part reads is kept until then."""
        for part in (self.compute, self.commit):
            for segment in part.segments:
                for slot, which in segment.slots.items():
                    assert isinstance(slot, Tensor)
                    if slot in self._fed:
                        self._fed[slot].lead(segment, which)
                    if part is self.commit:
                        self._kept(slot.node, self.names[slot])

    # The text -----------------------------------------------------------------------------------

    def _line(self, node: Node, line: str) -> None:
        self.compute.line(node, line)

    @cached_property
    def _result(self) -> str:
        """The expression of the fetched values; it may take lines for aliases."""
        names = [self._name(t) for t in self.partition.fetches.values()]
        return "(" + "".join(f"{name}, " for name in names) + ")"

    @property
    def is_native(self) -> bool:
        """Whether it is generated kernels throughout."""
        lines = (*self._lines[len(self._feeds) :], *self.commit.lines)
        return self.backend.xp is np and all(isinstance(line, Segment) for line in lines)

    @cached_property
    def _lines(self) -> list[_Line]:
        assert self._result
        return [*self._feeds, *self.compute.lines]

    def computing(self, name: str = "compute") -> Callable[..., Any]:
        """The compute part as a function (feeds, step, draws) -> fetched values."""
        lines = [self._text(line) for line in self._lines]
        return self._function(name, "feeds, step, draws", lines, self._result)

    def committing(self) -> Callable[[], None]:
        """The commit part as a function."""
        lines = [self._text(line) for line in self.commit.lines]
        return self._function("commit", "", lines, "None")

    def traced(self) -> tuple[Callable[..., Any], list[Node]]:
        """The compute part with a fourth argument, which is told after each node by the number of
        its line; and the node of each line."""
        lines: list[str] = []
        nodes: list[Node] = []

        def add(node: Node, text: str) -> None:
            if nodes and nodes[-1] is node:  # several calls are one span
                lines.pop()
                nodes.pop()
            lines.extend((text, f"mark({len(nodes) + 1})"))
            nodes.extend((node, node))

        for line in self._lines:
            if isinstance(line, Segment | Strands):
                name = self._text(line, "one")
                for i, each in enumerate(line.calls):
                    add(each.node, f"{name}({i})")
            else:
                add(*line)
        return self._function("traced", "feeds, step, draws, mark", lines, self._result), nodes

    def _text(self, line: _Line, how: str = "run") -> str:
        if not isinstance(line, Segment | Strands):
            return line[1]
        name = f"{how}_{id(line)}"
        self.scope[name] = getattr(line, how)
        return f"{name}()" if how == "run" else name

    def _function(
        self, name: str, arguments: str, lines: list[str], result: str
    ) -> Callable[..., Any]:
        source = "\n ".join([f"def {name}({arguments}):", *lines, f"return {result}"])
        # The text is made of our own identifiers only; nothing from a graph or the wire enters it.
        exec(compile(source, f"<{name}>", "exec"), self.scope)
        function: Callable[..., Any] = self.scope[name]
        return function

    def explained(self, error: Exception) -> Exception:
        """An error with the node of the failing line, unless it says already what went wrong."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if f.filename in _OURS]
        node = None
        if lines and lines[0].lineno is not None:
            at = lines[0].lineno - 2
            if lines[0].filename == "<traced>":
                node = self.traced()[1][at]
            else:
                line = self._lines[at]
                node = line[0] if isinstance(line, tuple) else line.calls[0].node
        return explained(error, node, self.layout, self.partition)

    @property
    def commits(self) -> bool:
        """Whether there is anything to assign."""
        return bool(self.commit.lines)

    @property
    def workspace(self) -> int:
        """Bytes that ops took for themselves: on a cpu nobody counts them."""
        return 0

    def release(self) -> None:
        """Let go of the buffers: the program does not run again."""
        self.scope.clear()  # its functions and itself refer to each other


class _Routine:
    """A body, compiled: arrays in, results out, which are good until it runs again."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._run = code.computing("routine")

    def __call__(self, arrays: Sequence[Any], step: int, draws: int) -> Any:
        try:
            return self._run(arrays, step, draws)
        except Exception as error:
            raise self.code.explained(error) from error


def _stays(places: Sequence[Place]) -> bool:
    """Whether addresses are known before a program runs."""
    return all(isinstance(place, int) for place in places)
