"""Memory layout: the buffer of each tensor of a partition, and the updates that run at commit.

    Partition ─plan_layout→ MemoryLayout: fused regions, buffers in the arena, deferred updates

`live_ranges.py` finds which results share a buffer. An update that only an assignment reads is
deferred: the commit part computes it straight into the variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.declarations.half_precision import has_half
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS
from graphflow.ops.control_flow.concurrent import concurrent
from graphflow.ops.control_flow.control import cond, scan, while_loop
from graphflow.ops.kernels.codegen.region import freeze_attributes
from graphflow.ops.kernels.fusion.fusion import FusedRegion, plan_regions, roots_of
from graphflow.ops.kernels.fusion.region_kernels import THREADING_NANOSECONDS, is_jit_enabled
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.runtime.memory.arena_planner import ArenaPlan, BufferLifetime, plan_arena
from graphflow.runtime.memory.branch_planning import (
    ParallelSection,
    ScheduledKernel,
    find_parallel_sections,
    plan_branches,
)
from graphflow.runtime.memory.deferred_updates import find_deferred
from graphflow.runtime.memory.live_ranges import (
    OUTSIDE_ARENA,
    PlanInputs,
    ResultBuffer,
    find_live_ranges,
    loop_states,
)
from graphflow.runtime.partitioning.check_modes import EVERY
from graphflow.runtime.partitioning.partition import Partition

_SYNCHRONISING = (*RECEIVING_OPS, *SENDING_OPS, "collective_finish")
"""Ops that wait for other devices or send to them. They end a section of parallel branches."""


@dataclass(frozen=True)
class ResultCopies:
    """Results of a body that are computed elsewhere than in their node's buffers.

    Attributes:
        direct: numbers of the results that are copied to their buffers, in this order.
        swapped: numbers of the results that are copied to spare memory first: they are old states
            of a loop, which other results overwrite.
        spares: spec and offset of the spare memory of each of these.
    """

    direct: tuple[int, ...] = ()
    swapped: tuple[int, ...] = ()
    spares: tuple[tuple[TensorSpec, int], ...] = ()


@dataclass(frozen=True)
class BodyLayout:
    """Layouts of the bodies that a node holds, in one block of the outer arena.

    Attributes:
        parts: each body as a partition, and its layout.
        offsets: offset of each body's arena in the block, in bytes.
        firsts: index of the node's output in which each body's first result lies.
        copies: the results of each body that are computed elsewhere.
        nbytes: size of the block.
    """

    parts: tuple[tuple[Partition, MemoryLayout], ...]
    offsets: tuple[int, ...]
    firsts: tuple[int, ...]
    copies: tuple[ResultCopies, ...]
    nbytes: int


@dataclass(frozen=True)
class MemoryLayout:
    """Decisions about a partition's memory.

    Attributes:
        specs: concrete spec of each tensor.
        roots: the tensor whose memory each tensor shares; most tensors are their own root.
        blocks: index into the arena's offsets of each root that lies in the arena.
        regions: the fused region of each node that belongs to one.
        deferred: nodes that run in the commit part, and the variable that each writes to. Of a
            region, all results are deferred or none.
        staged: assigns whose value is copied before any variable changes.
        commits: all assigns, in order.
        body_layouts: layouts of the bodies of nodes that hold some.
        tasks: generated kernels of nodes that belong to no region.
        scratch: index into the arena's offsets of the scratch memory of nodes that need some.
        kept_weights: nodes whose kernels keep a layout of their weights, which no step assigns:
            the weights' root, and the bytes of the layout.
        outside: for a body, the number of the node's buffer in which each root lies that is in
            one of these.
    """

    specs: Mapping[Tensor, TensorSpec]
    roots: Mapping[Tensor, Tensor]
    blocks: Mapping[Tensor, int]
    arena: ArenaPlan
    regions: Mapping[Node, FusedRegion]
    deferred: Mapping[Node, Tensor]
    staged: frozenset[Node]
    commits: tuple[Node, ...]
    body_layouts: Mapping[Node, BodyLayout]
    tasks: Mapping[Node, KernelTask]
    scratch: Mapping[Node, int]
    kept_weights: Mapping[Node, tuple[Tensor, int]]
    outside: Mapping[Tensor, int]

    def offset(self, tensor: Tensor) -> int:
        """Return the tensor's offset in the arena, in bytes."""
        owner = tensor if tensor in self.blocks else self.roots[tensor]
        return self.arena.offsets[self.blocks[owner]]

    def share_buffer(self, one: Tensor, other: Tensor) -> bool:
        """Return True if two tensors lie in the same buffer."""
        roots = self.roots[one], self.roots[other]
        first, second = ((self.blocks.get(t), self.outside.get(t)) for t in roots)
        return roots[0] is roots[1] or first == second != (None, None)


def plan_layout(
    partition: Partition,
    bindings: Mapping[str, int],
    buffers: Sequence[ResultBuffer] | None = None,
) -> MemoryLayout:
    """Lay out a partition for given sizes of its symbols.

    Args:
        buffers: for a body, the buffers of its results; None for a program.
    """
    graph = partition.graph
    specs = _bound_specs(graph, bindings)
    roots = roots_of(graph)
    commits = graph.of_op("assign")
    kind = DeviceName.parse(partition.device).kind or "cpu"
    wanted = partition.fetches.values()
    may_fuse = partition.checks != EVERY  # a check of each node needs a line for each
    regions = plan_regions(graph, kind, wanted, specs, bindings, roots) if may_fuse else {}
    # A value that is checked before the commit cannot be computed in it.
    deferred = {} if partition.checks else find_deferred(partition, roots, commits, regions)
    assigned = {assign.inputs[0] for assign in commits}
    staged = frozenset(
        a
        for a in commits
        if roots[a.inputs[1]] in assigned and roots[a.inputs[1]] is not a.inputs[0]
    )
    position = {node: i for i, node in enumerate(graph.nodes)}
    position.update({node: position[fused.last] for node, fused in regions.items()})
    inner = {n: _plan_bodies(n, partition, bindings) for n in graph.holders}
    tasks = _native_tasks(partition, specs, bindings, regions) if may_fuse else {}
    scratch_bytes = {node: need.nbytes for node, need in inner.items()}
    scratch_bytes.update({node: task.scratch for node, task in tasks.items() if task.scratch})
    is_cpu = DeviceName.parse(partition.device).kind == "cpu"
    for fused in {id(f): f for f in regions.values() if f.region.over and is_cpu}.values():
        if need := fused.task.scratch:
            scratch_bytes[fused.last] = need
    busy_until = _epilogue_positions(partition, tasks, regions, position)
    inputs = PlanInputs(
        partition, specs, roots, regions, deferred, staged, position, scratch_bytes, busy_until,
        buffers or (), copies_sent=is_cpu and buffers is not None,
    )  # fmt: skip
    memory = _plan_memory(inputs, ())
    sections = find_parallel_sections(_scheduled_kernels(inputs, tasks)) if is_cpu else ()
    if sections:
        parallel = _plan_memory(inputs, sections)
        most = _BRANCH_GROWTH * memory.arena.nbytes + _BRANCH_SLACK_BYTES
        memory = parallel if parallel.arena.nbytes <= most else memory
    return MemoryLayout(
        specs, roots, memory.blocks, memory.arena, regions, deferred, staged, commits, inner,
        tasks, memory.scratch,
        _find_kept_weights(inputs, bindings, tasks, assigned) if is_cpu else {},
        memory.outside,
    )  # fmt: skip


def _find_kept_weights(
    inputs: PlanInputs,
    bindings: Mapping[str, int],
    tasks: Mapping[Node, KernelTask],
    assigned: Set[Tensor],
) -> dict[Node, tuple[Tensor, int]]:
    """Return the nodes whose kernels keep a layout of weights, as `MemoryLayout` describes it."""
    kept = {}
    for node in inputs.partition.graph.nodes:
        if node.op.layout is None or node in tasks or not is_jit_enabled():
            continue
        root = inputs.roots[node.inputs[node.op.layout.operand]]
        if root.node.op.name not in ("variable", "constant") or root in assigned:
            continue
        specs = [inputs.specs[t] for t in node.inputs]
        size = node.op.layout.nbytes(*specs, **bind_attrs(node.attrs, bindings))
        if size and not has_half(specs):
            kept[node] = root, size
    return kept


def _bound_specs(graph: Graph, bindings: Mapping[str, int]) -> dict[Tensor, TensorSpec]:
    """Return the concrete spec of each tensor. Nodes that are copies share their specs."""
    specs: dict[Tensor, TensorSpec] = {}
    known: dict[int, tuple[TensorSpec, ...]] = {}
    for node in graph.nodes:
        bound = known.get(id(node.specs))
        if bound is None:
            bound = known[id(node.specs)] = node.bound_specs(bindings)
        for tensor, spec in zip(node.outputs, bound, strict=True):
            specs[tensor] = spec
    return specs


def _epilogue_positions(
    partition: Partition,
    tasks: Mapping[Node, KernelTask],
    regions: Mapping[Node, FusedRegion],
    position: Mapping[Node, int],
) -> dict[Node, int]:
    """Return, for each product in blocks, the position of the first region that reads its result.

    `gemm_epilogues.py` may interleave the two, so the product's memory is in use until then.
    """
    consumers = partition.graph.consumers
    readers = {
        node: [position[c] for c in consumers[node] if c in regions]
        for node, task in tasks.items()
        if task.blocks
    }
    return {node: min(places) for node, places in readers.items() if places}


@dataclass(frozen=True)
class _MemoryPlan:
    """Places of buffers, with the attributes of `MemoryLayout`."""

    blocks: dict[Tensor, int]
    scratch: dict[Node, int]
    arena: ArenaPlan
    outside: dict[Tensor, int]


def _plan_memory(inputs: PlanInputs, sections: Sequence[ParallelSection]) -> _MemoryPlan:
    """Plan the arena.

    Args:
        sections: sections in which no two branches may share memory, so that they can run in
            parallel.
    """
    specs, position = inputs.specs, inputs.position
    ranges = find_live_ranges(inputs, sections)
    blocks: dict[Tensor, int] = {}
    outside = dict(ranges.outside)
    members: dict[Tensor, list[Tensor]] = {}
    for tensor in ranges.deaths:
        members.setdefault(ranges.owner(tensor), []).append(tensor)
    lives: list[BufferLifetime] = []
    for owner, tensors in members.items():
        if owner in ranges.outside:
            outside |= dict.fromkeys(tensors, ranges.outside[owner])
            continue
        blocks |= dict.fromkeys(tensors, len(lives))
        death = max(ranges.deaths[t] for t in tensors)
        lives.append(BufferLifetime(position[owner.node], death, nbytes(specs[owner])))
    scratch: dict[Node, int] = {}
    for node, need in inputs.scratch_bytes.items():
        scratch[node] = len(lives)
        end = inputs.busy_until.get(node, position[node])
        end = len(inputs.partition.graph.nodes) if node in inputs.deferred else end
        lives.append(BufferLifetime(position[node], end, need))
    arena = plan_branches(lives, sections) if sections else plan_arena(lives)
    return _MemoryPlan(blocks, scratch, arena, outside)


_BRANCH_GROWTH, _BRANCH_SLACK_BYTES = 1.25, 2 << 20
"""Factor and bytes by which an arena may grow so that branches can run in parallel."""


def _scheduled_kernels(
    inputs: PlanInputs, tasks: Mapping[Node, KernelTask]
) -> list[ScheduledKernel | None]:
    """Return the kernels in program order; None for an operation that ends a parallel section."""
    units: list[ScheduledKernel | None] = []
    made: dict[Tensor, int] = {}
    for node in inputs.partition.graph.nodes:
        if node.op.alias or node.op.name in (*OUTSIDE_ARENA, "assign", "group"):
            if node.op.name in _SYNCHRONISING or node in inputs.staged:
                units.append(None)
            continue
        fused = inputs.regions.get(node)
        if node in inputs.deferred or (fused is not None and node is not fused.last):
            continue
        task = tasks.get(node)
        if fused is not None:
            task = fused.task
        operands = node.inputs if fused is None else fused.operands
        for tensor in node.outputs if fused is None else fused.results:
            made[tensor] = len(units)
        if task is None or task.nanoseconds > THREADING_NANOSECONDS:
            units.append(None)
            continue
        sources = {inputs.roots[t] for t in operands}
        waits = tuple(made[t] for t in sources if t in made)
        units.append(ScheduledKernel(inputs.position[node], task.nanoseconds, waits))
    return units


def _native_tasks(
    partition: Partition,
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    regions: Mapping[Node, FusedRegion],
) -> dict[Node, KernelTask]:
    """Return the generated kernels of nodes that belong to no region."""
    if not is_jit_enabled() or DeviceName.parse(partition.device).kind != "cpu":
        return {}
    known: dict[Any, KernelTask | None] = {}
    tasks = {}
    for node in partition.graph.nodes:
        if node.op.native is None or node in regions:
            continue
        inputs = tuple([specs[t] for t in node.inputs])
        attrs = bind_attrs(node.attrs, bindings)
        key = (node.op, inputs, freeze_attributes(attrs))
        if key not in known or key[2] is None:
            known[key] = node.op.native(*inputs, **attrs)
        task = known[key]
        if task is not None:
            tasks[node] = task
    return tasks


def _plan_bodies(node: Node, outer: Partition, bindings: Mapping[str, int]) -> BodyLayout:
    """Lay out a node's bodies one after the other. The branches of a cond share their memory."""
    parts, places, copies, end = [], [], [], 0
    firsts, buffers = _result_buffers(node)
    for body, own in zip(bodies(node), buffers, strict=True):
        part = _body_partition(body, outer)
        layout = plan_layout(part, bindings, own)
        places.append(0 if node.op is cond else end)
        end = max(end, places[-1] + align_up(layout.arena.nbytes))
        direct, swapped = _order_copies(own, layout)
        spares = []
        for number in swapped:
            spec = node.outputs[firsts[-1] + number].spec.bind(bindings)
            spares.append((spec, end))
            end += align_up(nbytes(spec))
        copies.append(ResultCopies(direct, swapped, tuple(spares)))
        parts.append((part, layout))
    return BodyLayout(tuple(parts), tuple(places), firsts, tuple(copies), end)


def _result_buffers(node: Node) -> tuple[tuple[int, ...], list[list[ResultBuffer]]]:
    """Return the index of the node's output in which each body's first result lies, and the
    buffers of each body's results."""
    inner = bodies(node)
    if node.op not in (scan, while_loop):
        counts = [body.results if node.op is concurrent else 0 for body in inner]
        firsts = tuple(sum(counts[:i]) for i in range(len(inner)))
        return firsts, [[ResultBuffer(t) for t in body.outputs] for body in inner]
    count = len(loop_states(node)[0])
    states = [[p.outputs[0] for p in body.inputs[:count]] for body in inner]
    found = [[ResultBuffer(None, state) for state in states[0]]] if len(inner) > 1 else []
    found.append([ResultBuffer(*p) for p in zip(inner[-1].outputs, states[-1], strict=False)])
    return (int(node.op is while_loop),) * len(inner), found


def _order_copies(
    buffers: Sequence[ResultBuffer], layout: MemoryLayout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the results that are copied to their buffers, in an order in which each is read
    before it is overwritten; and those for which there is no such order."""
    roots = {i: layout.roots[b.result] for i, b in enumerate(buffers) if b.result is not None}
    reads = {i: layout.outside.get(root) for i, root in roots.items()}
    waiting = {i: place for i, place in reads.items() if place != i}
    order: list[int] = []
    while free := [i for i in waiting if all(place != i for k, place in waiting.items() if k != i)]:
        order += free
        waiting = {i: place for i, place in waiting.items() if i not in free}
    return tuple(order), tuple(waiting)


def _body_partition(body: Body, outer: Partition) -> Partition:
    """Make a partition of a body: its parameters are feeds, its results fetches."""
    graph = body.graph
    feeds = tuple(graph.names[node] for node in graph.placeholders)
    results = {str(i): t for i, t in enumerate(body.outputs)}
    return Partition(outer.device, graph, feeds, results, outer.checks)
