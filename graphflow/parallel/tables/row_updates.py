"""Updates of looked-up rows, as optimisers build them: which nodes they are, and what they need.

An optimiser that updates rows only finds the distinct ids (`unique`), sums the gradients of each
(`take_grad`), reads these rows of the table and of its slots (`take`), computes, and writes them
back (`update_rows`; see `optim/update_targets.py`). Between reading and writing, each row is
computed by itself, so the owner of a row can do it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Shape
from graphflow.parallel.sharding.rules.node_rule import rule_of

Readers = Mapping[Tensor, Sequence[Node | None]]
"""The nodes that read each tensor; None stands for a fetch."""


@dataclass(frozen=True, eq=False)
class RowLookup:
    """A lookup whose gradient is part of an update.

    Attributes:
        ids: the ids, of any shape.
        gradient: the gradient of the row of each id, of shape ids.shape + table.shape[1:].
        sums: the node that sums the gradients of each distinct row.
    """

    ids: Tensor
    gradient: Tensor
    sums: Node


@dataclass(frozen=True, eq=False)
class RowUpdate:
    """The update of the looked-up rows of a table and of its slots.

    Attributes:
        table: the table, a variable.
        lookups: the lookups, in the order in which their gradients are added.
        rows: the distinct rows, as the nodes of the update read them.
        number: how many of these rows are in use.
        results: the nodes that write rows: of slots, and of the table.
        computed: the nodes that compute each row by itself, the results among them, in build order.
        replaced: all nodes that nothing else needs, and `computed`.
        firsts: of a hash table, what the nodes read of the lookup of each distinct row: the tensor
            that they read, and the lookup's, which has an element for each id.
    """

    table: Node
    lookups: tuple[RowLookup, ...]
    rows: Tensor
    number: Tensor
    results: tuple[Node, ...]
    computed: tuple[Node, ...]
    replaced: frozenset[Node]
    firsts: Mapping[Tensor, Tensor] = field(default_factory=dict)

    @property
    def states(self) -> list[Node]:
        """The variables whose rows are written."""
        return [node.inputs[0].node for node in self.results]


def readers_of(graph: Graph) -> dict[Tensor, list[Node | None]]:
    """Return the nodes that read each tensor; None stands for a fetch."""
    readers: dict[Tensor, list[Node | None]] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            readers.setdefault(tensor, []).append(node)
    for tensor in graph.outputs:
        readers.setdefault(tensor, []).append(None)
    return readers


def find_row_updates(graph: Graph, readers: Readers) -> list[RowUpdate]:
    """Return the updates of looked-up rows in a graph that their rows' owners can do alone."""
    groups: dict[Tensor, list[Node]] = {}
    for node in graph.of_op("update_rows"):
        groups.setdefault(node.inputs[1], []).append(node)
    found = (_find_update(graph, readers, results) for results in groups.values())
    return [update for update in found if update is not None]


def _find_update(graph: Graph, readers: Readers, results: list[Node]) -> RowUpdate | None:
    """Return the update that writes some rows; None if its nodes are not as optimisers build
    them."""
    last = results[-1]  # optimisers write slots first, and the table last
    rows, number = last.inputs[1], last.inputs[3]
    unique, table = number.node, last.inputs[0].node
    states = [node.inputs[0].node for node in results]
    if unique.op.name != "unique" or any(node.op.name != "variable" for node in states):
        return None
    if any(node.inputs[3] is not number for node in results):
        return None
    after = nodes_after(graph, unique)
    sums = [n for n in graph.of_op("take_grad") if n.inputs[1].node in after]
    ids = unique.inputs[0]
    flat = ids.node.inputs if ids.node.op.name == "concat" and len(sums) > 1 else (ids,)
    known = {tensor for node in graph.of_op("table_rows") for tensor in node.inputs}
    firsts = {
        node.outputs[0]: whole
        for node in readers.get(unique.outputs[0], ())
        if node is not None
        if node.op.name == "take" and (whole := _per_id(node.inputs[0])) in known
    }
    given = {rows, number, *(n.outputs[0] for n in sums), *firsts}
    computed = _nodes_between(results, given, after)
    if len(flat) != len(sums) or computed is None:
        return None
    if not all(_is_row_by_row(node, rows, after) for node in computed):
        return None
    lookups = []
    for each, node in zip(flat, sums, strict=True):
        looked_up = _looked_up_ids(each, table, readers)
        gradient = _restore_shape(node.inputs[0], (*looked_up.shape, *table.specs[0].shape[1:]))
        if gradient is None:
            return None
        if looked_up.node.op.name == "table_rows" and gradient.node.op.name == "where":
            gradient = gradient.node.inputs[1]  # the other ids have no row
        lookups.append(RowLookup(looked_up, gradient, node))
    kept = {t.node for lookup in lookups for t in (lookup.ids, lookup.gradient)}
    kept |= {t.node for node in computed for t in node.inputs if t.node not in after}
    replaced = _nodes_only_for(graph, readers, computed, kept)
    inside = after & nodes_before(results)
    if not (inside <= replaced and _is_closed(computed, results, replaced, readers)):
        return None
    return RowUpdate(
        table, tuple(lookups), rows, number, tuple(results), tuple(computed), frozenset(replaced),
        firsts,
    )  # fmt: skip


def _per_id(tensor: Tensor) -> Tensor:
    """Return the tensor of a lookup that an optimiser flattened."""
    while tensor.node.op.name in ("reshape", "concat") and len(tensor.node.inputs) == 1:
        tensor = tensor.node.inputs[0]
    return tensor


def nodes_after(graph: Graph, start: Node) -> set[Node]:
    """Return a node and all that depend on it."""
    after = {start}
    for node in graph.nodes:
        if any(t.node in after for t in node.inputs):
            after.add(node)
    return after


def nodes_before(ends: Sequence[Node]) -> set[Node]:
    """Return some nodes and all that they depend on."""
    found = set(ends)
    stack = list(ends)
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.node not in found:
                found.add(tensor.node)
                stack.append(tensor.node)
    return found


def _nodes_between(ends: list[Node], given: set[Tensor], after: set[Node]) -> list[Node] | None:
    """Return the nodes, in build order, that lead from given tensors to `ends`; None if they need
    something else that depends on the distinct ids."""
    found = set(ends)
    stack = list(ends)
    while stack:
        for tensor in stack.pop().inputs:
            if tensor in given or tensor.node not in after or tensor.node in found:
                continue
            if tensor.node.op.name in ("unique", "take_grad"):
                return None
            found.add(tensor.node)
            stack.append(tensor.node)
    return sorted(found, key=lambda node: node.serial)


def _is_row_by_row(node: Node, rows: Tensor, after: set[Node]) -> bool:
    """Return True if each row of a node's output follows from the same row of its inputs."""
    if node.op.name == "update_rows":
        return node.inputs[1] is rows and node.inputs[2].node in after
    if node.op.name == "take":
        state = node.inputs[0].node
        return node.inputs[1] is rows and state.op.name == "variable" and not node.attrs["axis"]
    count, out = rows.shape[0], node.outputs[0]
    own = [t for t in node.inputs if t.node in after]
    others = [t for t in node.inputs if t.node not in after]
    if not all(t.ndim and t.shape[0] == count for t in [*own, *node.outputs]):
        return False
    if not all(t.ndim < out.ndim or t.shape[0] == 1 for t in others):
        return False
    if node.op.name == "reshape":
        return True  # of each row, since rows stay first
    if node.op.elementwise:
        return all(t.ndim == out.ndim for t in own)
    rule = rule_of(node)
    named = zip(node.inputs, rule.inputs, strict=True)
    letters = {names[0] for tensor, names in named if tensor.node in after}
    letters |= {names[0] for names in rule.outputs}
    sized = rule.sharding.sizes is not None or {"shape", "size"} & set(node.attrs)
    return not sized and len(letters) == 1 and letters.pop().islower()


def _looked_up_ids(flat: Tensor, table: Node, readers: Readers) -> Tensor:
    """Return the ids of the lookup for which an optimiser made flat row numbers."""
    if flat.node.op.name != "ravel_multi_index":
        return flat
    ids: Tensor = flat.node.inputs[0]
    looked_up = {
        node.inputs[1]
        for node in readers.get(table.outputs[0], ())
        if node is not None and node.op.name == "take"
    }
    inner = ids.node.inputs[0] if ids.node.op.name == "reshape" else ids
    return inner if ids not in looked_up and inner in looked_up else ids


def _restore_shape(gradient: Tensor, shape: Shape) -> Tensor | None:
    """Return a gradient as it was before an optimiser flattened it; None if it had another
    shape."""
    if gradient.shape != shape and gradient.node.op.name == "reshape":
        gradient = gradient.node.inputs[0]
    return gradient if gradient.shape == shape else None


def _nodes_only_for(
    graph: Graph, readers: Readers, computed: Sequence[Node], kept: set[Node]
) -> set[Node]:
    """Return computed nodes and all others that only these and each other read, except kept
    ones."""
    found = set(computed)
    for node in reversed(graph.nodes):
        if node in found or node in kept or node.op.name in ("variable", "placeholder", "constant"):
            continue
        users = [user for t in node.outputs for user in readers.get(t, ())]
        if users and all(user is not None and user in found for user in users):
            found.add(node)
    return found


def _is_closed(
    computed: Sequence[Node], results: Sequence[Node], replaced: set[Node], readers: Readers
) -> bool:
    """Return True if nothing outside reads what is replaced, apart from the results."""
    ends = set(results)
    return all(
        user is not None and user in replaced
        for node in replaced
        if node not in ends
        for tensor in node.outputs
        for user in readers.get(tensor, ())
    )


def order_by_update(
    nodes: Sequence[Node], updates: Sequence[RowUpdate]
) -> Iterator[Node | RowUpdate]:
    """Yield nodes in an order in which each update is one step, in place of its nodes.

    An update comes where its last node was. Nodes before that which read its results follow it.
    """
    owner = {node: update for update in updates for node in update.replaced}
    position = {node: i for i, node in enumerate(nodes)}
    last = {update: max(update.replaced, key=position.__getitem__) for update in updates}
    open_updates = set(updates)
    waiting: list[Node] = []
    for node in nodes:
        update = owner.get(node)
        if update is not None:
            if node is last[update]:
                yield update
                open_updates.remove(update)
                ready, waiting = waiting, []
                for each in ready:
                    if _waits(each, owner, open_updates, waiting):
                        waiting.append(each)
                    else:
                        yield each
        elif _waits(node, owner, open_updates, waiting):
            waiting.append(node)
        else:
            yield node


def _waits(
    node: Node, owner: Mapping[Node, RowUpdate], open_updates: set[RowUpdate], waiting: list[Node]
) -> bool:
    """Return True if a node reads a result of an open update, or a node that waits for one."""
    return bool(open_updates) and any(
        owner.get(t.node) in open_updates or t.node in waiting for t in node.inputs
    )


__all__ = [
    "Readers", "RowLookup", "RowUpdate", "find_row_updates", "nodes_after", "nodes_before",
    "order_by_update", "readers_of",
]  # fmt: skip
