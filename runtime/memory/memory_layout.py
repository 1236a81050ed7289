"""Layout: which memory each tensor of a partition lives in, and which assignments run in place at
commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, is_inexact, nbytes
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
from graphflow.runtime.partitioning.check_modes import EVERY
from graphflow.runtime.partitioning.partition import Partition

_OUTSIDE_ARENA = ("constant", "placeholder", "variable", "recv", "send")
"""Ops whose value is not in the arena (or that have none)."""

_SYNCHRONISING = ("send", "recv", "collective_finish")
"""Ops that wait for other devices, or hand over to them."""


@dataclass(frozen=True)
class BodyLayout:
    """What the bodies of a node need while it runs.

    Attributes:
        parts: each body as a partition, and its layout.
        places: where the arena of each begins in the node's memory, in bytes.
        carried: specs and places of what a loop carries; it has two sets of buffers.
        nbytes: of it all.
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
        roots: the tensor whose memory each tensor shares (itself, mostly).
        blocks: index into the arena's offsets for each root that is in the arena.
        regions: the region of each node that is computed in one.
        deferred: elementwise nodes that run in the commit part, straight into the variable they
            update; all results of a region, or none.
        staged: assigns whose value is copied before any variable changes.
        commits: all assigns, in order.
        inner: what nodes with bodies need besides.
        tasks: generated kernels of nodes that are in no region.
        scratch: the index of the block that a node of either kind works in.
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
        """Where the tensor begins in the arena, in bytes."""
        owner = tensor if tensor in self.blocks else self.roots[tensor]
        return self.arena.offsets[self.blocks[owner]]


def plan_layout(partition: Partition, bindings: Mapping[str, int]) -> MemoryLayout:
    """Lay a partition out for given sizes of its symbols."""
    graph = partition.graph
    specs = _bound_specs(graph, bindings)
    roots = roots_of(graph)
    commits = graph.of_op("assign")
    kind = DeviceName.parse(partition.device).kind or "cpu"
    wanted = partition.fetches.values()
    whole = partition.checks != EVERY  # else each node is a line of its own
    regions = plan_regions(graph, kind, wanted, specs, bindings, roots) if whole else {}
    # What is checked before it is committed cannot run straight into its variable.
    deferred = {} if partition.checks else _find_deferred(partition, roots, commits, regions)
    assigned = {assign.inputs[0] for assign in commits}
    staged = frozenset(
        a
        for a in commits
        if roots[a.inputs[1]] in assigned and roots[a.inputs[1]] is not a.inputs[0]
    )
    position = {node: i for i, node in enumerate(graph.nodes)}
    position.update({node: position[fused.last] for node, fused in regions.items()})
    inner = {n: _plan_bodies(n, partition, bindings) for n in graph.holders}
    tasks = _native_tasks(partition, specs, bindings, regions) if whole else {}
    needs = {node: need.nbytes for node, need in inner.items()}
    needs.update({node: task.scratch for node, task in tasks.items() if task.scratch})
    is_cpu = DeviceName.parse(partition.device).kind == "cpu"
    for fused in {id(f): f for f in regions.values() if f.region.over and is_cpu}.values():
        if need := fused.task.scratch:
            needs[fused.last] = need
    until = _epilogue_positions(partition, tasks, regions, position)
    decided = _PlanInputs(
        partition, specs, roots, regions, deferred, staged, position, needs, until
    )
    blocks, scratch, arena = _plan_memory(decided, ())
    wide = find_parallel_sections(_scheduled_kernels(decided, tasks)) if is_cpu else ()
    if wide:
        spread = _plan_memory(decided, wide)
        if spread[2].nbytes <= _BRANCH_GROWTH * arena.nbytes + _BRANCH_SLACK_BYTES:
            blocks, scratch, arena = spread
    return MemoryLayout(
        specs, roots, blocks, arena, regions, deferred, staged, commits, inner, tasks, scratch
    )


def _bound_specs(graph: Graph, bindings: Mapping[str, int]) -> dict[Tensor, TensorSpec]:
    """The concrete spec of each tensor; nodes that are copies share theirs."""
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
    """What is known of a partition before its memory is planned.

    Attributes:
        position: of each node; that of its region, where it is in one.
        needs: bytes that nodes work in.
        until: up to which position nodes still work, which a region follows block by block.
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
    """Where the first region runs that reads the result of a task with blocks
    (`gemm_epilogues.py`)."""
    consumers = partition.graph.consumers
    readers = {
        node: [position[c] for c in consumers[node] if c in regions]
        for node, task in tasks.items()
        if task.blocks
    }
    return {node: min(places) for node, places in readers.items() if places}


def _plan_memory(
    decided: _PlanInputs, wide: Sequence[ParallelSection]
) -> tuple[dict[Tensor, int], dict[Node, int], ArenaPlan]:
    """The block of each tensor and of what nodes work in, and where blocks are.

    Args:
        wide: stretches in which no two branches use the same memory, so that they can run at once.
    """
    specs, position = decided.specs, decided.position
    shared, deaths = _live_ranges(decided, wide)
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
    for node, need in decided.scratch_bytes.items():
        scratch[node] = len(lives)
        end = decided.busy_until.get(node, position[node])
        end = len(decided.partition.graph.nodes) if node in decided.deferred else end
        lives.append(BufferLifetime(position[node], end, need))
    return blocks, scratch, plan_branches(lives, wide) if wide else plan_arena(lives)


_BRANCH_GROWTH, _BRANCH_SLACK_BYTES = 1.25, 2 << 20
"""Memory may grow by so much, and by so many bytes, for branches that run at once."""


def _scheduled_kernels(
    decided: _PlanInputs, tasks: Mapping[Node, KernelTask]
) -> list[ScheduledKernel | None]:
    """The kernels in order, each with those that it waits for; None for what is none."""
    units: list[ScheduledKernel | None] = []
    made: dict[Tensor, int] = {}
    for node in decided.partition.graph.nodes:
        if node.op.alias or node.op.name in (*_OUTSIDE_ARENA, "assign", "group"):
            if node.op.name in _SYNCHRONISING or node in decided.staged:
                units.append(None)
            continue
        fused = decided.regions.get(node)
        if node in decided.deferred or (fused is not None and node is not fused.last):
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
        sources = {decided.roots[t] for t in operands}
        waits = tuple(made[t] for t in sources if t in made)
        units.append(ScheduledKernel(decided.position[node], task.nanoseconds, waits))
    return units


def _native_tasks(
    partition: Partition,
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    regions: Mapping[Node, FusedRegion],
) -> dict[Node, KernelTask]:
    """The generated kernels of the nodes that have one of their own."""
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
    """Lay out the bodies of a node: one after the other, but only one branch of a cond runs."""
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
    """A body as what a device computes: its parameters are fed, its results are fetched."""
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


def _find_deferred(
    partition: Partition,
    roots: Mapping[Tensor, Tensor],
    commits: tuple[Node, ...],
    regions: Mapping[Node, FusedRegion],
) -> dict[Node, Tensor]:
    """Nodes, elementwise or in place, that only an assign reads, and that read no variable this
    step changes but their own; of a region, all results are such or none is deferred."""
    assigned = {assign.inputs[0] for assign in commits}
    fetched = set(partition.fetches.values())
    outputs = set(partition.graph.outputs)
    consumers = partition.graph.consumers
    candidates: dict[Node, Tensor] = {}
    for assign in commits:
        variable, value = assign.inputs
        node = value.node
        fused = regions.get(node)
        runs_late = fused is not None
        if fused is None:
            runs_late = node.op.into is not None and not node.op.random
            runs_late = runs_late and (
                _cannot_fail(node) or _updates_in_place(node, variable, roots)
            )
        if (
            runs_late
            and len(node.outputs) == 1
            and value.spec == variable.spec
            and all(
                reader is assign or (fused is not None and regions.get(reader) is fused)
                for reader in consumers[node]
            )
            and not consumers[assign]
            and value not in outputs  # fetched, or a member of a group
            and assign.outputs[0] not in fetched
        ):
            candidates[node] = variable
    found: dict[Node, Tensor] = {}
    known: dict[Node, bool] = {}  # by the last node of the region
    for node, variable in candidates.items():
        last = regions[node].last if node in regions else node
        if last not in known:
            known[last] = _reads_only_its_own(node, candidates, assigned, roots, regions)
        if known[last]:
            found[node] = variable
    return found


def _reads_only_its_own(
    node: Node,
    candidates: Mapping[Node, Tensor],
    assigned: set[Tensor],
    roots: Mapping[Tensor, Tensor],
    regions: Mapping[Node, FusedRegion],
) -> bool:
    """Whether what a node computes may be written to its variable at once, with all that its
    region writes: an element is read before it is written."""
    fused = regions.get(node)
    results, operands = (
        (node.outputs, node.inputs) if fused is None else (fused.results, fused.operands)
    )
    if not all(t.node in candidates for t in results):
        return False
    own = {candidates[t.node]: t for t in results}
    read = Counter(roots[t] for t in operands)

    def is_own(operand: Tensor) -> bool:
        result = own.get(roots[operand])
        if result is None or result.spec != operand.spec:
            return False
        return fused is None or (read[roots[operand]] == 1 and fused.replaces(result, operand))

    return len(own) == len(results) and all(roots[t] not in assigned or is_own(t) for t in operands)


def _cannot_fail(node: Node) -> bool:
    """Whether a node is elementwise and cannot fail, half way through a commit: numpy refuses some
    powers of integers."""
    return node.op.elementwise and is_inexact(node.outputs[0].dtype)


def _updates_in_place(node: Node, variable: Tensor, roots: Mapping[Tensor, Tensor]) -> bool:
    """Whether a node changes some places of the variable, and reads it nowhere else."""
    return (
        node.op.in_place
        and node.inputs[0] is variable
        and all(roots[t] is not variable for t in node.inputs[1:])
    )


def _live_ranges(
    decided: _PlanInputs, wide: Sequence[ParallelSection]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, int]]:
    """The first owner of the block that each in-place result takes over, and the last position that
    reads each arena tensor."""
    partition, specs, roots = decided.partition, decided.specs, decided.roots
    regions, deferred, staged = decided.regions, decided.deferred, decided.staged
    position = decided.position
    graph = partition.graph
    end = len(graph.nodes)
    last: dict[Tensor, int] = {}
    for node in graph.nodes:
        at = decided.busy_until.get(node, position[node])
        for tensor in node.inputs:
            root = roots[tensor]
            if last.get(root, -1) < at:
                last[root] = at
    if wide:  # what comes from before a stretch is read by any of its branches until its end
        for tensor, at in last.items():
            home = section_at(wide, at)
            if home is not None and home.first > position[tensor.node]:
                last[tensor] = home.last
    held = {roots[t] for t in partition.fetches.values()}
    for node in graph.nodes:
        # A sent buffer may still be on the wire, and a commit reads its inputs, until the step
        # ends.
        if node.op.name in ("send", "assign") or node in deferred:
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
    """Whether the first input's memory is read by way of no other one."""
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
    """Let each result take over the block of an operand of its spec that dies here, and that is
    read in one way only."""
    taken: set[Tensor] = set()
    read = Counter(roots[t] for t in (operands if fused else dict.fromkeys(operands)))
    for result in results:
        for source in operands:
            before = roots[source]
            if deaths.get(before) != at or read[before] > 1 or specs[source] != specs[result]:
                continue
            if fused is not None and not fused.replaces(result, source):
                continue
            leader = shared.get(before, before)
            if leader not in taken:
                taken.add(leader)
                shared[result] = leader
                break
