"""Deferred updates: nodes that run in the commit part, straight into the variable that they update.

An optimiser's update is often read by its assignment alone. Such an update needs no buffer and no
copy: the commit part computes it in place. It may not read a variable that another update of the
same commit has already changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import is_inexact
from graphflow.ops.kernels.fusion.fusion import FusedRegion
from graphflow.runtime.partitioning.partition import Partition


def find_deferred(
    partition: Partition,
    roots: Mapping[Tensor, Tensor],
    commits: tuple[Node, ...],
    regions: Mapping[Node, FusedRegion],
) -> dict[Node, Tensor]:
    """Find the nodes that can run in the commit part, straight into the variable that they update.

    Such a node is elementwise or in place, only an assign reads it, and of the variables that the
    step changes it reads no other than its own. Of a region, all results qualify or none.

    Returns:
        Node -> the variable that it writes to.
    """
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
            and value not in outputs  # else it is fetched, or a member of a group
            and assign.outputs[0] not in fetched
        ):
            candidates[node] = variable
    found: dict[Node, Tensor] = {}
    known: dict[Node, bool] = {}  # last node of a region -> result
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
    """Return True if a node, with all results of its region, may write straight to its variables.

    A variable that the step changes may be read only element by element, before that element is
    written.
    """
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
    """Return True if a node is elementwise and cannot fail halfway through a commit.

    Nodes on integers can: numpy refuses negative powers of integers.
    """
    return node.op.elementwise and is_inexact(node.outputs[0].dtype)


def _updates_in_place(node: Node, variable: Tensor, roots: Mapping[Tensor, Tensor]) -> bool:
    """Return True if a node updates a variable in place and reads it as its first input only."""
    return (
        node.op.in_place
        and node.inputs[0] is variable
        and all(roots[t] is not variable for t in node.inputs[1:])
    )
