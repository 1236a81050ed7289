"""Memory layout: the buffer of each tensor of a partition, and the updates that run at commit.

    Partition ─plan_layout→ MemoryLayout: fused regions, buffers in the arena, deferred updates

An elementwise result takes over the buffer of an input that dies there. An update that only an
assignment reads is deferred: the commit part computes it straight into the variable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS
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
    section_at,
)
from graphflow.runtime.memory.deferred_updates import find_deferred
from graphflow.runtime.partitioning.check_modes import EVERY
from graphflow.runtime.partitioning.partition import Partition

_OUTSIDE_ARENA = ("constant", "placeholder", "variable", *RECEIVING_OPS, *SENDING_OPS)
"""Ops whose value, if any, lies outside the arena."""

_SYNCHRONISING = (*RECEIVING_OPS, *SENDING_OPS, "collective_finish")
"""Ops that wait for other devices or send to them. They end a section of parallel branches."""


@dataclass(frozen=True)
class BodyLayout:
    """Layouts of the bodies that a node holds, in one block of the outer arena.

    Attributes:
        parts: each body as a partition, and its layout.
        offsets: offset of each body's arena in the block, in bytes.
        loop_state: spec and offset of each tensor that a loop carries; room for two buffers each.
        nbytes: size of the block.
    """

    parts: tuple[tuple[Partition, MemoryLayout], ...]
    offsets: tuple[int, ...]
    loop_state: tuple[tuple[TensorSpec, int], ...]
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

    def offset(self, tensor: Tensor) -> int:
        """Return the tensor's offset in the arena, in bytes."""
        owner = tensor if tensor in self.blocks else self.roots[tensor]
        return self.arena.offsets[self.blocks[owner]]


def plan_layout(partition: Partition, bindings: Mapping[str, int]) -> MemoryLayout:
    """Lay out a partition for given sizes of its symbols."""
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
    inputs = _PlanInputs(
        partition, specs, roots, regions, deferred, staged, position, scratch_bytes, busy_until
    )
    blocks, scratch, arena = _plan_memory(inputs, ())
    sections = find_parallel_sections(_scheduled_kernels(inputs, tasks)) if is_cpu else ()
    if sections:
        parallel = _plan_memory(inputs, sections)
        if parallel[2].nbytes <= _BRANCH_GROWTH * arena.nbytes + _BRANCH_SLACK_BYTES:
            blocks, scratch, arena = parallel
    return MemoryLayout(
        specs, roots, blocks, arena, regions, deferred, staged, commits, inner, tasks, scratch
    )


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


@dataclass(frozen=True)
class _PlanInputs:
    """Decisions about a partition that its memory plan is made from.

    Attributes:
        position: index of each node; for a member of a region, that of the region's last node.
        scratch_bytes: bytes of scratch memory of nodes that need some.
        busy_until: position up to which a product still runs, because a region's epilogue is
            interleaved with it.
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


def _plan_memory(
    inputs: _PlanInputs, sections: Sequence[ParallelSection]
) -> tuple[dict[Tensor, int], dict[Node, int], ArenaPlan]:
    """Return the arena's buffer of each tensor, that of each node's scratch memory, and the plan.

    Args:
        sections: sections in which no two branches may share memory, so that they can run in
            parallel.
    """
    specs, position = inputs.specs, inputs.position
    shared, deaths = _live_ranges(inputs, sections)
    blocks: dict[Tensor, int] = {}
    members: dict[Tensor, list[Tensor]] = {}
    for tensor in deaths:
        members.setdefault(shared.get(tensor, tensor), []).append(tensor)
    lives: list[BufferLifetime] = []
    for leader, tensors in members.items():
        for tensor in tensors:
            blocks[tensor] = len(lives)
        lives.append(
            BufferLifetime(
                position[leader.node], max(deaths[t] for t in tensors), nbytes(specs[leader])
            )
        )
    scratch: dict[Node, int] = {}
    for node, need in inputs.scratch_bytes.items():
        scratch[node] = len(lives)
        end = inputs.busy_until.get(node, position[node])
        end = len(inputs.partition.graph.nodes) if node in inputs.deferred else end
        lives.append(BufferLifetime(position[node], end, need))
    return blocks, scratch, plan_branches(lives, sections) if sections else plan_arena(lives)


_BRANCH_GROWTH, _BRANCH_SLACK_BYTES = 1.25, 2 << 20
"""Factor and bytes by which an arena may grow so that branches can run in parallel."""


def _scheduled_kernels(
    inputs: _PlanInputs, tasks: Mapping[Node, KernelTask]
) -> list[ScheduledKernel | None]:
    """Return the kernels in program order; None for an operation that ends a parallel section."""
    units: list[ScheduledKernel | None] = []
    made: dict[Tensor, int] = {}
    for node in inputs.partition.graph.nodes:
        if node.op.alias or node.op.name in (*_OUTSIDE_ARENA, "assign", "group"):
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
    parts, places, end = [], [], 0
    for body in bodies(node):
        part = _body_partition(body, outer)
        layout = plan_layout(part, bindings)
        places.append(0 if node.op is cond else end)
        end = max(end, places[-1] + align_up(layout.arena.nbytes))
        parts.append((part, layout))
    carried = []
    for tensor in _loop_state(node):
        spec = tensor.spec.bind(bindings)
        carried.append((spec, end))
        end += 2 * align_up(nbytes(spec))
    return BodyLayout(tuple(parts), tuple(places), tuple(carried), end)


def _body_partition(body: Body, outer: Partition) -> Partition:
    """Make a partition of a body: its parameters are feeds, its results fetches."""
    graph = body.graph
    feeds = tuple(graph.names[node] for node in graph.placeholders)
    results = {str(i): t for i, t in enumerate(body.outputs)}
    return Partition(outer.device, graph, feeds, results, outer.checks)


def _loop_state(node: Node) -> tuple[Tensor, ...]:
    if node.op is scan:
        return tuple(node.attrs["body"].outputs[: node.attrs["carries"]])
    if node.op is while_loop:
        return tuple(node.attrs["body"].outputs[: node.attrs["states"]])
    return ()


def _live_ranges(
    inputs: _PlanInputs, sections: Sequence[ParallelSection]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, int]]:
    """Find which results reuse a buffer, and how long each tensor of the arena is needed.

    Returns:
        Result -> the first owner of the buffer that it reuses; tensor -> the last position that
        reads it.
    """
    partition, specs, roots = inputs.partition, inputs.specs, inputs.roots
    regions, deferred, staged = inputs.regions, inputs.deferred, inputs.staged
    position = inputs.position
    graph = partition.graph
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
    held = {roots[t] for t in partition.fetches.values()}
    for node in graph.nodes:
        # A sent buffer may still be on the wire, and a commit reads its inputs, until the step
        # ends.
        if node.op.name in (*SENDING_OPS, "assign") or node in deferred:
            fused = regions.get(node)
            held.update(roots[t] for t in (node.inputs if fused is None else fused.operands))
    deaths: dict[Tensor, int] = {}
    shared: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        if node in staged:
            deaths[node.outputs[0]] = end
        if node.op.name in _OUTSIDE_ARENA or node.op.alias or node.op.name == "assign":
            continue
        fused = regions.get(node)
        if node in deferred or (fused is not None and node is not fused.last):
            continue
        at = position[node]
        results = node.outputs if fused is None else fused.results
        for tensor in results:
            deaths[tensor] = end if tensor in held else last.get(tensor, at)
        if fused is not None or (node.op.elementwise and node.op.into is not None):
            operands = node.inputs if fused is None else fused.operands
            _reuse_dying_inputs(results, operands, fused, specs, roots, deaths, shared, at)
        elif node.op.in_place and _reads_memory_once(node, roots):
            _reuse_dying_inputs(results, node.inputs[:1], None, specs, roots, deaths, shared, at)
    return shared, deaths


def _reads_memory_once(node: Node, roots: Mapping[Tensor, Tensor]) -> bool:
    """Return True if no other input shares the memory of the first one."""
    return all(roots[t] is not roots[node.inputs[0]] for t in node.inputs[1:])


def _reuse_dying_inputs(
    results: Sequence[Tensor],
    operands: Sequence[Tensor],
    fused: FusedRegion | None,
    specs: Mapping[Tensor, TensorSpec],
    roots: Mapping[Tensor, Tensor],
    deaths: Mapping[Tensor, int],
    shared: dict[Tensor, Tensor],
    at: int,
) -> None:
    """Let each result reuse the buffer of an operand of equal spec that dies at this position.

    The operand must be read once only: a second read could see an element that is already
    overwritten.
    """
    reused: set[Tensor] = set()
    read = Counter(roots[t] for t in (operands if fused else dict.fromkeys(operands)))
    for result in results:
        for source in operands:
            before = roots[source]
            if deaths.get(before) != at or read[before] > 1 or specs[source] != specs[result]:
                continue
            if fused is not None and not fused.replaces(result, source):
                continue
            leader = shared.get(before, before)
            if leader not in reused:
                reused.add(leader)
                shared[result] = leader
                break
