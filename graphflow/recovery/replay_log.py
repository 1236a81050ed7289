"""The log of a session: checkpoints, and what changed the state after each of them.

A recovery loads one of the checkpoints, and replays the entries that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CheckpointError
from graphflow.ir.op import Node, Tensor
from graphflow.runtime.checkpoint import Checkpoint
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray
from graphflow.runtime.telemetry.logs import Log

Array = np.ndarray[Any, Any]
ReadCheckpoint = Callable[[], Checkpoint]

_ENTRY_BYTES = 1000  # counted for each entry beside its arrays

_log = Log("graphflow.session")


@dataclass(frozen=True)
class CommittedStep:
    """A step that committed: fetches, feeds, and the number of steps before it."""

    tensors: Sequence[Tensor]
    feeds: Mapping[Node, Array]
    before: int

    @property
    def nbytes(self) -> int:
        """Bytes that the entry keeps alive."""
        return _ENTRY_BYTES + sum(value.nbytes for value in self.feeds.values())


@dataclass(frozen=True)
class VariableWrite:
    """A variable that was set."""

    node: Node
    value: Array | LazyArray

    @property
    def nbytes(self) -> int:
        """Bytes that the entry keeps alive."""
        return _ENTRY_BYTES + self.value.nbytes


@dataclass
class ReplaySegment:
    """A checkpoint, and the entries from it to the next one.

    Attributes:
        read: reads the checkpoint again; None for the initial values of variables.
        written: True once the checkpoint is on disk.
        entries: what changed the state since.
        nbytes: size of the entries.
    """

    read: ReadCheckpoint | None
    written: bool
    entries: list[CommittedStep | VariableWrite] = field(default_factory=list)
    nbytes: int = 0


class ReplayLog:
    """Segments from the oldest checkpoint that a recovery may need.

    Without segments the log leads nowhere: entries are dropped until the next checkpoint.
    """

    def __init__(self, read: ReadCheckpoint | None) -> None:
        self._segments = [ReplaySegment(read, written=True)]

    @property
    def nbytes(self) -> int:
        """Size of all entries."""
        return sum(each.nbytes for each in self._segments)

    def add(self, entry: CommittedStep | VariableWrite) -> None:
        """Append what changed the state."""
        if self._segments:
            self._segments[-1].entries.append(entry)
            self._segments[-1].nbytes += entry.nbytes

    def begin_segment(self, read: ReadCheckpoint) -> ReplaySegment:
        """Start a segment with a checkpoint that is being written, and return it."""
        segment = ReplaySegment(read, written=False)
        self._segments.append(segment)
        return segment

    def restart(self, read: ReadCheckpoint) -> None:
        """Drop everything, and start from another checkpoint."""
        self._segments = [ReplaySegment(read, written=True)]

    def clear(self) -> None:
        """Drop everything, because the state cannot be reached from the log any more."""
        self._segments.clear()

    def drop_old(self, spare: int = 0) -> None:
        """Drop the segments before the last written checkpoint, but keep `spare` older ones."""
        del self._segments[: self._last_written(spare)]

    def _last_written(self, skip: int) -> int:
        """Return the index of the last written checkpoint, or `skip` before it; 0 if none."""
        places = [i for i, each in enumerate(self._segments) if each.written]
        return places[-1 - skip] if len(places) > skip else 0

    def find_base(self) -> tuple[int, Checkpoint]:
        """Return the last readable checkpoint, and the index of its segment.

        Raises:
            CheckpointError: there is none; the message says why.
        """
        why = (
            "none was written since a step was interrupted, another checkpoint was loaded, or the "
            "log became too large"
        )
        for place in reversed(range(len(self._segments))):
            segment = self._segments[place]
            if not segment.written:
                continue
            if segment.read is None:
                return place, Checkpoint({}, 0)
            try:
                return place, segment.read()
            except CheckpointError as error:
                why = str(error)
                _log.tell("checkpoint.ignored", reason=why)
        raise CheckpointError(why)

    def entries_from(self, place: int) -> Iterator[CommittedStep | VariableWrite]:
        """Yield the entries after the checkpoint of the segment at an index."""
        for segment in self._segments[place:]:
            yield from segment.entries
