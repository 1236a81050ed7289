"""What a coordinator asks of workers: an order to each of some, until all have replied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graphflow.errors import GraphflowError
from graphflow.runtime.messages import (
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
    Open,
    Prepare,
    Probe,
    Probed,
    Read,
    Ready,
    Save,
    Saved,
    Span,
    Welcome,
    Write,
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
    Meet: Ready,
    Probe: Probed,
    Close: Ready,
}


@dataclass(frozen=True)
class Order:
    """What one worker is asked, and the arrays (purpose, name, array) that go before it;
    of one that is lent, the message that says where it is."""

    message: Message
    arrays: Sequence[tuple[str, Key, Array | Chunk]] = ()


@dataclass(frozen=True)
class Begin:
    """The event that starts an operation; `seconds` is its deadline from now."""

    request: int
    orders: Mapping[int, Order]
    seconds: float
    step: int = 0


@dataclass
class Replies:
    """What the workers replied: messages and arrays by worker, and the spans of a traced step, on
    our clock."""

    messages: dict[int, Message] = field(default_factory=dict)
    arrays: dict[int, dict[Key, Array]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    errors: dict[int, float] = field(default_factory=dict)  # of their times, in seconds


@dataclass(frozen=True)
class Settle:
    """The action that ends an operation, with replies or with an error."""

    request: int
    outcome: Replies | GraphflowError


@dataclass
class Operation:
    """An operation under way."""

    begin: Begin
    deadline: float
    waiting: set[int]
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
