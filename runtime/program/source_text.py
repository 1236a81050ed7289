"""The lines of a program as Python functions, and the way back from a failing line to its node."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphflow.ir.op import Node
from graphflow.runtime.diagnostics.crash_recorder import is_generated_code, name_code
from graphflow.runtime.native_calls.branch_parallelism import ParallelBranches
from graphflow.runtime.native_calls.integer_checks import refused_node
from graphflow.runtime.native_calls.native_segments import NativeSegment
from graphflow.runtime.program.program_part import Line


class ProgramSource:
    """The source of a program's functions.

    Args:
        scope: global names of the functions; the functions are added to it.
        lines: lines of the compute section.
        commit: lines of the commit section.
        result: the Python expression of the fetched values.
        opening: statements that run before the compute section and belong to no node.
    """

    def __init__(
        self,
        scope: dict[str, Any],
        lines: Sequence[Line],
        commit: Sequence[Line],
        result: str,
        opening: Sequence[str] = (),
    ) -> None:
        self._opening = list(opening)
        self._scope = scope
        self.lines = lines
        self._commit = commit
        self._result = result

    def compile_compute(self, name: str = "compute") -> Callable[..., Any]:
        """Compile the compute section to a function (feeds, step, draws) -> fetched values."""
        lines = [self._line_source(line) for line in self.lines]
        of = (_describe_line(line) for line in self.lines)
        return self._compile(name, "feeds, step, draws", self._open(lines), self._result, of)

    def compile_commit(self) -> Callable[[], None]:
        """Compile the commit section to a function."""
        lines = [self._line_source(line) for line in self._commit]
        of = (_describe_line(line) for line in self._commit)
        return self._compile("commit", "", lines, "None", of)

    def compile_traced(self) -> tuple[Callable[..., Any], list[Node]]:
        """Compile the compute section to a function (feeds, step, draws, record) for traced steps.

        The function calls `record`, a `SpanRecorder`, with the number of a line once that line has
        run, and lets it run native calls.

        Returns:
            The function, and the node of each line.
        """
        lines: list[str] = []
        nodes: list[Node] = []

        def add(node: Node, text: str) -> None:
            if nodes and nodes[-1] is node:  # several lines are one span
                lines.pop()
                nodes.pop()
            lines.extend((text, f"record({len(nodes) + 1})"))
            nodes.extend((node, node))

        for line in self.lines:
            if isinstance(line, NativeSegment | ParallelBranches):
                for segment in line.segments if isinstance(line, ParallelBranches) else (line,):
                    self._scope[f"segment_{id(segment)}"] = segment
                    lines.append(f"record.run_segment(segment_{id(segment)})")
                    nodes.append(segment.calls[-1].node)
            else:
                add(*line)
        of = (_describe_node(node) for node in nodes)
        arguments = "feeds, step, draws, record"
        return self._compile("traced", arguments, self._open(lines), self._result, of), nodes

    def _open(self, lines: list[str]) -> list[str]:
        """Put the opening before the first line, as one line, so that line numbers stay."""
        if not self._opening:
            return lines
        return ["; ".join([*self._opening, *lines[:1]]), *lines[1:]]

    def _line_source(self, line: Line) -> str:
        if not isinstance(line, NativeSegment | ParallelBranches):
            return line[1]
        self._scope[f"run_{id(line)}"] = line.run
        return f"run_{id(line)}()"

    def _compile(
        self, name: str, arguments: str, lines: list[str], result: str, of: Iterable[str]
    ) -> Callable[..., Any]:
        source = "\n ".join([f"def {name}({arguments}):", *lines, f"return {result}"])
        # exec is safe here: the source consists of our own identifiers only. No text from a graph
        # or from the wire enters it.
        exec(compile(source, name_code(name, of), "exec"), self._scope)  # noqa: S102
        function: Callable[..., Any] = self._scope[name]
        return function

    def failing_node(self, error: BaseException) -> Node | None:
        """Return the node of the line that raised an error; None if no generated line did."""
        if (refused := refused_node(error)) is not None:
            return refused
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if is_generated_code(f.filename)]
        if not lines or lines[0].lineno is None:
            return None
        at = lines[0].lineno - 2
        if lines[0].filename.startswith("<traced"):
            return self.compile_traced()[1][at]
        line = self.lines[at]
        return line[0] if isinstance(line, tuple) else line.calls[0].node


def _describe_line(line: Line) -> str:
    """Describe the nodes of a line, for the crash recorder."""
    if isinstance(line, tuple):
        return _describe_node(line[0])
    nodes = list(dict.fromkeys(call.node for call in line.calls))
    if len(nodes) == 1:
        return _describe_node(nodes[0])
    first, last = _describe_node(nodes[0]), _describe_node(nodes[-1])
    return f"one of {len(nodes)} kernels, from {first} to {last}"


def _describe_node(node: Node) -> str:
    return f"{node.op.name} {node.name!r} (made at {node.location})"
