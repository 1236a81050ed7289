"""Runs of imported models: segments of graphs, with host nodes between them.

A session runs the graph of each segment. Where a segment stops, a node runs on the host, or a value
that decides shapes is read. The next segment is then imported for the result, and cached by value
(or by dtype and rank, if the value decides nothing).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import FeedError, OnnxError, StepTimeout
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.frontend.pytree import depends_on_placeholder
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import Dim
from graphflow.onnx.loading.host import host_nodes as host
from graphflow.onnx.loading.importer import Importer
from graphflow.onnx.loading.reading.value_kinds import Known, OnHost, Value, is_native
from graphflow.onnx.loading.repeated_run import RepeatedRun
from graphflow.onnx.loading.translation.segments import (
    FetchPlan,
    ImportedSegment,
    OnnxBody,
    Stop,
    captured_names,
    concrete_value,
)
from graphflow.sessions.session import DEADLINE, Session

MAX_CHILDREN = 64
"""The largest number of cached specialisations of one segment."""


class ModelRun:
    """One run of a model, with its session and its deadline."""

    def __init__(
        self, importer: Importer, session: Session | None = None, deadline: float = DEADLINE
    ) -> None:
        self.importer = importer
        self.session = session
        self.seconds = deadline
        self._doing = importer.file
        self._end = time.monotonic() + deadline

    def check(self, what: str | None = None) -> None:
        """Raise StepTimeout if the deadline has passed; `what` names the current work in it."""
        self._doing = what or self._doing
        if time.monotonic() > self._end:
            raise StepTimeout(
                f"{self._doing}: not done after {self.seconds} s; give a longer deadline="
            )

    def evaluate(self, tensors: Sequence[Tensor], feeds: Mapping[Tensor, Any]) -> list[Any]:
        """Compute tensors by the session, or by the interpreter while a model is read."""
        if self.session is None:
            return evaluate(tensors, feeds)
        return list(self.session.run(list(tensors), feeds))

    def read_shared(self, tensor: Tensor) -> Any:
        """Return the value of a constant, or of a variable as the step begins."""
        if self.session is not None and tensor.node.op.name == "variable":
            return self.session.get(tensor)
        return evaluate([tensor])[0]

    def program_for(self, owner: Any, body: OnnxBody) -> SegmentedProgram:
        """Return the program of a subgraph or function, made once for each proto `owner`."""
        entry = (owner, SegmentedProgram(self.importer, body))
        program: SegmentedProgram = self.importer.programs.setdefault(id(owner), entry)[1]
        return program


class SegmentedProgram:
    """A body, and the segments that have been imported from it."""

    def __init__(
        self, importer: Importer, body: OnnxBody, first: ImportedSegment | None = None
    ) -> None:
        self.importer = importer
        self.body = body
        self._first = first
        self._roots: dict[Any, ImportedSegment] = {}
        self._reads = _last_reads(body)

    @property
    def whole(self) -> bool:
        """True if the first segment goes to the end."""
        return self._first is not None and self._first.stop is None

    def run(self, run: ModelRun, values: Mapping[str, Any]) -> list[Any]:
        """Run the body, and return the values of its outputs.

        Args:
            values: the values of inputs, and of names that the body reads from outside.

        Raises:
            StepTimeout: the deadline has passed.
            OnnxError, OpError: a node is invalid, or fails.
        """
        first = self._first
        ranked = first is not None and not (first.stop and first.stop.kind == "rank")
        defaults = self.body.initializers.keys().isdisjoint(values)
        segment = (
            first if first is not None and ranked and defaults else self._first_segment(values)
        )
        current = dict(values)
        while True:
            run.check()
            stop = segment.stop
            if stop is not None and stop.kind in ("input", "shapes"):
                segment = self._specialize(segment, stop, current)
                continue
            try:
                self._run_graph(run, segment, current)
            except FeedError as error:  # two symbolic sizes differ, since one of them is 1
                if not any(_has_symbolic_shape(tensor) for tensor in segment.inputs.values()):
                    raise
                segment.stop, segment.plan = Stop("shapes", 0, str(error)), None
                continue
            if stop is None:
                return [self._value_of(run, segment, name, current) for name in self.body.outputs]
            if stop.kind == "host":
                self._run_host_node(run, segment, stop, current)
            segment = self._next_segment(segment, stop, self._live_names(segment), current)

    def repeated_run(self, values: Mapping[str, Any]) -> RepeatedRun | None:
        """Return the fast path for inputs like those of a run that has ended; None if its program
        is not one graph that takes all inputs and makes all outputs."""
        if not self.whole or self._first is None or self._first.plan is None:
            return None
        wanted, placeholders = self._first.plan
        if placeholders.keys() != values.keys() or not wanted.keys() >= set(self.body.outputs):
            return None
        return RepeatedRun(placeholders, values, {n: wanted[n] for n in self.body.outputs})

    # Steps ------------------------------------------------------------------------------------

    def _first_segment(self, values: Mapping[str, Any]) -> ImportedSegment:
        key = tuple((name, _value_kind(value)) for name, value in values.items())
        if key not in self._roots:
            before = {} if self._first is None else self._first.given
            given: dict[str, Value] = {n: v for n, v in before.items() if isinstance(v, Known)}
            given.update((name, _placeholder_for(name, value)) for name, value in values.items())
            self._roots[key] = self.importer.read_segment(self.body, 0, given)
        return self._roots[key]

    def _live_names(self, segment: ImportedSegment) -> list[str]:
        """Return the names that are read after the segment."""
        end = len(self.body.nodes) if segment.stop is None else segment.stop.index
        return [name for name in segment.values if self._reads.get(name, -1) >= end]

    def _run_graph(self, run: ModelRun, segment: ImportedSegment, current: dict[str, Any]) -> None:
        """Run the segment's graph for the values that are read after it."""
        if segment.plan is None:
            segment.plan = _plan_fetches(segment, self._live_names(segment))
        wanted, placeholders = segment.plan
        if wanted:
            feeds = {tensor: current[name] for name, tensor in placeholders.items()}
            results = run.evaluate(list(wanted.values()), feeds)
            current.update(zip(wanted, results, strict=True))

    def _run_host_node(
        self, run: ModelRun, segment: ImportedSegment, stop: Stop, current: dict[str, Any]
    ) -> None:
        proto = self.body.nodes[stop.index]
        node = host.HostNode(
            proto, self.body.opsets, self.importer.label(proto, stop.index), stop.why
        )
        arguments = [self._value_of(run, segment, n, current) if n else None for n in proto.input]
        outer = {n: self._value_of(run, segment, n, current) for n in captured_names(proto)}
        results = host.execute(run, node, arguments, outer)
        current.update((n, v) for n, v in zip(proto.output, results, strict=False) if n)

    def _value_of(
        self, run: ModelRun, segment: ImportedSegment, name: str, current: Mapping[str, Any]
    ) -> Any:
        if name in current:
            return current[name]
        value = segment.values.get(name)
        if isinstance(value, Known) and value.parameter is not None:
            value = self.importer.weight_variable(value)
        if isinstance(value, Tensor):  # a constant or a variable, which all segments share
            return run.read_shared(value)
        if value is None:
            return None
        if isinstance(value, OnHost):
            raise OnnxError(f"{self.importer.file}: {name!r} has no value")
        return concrete_value(value)

    # The segment that follows -----------------------------------------------------------------

    def _specialize(
        self, segment: ImportedSegment, stop: Stop, current: Mapping[str, Any]
    ) -> ImportedSegment:
        """Return the segment imported again with a known input, or with known shapes."""
        given = dict(segment.given)
        if stop.kind == "input":
            key: Any = (stop.name, *_content_key(current[stop.name]))
            array = np.asarray(current[stop.name])
            given[stop.name] = Known(array.copy(), array.dtype)
        else:
            shapes = {name: np.shape(current[name]) for name in segment.inputs}
            key = tuple(shapes.items())
            given.update(
                (name, placeholder(tensor.dtype, shapes[name], name=_placeholder_name(name)))
                for name, tensor in segment.inputs.items()
            )
        return self._find_or_import(segment, key, segment.start, given)

    def _next_segment(
        self, segment: ImportedSegment, stop: Stop, live: Sequence[str], current: dict[str, Any]
    ) -> ImportedSegment:
        """Return the segment after a host node, or with a computed value as known."""
        start = stop.index + (stop.kind == "host")
        given: dict[str, Value] = {}
        names = dict.fromkeys(n for n in live if self._reads[n] >= start)
        if stop.kind == "host":
            made = self.body.nodes[stop.index].output
            names.update(dict.fromkeys(n for n in made if self._reads.get(n, -1) >= start))
        key: list[Any] = [stop.kind]
        for name in names:
            value = segment.values.get(name)
            if name in current:
                if name == stop.name:
                    array = np.asarray(current[name])
                    given[name] = Known(array.copy(), array.dtype)
                    key.append((name, *_content_key(array)))
                    continue
                given[name] = _placeholder_for(name, current[name], value)
                key.append((name, _value_kind(current[name])))
            elif value is not None:
                given[name] = value
        for name in [n for n in current if self._reads.get(n, -1) < start]:
            del current[name]
        return self._find_or_import(segment, tuple(key), start, given)

    def _find_or_import(
        self, segment: ImportedSegment, key: Any, start: int, given: Mapping[str, Value]
    ) -> ImportedSegment:
        child = segment.children.pop(key, None)
        if child is None:
            child = self.importer.read_segment(self.body, start, given)
            if len(segment.children) >= MAX_CHILDREN:
                del segment.children[next(iter(segment.children))]
        segment.children[key] = child
        return child


def _last_reads(body: OnnxBody) -> dict[str, int]:
    """Return the last node that reads each name; outputs are read after the last node."""
    reads: dict[str, int] = {}
    for index, node in enumerate(body.nodes):
        for name in (*node.input, *captured_names(node)):
            reads[name] = index
    reads.update(dict.fromkeys(body.outputs, len(body.nodes)))
    return reads


def _plan_fetches(segment: ImportedSegment, live: Sequence[str]) -> FetchPlan:
    """Choose the tensors to fetch from a segment, and the placeholders that they depend on."""
    wanted: dict[str, Tensor] = {}
    for name in live:
        value = segment.values[name]
        if isinstance(value, Known) and value.symbolic:
            value = value.tensor()
        if not isinstance(value, Tensor) or name in segment.inputs:
            continue
        if segment.stop is None or not _is_shared(value):
            wanted[name] = value
    if not wanted:
        return {}, {}
    graph = Graph(list(wanted.values()))
    used = {name: t for name, t in segment.inputs.items() if depends_on_placeholder(graph, t.node)}
    return wanted, used


def _is_shared(tensor: Tensor) -> bool:
    """Return True for a constant or variable, which later segments can read directly."""
    return tensor.node.op.name in ("constant", "variable")


def _value_kind(value: Any) -> Any:
    """Return the properties of a value that a segment depends on if the value decides nothing."""
    if isinstance(value, np.ndarray | np.generic) and is_native(value.dtype):
        return (value.dtype.name, tuple(size == 1 for size in np.shape(value)))
    return "host"


def _placeholder_for(name: str, value: Any, before: Value | None = None) -> Value:
    """Make the placeholder for a run-time value in the next segment, or an OnHost value."""
    if _value_kind(value) == "host":
        return OnHost("it is not a tensor that a graph can hold")
    shape: list[Any] = [1 if size == 1 else None for size in np.shape(value)]  # 1 may broadcast
    if isinstance(before, Tensor):
        known = [size if isinstance(size, int) else None for size in before.shape]
        shape = [a if a is not None else b for a, b in zip(known, shape, strict=True)]
    return placeholder(np.asarray(value).dtype, tuple(shape), name=_placeholder_name(name))


def _content_key(array: Any) -> tuple[Any, ...]:
    array = np.ascontiguousarray(array)
    return (array.dtype.str, np.shape(array), array.tobytes())


def _has_symbolic_shape(tensor: Tensor) -> bool:
    return any(isinstance(size, Dim) for size in tensor.shape)


def _placeholder_name(name: str) -> str:
    return name or "input"


__all__ = ["SegmentedProgram", "ModelRun"]
