"""The records of a plan: nodes with devices and times, transfers; and what was
measured of them."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.base.formatting import show_seconds
from graphflow.base.lazy_dataclass import dataclass

ON_ONE = "on one device"
"""Where the rival of a plan over several devices is."""


@dataclass(frozen=True)
class BodyNode:
    """A node of a body that a planned node holds; it runs with it, as a part of it.

    `inputs` are names of nodes of the same body, `location` is the user's line.
    """

    name: str
    op: str
    output: str
    inputs: tuple[str, ...]
    location: str


@dataclass(frozen=True)
class PlannedNode:
    """A node with its place; placeholders are on "/client", constants have no place.

    Args:
        start, finish: predicted seconds from the start of the step.
        output: what it makes, "float32(128, 64)".
        bytes: of its outputs.
        inputs: names of the nodes that it reads, constants left out.
        location: the user's line.
        why: one sentence: why it is there.
        candidates: seconds of computation on each device that may run it.
        holds: what its bodies consist of, if it has any.
        fused: name of the last node of the kernel that it is part of; "" if it has its own.
        task: of a pipeline's schedule: "F0", the forward pass of micro-batch 0; "" if of none.
        low, high: ends of the 80 % interval of its seconds; None where that is unknown.
        basis: of the prediction: "9 observations in traced steps", "calibration of the op".
    """

    name: str
    op: str
    device: str
    start: float
    finish: float
    output: str
    bytes: int
    inputs: tuple[str, ...]
    location: str
    why: str
    candidates: Mapping[str, float]
    holds: tuple[BodyNode, ...] = ()
    fused: str = ""
    task: str = ""
    low: float | None = None
    high: float | None = None
    basis: str = ""


@dataclass(frozen=True)
class PlannedTransfer:
    """A tensor on its way. `edge` is its number in the running program; -1: a feed or a fetch."""

    tensor: str
    source: str
    target: str
    start: float
    finish: float
    bytes: int
    edge: int


@dataclass(frozen=True)
class Interval:
    """The activity of a track (a device, or a link "/worker:0/cpu:0 → /worker:1/cpu:0") does for
    some time.

    `kind` is "compute", "send", "transfer" or "wait"; start and finish in seconds.
    """

    track: str
    name: str
    start: float
    finish: float
    kind: str


@dataclass(frozen=True)
class LinkTotal:
    """The messages from one device to another in a window; `seconds` are those on the way."""

    source: str
    target: str
    transfers: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PlannedWindow:
    """A window of turns: servers and workers that run beside each other in a `concurrent` node.

    Args:
        node: name of the node.
        text: the window in words: "pool of 2 workers, 32 turns".
        seconds: predicted, from its start to its end.
        high: with a jitter, the seconds that 9 of 10 draws stay below; else None. `seconds` are
            then the median.
        busy: device -> seconds in which its parties compute or send.
        bars: what parties do, by start. Names are "window/1/T3": turn 3 of party 1; A is an update
            of a server, E a push or a pull.
        links: what travels between devices.
    """

    node: str
    text: str
    seconds: float
    high: float | None
    busy: Mapping[str, float]
    bars: tuple[Interval, ...]
    links: tuple[LinkTotal, ...]


@dataclass(frozen=True)
class Rival:
    """The placement that a plan was compared with: on one device if the plan is over several.

    A plan on one device has a rival over several devices if that is faster, but not surely.

    Args:
        where: `ON_ONE`, or "over 2 devices".
        seconds: predicted, of a step.
        margin: half the width of the 80 % interval of these.
        least_gain: seconds that one of the two must save for that not to be chance.
    """

    where: str
    seconds: float
    margin: float
    least_gain: float


@dataclass(frozen=True)
class MeasuredSteps:
    """Measurements of traced steps: median seconds, one step's timeline, bytes by device."""

    makespan: float
    timeline: tuple[Interval, ...]
    peak_memory: Mapping[str, int]
    steps: int


@dataclass(frozen=True)
class StepQuartiles:
    """Quartiles of the durations of steps, in seconds."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        low, median, high = map(show_seconds, (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


@dataclass(frozen=True)
class PlacementVerdict:
    """The outcome of comparing a new placement with another one by the steps of both.

    With several sets of fetches, seconds are means over the steps that were compared.

    Args:
        stays: True if the new placement stays; False if the session went back to the other.
        promised: predicted seconds of a step with the new placement, when it was adopted.
        measured: seconds of a step with the new placement.
        other: the other placement in words: the one before, or one device.
        other_promised: predicted seconds of a step with the other placement; None: there is no
            other that fits in memory.
        other_measured: seconds of a step with the other placement; None: it did not run.
    """

    stays: bool
    promised: float
    measured: StepQuartiles
    other: str
    other_promised: float | None = None
    other_measured: StepQuartiles | None = None

    def __str__(self) -> str:
        outcome = "the new placement stays" if self.stays else f"back to {self.other}"
        text = f"{outcome}: {show_seconds(self.promised)} a step promised, {self.measured} measured"
        if self.other_promised is not None:
            text += f"; {self.other}: {show_seconds(self.other_promised)} promised, "
            measured = self.other_measured
            text += "not tried" if measured is None else f"{measured} measured"
        return text
