"""What a coordinator asks of workers: an order to each of some, until all have replied."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.errors import GraphflowError, ProtocolError, StepTimeout
from graphflow.runtime.protocol.coordinator_events import BeginOperation, Replies
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.frame_codec import decode_small, message_parts
from graphflow.runtime.wire.messages import (
    Array,
    Chunk,
    Close,
    Compute,
    Done,
    Forget,
    Hello,
    Key,
    Load,
    Measure,
    Measured,
    Meet,
    Message,
    Met,
    Open,
    Prepare,
    Probe,
    Probed,
    Read,
    Ready,
    Save,
    Saved,
    Welcome,
    Write,
    step_of,
)

REPLIES: dict[type[Message], type[Message]] = {
    Hello: Welcome,
    Open: Ready,
    Load: Ready,
    Prepare: Ready,
    Compute: Done,
    Read: Done,
    Write: Ready,
    Forget: Ready,
    Save: Saved,
    Measure: Measured,
    Meet: Met,
    Probe: Probed,
    Close: Ready,
}


_ARRAY_REPLIES = (Done, Saved)


class Operation:
    """An operation under way.

    Attributes:
        is_step: whether its end is a decision that all its workers are told.
    """

    def __init__(self, begin: BeginOperation, now: float) -> None:
        self.begin = begin
        self.deadline = now + begin.seconds
        self.waiting = set(begin.orders)
        self.is_held = begin.is_held
        self.is_withheld = False
        """A step whose order is sent once the one that it follows has committed."""
        self.failure: GraphflowError | None = None
        """Of a free step: told once the one before is decided."""
        self.peer_timeouts: dict[int, StepTimeout] = {}
        """Of the workers that have waited in vain for another one: what they told."""
        self.replies = Replies()
        self.is_step = False
        for order in begin.orders.values():
            self.is_step = type(order.message) is Compute
            break

    @property
    def first_order(self) -> Message:
        """One of its orders; all are of one kind."""
        for order in self.begin.orders.values():
            return order.message
        raise ProtocolError("an operation without orders has no first one")

    @property
    def step_number(self) -> int | None:
        """The session's own number of the step; None for anything else."""
        return step_of(self.begin.step) if self.is_step else None

    @property
    def is_free(self) -> bool:
        """Whether it is a step that may compute before the one that it follows is decided."""
        first = self.first_order
        return isinstance(first, Compute) and first.free

    @property
    def description(self) -> str:
        """What errors call it."""
        if isinstance(self.first_order, Compute):
            return f"step {step_of(self.begin.step)}"
        subject = getattr(self.first_order, "variable", getattr(self.first_order, "program", ""))
        return f"{type(self.first_order).__name__.lower()} {subject}".rstrip()

    def blocking_chain(self) -> list[int]:
        """Who has waited for whom in vain, up to the one that keeps the others waiting: one that
        will not say any more that it has waited itself, if there is such."""
        chains = [self._chain_from(worker) for worker in self.peer_timeouts]
        return min(chains, key=lambda each: self.may_report_wait(each[-1]))

    def _chain_from(self, worker: int) -> list[int]:
        found = [worker]
        while (error := self.peer_timeouts.get(found[-1])) is not None:
            if error.worker is None or error.worker in found:  # they wait in a circle
                break
            found.append(error.worker)
        return found

    def may_report_wait(self, worker: int) -> bool:
        """Whether a worker may say yet that it has waited in vain."""
        return worker in self.waiting and worker not in self.peer_timeouts

    def split_arrays(self, far: Sequence[bool]) -> dict[int, list[tuple[Chunk, memoryview | None]]]:
        """The pieces of all arrays, by worker that has any. They are cut before anything is
        numbered, so that one that cannot travel leaves no trace.

        Raises:
            ProtocolError: an array's dtype has no name on the wire.
        """
        found = {}
        for worker, order in self.begin.orders.items():
            if order.arrays:
                found[worker] = [
                    piece
                    for purpose, name, array in order.arrays
                    for piece in message_parts(
                        purpose, self.begin.request, name, array, far=far[worker]
                    )
                ]
        return found

    def accept(self, worker: int, message: Message, inbox: ChunkAssembler) -> None:
        """Takes a worker's reply, with the arrays that came before it.

        Raises:
            ProtocolError: it answers something else, or lacks an array.
        """
        if type(message) is not REPLIES[type(self.begin.orders[worker].message)]:
            raise ProtocolError(f"{type(message).__name__} is no answer to {self.description}")
        if isinstance(message, _ARRAY_REPLIES):
            arrays: dict[Key, Array] = {}
            self.replies.arrays[worker] = arrays
            for name in message.fetches:
                arrays[name] = inbox.take(worker, "fetch", self.begin.request, name)
            if isinstance(message, Done) and message.small:
                arrays.update(map(decode_small, message.small))
        self.replies.messages[worker] = message
        self.waiting.discard(worker)

    def unfinished_program(self, worker: int) -> str:
        """The program that a worker has not computed yet; "" if there is none."""
        if worker not in self.waiting:
            return ""
        message = self.begin.orders[worker].message
        return message.program if isinstance(message, Compute) else ""


class OperationTable(dict[int, Operation]):
    """The operations that have not ended, by request."""

    def steps(self) -> list[Operation]:
        """Those that are steps, in the order in which they were begun."""
        return [operation for operation in self.values() if operation.is_step]

    def step(self, number: int) -> Operation | None:
        """The step of that number."""
        for operation in self.values():
            if operation.begin.step == number and operation.is_step:
                return operation
        return None

    def predecessor(self, step: Operation) -> Operation | None:
        """The step that one follows."""
        return self.step(step.begin.follows) if step.begin.follows >= 0 else None

    def successors(self, step: Operation) -> list[Operation]:
        """The steps that follow one."""
        number = step.begin.step
        return [each for each in self.values() if each.begin.follows == number and each.is_step]

    def for_worker(self, worker: int) -> list[Operation]:
        """Those in which a worker takes part."""
        return [operation for operation in self.values() if worker in operation.begin.orders]

    def using_link(self, source: int, target: int, step: int) -> Operation | None:
        """What is under way over the link of two workers: a step, or a probe of it."""
        if step:
            return self.step(step)
        for operation in self.values():
            first = operation.first_order
            if isinstance(first, Probe) and first.target == target and source in operation.waiting:
                return operation
        return None

    def unanswered_workers(self) -> list[int]:
        """The workers whose replies one of them waits for; from any thread."""
        return sorted({worker for each in list(self.values()) for worker in tuple(each.waiting)})
