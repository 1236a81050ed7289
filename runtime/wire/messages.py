"""What travels while a graph runs: tensors between hosts, results, and the control messages.

Plain frozen values without behaviour. `wire` turns the control messages into frames by their field
types, the state machines of `protocol` pass them around, `Host` and the session exchange the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.runtime.wire.field_checks import construct_unchecked

Array = np.ndarray[Any, np.dtype[Any]]
Span = tuple[str, str, int, int]  # track, name, start and end in ns (monotonic)

COORDINATOR = -1  # the origin of a session's coordinator; workers are 0, 1, …

# Field types of messages. wire refuses a value that is not of the type that the field declares.
Count = Annotated[int, "not negative"]
Plain = Annotated[Any, "plain data"]  # None, bool, int, float, str, and lists and dicts of them
Key = int | str
EDGE_BITS = 32
"""Of the key of a tensor in a step: its edge; above them is its number, for an edge in a loop."""
STEP_BITS = 36
"""Of the number that a step has on the wire: the session's own number of it. Above them is how
often that number did not grow from one step to the next, as after a failure or a recovery, so that
numbers on the wire always grow. The lowest is 1 << STEP_BITS."""
CREDIT_PREFIX = "taken/"
"""What keys begin with that tell how much of an edge in a loop was received."""
EXCHANGE_PREFIX = "collective/"
"""What keys begin with of what ranks tell each other; then come the program, "/", and the number of
the group."""
Small = bytes
"""A small array in a message, with its name and their checksum: see `wire.small`."""
WAIT_PREFIX, SEND_PREFIX = "recv/", "send/"
"""How spans of edges begin; then comes the tensor's name, "/", and the number of the edge. Of those
in loops, whose lines know no names, the number alone."""


def step_of(number: int) -> int:
    """Return the session's own number of a step, for people: how many had committed before it."""
    return number & ((1 << STEP_BITS) - 1)


class TensorParcel(NamedTuple):
    """A tensor on its way to another worker, over the cut edge `edge` of one step.

    `owned` says that nobody writes to the array again, so that it is sent without a copy;
    otherwise it is copied before `outbox` returns, and its buffer may be reused at once.
    """

    session: str
    step: int
    edge: Key
    target_worker: int
    array: Array
    owned: bool = False


class Computed(NamedTuple):
    """What one host computed in a step. The fetched arrays belong to the receiver, and may be lent;
    peaks are in bytes a device."""

    fetches: Mapping[str, Any] = MappingProxyType({})
    spans: Sequence[Span] = ()
    peak: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class HostUsage:
    """What a session takes of one host: bytes a device of its programs' arenas and of its
    variables, and for each tensor that is being waited for since how many seconds."""

    arenas: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What all hosts computed in a step, once it is decided that the step commits. `errors` tells
    for each worker with a clock of its own by how many seconds its spans may be off."""

    fetches: dict[str, Array]
    spans: list[Span]
    peak: dict[str, int]
    errors: dict[int, float] = field(default_factory=dict)


# Control messages ------------------------------------------------------------------------------


class Envelope(NamedTuple):
    """What every message carries beside its content.

    `epoch` fences what a session sent before it was recovered. `sequence` counts the messages of
    one sender to one receiver within a session and epoch, from 1; a message of `UNNUMBERED` repeats
    the number of the last one before it, so that its receiver sees what it lacks. `acknowledged` is
    the last one that the sender has received in the other direction. `token` is the secret that the
    parties of a session share, and nobody else has. In place of a step, `Welcome` has the number of
    the process that answers, and `Open` of the one that it is meant for.
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
    """A message with other values in some fields."""
    return construct_unchecked(type(message), message.__dict__ | fields)


@dataclass(frozen=True)
class Hello(Message):
    """A coordinator asks who listens. `Hello` and `Welcome` never change, so that versions that
    differ can still tell each other."""

    request: Count
    version: str
    wire: Count
    python: str


@dataclass(frozen=True)
class Welcome(Message):
    """A worker says which program it runs and what it offers."""

    request: Count
    version: str
    wire: Count
    python: str
    devices: list[str]


@dataclass(frozen=True)
class Status(Message):
    """Asks a worker what it does; outside of sessions, as `Hello`."""

    request: Count


@dataclass(frozen=True)
class StatusReport(Message):
    """What a worker does, as plain data; see `status.report`."""

    request: Count
    report: Plain


@dataclass(frozen=True)
class Open(Message):
    """Starts a session on a worker: its index, the addresses of all workers in order, after how
    many silent seconds the worker may forget the session, the names of the modules whose ops it
    uses, and the public keys of all workers in order ("" where there is none), or nothing. What a
    `trial` does is not counted."""

    request: Count
    worker: Count
    peers: list[str]
    lease: float
    ops: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    trial: bool = False


@dataclass(frozen=True)
class Load(Message):
    """A program follows its `parts` chunks: part 0 is the header, the others are its constants."""

    request: Count
    program: str
    parts: Count


@dataclass(frozen=True)
class Compute(Message):
    """Runs the compute half of the envelope's step; its feeds were sent before it. The step before
    it that commits, if it was not told yet, is `commits`; else that is -1. A step that `follows`
    one that is not decided yet waits for it to commit, and is dropped if it does not; a `free` one
    reads nothing that steps of its program change, and need not wait for another one of them."""

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
    """The envelope's step happened, and those before it: apply their assignments."""


@dataclass(frozen=True)
class Abort(Message):
    """The envelope's step did not happen: forget it, and wake what waits in it."""

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
    """Copies all variables as they are now, and writes them to a file in a folder of a checkpoint
    under the worker's own root, or sends them; `of` is the number of steps committed."""

    request: Count
    folder: str
    file: str
    of: Count


@dataclass(frozen=True)
class Forget(Message):
    """Lets go of programs and of variables, which live elsewhere from now on."""

    request: Count
    programs: list[str]
    variables: list[str]


@dataclass(frozen=True)
class Measure(Message):
    """Asks for a calibration of the worker's machine."""

    request: Count


@dataclass(frozen=True)
class Meet(Message):
    """Asks a worker which others it reaches."""

    request: Count
    deadline: float


@dataclass(frozen=True)
class Probe(Message):
    """Asks a worker to time round trips of `nbytes` to another worker and back."""

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
    """Keeps a session's lease. `resent` is the last `Resend` that its sender has answered, `sent`
    the time on its sender's clock."""

    resent: Count = 0
    sent: float = 0.0


@dataclass(frozen=True)
class Pong(Message):
    """Answers a ping; the envelope's step is the one that is being computed, or 0. `sent` is the
    ping's, `clock` the time on the worker's clock, and `home` says which clock that is."""

    resent: Count = 0
    sent: float = 0.0
    clock: float = 0.0
    home: str = ""


@dataclass(frozen=True)
class Ack(Message):
    """Says what was received and what was sent, where no other message does; `asks` for the same,
    by one whose messages are not acknowledged."""

    resent: Count = 0
    asks: bool = False


@dataclass(frozen=True)
class Resend(Message):
    """Messages from number `first` on were lost, or damaged: send them again. Each gap is asked for
    by an `attempt` of its own, which is answered once."""

    first: Count
    attempt: Count


@dataclass(frozen=True)
class Fenced(Message):
    """What was sent belongs to another epoch or session, and was not applied: StaleEpoch, with the
    epoch that counts in the envelope, or StaleSession."""

    error: str
    text: str


@dataclass(frozen=True)
class Unreached(Message):
    """Another worker has taken nothing of what waits for it, though it was `asked` so many times,
    each half second; the last of it is an edge of the envelope's step."""

    worker: Count
    asked: Count
    edge: Key


@dataclass(frozen=True)
class Draining(Message):
    """The worker is asked to end, and waits so many seconds for its sessions to leave it."""

    seconds: float


@dataclass(frozen=True)
class Chunk(Message):
    """A piece of an array, in the frame behind it, from byte `offset` of the array's memory.

    `purpose` says what the array is for, `number` is the step (edges) or the request (all others),
    and `name` the edge, feed, fetch or part. `axes` orders the axes from the slowest to the fastest
    in memory, so that an array keeps its layout when it travels. `checksum` is of the piece;
    0 where it travels by what cannot damage it. Where there is a `slot`, no frame follows: the
    array lies there in memory that the sender shares, for the `turn`-th time.
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
    """Offers memory of the sender's, in which it will lend arrays to a receiver that attaches."""

    token: str


@dataclass(frozen=True)
class Ready(Message):
    """A request without a result of its own is done."""

    request: Count


@dataclass(frozen=True)
class Met(Message):
    """Who did not answer among the other workers."""

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
    """A shard of a checkpoint is on disk: its SHA-256 and bytes; or, with no SHA-256, the
    variables that were sent before instead."""

    request: Count
    sha256: str
    nbytes: Count
    fetches: list[str]


@dataclass(frozen=True)
class Measured(Message):
    """The calibration of the worker's machine."""

    request: Count
    report: Plain


@dataclass(frozen=True)
class Probed(Message):
    """The median one-way time in seconds."""

    request: Count
    seconds: float


@dataclass(frozen=True)
class Failed(Message):
    """A request failed with an error class of `graphflow.errors`, or OpError for any other. If it
    is late because it waited for another worker, it `awaits` that one; else this is -1."""

    request: Count
    error: str
    text: str
    traceback: str
    awaits: int = -1


@dataclass(frozen=True)
class Broken(Message):
    """The worker cannot go on with the session; or its process has `ended`, by a signal in an `op`,
    and another one at its address says so."""

    reason: str
    op: str = ""
    ended: bool = False


KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}

UNNUMBERED = (Ping, Pong, Ack, Resend, Fenced, Broken, Share, Unreached)
"""What is neither kept nor sent again: a later one says all that a lost one did."""
