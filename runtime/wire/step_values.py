"""Values of steps: tensors between hosts, results, and how edges and steps are numbered.

`Host` and the session exchange them; control messages carry some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.lazy_dataclass import dataclass

Array = np.ndarray[Any, np.dtype[Any]]
Span = tuple[str, str, int, int]  # track, name, start and end in ns (monotonic)
Key = int | str
EDGE_BITS = 32
"""Bits of an edge's number in the key of a tensor in a step.

Above them is the iteration, for an edge in a loop.
"""
STEP_BITS = 36
"""Bits of the session's own number of a step in its number on the wire.

Above them is a count of how often that number did not grow from one step to the next, as after a
failure or a recovery. So numbers on the wire always grow. The lowest is 1 << STEP_BITS.
"""
CREDIT_PREFIX = "taken/"
"""Prefix of keys by which a receiver tells how much of an edge in a loop it has taken."""
EXCHANGE_PREFIX = "collective/"
"""Prefix of keys of messages between the ranks of a collective.

The program, "/", and the number of the group follow.
"""
WAIT_PREFIX, SEND_PREFIX = "recv/", "send/"
"""Prefixes of the names of edges' spans.

The tensor's name, "/", and the number of the edge follow; for edges in loops, whose lines know no
names, the number alone.
"""


def step_of(number: int) -> int:
    """Return the session's own number of a step: how many steps had committed before it."""
    return number & ((1 << STEP_BITS) - 1)


class TensorParcel(NamedTuple):
    """A tensor for another worker, over the cut edge `edge` of one step.

    If it is `owned`, nobody writes to the array again, so it is sent without a copy. Otherwise it
    is copied before `outbox` returns, and its buffer may be reused at once.
    """

    session: str
    step: int
    edge: Key
    target_worker: int
    array: Array
    owned: bool = False


class Computed(NamedTuple):
    """The results of one host in a step.

    The fetched arrays belong to the receiver, and may be lent. Peaks are in bytes for each device.
    """

    fetches: Mapping[str, Any] = MappingProxyType({})
    spans: Sequence[Span] = ()
    peak: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class HostUsage:
    """The memory and time that a session uses of one host.

    Attributes:
        arenas: Bytes of its programs' arenas, by device.
        variables: Bytes of its variables, by device.
        waits: Seconds of the wait for each tensor that is being waited for.
    """

    arenas: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, int] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """The results of all hosts in a step that commits.

    `errors` is, for each worker with a clock of its own, by how many seconds its spans may be off.
    """

    fetches: dict[str, Array]
    spans: list[Span]
    peak: dict[str, int]
    errors: dict[int, float] = field(default_factory=dict)
