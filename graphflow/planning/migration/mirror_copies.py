"""Give new mirrors the values of their variables, piece by piece, between the session's steps.

A piece is some small variables, or some rows of a large one. It is copied by a step of its own,
which counts for nothing. From then on the updates of later steps keep variable and mirror equal. So
a mirror is copied after those that its update reads, and is right once all its pieces were copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.frontend.builders import placeholder
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.tensors.take import take
from graphflow.planning.deployment import Deployment
from graphflow.planning.mirrors.mirrors import Mirrors, make_mirror
from graphflow.runtime.host.host_variables import MIRROR
from graphflow.runtime.partitioning.partition import partition

Array = np.ndarray[Any, Any]
PIECE_BYTES = 32 << 20
"""Bytes of a piece; a single row may have more."""


class MirrorCopies:
    """Copies the values of a session's variables to their new mirrors."""

    def __init__(self, deployment: Deployment, mirrors: Mirrors) -> None:
        self._deployment = deployment
        self._mirrors = mirrors
        self._state = deployment.state
        self._large: _RowCopy | None = None

    @property
    def is_done(self) -> bool:
        """True if every mirror has the value of its variable."""
        return self._state.mirrors.are_current

    def restart(self) -> None:
        """Forget what was begun, after workers were lost."""
        self._large = None

    def copy_piece(self) -> None:
        """Copy the next piece.

        Raises:
            WorkerLost: a worker was lost meanwhile.
        """
        if self._large is not None and self._large.homes != self._homes(self._large.variable):
            self._large = None
        if self._large is None:
            chosen = self._choose()
            if len(chosen) > 1 or _row_count(chosen[0]) < 2:
                self._copy_whole(chosen)
            else:
                self._large = self._begin_rows(chosen[0])
            return
        large = self._large
        self._run(large.compiled, {large.feed: large.rows(PIECE_BYTES)})
        if large.is_done:
            self._large = None
            self._deployment.hosts.forget([large.compiled.program], {})
            self._state.mirrors.note_current([large.variable])

    def _homes(self, variable: Node) -> tuple[str | None, str | None]:
        home = self._state.homes.get(variable, "")
        return self._mirrors.holder(home), self._state.mirrors.homes.get(variable)

    def _choose(self) -> list[Node]:
        """Return the variables to copy next: some small ones, a large one, or all that read each
        other's mirrors."""
        mirrors = self._state.mirrors
        waiting = [node for node in mirrors.homes if node not in mirrors.current]
        ready = [node for node in waiting if mirrors.current.issuperset(mirrors.reads_of(node))]
        chosen, left = ready[:1], PIECE_BYTES
        for node in ready:
            left -= nbytes(node.specs[0])
            if left >= 0 and node not in chosen:
                chosen.append(node)
        return chosen or waiting

    def _copy_whole(self, variables: Sequence[Node]) -> None:
        assigns, mirrors = [], {}
        for node in variables:
            mirrors[node] = mirror = make_mirror(node, self._state.mirrors.homes[node])
            assigns.append(REGISTRY["assign"](mirror.outputs[0], node.outputs[0]))
        compiled = self._compile(assigns, mirrors)
        self._run(compiled, {})
        self._deployment.hosts.forget([compiled.program], {})
        self._state.mirrors.note_current(variables)

    def _begin_rows(self, variable: Node) -> _RowCopy:
        mirror = make_mirror(variable, self._state.mirrors.homes[variable])
        rows = placeholder("int64", (None,), name="rows")
        read = take(variable.outputs[0], rows, 0)
        written: Tensor = REGISTRY["scatter_rows"](mirror.outputs[0], rows, read, reduction="none")
        assign: Tensor = REGISTRY["assign"](mirror.outputs[0], written)
        compiled = self._compile([assign], {variable: mirror}, {written.node: mirror})
        return _RowCopy(variable, rows.node, compiled, self._homes(variable))

    def _compile(
        self,
        assigns: Sequence[Tensor],
        mirrors: Mapping[Node, Node],
        beside: Mapping[Node, Node] | None = None,
    ) -> CompiledFetches:
        """Give the workers the program of some assignments.

        Args:
            mirrors: the mirror of each variable.
            beside: nodes that run where a mirror is, besides the assignments.
        """
        state = self._state
        group: Tensor = REGISTRY["group"](*assigns, name="copied_mirrors")
        source = Graph([group]).verify()
        compiled = CompiledFetches((group,), source, source)
        home = {node: self._mirrors.holder(state.homes[node]) for node in mirrors}
        there = {mirror: state.mirrors.homes[node] for node, mirror in mirrors.items()}
        there |= {each.node: there[each.node.inputs[0].node] for each in assigns}
        there |= {node: there[mirror] for node, mirror in (beside or {}).items()}
        reads = {n: home[n.inputs[0].node] for n in source.of_op("take")}
        names = {node: state.names[node] for node in mirrors}
        names |= {mirror: MIRROR + state.names[node] for node, mirror in mirrors.items()}
        compiled.partitions = partition(
            source, {**reads, **home, **there}, None, names, self._mirrors.devices
        )
        compiled.program = self._deployment.steps.add(compiled)
        return compiled

    def _run(self, compiled: CompiledFetches, feeds: Mapping[Node, Array]) -> None:
        """Run a step that is not counted."""
        steps = self._deployment.steps
        kept = steps.trace, steps.last, steps.committed
        steps.trace = None
        try:
            bindings = compiled.bindings({node: rows.shape for node, rows in feeds.items()})
            steps.run(compiled, feeds, bindings)
        finally:
            steps.trace, steps.last, steps.committed = kept


@dataclass
class _RowCopy:
    """A large variable that is copied by rows.

    Attributes:
        feed: the placeholder of the numbers of rows.
        compiled: the program that copies some rows.
        homes: the devices of the variable and its mirror.
        next: the first row that was not copied yet.
    """

    variable: Node
    feed: Node
    compiled: CompiledFetches
    homes: tuple[str | None, str | None]
    next: int = field(default=0)

    @property
    def is_done(self) -> bool:
        return self.next >= _row_count(self.variable)

    def rows(self, most: int) -> Array:
        """Return the numbers of the next rows, of at most so many bytes, and count them as copied.

        All pieces have the same number of rows, so that they share a compiled program.
        """
        count = _row_count(self.variable)
        size = max(1, most // (nbytes(self.variable.specs[0]) // count))
        self.next = min(count, self.next + size)
        return np.arange(max(0, self.next - size), self.next)


def _row_count(variable: Node) -> int:
    """Return the number of rows of a variable that has more bytes than a piece; else 1."""
    spec = variable.specs[0]
    return int(spec.shape[0]) if spec.shape and nbytes(spec) > PIECE_BYTES else 1
