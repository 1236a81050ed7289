"""What a coordinator asks of workers: an order to each of some, until all have replied."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from graphflow.runtime.messages import (
    Close,
    Compute,
    Done,
    Forget,
    Hello,
    Load,
    Measure,
    Measured,
    Meet,
    Message,
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
from graphflow.runtime.protocol.orders import Begin, Replies

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
    Meet: Ready,
    Probe: Probed,
    Close: Ready,
}


@dataclass
class Operation:
    """An operation under way."""

    begin: Begin
    deadline: float
    waiting: set[int]
    held: bool = False
    replies: Replies = field(default_factory=Replies)

    @cached_property
    def is_step(self) -> bool:
        """Whether its end is a decision that all its workers are told."""
        return any(isinstance(order.message, Compute) for order in self.begin.orders.values())

    @property
    def first(self) -> Message:
        """One of its orders; all are of one kind."""
        return next(iter(self.begin.orders.values())).message

    @property
    def what(self) -> str:
        """What errors call it."""
        if isinstance(self.first, Compute):
            return f"step {self.begin.step}"
        subject = getattr(self.first, "variable", getattr(self.first, "program", ""))
        return f"{type(self.first).__name__.lower()} {subject}".rstrip()

    def computing(self, worker: int) -> str:
        """The program that a worker has not computed yet; "" if there is none."""
        if worker not in self.waiting:
            return ""
        message = self.begin.orders[worker].message
        return message.program if isinstance(message, Compute) else ""
