"""CUDA graphs: a program's steps run one by one the first time, and as graphs later.

A program on a GPU is a list of steps, each of which starts work on the device's stream. Steps that
exchange data with the host stay outside of graphs: feeds, tensors from other devices, predicates,
and random numbers, whose counter is on the host. The steps between two of these form a run. A run
is captured when it runs for the second time, and replayed from then on. Its first time shows which
steps allocate memory, and leaves that memory in the pool for the capture.

If a capture fails, the failing step, or the whole run, is left out of graphs, and the log says so
once. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from graphflow.base.environment import is_on
from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.gpu")


class GraphDevice(Protocol):
    """A GPU whose stream captures and replays work."""

    @property
    def allocations(self) -> int:
        """Number of allocations so far."""

    def graph_memory(self) -> AbstractContextManager[None]:
        """Return a context in which memory comes from the pool for captured work."""

    def capture(self, run: Callable[[], None]) -> Any:
        """Return a graph of the work that `run` starts. None of the work is done.

        Raises:
            Exception: the work cannot be captured.
        """

    def replay(self, graph: Any) -> None:
        """Start the work of a graph."""


@dataclass(frozen=True)
class GpuStep:
    """Starts the work of a node on the stream.

    Attributes:
        is_repeatable: whether it starts the same work in each run, so that it can be captured.
    """

    node: Node
    run: Callable[[], None]
    is_repeatable: bool


@dataclass
class _StepRun:
    """Steps `start` to `stop`, which may be a graph; `allocates`: they allocate memory."""

    start: int
    stop: int
    is_repeatable: bool
    allocates: bool = False
    graph: Any = None


def graphs_enabled() -> bool:
    """Return True unless GRAPHFLOW_CUDA_GRAPHS=off."""
    return is_on("GRAPHFLOW_CUDA_GRAPHS")


class CapturedSteps:
    """Runs a program's steps in order, as graphs where possible.

    Args:
        device: the GPU that captures and replays.
        program: name of the program, for the log.

    Attributes:
        failing: the node whose step raised; None if no step did.
    """

    def __init__(self, steps: Sequence[GpuStep], device: GraphDevice, program: str) -> None:
        self.steps = tuple(steps)
        self.failing: Node | None = None
        self._device = device
        self._program = program
        self._runs: list[_StepRun] | None = None
        self._current = -1
        self._has_logged = False
        self._captures = graphs_enabled()

    @property
    def graphs(self) -> int:
        """The number of runs that are graphs by now."""
        return sum(run.graph is not None for run in self._runs or ())

    def __call__(self) -> None:
        """Start the work of all steps."""
        self.failing = None
        if not self._captures:
            self._one_by_one(0, len(self.steps))
        elif self._runs is None:
            self._runs = self._run_first_time()
        else:
            for run in tuple(self._runs):
                if run.graph is not None:
                    self._device.replay(run.graph)
                elif run.is_repeatable:
                    self._capture(run)
                else:
                    self._one_by_one(run.start, run.stop)

    def run_step(self, i: int) -> None:
        """Start the work of one step."""
        self._current = i
        try:
            self.steps[i].run()
        except BaseException:
            self.failing = self.steps[i].node
            raise

    def release(self) -> None:
        """Release graphs and steps."""
        self.steps, self._runs = (), []

    def _one_by_one(self, start: int, stop: int) -> None:
        for i in range(start, stop):
            self.run_step(i)

    def _run_first_time(self) -> list[_StepRun]:
        """Run the steps one by one and cut them into runs."""
        runs: list[_StepRun] = []
        for i, step in enumerate(self.steps):
            before = self._device.allocations
            with self._device.graph_memory() if step.is_repeatable else nullcontext():
                self.run_step(i)
            if not runs or runs[-1].is_repeatable != step.is_repeatable:
                runs.append(_StepRun(i, i, step.is_repeatable))
            runs[-1].stop = i + 1
            runs[-1].allocates = runs[-1].allocates or self._device.allocations != before
        # A graph of a single kernel launch saves nothing. A step that allocates launches several.
        for run in runs:
            run.is_repeatable = run.is_repeatable and (run.allocates or run.stop - run.start > 1)
        return runs

    def _capture(self, run: _StepRun) -> None:
        self._current = -1
        try:
            graph = self._device.capture(lambda: self._one_by_one(run.start, run.stop))
        except Exception as error:
            self._exclude_from_graphs(run, error)
            self.failing = None
            self._one_by_one(run.start, run.stop)
        else:
            run.graph = graph
            self._device.replay(graph)

    def _exclude_from_graphs(self, run: _StepRun, error: Exception) -> None:
        """Leave the step that failed out of graphs, or the whole run if no step raised."""
        assert self._runs is not None
        place = self._runs.index(run)
        if self.failing is None:
            run.is_repeatable = False
            culprit = f"{run.stop - run.start} nodes"
        else:
            at = self._current
            parts = [(run.start, at, True), (at, at + 1, False), (at + 1, run.stop, True)]
            self._runs[place : place + 1] = [
                _StepRun(start, stop, steady and (run.allocates or stop - start > 1))
                for start, stop, steady in parts
                if stop > start
            ]
            culprit = f"{self.failing.op.name} (made at {self.failing.location})"
        if not self._has_logged:
            self._has_logged = True
            _log.tell(
                "gpu.uncaptured", program=self._program, what=culprit, error=type(error).__name__,
                reason=str(error),
            )  # fmt: skip
