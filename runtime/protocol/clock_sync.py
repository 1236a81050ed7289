"""Offset and drift of another process's monotonic clock, from round trips, without I/O.

A ping leaves at `sent`, the other process reads its clock, and the answer arrives at `came`. The
reading happened in between, so the offset lies within half a round trip of the middle. Each round
trip is such an interval. The intervals are widened by the possible drift since then, and then
intersected: the middle of the intersection is the estimate, its half width the error bound. Short
round trips dominate, as in NTP's clock filter. No path is assumed symmetric.

Source: Marzullo, Maintaining the Time in a Distributed System, 1984; Mills, RFC 5905, section 10.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from graphflow.base.lazy_dataclass import dataclass

DRIFT = 2e-4
"""Seconds a second that two clocks may drift apart; RFC 5905 allows 5e-4, quartz has less than
1e-4, and the kernel keeps to what NTP disciplines."""
WANDER = 1e-6
"""Seconds a second by which a drift, once measured, may change: with the temperature."""
BURST = 8
"""Pings that follow each other at once when a session opens: its first trace has a clock."""

_RECENT = 8  # round trips that are kept whatever they took
_SPAN = 30.0  # seconds of which only the quickest round trip is kept later
_SPANS = 32

Span = tuple[str, str, int, int]


@dataclass(frozen=True)
class ClockReading:
    """The estimate of another clock around one moment of this process's clock.

    Attributes:
        offset: their clock minus ours, in seconds, at our time `at`.
        drift: growth of the offset, in seconds per second.
        error: bound of the offset's error, in seconds; infinite if nothing is known.
    """

    at: float
    offset: float
    drift: float
    error: float

    def to_ours(self, theirs_ns: int) -> int:
        """Convert a time of the other clock to ours; both in ns."""
        # In integers: after a year, a clock has more ns than a float has digits.
        since = theirs_ns * 1e-9 - self.offset - self.at
        return theirs_ns - round(self.offset * 1e9) - round(self.drift * since * 1e9)

    def shift_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Convert spans of the other clock to ours."""
        if self.offset == 0 and self.drift == 0:
            return list(spans)
        return [
            (track, name, self.to_ours(start), self.to_ours(end))
            for track, name, start, end in spans
        ]


UNKNOWN = ClockReading(0.0, 0.0, 0.0, math.inf)


@dataclass(frozen=True)
class _RoundTrip:
    at: float
    offset: float
    error: float


class PeerClock:
    """Another process's monotonic clock, in seconds. Not thread-safe.

    Args:
        home: identity of this process's clock, see `clock_identity`; "" if it is unknown.

    Attributes:
        round_trips: number of round trips that were added.
    """

    def __init__(self, home: str = "") -> None:
        self._home = home
        self._is_same = bool(home)
        self._recent: deque[_RoundTrip] = deque(maxlen=_RECENT)
        self._kept: deque[_RoundTrip] = deque(maxlen=_SPANS)
        self.round_trips = 0

    def add_round_trip(self, sent: float, theirs: float, came: float, home: str = "") -> None:
        """Add a round trip: the other clock showed `theirs` between `sent` and `came` of ours.

        A round trip of negative length, or a time that is not finite, is ignored.
        """
        trip = _RoundTrip((sent + came) / 2, theirs - (sent + came) / 2, (came - sent) / 2)
        if not (trip.error >= 0 and math.isfinite(theirs)):
            return
        self.round_trips += 1
        # Equal identities mean one clock, unless a round trip disagrees (a copied machine).
        self._is_same = self._is_same and home == self._home and abs(trip.offset) <= trip.error
        kept = [*self._kept, *self._recent]
        if kept and not _are_consistent(trip, kept[-1]):  # the clock jumped: its machine slept
            self._kept.clear()
            self._recent.clear()
        elif len(self._recent) == _RECENT:
            self._keep(self._recent[0])
        self._recent.append(trip)

    def _keep(self, trip: _RoundTrip) -> None:
        last = self._kept[-1] if self._kept else None
        if last is None or trip.at // _SPAN != last.at // _SPAN:
            self._kept.append(trip)
        elif trip.error < last.error:
            self._kept[-1] = trip

    @property
    def round_trip(self) -> float:
        """The shortest recent round trip, in seconds; infinite before the first one."""
        return 2 * min((trip.error for trip in self._recent), default=math.inf)

    def estimate_at(self, at: float) -> ClockReading:
        """Return the estimate of the other clock around our time `at`."""
        trips = [*self._kept, *self._recent]
        if not trips:
            return UNKNOWN
        if self._is_same:
            return ClockReading(at, 0.0, 0.0, 0.0)
        drift, doubt = _estimate_drift(trips)
        low, high = -math.inf, math.inf
        for trip in reversed(trips):  # an older interval that contradicts younger ones is stale
            middle = trip.offset + drift * (at - trip.at)
            reach = trip.error + doubt * abs(at - trip.at)
            if middle - reach > high or middle + reach < low:
                break
            low, high = max(low, middle - reach), min(high, middle + reach)
        return ClockReading(at, (low + high) / 2, drift, (high - low) / 2)


def _are_consistent(one: _RoundTrip, other: _RoundTrip) -> bool:
    """Return True if two round trips can be of one clock with an allowed drift."""
    apart = abs(one.offset - other.offset)
    return apart <= one.error + other.error + DRIFT * abs(one.at - other.at)


def _estimate_drift(trips: Sequence[_RoundTrip]) -> tuple[float, float]:
    """Return the drift and the bound of its error.

    The drift is the slope between the shortest round trips of the first and of the second half.
    """
    half = len(trips) // 2
    if not half:
        return 0.0, DRIFT
    first = min(trips[:half], key=lambda trip: trip.error)
    last = min(trips[half:], key=lambda trip: trip.error)
    apart = last.at - first.at
    if apart <= 0:
        return 0.0, DRIFT
    doubt = (first.error + last.error) / apart + WANDER
    if doubt >= DRIFT:  # too little time has passed to measure it
        return 0.0, DRIFT
    drift = (last.offset - first.offset) / apart
    return max(-DRIFT, min(DRIFT, drift)), doubt


def clock_identity() -> str:
    """Return an identifier of this process's monotonic clock; "" if the system has none.

    Processes of the same boot and time namespace share a clock, and get the same identifier.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = str(Path("/proc/self/ns/time").readlink())
    except (OSError, UnicodeError):
        return ""
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=8).hexdigest()
