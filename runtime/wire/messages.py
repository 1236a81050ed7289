"""Control messages of the protocol.

Plain frozen values without behaviour. `frame_codec` turns them into frames by the types of their
fields. The state machines of `protocol` exchange them.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.runtime.wire.field_checks import construct_unchecked
from graphflow.runtime.wire.step_values import Key

Array = np.ndarray[Any, np.dtype[Any]]

COORDINATOR = -1  # the origin of a session's coordinator; workers are 0, 1, …

# Field types of messages. `field_checks` refuses values that are not of the declared type.
Count = Annotated[int, "not negative"]
Plain = Annotated[Any, "plain data"]  # None, bool, int, float, str, and lists and dicts of them
Small = bytes
"""A small array in a message, with its name and a checksum: see `array_codec.encode_small`."""


class Envelope(NamedTuple):
    """The fields that every message carries beside its content.

    Attributes:
        epoch: Fences messages that a session sent before it was recovered.
        origin: The sender: a worker's number, or COORDINATOR.
        step: The step. In `Welcome` the number of the process that answers, in `Open` that of the
            process that the message is for.
        sequence: The number of the message from its sender to its receiver within a session and
            epoch, from 1. A message of `UNNUMBERED` repeats the last number before it, so that its
            receiver sees which ones it lacks.
        acknowledged: The last message that the sender has received in the other direction.
        token: The secret that only the parties of a session share.
    """

    session: str
    epoch: Count
    origin: int
    step: Count
    sequence: Count
    acknowledged: Count = 0
    token: str = ""


@dataclass(frozen=True)
class Message:
    """Base of all control messages; the class name is the kind on the wire."""


M = TypeVar("M", bound=Message)


def replace_fields(message: M, **fields: Any) -> M:
    """Return a message with other values in some fields."""
    return construct_unchecked(type(message), message.__dict__ | fields)


@dataclass(frozen=True)
class Hello(Message):
    """A coordinator asks a worker for its version.

    `Hello` and `Welcome` never change, so that versions that differ can still tell each other.
    """

    request: Count
    version: str
    wire: Count
    python: str


@dataclass(frozen=True)
class Welcome(Message):
    """A worker tells which program it runs and which devices it offers."""

    request: Count
    version: str
    wire: Count
    python: str
    devices: list[str]


@dataclass(frozen=True)
class Status(Message):
    """Asks a worker for its status; outside of sessions, as `Hello`."""

    request: Count


@dataclass(frozen=True)
class StatusReport(Message):
    """A worker's status as plain data; see `worker_status`."""

    request: Count
    report: Plain


@dataclass(frozen=True)
class Open(Message):
    """Starts a session on a worker.

    Attributes:
        worker: The worker's number.
        peers: The addresses of all workers, in order; "" for one that was lost before.
        lease: Silent seconds after which the worker may forget the session.
        ops: The modules whose ops the session uses.
        keys: The public keys of all workers, in order ("" where there is none), or nothing.
        trial: The session's steps are not counted.
    """

    request: Count
    worker: Count
    peers: list[str]
    lease: float
    ops: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    trial: bool = False


@dataclass(frozen=True)
class Load(Message):
    """A program; its `parts` chunks follow. Part 0 is the header, the others are its constants."""

    request: Count
    program: str
    parts: Count


@dataclass(frozen=True)
class Compute(Message):
    """Runs the compute half of the envelope's step; its feeds were sent before.

    Attributes:
        commits: The last earlier step that commits, if the worker was not told yet; else -1.
        follows: The undecided step that must commit first; this one is dropped if it does not. -1:
            none.
        free: The step reads nothing that other steps of its program change, so it need not wait for
            one of them.
    """

    request: Count
    program: str
    bindings: dict[str, int]
    feeds: list[str]
    trace: bool
    deadline: float
    commits: int = -1
    small: list[Small] = field(default_factory=list)
    follows: int = -1
    free: bool = False


@dataclass(frozen=True)
class Prepare(Message):
    """Compiles a program for the sizes of coming steps."""

    request: Count
    program: str
    bindings: dict[str, int]


@dataclass(frozen=True)
class Commit(Message):
    """Commits the envelope's step and those before it: the worker applies their assignments."""


@dataclass(frozen=True)
class Abort(Message):
    """Aborts the envelope's step: the worker forgets it and wakes what waits in it."""

    error: str
    text: str


@dataclass(frozen=True)
class Read(Message):
    """Asks for the value of a variable."""

    request: Count
    variable: str


@dataclass(frozen=True)
class Write(Message):
    """Sets a variable to the value that was sent before."""

    request: Count
    variable: str


@dataclass(frozen=True)
class Save(Message):
    """Copies all variables as they are now, for a checkpoint.

    The worker writes them to a file in a folder under its own root, or sends them. `of` is the
    number of committed steps.
    """

    request: Count
    folder: str
    file: str
    of: Count


@dataclass(frozen=True)
class Forget(Message):
    """Drops programs, and variables that live elsewhere from now on."""

    request: Count
    programs: list[str]
    variables: list[str]


@dataclass(frozen=True)
class Join(Message):
    """Tells a worker that another one takes part in the session from now on.

    Attributes:
        worker: The new worker's number, which is higher than those before.
        address: Its address.
        key: Its public key, or "".
    """

    request: Count
    worker: Count
    address: str
    key: str = ""


@dataclass(frozen=True)
class Adopt(Message):
    """Lets mirrors take the place of the variables that they mirror.

    Attributes:
        moved: For each new name the variable that has this name from now on.
        copied: For each new name the variable, which keeps its own, whose value it gets.
    """

    request: Count
    moved: dict[str, str]
    copied: dict[str, str]


@dataclass(frozen=True)
class Measure(Message):
    """Asks for a calibration of the worker's machine.

    If it `probes`, the worker reports how fast it is at the moment instead, in a fraction of a
    second.
    """

    request: Count
    probes: bool = False


@dataclass(frozen=True)
class Meet(Message):
    """Asks a worker which others it reaches."""

    request: Count
    deadline: float


@dataclass(frozen=True)
class Probe(Message):
    """Asks a worker to time round trips of `nbytes` to another worker."""

    request: Count
    target: Count
    nbytes: Count
    repeats: Count
    deadline: float


@dataclass(frozen=True)
class Close(Message):
    """Ends the session on this worker and frees its state."""

    request: Count


@dataclass(frozen=True)
class Ping(Message):
    """Renews a session's lease.

    `resent` is the last `Resend` that the sender has answered, `sent` the time on the sender's
    clock.
    """

    resent: Count = 0
    sent: float = 0.0


@dataclass(frozen=True)
class Pong(Message):
    """Answers a ping. The envelope's step is the one that is being computed, or 0.

    `sent` is the ping's, `clock` the time on the worker's clock, and `home` names that clock.
    """

    resent: Count = 0
    sent: float = 0.0
    clock: float = 0.0
    home: str = ""


@dataclass(frozen=True)
class Ack(Message):
    """Acknowledges messages where no other message does.

    `asks` requests the same from a peer that does not acknowledge.
    """

    resent: Count = 0
    asks: bool = False


@dataclass(frozen=True)
class Resend(Message):
    """Requests messages from number `first` on, which were lost or damaged.

    Each gap is requested by an `attempt` of its own, which is answered once.
    """

    first: Count
    attempt: Count


@dataclass(frozen=True)
class Fenced(Message):
    """Rejects a message of another epoch or session.

    The error is StaleEpoch, with the valid epoch in the envelope, or StaleSession.
    """

    error: str
    text: str


@dataclass(frozen=True)
class Unreached(Message):
    """Reports that another worker acknowledges nothing, after `asked` requests half a second apart.

    `edge` is the edge of the last message for it, of the envelope's step.
    """

    worker: Count
    asked: Count
    edge: Key


@dataclass(frozen=True)
class Draining(Message):
    """The worker was asked to end, and waits so many seconds for its sessions to leave."""

    seconds: float


@dataclass(frozen=True)
class Chunk(Message):
    """A piece of an array, in the frame behind it, from byte `offset` of the array's memory.

    Attributes:
        purpose: What the array is for.
        number: The step (of edges) or the request (of all others).
        name: The edge, feed, fetch or part.
        axes: The axes from the slowest to the fastest in memory, so that an array keeps its layout.
        checksum: Of the piece; 0 if it travels over what cannot damage it.
        slot: If not 0, no frame follows: the array lies there in memory that the sender shares.
        turn: The number of the slot's use.
    """

    purpose: str
    number: Count
    name: Key
    dtype: str
    shape: list[Count]
    axes: list[Count]
    nbytes: Count
    offset: Count
    checksum: Count = 0
    slot: Count = 0
    turn: Count = 0


@dataclass(frozen=True)
class Tensor(Message):
    """A small tensor of another worker, for the envelope's step; its name is the edge."""

    array: Small


@dataclass(frozen=True)
class Share(Message):
    """Offers memory of the sender, in which it lends arrays to a receiver that attaches it."""

    token: str


@dataclass(frozen=True)
class Ready(Message):
    """Answers a request that has no result of its own."""

    request: Count


@dataclass(frozen=True)
class Met(Message):
    """The workers that did not answer."""

    request: Count
    missing: list[int]


@dataclass(frozen=True)
class Spans(Message):
    """A part of what a traced step measured."""

    request: Count
    spans: list[tuple[str, str, int, int]]


@dataclass(frozen=True)
class Done(Message):
    """A step is computed and can commit; the arrays it names were sent before."""

    request: Count
    fetches: list[str]
    peak: dict[str, int]
    small: list[Small] = field(default_factory=list)


@dataclass(frozen=True)
class Saved(Message):
    """A shard of a checkpoint is on disk: its SHA-256 and bytes.

    Without a SHA-256, the variables that it names were sent before instead.
    """

    request: Count
    sha256: str
    nbytes: Count
    fetches: list[str]


@dataclass(frozen=True)
class Measured(Message):
    """The calibration of the worker's machine, or its present speed."""

    request: Count
    report: Plain


@dataclass(frozen=True)
class Probed(Message):
    """The median one-way time in seconds."""

    request: Count
    seconds: float


@dataclass(frozen=True)
class Failed(Message):
    """A request failed with an error class of `graphflow.errors`, or OpError for any other.

    If it is late because it waited for another worker, `awaits` is that worker; else -1.
    """

    request: Count
    error: str
    text: str
    traceback: str
    awaits: int = -1


@dataclass(frozen=True)
class Broken(Message):
    """The worker cannot go on with the session.

    If its process has `ended`, by a signal in an `op`, another process at its address says so.
    """

    reason: str
    op: str = ""
    ended: bool = False


KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}

UNNUMBERED = (Ping, Pong, Ack, Resend, Fenced, Broken, Share, Unreached)
"""Messages that are neither kept nor sent again: a later one says all that a lost one did."""
