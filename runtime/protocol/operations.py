"""The coordinator's record of an operation: orders to workers, and their replies."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.errors import GraphflowError, ProtocolError, StepTimeout
from graphflow.runtime.protocol.coordinator_events import BeginOperation, Replies
from graphflow.runtime.wire.array_codec import decode_small, message_parts
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.messages import (
    Adopt,
    Array,
    Chunk,
    Close,
    Compute,
    Done,
    Forget,
    Hello,
    Join,
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
)
from graphflow.runtime.wire.step_values import Key, step_of

REPLIES: dict[type[Message], type[Message]] = {
    Hello: Welcome,
    Open: Ready,
    Load: Ready,
    Prepare: Ready,
    Compute: Done,
    Read: Done,
    Write: Ready,
    Forget: Ready,
    Adopt: Ready,
    Join: Ready,
    Save: Saved,
    Measure: Measured,
    Meet: Met,
    Probe: Probed,
    Close: Ready,
}


_ARRAY_REPLIES = (Done, Saved)


class Operation:
    """An operation that has not ended: its orders, its replies, and who has yet to reply.

    The caller's handle on it is `client.pending_operation.PendingOperation`.

    Attributes:
        waiting: workers that have not replied.
        is_held: the step is decided only after it is released.
        is_withheld: the step's orders are sent once the step that it follows has committed.
        failure: the error of a free step, to report once the step before it is decided.
        peer_timeouts: errors of workers that waited for another worker until the deadline.
        is_step: the operation ends with a decision that all its workers are told.
    """

    def __init__(self, begin: BeginOperation, now: float) -> None:
        self.begin = begin
        self.deadline = now + begin.seconds
        self.waiting = set(begin.orders)
        self.is_held = begin.is_held
        self.is_withheld = False
        self.failure: GraphflowError | None = None
        self.peer_timeouts: dict[int, StepTimeout] = {}
        self.replies = Replies()
        self.is_step = False
        for order in begin.orders.values():
            self.is_step = type(order.message) is Compute
            break

    @property
    def first_order(self) -> Message:
        """One of its orders. All orders of an operation are of the same type."""
        for order in self.begin.orders.values():
            return order.message
        raise ProtocolError("the operation has no orders")

    @property
    def step_number(self) -> int | None:
        """The session's number of the step; None for other operations."""
        return step_of(self.begin.step) if self.is_step else None

    @property
    def is_free(self) -> bool:
        """True if the step may compute before the step that it follows is decided."""
        first = self.first_order
        return isinstance(first, Compute) and first.free

    @property
    def description(self) -> str:
        """The operation's name in error messages."""
        if isinstance(self.first_order, Compute):
            return f"step {step_of(self.begin.step)}"
        subject = getattr(self.first_order, "variable", getattr(self.first_order, "program", ""))
        return f"{type(self.first_order).__name__.lower()} {subject}".rstrip()

    def blocking_chain(self) -> list[int]:
        """Return the workers that wait for each other, ending at the one that blocks the rest.

        Of several chains, prefer one whose last worker cannot report any more that it was waiting
        itself.
        """
        chains = [self._chain_from(worker) for worker in self.peer_timeouts]
        return min(chains, key=lambda each: self.may_report_wait(each[-1]))

    def _chain_from(self, worker: int) -> list[int]:
        found = [worker]
        while (error := self.peer_timeouts.get(found[-1])) is not None:
            if error.worker is None or error.worker in found:  # a cycle
                break
            found.append(error.worker)
        return found

    def may_report_wait(self, worker: int) -> bool:
        """Return True if a worker may still report that it waited for another one."""
        return worker in self.waiting and worker not in self.peer_timeouts

    def split_arrays(self, far: Sequence[bool]) -> dict[int, list[tuple[Chunk, memoryview | None]]]:
        """Split all arrays into chunks, by worker.

        This happens before any message is numbered. An array that cannot travel then leaves no
        trace.

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
        """Take in a worker's reply, with the arrays that arrived before it.

        Raises:
            ProtocolError: the reply is of the wrong type, or an array is missing.
        """
        if type(message) is not REPLIES[type(self.begin.orders[worker].message)]:
            raise ProtocolError(f"{type(message).__name__} does not answer {self.description}")
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
        """Return the program that a worker has not finished computing; "" if there is none."""
        if worker not in self.waiting:
            return ""
        message = self.begin.orders[worker].message
        return message.program if isinstance(message, Compute) else ""


class OperationTable(dict[int, Operation]):
    """The operations that have not ended, by request number."""

    def steps(self) -> list[Operation]:
        """Return the steps, in the order in which they were begun."""
        return [operation for operation in self.values() if operation.is_step]

    def step(self, number: int) -> Operation | None:
        """Return the step of a number."""
        for operation in self.values():
            if operation.begin.step == number and operation.is_step:
                return operation
        return None

    def predecessor(self, step: Operation) -> Operation | None:
        """Return the step that a step follows."""
        return self.step(step.begin.follows) if step.begin.follows >= 0 else None

    def successors(self, step: Operation) -> list[Operation]:
        """Return the steps that follow a step."""
        number = step.begin.step
        return [each for each in self.values() if each.begin.follows == number and each.is_step]

    def for_worker(self, worker: int) -> list[Operation]:
        """Return the operations in which a worker takes part."""
        return [operation for operation in self.values() if worker in operation.begin.orders]

    def using_link(self, source: int, target: int, step: int) -> Operation | None:
        """Return the step, or the probe, that uses the link between two workers."""
        if step:
            return self.step(step)
        for operation in self.values():
            first = operation.first_order
            if isinstance(first, Probe) and first.target == target and source in operation.waiting:
                return operation
        return None

    def unanswered_workers(self) -> list[int]:
        """Return the workers that have yet to reply to an operation. Callable from any thread."""
        return sorted({worker for each in list(self.values()) for worker in tuple(each.waiting)})
