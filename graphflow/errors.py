"""All errors that graphflow raises, in one hierarchy.

A message says what happened, where (node and user's line), with which numbers, and what to do.
"""

from __future__ import annotations


class GraphflowError(Exception):
    """Base of all errors that graphflow raises on purpose.

    Attributes:
        longest: most characters of a message. The middle of a longer one is left out: it may
            show a large value that the user gave by mistake.
    """

    longest = 20_000

    def __init__(self, *args: object) -> None:
        super().__init__(*(_abridge(a, self.longest) if isinstance(a, str) else a for a in args))


def error_text(error: BaseException) -> str:
    """Return an error's message as text that can be sent; a user's `__str__` may fail."""
    try:
        text = str(error)
    except Exception as failed:
        return f"({type(failed).__name__} from its message)"
    return escape_surrogates(text)


def escape_surrogates(text: str) -> str:
    """Return text with lone surrogates as escapes, since UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


def escape_unprintable(text: str) -> str:
    """Return text with control and other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _abridge(text: str, longest: int) -> str:
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    begin, end = longest * 3 // 4, longest // 4
    return f"{text[:begin]} … ({left_out:,} characters left out) … {text[-end:]}"


# Building a graph -----------------------------------------------------------------------------


class GraphError(GraphflowError):
    """A graph is malformed: a cycle, a foreign tensor, a truth value asked of a symbolic tensor."""

    longest = 2_000


class ShapeError(GraphError):
    """Shapes do not fit an op."""


class DTypeError(GraphError):
    """Dtypes do not fit an op, or two kinds would mix."""


class ArgumentError(GraphError):
    """An argument of an op or function has a wrong kind or value."""


class DifferentiationError(GraphError):
    """A gradient was requested of something that has none."""


class OpCheckError(GraphError):
    """`gf.check_op` found that an op does not do what its declaration says."""


class VariableError(GraphError):
    """Two variables have one name, or a step assigns one variable twice."""


# Planning -------------------------------------------------------------------------------------


class PlacementError(GraphflowError):
    """No placement satisfies the constraints.

    Attributes:
        nodes: indices, in the placement problem, of the nodes at fault, so that a caller can
            name them.
    """

    nodes: tuple[int, ...] = ()


class DeviceError(PlacementError):
    """A device name is malformed, unknown to the cluster, or has no kernel for a pinned node."""


class DeviceLost(DeviceError):
    """A GPU failed so that only a new process can use it again, after an illegal memory access for
    example."""


class MemoryLimitError(PlacementError):
    """A graph fits in no device's memory.

    Attributes:
        needed: bytes of each device of the cluster, for the placement that came closest.
    """

    needed: tuple[int, ...] = ()


class ClusterError(PlacementError):
    """A cluster file or description is wrong."""


class PlanError(PlacementError):
    """A plan does not fit this graph or cluster, or cannot be drawn or read."""


class ProblemError(PlacementError):
    """The arrays of a placement problem contradict each other."""


class ShardingError(PlacementError):
    """A strategy cannot partition a graph over its mesh of devices."""


class ScheduleError(PlacementError):
    """A pipeline schedule lacks or repeats tasks, would deadlock, or cannot be built."""


# Running --------------------------------------------------------------------------------------


class SessionError(GraphflowError):
    """A session is used wrongly: after it was closed, or with a fetch that it cannot serve."""


class FeedError(SessionError):
    """A feed is missing, unknown, or of the wrong shape or dtype."""


class FetchError(SessionError):
    """A fetch is not a tensor, or cannot be computed."""


class OpError(GraphflowError):
    """An op failed while a step ran; names node, user's line and the (remote) traceback."""

    explained = False  # True if the message names the node already


class CheckError(OpError):
    """A `gf.debug.check` failed, or an op has no result for its input.

    Such inputs are a singular matrix, or a signal shorter than its frames.
    """


class DeviceOutOfMemory(OpError, MemoryLimitError):
    """A device's memory ran out while a step ran; names the node, the bytes and the device."""


class TableFullError(OpError, MemoryLimitError):
    """A `gf.nn.HashTable` has no row for a new id; names the table's rows and how many it needs."""


class NonFiniteError(OpError):
    """A step of a session with `check_finite` produced NaN or infinity, and was undone.

    The message names the first node that produced it.
    """


class WorkerLost(GraphflowError):
    """A worker process died, froze or cannot be reached.

    Attributes:
        worker: index of the worker; None if unknown.
        step: the step during which it was lost, if any.
        reason: a few words, such as "out of memory".
        op: the op that was running when a signal ended the process, with its node and the
            user's line; "" if unknown.
        program: the program that it was computing; "" if none.
        ended: True if the process is known to have ended; otherwise it may be frozen or
            unreachable.
    """

    def __init__(
        self,
        text: str = "",
        *,
        worker: int | None = None,
        step: int | None = None,
        reason: str = "",
        op: str = "",
        program: str = "",
        ended: bool = False,
    ) -> None:
        super().__init__(text)
        self.worker = worker
        self.step = step
        self.reason = reason
        self.op = op
        self.program = program
        self.ended = ended


class StateLost(WorkerLost):
    """A lost worker held variables, and no checkpoint restores them."""


class PoisonedTask(GraphflowError):
    """The same op or program ended three workers that computed it; it is not tried again."""


class StepTimeout(GraphflowError):
    """A step passed its deadline; the message names the edge and the peer that did not deliver.

    If workers wait for each other in a chain, that peer is the last of it, which waits for no
    other.

    Attributes:
        worker: index of that worker; None if no worker was waited for.
    """

    def __init__(self, text: str = "", *, worker: int | None = None) -> None:
        super().__init__(text)
        self.worker = worker


class LinkLost(StepTimeout):
    """Two workers cannot reach each other, though both reach this process.

    The step has changed nothing; it can be tried again.

    Attributes:
        source: the worker that sent a tensor.
        target: the worker that did not acknowledge it.
        step: the step.
        edge: the number of the edge, or the name of a collective.
    """

    def __init__(
        self,
        text: str = "",
        *,
        source: int | None = None,
        target: int | None = None,
        step: int | None = None,
        edge: int | str | None = None,
    ) -> None:
        super().__init__(text)
        self.source = source
        self.target = target
        self.step = step
        self.edge = edge


class RendezvousTimeout(GraphflowError):
    """Workers did not start or answer before the deadline."""


class LaunchError(GraphflowError):
    """A launcher cannot start workers: its engine is missing, refuses, or has no room in time."""


class TransportError(GraphflowError):
    """An address cannot be used: malformed, occupied, or beyond loopback without keys."""


class AddressInUse(TransportError):
    """Another process listens at the address."""


class InsecureAddress(TransportError):
    """An address beyond loopback was given without keys and without `--insecure`."""


class KeyFileError(TransportError):
    """A key is missing or damaged, has a wrong role, or its file is readable by others."""


class ProtocolError(GraphflowError):
    """A peer sent something that is not a valid message."""


class VersionMismatch(ProtocolError):
    """Two processes run different versions of graphflow."""


class NotAuthorised(ProtocolError):
    """A peer's key does not allow what it asked for."""


class StaleEpoch(ProtocolError):
    """The session recovered to a newer epoch; this process belongs to the old one and must stop."""


class StaleSession(ProtocolError):
    """A message belongs to a session that has ended, or lacks the secret of its session."""


class MessageTooLarge(ProtocolError):
    """A message exceeds its size limit."""


class GraphLimitError(ProtocolError):
    """A graph from the wire exceeds the limit on nodes or bytes, or names an unknown op."""


class ModuleNotAllowed(ProtocolError):
    """A session needs ops or functions of a module that a worker does not allow."""


class CheckpointError(GraphflowError):
    """A checkpoint cannot be written or read."""


# Generated kernels ----------------------------------------------------------------------------


class CompileError(GraphflowError):
    """LLVM rejects a generated kernel: a bug in graphflow."""


class Untraceable(GraphflowError):
    """An op's expression cannot become a generated loop; the op keeps its numpy kernel."""


# Models from files ----------------------------------------------------------------------------


class LinearModelError(GraphflowError, ValueError):
    """A linear model was given an argument or data that it cannot use."""


class OnnxError(GraphflowError):
    """An ONNX model is broken, exceeds a limit, or is used wrongly."""


class UnsupportedOnnxError(OnnxError):
    """A model's nodes, or a graph's ops, cannot be translated; the message lists all of them."""
