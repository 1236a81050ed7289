"""Every error graphflow raises, in one hierarchy.

Each message says what happened, where (node, user's line), with which numbers, and what to do
about it.
"""

from __future__ import annotations


class GraphflowError(Exception):
    """Base of all errors that graphflow raises on purpose.

    Attributes:
        longest: characters of a message; of a longer one, which shows a value that somebody gave
            for another, the middle is left out.
    """

    longest = 20_000

    def __init__(self, *args: object) -> None:
        super().__init__(*(_abridge(a, self.longest) if isinstance(a, str) else a for a in args))


def error_text(error: BaseException) -> str:
    """What an error says, as text that can be sent: a user's class may make of its message what it
    likes."""
    try:
        text = str(error)
    except Exception as failed:
        return f"({type(failed).__name__} from its message)"
    return escape_surrogates(text)


def escape_surrogates(text: str) -> str:
    """A text in which lone surrogates, which UTF-8 does not have, are told by their numbers."""
    return text.encode("utf-8", "backslashreplace").decode()


def escape_unprintable(text: str) -> str:
    """The text with control characters, and all others that do not print, written as escapes."""
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
    """An argument of an op or function is not one of those it takes."""


class DifferentiationError(GraphError):
    """A gradient was asked of something that has none."""


class OpCheckError(GraphError):
    """`gf.check_op` found that an op does not do what it declares."""


class VariableError(GraphError):
    """A variable is declared twice under a name, or assigned twice in a step."""


# Planning -------------------------------------------------------------------------------------


class PlacementError(GraphflowError):
    """No placement satisfies the constraints.

    `nodes` are the indices, in the placement problem, of the nodes at fault, so that a caller can
    name them.
    """

    nodes: tuple[int, ...] = ()


class DeviceError(PlacementError):
    """A device name is malformed, unknown to the cluster, or has no kernel for a pinned node."""


class DeviceLost(DeviceError):
    """A GPU failed in a way that only a new process gets over: an op read where there is no memory,
    or the GPU's memory is broken."""


class MemoryLimitError(PlacementError):
    """A graph fits in no device's memory.

    Attributes:
        needed: bytes of each device of the cluster, for the placement that came closest.
    """

    needed: tuple[int, ...] = ()


class ClusterError(PlacementError):
    """A cluster file or description is wrong."""


class PlanError(PlacementError):
    """A plan does not belong to this graph or cluster, or cannot be drawn or read."""


class ProblemError(PlacementError):
    """The arrays of a placement problem contradict each other."""


class ShardingError(PlacementError):
    """A graph cannot be cut over a mesh of devices as a strategy says."""


class ScheduleError(PlacementError):
    """A pipeline schedule misses or repeats tasks, would deadlock, or cannot be made so."""


# Running --------------------------------------------------------------------------------------


class SessionError(GraphflowError):
    """A session is used wrongly: closed, or with a fetch it cannot serve."""


class FeedError(SessionError):
    """A feed is missing, unknown, or of the wrong shape or dtype."""


class FetchError(SessionError):
    """A fetch is not a tensor, or cannot be computed."""


class OpError(GraphflowError):
    """An op failed while a step ran; names node, user's line and the (remote) traceback."""

    explained = False  # whether the message names the node already


class CheckError(OpError):
    """A `gf.debug.check` found its condition false, or an op a value that it has no result for (a
    singular matrix, a signal shorter than its frames)."""


class DeviceOutOfMemory(OpError, MemoryLimitError):
    """A device's memory ran out while a step ran; names the node, the bytes and the device."""


class NonFiniteError(OpError):
    """A step of a session with `check_finite` made a number that is not finite, and was undone;
    names the first node that did."""


class WorkerLost(GraphflowError):
    """A worker process died, froze or cannot be reached.

    Attributes:
        worker: its index; None where that is not known.
        step: the step in which it was lost, if it was in one.
        reason: in a few words, such as "out of memory".
        op: the op that a signal ended it in, with its node and the user's line; "" if unknown.
        program: the program that it was computing; "" if none.
        ended: whether its process is known to have ended; else it may be frozen, or cut off.
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
    """A worker took variables with it when it was lost, and no checkpoint restores them."""


class PoisonedTask(GraphflowError):
    """The same op, or program, ended three workers that computed it; it is not tried on another."""


class StepTimeout(GraphflowError):
    """A step passed its deadline; names the edge and the peer that did not deliver.

    Where workers wait for each other in a chain, that is the one at its end, which waits for none.

    Attributes:
        worker: the one that did not deliver; None where no worker was waited for.
    """

    def __init__(self, text: str = "", *, worker: int | None = None) -> None:
        super().__init__(text)
        self.worker = worker


class LinkLost(StepTimeout):
    """Two workers do not reach each other, though both answer this process. The step has changed
    nothing: it can be tried again once they do.

    Attributes:
        source: the worker that has sent something.
        target: the one that did not take it.
        step: the step.
        edge: what was sent: the number of the edge, or the name of an exchange.
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
    """Workers did not come up, or answer, within the start deadline."""


class TransportError(GraphflowError):
    """An address cannot be used: taken, malformed, or beyond loopback without keys."""


class AddressInUse(TransportError):
    """Another process listens at the address already."""


class InsecureAddress(TransportError):
    """An address beyond loopback was given without keys and without `--insecure`."""


class KeyFileError(TransportError):
    """A key is missing, damaged, of the wrong role, or not as private as a secret must be."""


class ProtocolError(GraphflowError):
    """A peer sent something that is not a valid message."""


class VersionMismatch(ProtocolError):
    """Two processes run different versions of graphflow."""


class NotAuthorised(ProtocolError):
    """A peer's key does not allow what it asked for."""


class StaleEpoch(ProtocolError):
    """The session was recovered meanwhile, and goes on without the one who missed that."""


class StaleSession(ProtocolError):
    """A message belongs to another session: one that is over, or whose secret it does not have."""


class MessageTooLarge(ProtocolError):
    """A message exceeds its cap."""


class GraphLimitError(ProtocolError):
    """A graph from the wire exceeds the limits on nodes or bytes, or names an unknown op."""


class ModuleNotAllowed(ProtocolError):
    """A session asks for ops or functions of a module that is not allowed where they would run."""


class CheckpointError(GraphflowError):
    """A checkpoint cannot be written or read."""


# Generated kernels ----------------------------------------------------------------------------


class CompileError(GraphflowError):
    """LLVM refuses the text of a generated kernel: a fault of ours."""


class Untraceable(GraphflowError):
    """An op's expression does what no generated loop does; the op keeps its plain kernel."""


# Models from files ----------------------------------------------------------------------------


class OnnxError(GraphflowError):
    """An ONNX model is broken, exceeds a limit, or is used wrongly."""


class UnsupportedOnnxError(OnnxError):
    """A model has nodes, or a graph has ops, that cannot be translated; the message lists all."""
