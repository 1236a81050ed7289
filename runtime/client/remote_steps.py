"""Programs and steps of a session on the workers of a cluster.

Orders go through `io_loop`: most steps by the fast path, all others as general operations. A step
may also begin before the step before it is decided (`PendingStep`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import (
    Interrupt,
    defer_signals,
    is_interrupt,
    passing_interrupts,
)
from graphflow.base.progress import show_progress
from graphflow.errors import GraphflowError, SessionError
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.client.io_loop import SLACK
from graphflow.runtime.client.pending_operation import PendingOperation
from graphflow.runtime.client.worker_admission import WorkerAdmission
from graphflow.runtime.host.host_interface import DirectStep
from graphflow.runtime.host.session_state import DRAWS, FAILED
from graphflow.runtime.partitioning.user_code_check import require_user_modules
from graphflow.runtime.protocol.coordinator_events import (
    BeginOperation,
    Order,
    ReleaseStep,
    Replies,
)
from graphflow.runtime.protocol.fast_path import SteadyStateStep
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.wire.array_codec import SMALL_TOTAL_BYTES, encode_small
from graphflow.runtime.wire.messages import (
    Array,
    Chunk,
    Compute,
    Done,
    Load,
    Prepare,
    Small,
    replace_fields,
)
from graphflow.runtime.wire.step_values import Span, StepResult, step_of

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster
    from graphflow.runtime.partitioning.partition import Partition

REQUEST_SECONDS = 300.0  # for loading, reading, writing and measuring

_SIDE_EFFECT_OPS = frozenset({"assign", "collective_start", "host_call", "print"})

_Decided = TypeVar("_Decided", Replies, Replies | None)

_log = Log("graphflow.coordinator")


@dataclass(frozen=True)
class DistributedProgram:
    """A program as the workers have it: its workers, the names of their feeds, and all fetches."""

    workers: Sequence[int]
    feeds: Mapping[int, Sequence[str]] = field(default_factory=dict)
    fetches: Sequence[tuple[int, str]] = ()
    is_free: bool = False  # its steps have no side effects


class PendingStep(NamedTuple):
    """A step that workers compute ahead of its decision, and its pending operation.

    A `free` step changes no state, so that it does not wait for the steps before it.
    """

    step: int
    deadline: float
    operation: PendingOperation
    free: bool


class RemoteSteps(WorkerAdmission):
    """The programs on the workers of a session, and the steps that run them.

    Methods may be called from any thread. Steps run one at a time.
    """

    def __init__(
        self, store: CheckpointStore | None, *, ops: Sequence[str], dead_after: float, trial: bool
    ) -> None:
        super().__init__(store, ops=ops, dead_after=dead_after, trial=trial)
        self._programs: dict[str, DistributedProgram] = {}
        self._last_step = -1
        self._last_committed = -1  # the number of the last committed step
        self._failed_steps = 0  # steps
        self._step_lock = threading.Lock()

    # Programs ------------------------------------------------------------------------------------

    def add(self, program: str, partitions: Mapping[int, Sequence[Partition]]) -> None:
        """Give each worker its partitions of a program; raises as `load` does.

        Raises:
            ModuleNotAllowed: an op or a host function is of a module that is not among `ops`.
        """
        from graphflow.runtime.wire.graph_codec import encode as encode_partitions

        require_user_modules(partitions, self._ops)
        self.load(program, {w: encode_partitions(mine) for w, mine in partitions.items()})
        self._programs[program] = DistributedProgram(
            list(partitions),
            {w: [name for part in mine for name in part.feeds] for w, mine in partitions.items()},
            [(w, name) for w, mine in partitions.items() for part in mine for name in part.fetches],
            not any(_has_side_effects(part) for mine in partitions.values() for part in mine),
        )

    def load(self, program: str, partitions: Mapping[int, tuple[bytes, list[Array]]]) -> None:
        """Give each worker its encoded partitions of a program: header and constants.

        Raises:
            GraphLimitError: a worker refuses the partitions.
            WorkerLost: a worker was lost before or meanwhile.
        """
        orders = {}
        request = next(self._requests)
        for worker, (header, buffers) in partitions.items():
            parts = [np.frombuffer(header, np.uint8), *buffers]
            arrays = [("part", index, part) for index, part in enumerate(parts)]
            orders[worker] = Order(Load(request, program, len(parts)), arrays)
        started = time.monotonic()
        with show_progress(f"loading a program on {len(orders)} workers"):
            self._ask(request, orders, REQUEST_SECONDS)
        self._programs[program] = DistributedProgram(list(partitions))
        _log.tell(
            "program.loaded", session=self.session, program=program, workers=list(partitions),
            bytes=sum(array.nbytes for o in orders.values() for _, _, array in o.arrays),
            seconds=time.monotonic() - started,
        )  # fmt: skip

    def prepare(self, program: str, bindings: Mapping[str, int]) -> None:
        """Have the workers compile a program for the sizes of coming steps.

        Raises:
            WorkerLost: a worker was lost before or meanwhile.
        """
        request = next(self._requests)
        order = Order(Prepare(request, program, dict(bindings)))
        orders = dict.fromkeys(self._programs[program].workers, order)
        try:
            self._ask(request, orders, REQUEST_SECONDS)
        except BaseException:
            self._failed_steps += (
                1  # only some may have compiled it: all agree on their exchanges anew
            )
            raise

    def reopen(self, cluster: Cluster, epoch: int, patience: Callable[[], float]) -> Cluster:
        self._programs.clear()
        return super().reopen(cluster, epoch, patience)

    def _require_program(self, program: str) -> DistributedProgram:
        loaded = self._programs.get(program)
        if loaded is None:
            raise SessionError(f"program {program!r} is not loaded")
        return loaded

    # Steps ---------------------------------------------------------------------------------------

    def step(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        trace: bool,
        deadline: float,
    ) -> StepResult:
        """Run one step on a program's workers; return once it is decided to commit.

        Args:
            step: larger than that of every step before, including failed ones.
            bindings: sizes of the program's symbolic dims.
            feeds: by worker and name.
            trace: measure spans.
            deadline: seconds.

        Raises:
            OpError, CheckError: an op failed; nothing has changed.
            StepTimeout: the deadline passed; nothing has changed.
            WorkerLost: a worker died, froze or cannot be reached; its state is gone.
            SessionError: cancelled, closed, an unknown program, or a step that is not new.
        """
        with self._step_lock:
            loaded = self._require_program(program)
            order = Compute(0, program, dict(bindings), [], trace, deadline)
            return _step_result(self._step(loaded, order, step, feeds))

    def wait_for_clocks(self) -> None:
        """Wait until each worker's clock was measured, for those that answer."""
        if self._loop is not None:
            self._loop.wait_for_clocks()

    def _step(
        self,
        loaded: DistributedProgram,
        order: Compute,
        step: int,
        feeds: Mapping[int, Mapping[str, Array]],
    ) -> Replies:
        """Run a step; `order` lacks only its request and its feeds. The step lock is held."""
        replies = None if order.trace else self._try_fast_path(loaded, order, step, feeds)
        if replies is not None:
            return replies
        with passing_interrupts():
            request, orders = self._make_orders(loaded, order, step, feeds, waits=True)
            begin = BeginOperation(request, orders, order.deadline, step)
            operation = PendingOperation(request)
            wait = partial(self._require_loop().ask, begin, order.deadline + SLACK, operation)
            return self._await_decision(step, operation, wait)

    def _try_fast_path(
        self,
        loaded: DistributedProgram,
        order: Compute,
        step: int,
        feeds: Mapping[int, Mapping[str, Array]],
    ) -> Replies | None:
        """Run a step by the fast path, as `_step`; return None if it does not apply."""
        loop, before = self._loop, self._last_step
        if loop is None or step <= before:
            return None
        inside: dict[int, list[Small]] = {}
        nbytes, room = 0, SMALL_TOTAL_BYTES
        for worker, arrays in feeds.items():
            inside[worker] = mine = []
            for name, array in arrays.items():
                sent = encode_small(name, array) if room > 0 else None
                if sent is None:
                    return None
                mine.append(sent)
                room -= len(sent)
                nbytes += array.nbytes
        self._add_failure_count(order)
        steady = SteadyStateStep(next(self._requests), step, order, loaded.workers, inside)
        self._last_step = step
        operation = PendingOperation(steady.request)
        wait = partial(loop.run_step, steady, order.deadline, operation)
        replies = self._await_decision(step, operation, wait, nbytes)
        if replies is None:
            self._last_step = before
        return replies

    def _await_decision(
        self,
        step: int,
        operation: PendingOperation,
        wait: Callable[[], _Decided],
        fed: int = 0,
    ) -> _Decided:
        """Wait until a step is decided, record the decision, and return the replies.

        Args:
            wait: runs the step to its end; returns None if it was not begun. `operation` gets the
                outcome.
            fed: bytes of feeds that `_activity` was not told of.
        """
        began = time.monotonic()
        try:
            replies = wait()
            if replies is not None:
                self._last_committed = step
        except BaseException as error:
            if is_interrupt(error):
                self._cancel_step(step, operation)
            self._failed_steps += 1
            cause = error.error if isinstance(error, Interrupt) else error
            self._activity.on_abort(step, time.monotonic() - began, cause)
            raise
        if replies is not None:
            self._activity.on_commit(step, time.monotonic() - began, replies.nbytes, fed)
        return replies

    def _cancel_step(self, step: int, operation: PendingOperation) -> None:
        """Cancel a step unless it was decided already, and wait until that is known."""
        self.cancel()
        with defer_signals(), suppress(GraphflowError):
            if (loop := self._loop) is not None and loop.is_submitted(operation):
                loop.finish(operation, SLACK)
                self._last_committed = step

    def has_committed(self, step: int, error: BaseException) -> bool:
        return self._last_committed == step

    def _add_failure_count(self, order: Compute) -> None:
        """Put the number of failed steps into the order.

        After a failure, workers agree anew on the paths of their exchanges.
        """
        if self._failed_steps:
            order.bindings[FAILED] = self._failed_steps

    def begin(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        deadline: float,
        follows: int,
    ) -> PendingStep:
        """Begin a step that is decided only by `finish`.

        Its feeds travel at once. It computes once the step that it `follows` has committed (-1: at
        once).

        Raises:
            SessionError: closed, an unknown program, or a step that is not new.
        """
        with self._step_lock:
            loop, loaded = self._require_loop(), self._require_program(program)
            order = Compute(
                0,
                program,
                dict(bindings),
                [],
                False,
                deadline,
                follows=follows,
                free=loaded.is_free,
            )
            request, orders = self._make_orders(loaded, order, step, feeds, waits=False)
            begin = BeginOperation(request, orders, deadline, step, follows, is_held=True)
            return PendingStep(step, deadline, loop.submit(begin), loaded.is_free)

    def finish(self, pending: PendingStep) -> StepResult:
        """Decide the first of the steps that were begun; returns and raises as `step`."""
        with self._step_lock:
            loop = self._require_loop()
            loop.add(ReleaseStep(pending.operation.request))
            seconds = 2 * pending.deadline + SLACK  # its deadline starts when it may compute
            wait = partial(loop.finish, pending.operation, seconds)
            return _step_result(self._await_decision(pending.step, pending.operation, wait))

    def undo(self, pending: Sequence[PendingStep]) -> None:
        """End steps that were begun and not decided; nothing of them happens."""
        self._failed_steps += 1
        self.cancel()
        for each in pending:
            with suppress(GraphflowError):
                if self._loop is not None:
                    self._loop.finish(each.operation, SLACK)

    def _make_orders(
        self,
        loaded: DistributedProgram,
        order: Compute,
        step: int,
        feeds: Mapping[int, Mapping[str, Array]],
        waits: bool,
    ) -> tuple[int, dict[int, Order]]:
        """Return a new request number, and the order of a step for each worker of a program.

        Args:
            waits: the caller, which owns the feeds' arrays, waits for the step.
        """
        if step <= self._last_step:
            last = step_of(self._last_step)
            raise SessionError(f"step {step_of(step)} is not after step {last}")
        self._last_step = step
        self._add_failure_count(order)
        request = next(self._requests)
        numbered = replace_fields(order, request=request)
        unfed = Order(numbered)
        orders = {}
        for worker in loaded.workers:
            given = feeds.get(worker)
            orders[worker] = (
                self._order_with_feeds(numbered, worker, given, waits) if given else unfed
            )
        return request, orders

    def _order_with_feeds(
        self,
        order: Compute,
        worker: int,
        feeds: Mapping[str, Array],
        waits: bool,
    ) -> Order:
        """Return an order with its feeds: inside the order, in shared memory, or sent before it."""
        inside: list[Small] = []
        before: list[str] = []
        arrays = []
        room, nbytes = SMALL_TOTAL_BYTES, 0
        for name, array in feeds.items():
            nbytes += array.nbytes
            found = encode_small(name, array) if room > 0 else None
            if found is not None:
                inside.append(found)
                room -= len(found)
            else:
                before.append(name)
                sent: Array | Chunk = array
                if self._loop is not None:
                    memory = self._loop.array_memory[worker]
                    sent = memory.lend("feed", order.request, name, array, defer=waits)
                arrays.append(("feed", name, sent))
        self._activity.add_fed_bytes(nbytes)
        return Order(replace_fields(order, feeds=before, small=inside), arrays)

    def direct_step(self, program: str, bindings: Mapping[str, int]) -> DirectStep | None:
        """Return a function that runs steps whose feeds have known sizes, without checks."""
        loaded = self._programs[program]
        if not loaded.feeds:
            return None

        order = Compute(0, program, {}, [], False, math.inf)
        fed = [(worker, names) for worker, names in loaded.feeds.items() if names]

        def run(
            step: int, draws: int, feeds: Mapping[str, Array], deadline: float
        ) -> list[Array] | None:
            if self._programs.get(program) is not loaded:
                return None
            sized = replace_fields(order, bindings={**bindings, DRAWS: draws}, deadline=deadline)
            given = {worker: {name: feeds[name] for name in names} for worker, names in fed}
            with self._step_lock:
                arrays = self._step(loaded, sized, step, given).arrays
            return [copy_if_borrowed(arrays[worker][name]) for worker, name in loaded.fetches]

        return run


def _has_side_effects(part: Partition) -> bool:
    """Return True if a step of a partition has effects that undoing it would not remove.

    Collectives count, too: they meet other workers in shared memory.
    """
    return any(node.op.name in _SIDE_EFFECT_OPS for node in part.graph.walk())


def _step_result(replies: Replies) -> StepResult:
    fetches: dict[str, Array] = {}
    spans: list[Span] = replies.spans
    peak: dict[str, int] = {}
    for worker, message in replies.messages.items():
        assert isinstance(message, Done)
        peak |= message.peak
        fetches |= {
            str(name): copy_if_borrowed(array) for name, array in replies.arrays[worker].items()
        }
    return StepResult(fetches, spans, peak, replies.errors)


def copy_if_borrowed(array: Array) -> Array:
    """Return an array that belongs to the caller. Copying a lent one returns its memory."""
    return array if array.flags.writeable else array.copy("K")
