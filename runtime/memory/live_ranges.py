"""Live ranges of a program's tensors, and results that are computed into the buffer of an input.

A result takes over the buffer of an input that nobody reads later, if its kernel allows it. The
results of a body have buffers outside the body's arena: those of the node that holds it. A loop's
state lies there, too. So the next state is computed into the state's own buffer, if nothing reads
the state later in the iteration; otherwise the iteration's end copies it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS
from graphflow.ops.control_flow.control import scan, while_loop
from graphflow.ops.kernels.fusion.fusion import FusedRegion
from graphflow.runtime.memory.branch_planning import ParallelSection, section_at
from graphflow.runtime.partitioning.partition import Partition

OUTSIDE_ARENA = ("constant", "placeholder", "variable", *RECEIVING_OPS, *SENDING_OPS)
"""Ops whose value, if any, lies outside the arena."""


@dataclass(frozen=True)
class ResultBuffer:
    """A buffer of the node that holds a body, for one of the body's results.

    Attributes:
        result: the result; None if the body only reads the buffer, as a loop's test does.
        state: the parameter whose value lies in the buffer when a loop's body begins, if any.
    """

    result: Tensor | None
    state: Tensor | None = None


@dataclass(frozen=True)
class PlanInputs:
    """Decisions about a partition that its memory plan is made from.

    Attributes:
        position: index of each node; for a member of a region, that of the region's last node.
        scratch_bytes: bytes of scratch memory of nodes that need some.
        busy_until: position up to which a product still runs, because a region's epilogue is
            interleaved with it.
        buffers: for a body, the buffers of its results.
        copies_sent: whether tensors are copied when they are sent.
    """

    partition: Partition
    specs: Mapping[Tensor, TensorSpec]
    roots: Mapping[Tensor, Tensor]
    regions: Mapping[Node, FusedRegion]
    deferred: Mapping[Node, Tensor]
    staged: frozenset[Node]
    position: Mapping[Node, int]
    scratch_bytes: Mapping[Node, int]
    busy_until: Mapping[Node, int]
    buffers: Sequence[ResultBuffer]
    copies_sent: bool


@dataclass(frozen=True)
class LiveRanges:
    """Live ranges of buffers, and the tensors that share them.

    Attributes:
        deaths: the last position that reads each tensor of the arena and each state.
        shared: result -> the first owner of the buffer that it takes over.
        outside: first owner of a buffer -> number of the node's buffer in which it lies.
    """

    deaths: dict[Tensor, int]
    shared: dict[Tensor, Tensor] = field(default_factory=dict)
    outside: dict[Tensor, int] = field(default_factory=dict)

    def owner(self, tensor: Tensor) -> Tensor:
        """Return the first owner of the buffer of a root."""
        return self.shared.get(tensor, tensor)


def find_live_ranges(inputs: PlanInputs, sections: Sequence[ParallelSection]) -> LiveRanges:
    """Find how long each tensor of the arena is needed, and which results share a buffer.

    Args:
        sections: sections whose branches run in parallel.
    """
    ranges = LiveRanges(_deaths(inputs, sections))
    for number, buffer in enumerate(inputs.buffers):
        if buffer.state is not None:
            ranges.outside[buffer.state] = number
    wanted = _wanted_buffers(inputs, ranges)
    for choices in _overwrites(inputs, inputs.partition.graph.nodes, ranges.deaths):
        reused: set[Tensor] = set()
        for result, sources in choices.items():
            own = wanted.get(result, frozenset())
            owners = [
                owner
                for owner in map(ranges.owner, sources)
                if owner not in reused and ranges.outside.get(owner, -1) in {-1, *own}
            ]
            # A state's buffer first: any other can be reused by something else.
            chosen = min(owners, key=lambda o: o not in ranges.outside, default=None)
            if chosen is not None:
                reused.add(chosen)
                ranges.shared[result] = chosen
    _place_results(inputs, ranges)
    return ranges


def _writers(inputs: PlanInputs, nodes: Sequence[Node]) -> Iterator[tuple[Node, Sequence[Tensor]]]:
    """Yield the nodes that write buffers of the arena, of a region its last one, with results."""
    for node in nodes:
        if node.op.name in OUTSIDE_ARENA or node.op.alias or node.op.name == "assign":
            continue
        fused = inputs.regions.get(node)
        if node not in inputs.deferred and (fused is None or node is fused.last):
            yield node, node.outputs if fused is None else fused.results


def _deaths(inputs: PlanInputs, sections: Sequence[ParallelSection]) -> dict[Tensor, int]:
    """Return the last position that needs each tensor of the arena, and each state."""
    graph, roots, position = inputs.partition.graph, inputs.roots, inputs.position
    end = len(graph.nodes)
    last: dict[Tensor, int] = {}
    for node in graph.nodes:
        at = inputs.busy_until.get(node, position[node])
        for tensor in node.inputs:
            root = roots[tensor]
            if last.get(root, -1) < at:
                last[root] = at
    if sections:  # any branch may read a tensor from before its section, until the end
        for tensor, at in last.items():
            home = section_at(sections, at)
            if home is not None and home.first > position[tensor.node]:
                last[tensor] = home.last
    held = {roots[t] for t in inputs.partition.fetches.values()}
    # A sent buffer may still be on the wire, and a commit reads its inputs, until the step ends.
    kept = ("assign",) if inputs.copies_sent else (*SENDING_OPS, "assign")
    for node in graph.nodes:
        if node.op.name in kept or node in inputs.deferred:
            fused = inputs.regions.get(node)
            held.update(roots[t] for t in (node.inputs if fused is None else fused.operands))
    deaths = {node.outputs[0]: end for node in inputs.staged}
    for node, results in _writers(inputs, graph.nodes):
        for tensor in results:
            deaths[tensor] = end if tensor in held else last.get(tensor, position[node])
    for buffer in inputs.buffers:
        if buffer.state is not None:
            is_kept = buffer.state in held or buffer.result is None
            deaths[buffer.state] = end if is_kept else last.get(buffer.state, -1)
    return deaths


def _overwrites(
    inputs: PlanInputs, nodes: Sequence[Node], deaths: Mapping[Tensor, int]
) -> Iterator[dict[Tensor, list[Tensor]]]:
    """Yield, for the results of each node, the roots whose buffers each may take over.

    These have the result's spec and are not needed later. The node reads them once only: a second
    read could see an element that is already overwritten.
    """
    specs, roots = inputs.specs, inputs.roots
    for node, results in _writers(inputs, nodes):
        fused = inputs.regions.get(node)
        read = node.inputs if fused is None else fused.operands
        if fused is not None:
            choices = {
                r: [t for t in fused.operands if specs[t] == specs[r] and fused.replaces(r, t)]
                for r in results
            }
        elif node.op.elementwise and node.op.into is not None:
            read = tuple(dict.fromkeys(node.inputs))
            choices = {r: list(read) for r in results}
        elif node.op.in_place:
            choices = {r: list(node.inputs[:1]) for r in results}
        elif node.op in (scan, while_loop):
            before, after = loop_states(node)
            choices = {r: [t] for t, r in zip(before, after, strict=True)}
        else:
            continue
        times = Counter(roots[t] for t in read)
        free = {t for t in times if times[t] == 1 and deaths.get(t) == inputs.position[node]}
        yield {
            result: [roots[t] for t in found if roots[t] in free and specs[t] == specs[result]]
            for result, found in choices.items()
        }


def loop_states(node: Node) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the operands with which a loop's states begin, and its outputs with which they end."""
    if node.op is while_loop:
        count = node.attrs["states"]
        return node.inputs[:count], node.outputs[1 : 1 + count]
    count, first = node.attrs["carries"], int(node.attrs["counted"])
    return node.inputs[first : first + count], node.outputs[:count]


def _wanted_buffers(inputs: PlanInputs, ranges: LiveRanges) -> dict[Tensor, frozenset[int]]:
    """Return the states' buffers that tensors may take over, so that a next state lies in its
    own."""
    wanted: dict[Tensor, frozenset[int]] = {}
    for number, buffer in enumerate(inputs.buffers):
        if buffer.state is not None and buffer.result is not None:
            root = inputs.roots[buffer.result]
            wanted[root] = wanted.get(root, frozenset()) | {number}
    if wanted:
        nodes = inputs.partition.graph.nodes[::-1]
        for choices in _overwrites(inputs, nodes, ranges.deaths):
            for result, sources in choices.items():
                for source in sources if result in wanted else ():
                    wanted[source] = wanted.get(source, frozenset()) | wanted[result]
    return wanted


def _place_results(inputs: PlanInputs, ranges: LiveRanges) -> None:
    """Let results lie in the node's buffers, if the states there are not needed any more."""
    ends: dict[int, int] = {}
    for tensor, death in ranges.deaths.items():
        number = ranges.outside.get(ranges.owner(tensor))
        if number is not None:
            ends[number] = max(ends.get(number, -1), death)
    for number, buffer in enumerate(inputs.buffers):
        if buffer.result is None:
            continue
        root = inputs.roots[buffer.result]
        owner, end = ranges.owner(root), ends.get(number, -1)
        if owner in ranges.outside or owner not in ranges.deaths:
            continue
        if inputs.position[owner.node] > end:
            ranges.outside[owner] = number
        elif inputs.position[root.node] > end:  # it need not take over another buffer
            del ranges.shared[root]
            ranges.outside[root] = number
