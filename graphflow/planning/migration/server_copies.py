"""Copy variables, and ranges of rows, to the variables that replace them when servers change.

Steps of their own copy them, some MiB each, straight from the server that has them to the one that
is to have them. They count for nothing: random numbers of later steps are those that they would
have been. The variables that are copied stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.formatting import show_bytes
from graphflow.errors import MemoryLimitError
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.frontend.builders import placeholder
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.planning.deployment import Deployment
from graphflow.strategy import RowCopies, ServerMoves

Array = np.ndarray[Any, Any]
PIECE_BYTES = 32 << 20
"""Bytes that a step copies; a single variable or range may have more."""


class ServerCopies:
    """Copies what moves between servers.

    Args:
        deployment: the session's programs and variables.
        moves: the copies.
    """

    def __init__(self, deployment: Deployment, moves: ServerMoves) -> None:
        self._deployment = deployment
        self._moves = moves

    @property
    def made(self) -> list[Node]:
        """The variables that are new."""
        pairs = [*self._moves.whole, *(pair for rows in self._moves.rows for pair in rows.pairs)]
        return [*dict.fromkeys(target for _, target in pairs)]

    @property
    def nbytes(self) -> int:
        """The bytes that travel between devices."""
        total = sum(nbytes(a.specs[0]) for a, b in self._moves.whole if self._is_apart(a, b))
        for rows in self._moves.rows:
            for a, b in rows.pairs:
                if self._is_apart(a, b):
                    total += _row_bytes(a) * rows.width * len(rows.sources)
        return total

    def check_memory(self) -> None:
        """Check that servers have room for what they have and what they get.

        Raises:
            MemoryLimitError: one has not.
        """
        deployment = self._deployment
        held: Counter[str] = Counter()
        for node in {*deployment.state.homes, *self.made}:
            held[self.home(node)] += int(nbytes(node.specs[0]))
        for name in {self.home(node) for node in self.made}:
            limit = deployment.cluster.device(name).memory
            if held[name] > limit:
                raise MemoryLimitError(
                    f"while servers change, {name} would hold {show_bytes(held[name])} of "
                    f"variables, old ones and new ones, and it has {show_bytes(limit)}; give it "
                    "more memory, or save a checkpoint and load it on the other number of servers"
                )

    def run(self) -> None:
        """Copy all of them.

        Raises:
            WorkerLost, LinkLost, StepTimeout: it failed; nothing has changed for the session.
        """
        for pairs in _batches(self._moves.whole):
            self._copy_whole(pairs)
        for rows in self._moves.rows:
            self._copy_rows(rows)

    def home(self, node: Node) -> str:
        """Return the device of a variable, as plans name it."""
        return self._deployment.state.homes.get(node) or str(node.device)

    def _is_apart(self, source: Node, target: Node) -> bool:
        return self.home(source) != self.home(target)

    def _copy_whole(self, pairs: Sequence[tuple[Node, Node]]) -> None:
        assigns = [REGISTRY["assign"](b.outputs[0], a.outputs[0]) for a, b in pairs]
        devices = {each.node: self.home(b) for each, (_, b) in zip(assigns, pairs, strict=True)}
        self._run(assigns, devices, pairs, [{}])

    def _copy_rows(self, rows: RowCopies) -> None:
        """Copy ranges of rows, all states of a table together."""
        source, target = (self.home(node) for node in rows.pairs[0])
        steps, first, there, count = (
            placeholder("int64", shape, name=name)
            for name, shape in (("steps", (None,)), ("first", (None,)), ("there", (None,)),
                                ("count", ()))
        )  # fmt: skip
        read, written = (FUNCTIONS["reshape"](FUNCTIONS["expand_dims"](at, 1) + steps, (-1,))
                         for at in (first, there))  # fmt: skip
        devices = dict.fromkeys(_nodes_behind(read), source)
        devices |= dict.fromkeys(_nodes_behind(written), target)
        assigns = []
        for a, b in rows.pairs:
            taken = FUNCTIONS["take"](a.outputs[0], read, 0)
            value = REGISTRY["update_rows"](b.outputs[0], written, taken, count)
            assigns.append(REGISTRY["assign"](b.outputs[0], value))
            devices |= {taken.node: source, value.node: target, assigns[-1].node: target}
        width = np.arange(rows.width)
        size = sum(_row_bytes(a) for a, _ in rows.pairs) * rows.width
        feeds = [
            {
                steps.node: width, first.node: rows.sources[part], there.node: rows.targets[part],
                count.node: np.array(len(width) * (part.stop - part.start)),
            }
            for part in _parts(len(rows.sources), max(1, PIECE_BYTES // max(1, size)))
        ]  # fmt: skip
        self._run(assigns, devices, rows.pairs, feeds)

    def _run(
        self,
        assigns: Sequence[Tensor],
        devices: Mapping[Node, str],
        pairs: Sequence[tuple[Node, Node]],
        feeds: Sequence[Mapping[Node, Array]],
    ) -> None:
        """Run assignments once for each of some feeds, as steps that are not counted."""
        deployment, steps = self._deployment, self._deployment.steps
        group: Tensor = REGISTRY["group"](*assigns, name="moved_to_servers")
        source = Graph([group]).verify()
        compiled = CompiledFetches((group,), source, source)
        homes = {node: self.home(node) for pair in pairs for node in pair}
        compiled.devices = {**homes, **devices}
        bindings = [compiled.bindings({n: v.shape for n, v in fed.items()}) for fed in feeds]
        deployment.partition_placed(compiled, None, bindings[0])
        kept = steps.last, steps.committed
        try:
            deployment.send_programs(compiled)
            for fed, sizes in zip(feeds, bindings, strict=True):
                steps.run(compiled, fed, sizes)
                steps.committed = kept[1]
        finally:
            steps.last, steps.committed = kept
            deployment.compiled.pop(compiled.key, None)
        deployment.hosts.forget([compiled.program], {})


def _nodes_behind(tensor: Tensor) -> list[Node]:
    """Return the nodes that compute a tensor from feeds."""
    return [node for node in Graph([tensor]).nodes if node.op.name != "placeholder"]


def _row_bytes(node: Node) -> int:
    spec = node.specs[0]
    return int(nbytes(spec)) // max(1, int(spec.shape[0]))


def _parts(count: int, most: int) -> Iterator[slice]:
    """Yield parts of at most so many, all of one size: the last one may overlap the one before."""
    size = min(count, most)
    for start in range(0, count, size):
        first = min(start, count - size)
        yield slice(first, first + size)


def _batches(pairs: Sequence[tuple[Node, Node]]) -> Iterator[list[tuple[Node, Node]]]:
    """Yield pairs of variables, about `PIECE_BYTES` at a time."""
    batch: list[tuple[Node, Node]] = []
    left = PIECE_BYTES
    for pair in pairs:
        size = int(nbytes(pair[0].specs[0]))
        if batch and size > left:
            yield batch
            batch, left = [], PIECE_BYTES
        batch.append(pair)
        left -= size
    if batch:
        yield batch


__all__ = ["ServerCopies"]
