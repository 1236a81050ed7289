"""The mirrors of a session's variables: where they are, and which have their variables' values.

A mirror changes with the same commit as its variable, in another process (`planning.mirrors`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from graphflow.ir.op import Node


class VariableMirrors:
    """The mirrors, by the variables that they mirror.

    Attributes:
        homes: the device of each variable's mirror.
        current: the variables whose mirrors have their values.
    """

    def __init__(self) -> None:
        self.homes: dict[Node, str] = {}
        self.current: set[Node] = set()
        self._reads: dict[Node, frozenset[Node]] = {}

    @property
    def are_current(self) -> bool:
        """True if all mirrors have the values of their variables."""
        return len(self.current) == len(self.homes)

    def add(self, homes: Mapping[Node, str], reads: Mapping[Node, frozenset[Node]]) -> None:
        """Note the mirrors of a program that workers get.

        Args:
            homes: the device of each variable's mirror.
            reads: the other variables whose mirrors the update of a mirror reads.
        """
        self.homes.update(homes)
        for node, others in reads.items():
            self._reads[node] = self.reads_of(node) | others

    def note_current(self, nodes: Iterable[Node]) -> None:
        """Note that mirrors got the values of their variables.

        A mirror keeps its value only if those that its update reads are right as well.
        """
        self.current.update(nodes)
        while wrong := [n for n in self.current if not self.current.issuperset(self.reads_of(n))]:
            self.current.difference_update(wrong)

    def reads_of(self, node: Node) -> frozenset[Node]:
        """Return the other variables whose mirrors the update of a variable's mirror reads."""
        return self._reads.get(node, frozenset())

    def drop(self, node: Node) -> str | None:
        """Note that a variable has no mirror any more; return where it was, None if nowhere."""
        self.current.discard(node)
        return self.homes.pop(node, None)

    def forget(self, nodes: Collection[Node]) -> None:
        """Forget what the updates of mirrors read, of variables that others have replaced."""
        gone = {*nodes}
        for node, others in self._reads.items():
            if not gone.isdisjoint(others):  # its mirror has what it read of them
                self._reads[node] = others - gone
        for node in gone:
            self._reads.pop(node, None)

    def clear(self) -> None:
        """Forget all mirrors: their values were lost."""
        self.homes.clear()
        self.current.clear()
        self._reads.clear()
