"""The limit on iterations of a graph from the wire, and the refusal of loops that cannot end."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.errors import GraphLimitError
from graphflow.ir.graph import Body, bodies
from graphflow.ir.op import Node
from graphflow.runtime.wire.graph_limits import MAX_ITERATIONS


class LoopLimit:
    """Counts the iterations of a graph's loops, bodies before the nodes that hold them.

    Args:
        limit: Iterations of all loops, one in another multiplied. None: `MAX_ITERATIONS`, and loops
            without a bound are taken, too.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._by_body: dict[int, int] = {}  # of the loops in a body, by its id

    def add_body(self, body: Body, nodes: Sequence[Node]) -> None:
        """Count the loops among the `nodes` of a body; raises as `count_iterations`."""
        self._by_body[id(body)] = self.count_iterations(nodes)

    def count_iterations(self, nodes: Sequence[Node]) -> int:
        """Return how often the loops among `nodes` run a body at most; loops without a bound count
        once.

        Raises:
            GraphLimitError: It is more often than the limit, or one of them cannot end.
        """
        total = 0
        for node in nodes:
            held = bodies(node)
            if not held:
                continue
            times = node.attrs.get("length", node.attrs.get("limit"))
            if node.op.name == "while_loop" and times is None:
                self._check_termination(node)
            once = node.op.name not in ("scan", "while_loop") or not isinstance(times, int)
            inner = sum(self._by_body[id(body)] for body in held)
            total += inner if once else max(0, times) * (1 + inner)
            most = self._limit or MAX_ITERATIONS
            if total > most:
                raise GraphLimitError(
                    f"{node} at {node.location} and the loops before it run {total:,} times in "
                    f"all; the limit is {most:,}"
                )
        return total

    def _check_termination(self, loop: Node) -> None:
        """Refuse a loop without a bound where one is required, and one that cannot end."""
        if self._limit is not None:
            raise GraphLimitError(
                f"{loop} at {loop.location} has no bound, and this worker wants one: give it "
                "max_iterations"
            )
        if _is_loop_invariant(loop.attrs["test"], loop.attrs["body"], loop.attrs["states"]):
            raise GraphLimitError(
                f"{loop} at {loop.location} cannot end: its condition depends on nothing that its "
                "body changes"
            )


def _is_loop_invariant(test: Body, body: Body, states: int) -> bool:
    """Return True if a loop's condition has the same value before each iteration."""
    nodes = test.graph.nodes
    if not all(node.op.pure or node.op.name == "placeholder" for node in nodes):
        return False  # random, or a user's function
    kept = [
        before.outputs[0] is after
        for before, after in zip(body.inputs[:states], body.outputs, strict=False)
    ]
    changed = {node for node, same in zip(test.inputs, kept, strict=False) if not same}
    return not changed & set(nodes)
