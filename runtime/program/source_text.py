"""Text: the lines of a program as Python functions, and from a failing line back to its node."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphflow.ir.op import Node
from graphflow.runtime.diagnostics.crash_recorder import is_generated_code, name_code
from graphflow.runtime.native_calls.branch_parallelism import Strands
from graphflow.runtime.native_calls.native_segments import Segment
from graphflow.runtime.program.program_part import Line


class Text:
    """The functions of a program.

    Args:
        scope: what the names in the lines mean; the functions are added to it.
        lines: of the compute part.
        commit: of the commit part.
        result: the expression of the fetched values.
    """

    def __init__(
        self, scope: dict[str, Any], lines: Sequence[Line], commit: Sequence[Line], result: str
    ) -> None:
        self._scope = scope
        self.lines = lines
        self._commit = commit
        self._result = result

    def computing(self, name: str = "compute") -> Callable[..., Any]:
        """The compute part as a function (feeds, step, draws) -> fetched values."""
        lines = [self._text(line) for line in self.lines]
        of = (_told(line) for line in self.lines)
        return self._function(name, "feeds, step, draws", lines, self._result, of)

    def committing(self) -> Callable[[], None]:
        """The commit part as a function."""
        lines = [self._text(line) for line in self._commit]
        of = (_told(line) for line in self._commit)
        return self._function("commit", "", lines, "None", of)

    def traced(self) -> tuple[Callable[..., Any], list[Node]]:
        """The compute part with a fourth argument, which is told after each node by the number of
        its line; and the node of each line."""
        lines: list[str] = []
        nodes: list[Node] = []

        def add(node: Node, text: str) -> None:
            if nodes and nodes[-1] is node:  # several calls are one span
                lines.pop()
                nodes.pop()
            lines.extend((text, f"mark({len(nodes) + 1})"))
            nodes.extend((node, node))

        for line in self.lines:
            if isinstance(line, Segment | Strands):
                name = self._text(line, "one")
                for i, each in enumerate(line.calls):
                    add(each.node, f"{name}({i})")
            else:
                add(*line)
        of = (_named(node) for node in nodes)
        return self._function("traced", "feeds, step, draws, mark", lines, self._result, of), nodes

    def _text(self, line: Line, how: str = "run") -> str:
        if not isinstance(line, Segment | Strands):
            return line[1]
        name = f"{how}_{id(line)}"
        self._scope[name] = getattr(line, how)
        return f"{name}()" if how == "run" else name

    def _function(
        self, name: str, arguments: str, lines: list[str], result: str, of: Iterable[str]
    ) -> Callable[..., Any]:
        source = "\n ".join([f"def {name}({arguments}):", *lines, f"return {result}"])
        # The text is made of our own identifiers only; nothing from a graph or the wire enters it.
        exec(compile(source, name_code(name, of), "exec"), self._scope)  # noqa: S102
        function: Callable[..., Any] = self._scope[name]
        return function

    def failed(self, error: BaseException) -> Node | None:
        """The node of the line that raised an error."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if is_generated_code(f.filename)]
        if not lines or lines[0].lineno is None:
            return None
        at = lines[0].lineno - 2
        if lines[0].filename.startswith("<traced"):
            return self.traced()[1][at]
        line = self.lines[at]
        return line[0] if isinstance(line, tuple) else line.calls[0].node


def _told(line: Line) -> str:
    """What a line is of, for whoever reads of a crash in it."""
    if isinstance(line, tuple):
        return _named(line[0])
    nodes = list(dict.fromkeys(call.node for call in line.calls))
    if len(nodes) == 1:
        return _named(nodes[0])
    return f"one of {len(nodes)} kernels, from {_named(nodes[0])} to {_named(nodes[-1])}"


def _named(node: Node) -> str:
    return f"{node.op.name} {node.name!r} (made at {node.location})"
