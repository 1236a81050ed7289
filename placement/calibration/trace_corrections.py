"""Corrections of the cost model that traced steps taught about this machine.

    traced nodes and transfers ─observe→ TraceCorrections ─factor, link→ the session's next plan
                                            └─corrections_file→ a file beside the profile

Nodes are kept as ratios, measured by predicted, so that an observation holds for other sizes of its
bucket. Ratios belong to one calibration. Under another one, all is learned anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlanError
from graphflow.placement.calibration.calibrate import LinkSpeed, fit_link
from graphflow.placement.calibration.held_out import error_deviation
from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.calibration.node_bucket import (
    TURN,
    Bucket,
    bottleneck_of,
    distance_between,
    half_octaves,
    op_name_of,
)
from graphflow.placement.calibration.profile_file import machine_key

FORMAT = 4
SAMPLES = 31
"""Ratios that are kept of each bucket, the latest."""
RECENT = 9
"""How many of these count. Old ones, perhaps of a busy machine, are replaced."""
TRUSTED_RATIO = 4.0
"""The largest ratio, or its inverse, that one observation can establish.

Two can establish its square, and so on: a more surprising ratio needs more evidence.
"""
BUCKETS = 4096
"""Buckets that are kept, those observed last."""
LIMITS = (1e-3, 1e3)
"""A ratio beyond is no speed: a process was suspended, or a clock was wrong."""
MOST_OF_TURNS = 1e9
"""The largest ratio of a turn of a window."""
SLOWEST = 1e3
"""Seconds of a transfer, likewise."""
FEW = 3
"""Errors from which the deviation of others is estimated at least."""
_CLOSEST = 5
_REACH = 8.0
"""Steps between buckets, half an octave each, over which half of an observation carries."""


@dataclass(frozen=True)
class Evidence:
    """Observations that stand for a bucket.

    Attributes:
        ratios: The latest of the bucket itself; else one for each of the closest buckets; none if
            nothing alike was observed.
        weight: At most 1; the less, the farther away the observed nodes are.
        source: Predictions that rest on the same observations have the same source.
        is_own: Such nodes themselves were observed.
        busy: Their neighbours were busy.
        class_deviation: Standard deviation of calibration's errors for all observed nodes with the
            same bottleneck; 0 for the bucket itself, or if these are few.
    """

    ratios: Sequence[float] = ()
    weight: float = 0.0
    source: tuple[Any, ...] = ()
    is_own: bool = False
    busy: bool = False
    class_deviation: float = 0.0


class TraceCorrections:
    """Medians of measurements, by bucket of nodes and by link.

    Args:
        basis: The calibration that they correct, see `corrections_file.basis_of`.

    Attributes:
        version: Grows with each observation, so that a session knows when to plan again.
    """

    def __init__(self, basis: str = "") -> None:
        self.basis = basis
        self.version = 0
        self._nodes: dict[Bucket, list[float]] = {}
        self._links: dict[tuple[str, int], list[float]] = {}
        self._steps: dict[tuple[str, int, int], list[float]] = {}
        self._profiled: dict[str, None] = {}
        self._families: dict[tuple[str, str, str], list[tuple[Bucket, float]]] | None = None
        self._deviations: dict[tuple[str, str, str], float] = {}
        self._errors: dict[str, list[float]] = {}

    def __len__(self) -> int:
        return len(self._nodes) + len(self._links) + len(self._steps)

    def observe(self, bucket: Bucket, measured: float, predicted: float) -> None:
        """Note the measured seconds of a node, and those that calibration alone predicted.

        A node that takes less than a reading of the clock counts with the least ratio. If it
        taught nothing, it would be profiled again and again.
        """
        ratio = measured / predicted if 0 < predicted < math.inf else 0.0
        if 0 < ratio <= limit_of(bucket):
            _append_sample(self._nodes, bucket, max(ratio, LIMITS[0]))
            self._families = None
            self.version += 1

    def observe_link(self, link: str, nbytes: int, measured: float) -> None:
        """Note the seconds of a transfer over a kind of link."""
        if 0 < measured < SLOWEST:
            _append_sample(self._links, (link, half_octaves(nbytes)), measured)
            self.version += 1

    def forget_links(self) -> None:
        """Drop the observations of transfers, because links were measured anew."""
        if self._links:
            self._links.clear()
            self.version += 1

    def observe_step(self, kind: str, units: int, predicted: float, measured: float) -> None:
        """Note the seconds of whole steps.

        Args:
            kind: Of session, "here" or "process".
            units: The number of participants, see `planning.units`.
            predicted: Seconds of the step's nodes and transfers, by all that is known of these.
            measured: Seconds of steps that were not traced.
        """
        if predicted > 0 and 0 < measured < SLOWEST:
            beyond = max(0.0, measured - predicted) / predicted
            _append_sample(self._steps, (kind, units, half_octaves(predicted * 1e9)), beyond)
            self.version += 1

    def step_overhead(self, kind: str, units: int, predicted: float) -> float:
        """Return the seconds of a step beyond its nodes and transfers; 0 if none was observed.

        The most similar observed steps count; the less, the less similar they are.
        """
        found = self.step_evidence(kind, units, predicted)
        return median(found.ratios) * predicted * found.weight if found.ratios else 0.0

    def step_evidence(self, kind: str, units: int, predicted: float) -> Evidence:
        """Return the observations of the most similar steps: seconds beyond nodes and transfers, in
        parts of these.
        """
        size = half_octaves(predicted * 1e9)
        near = [
            (abs(size - other) + 2 * abs(units - count), ratios, (kind, count, other))
            for (of, count, other), ratios in self._steps.items()
            if of == kind
        ]
        if not near:
            return Evidence()
        distance, ratios, source = min(near, key=lambda each: each[0])
        return Evidence(ratios[-RECENT:], 1.0 / (1.0 + distance / _REACH), source)

    def note_profiled(self, graph: str) -> None:
        """Note that a graph, named with its sizes, was tried before its first plan."""
        self._profiled[graph] = None
        while len(self._profiled) > BUCKETS:
            self._profiled.pop(next(iter(self._profiled)))

    def has_profiled(self, graph: str) -> bool:
        """Return True if such a graph was tried."""
        return graph in self._profiled

    def observe_error(self, graph: str, predicted: float, measured: float) -> None:
        """Note how far the prediction of a whole step was off.

        Args:
            graph: Fingerprint of the step's graph.
            predicted: Seconds, by all that was known, the overhead included.
            measured: Seconds of steps that were not traced.
        """
        if predicted > 0 and LIMITS[0] <= measured / predicted <= LIMITS[1]:
            _append_sample(self._errors, graph, measured / predicted)
            self.version += 1

    def step_deviation(self, graph: str) -> float:
        """Return the standard deviation of errors that all parts of a graph's step share.

        An error of its own latest predictions is expected again. The less there are, the more the
        first ones of other graphs count.
        """
        own = self._errors.get(graph, [])[-RECENT:]
        again = median(abs(math.log(ratio)) for ratio in own) if own else 0.0
        first = [ratios[0] for name, ratios in self._errors.items() if name != graph]
        return math.hypot(again, ratio_deviation(first) / math.sqrt(1.0 + len(own)))

    def has_observed(self, bucket: Bucket) -> bool:
        """Return True if such a node was observed, its neighbours idle or busy as it says."""
        return bucket in self._nodes

    def knows(self, bucket: Bucket) -> bool:
        """Return True if such a node was observed on a device whose neighbours were idle, or
        busy.
        """
        return any(replace(bucket, busy=busy) in self._nodes for busy in (False, True))

    def factor(self, bucket: Bucket) -> float:
        """Return how many times longer such a node takes than calibration predicts.

        Its own bucket counts. Otherwise the median over the closest buckets of the op counts or, if
        the op was never observed, over those with the same bottleneck (products, or memory). The
        factor is closer to 1 the farther away they are. A device with idle neighbours stands for
        one with busy neighbours if nothing else is known.
        """
        found = self.evidence(bucket)
        if not found.ratios:
            return 1.0
        if found.is_own:
            return robust_ratio(found.ratios)
        return float(median(found.ratios) ** found.weight)

    def evidence(self, bucket: Bucket) -> Evidence:
        """Return the observations by which `factor` corrects a bucket."""
        for known in (bucket, replace(bucket, busy=not bucket.busy)):
            own = self._nodes.get(known)
            if own:
                return Evidence(own[-RECENT:], 1.0, (known,), True, known.busy)
        family = (bucket.device, "op", op_name_of(bucket))
        bound = (bucket.device, "bound", bottleneck_of(bucket))
        if family not in self._by_family:
            family = bound
        alike = self._by_family.get(family)
        if not alike:
            return Evidence()
        ranked = sorted((distance_between(bucket, other), ratio) for other, ratio in alike)
        least = ranked[0][0]
        close = [ratio for distance, ratio in ranked[:_CLOSEST] if distance <= least + 2]
        weight = 1.0 / (1.0 + least / _REACH)
        return Evidence(close, weight, family, class_deviation=self._class_deviation(bound))

    def _class_deviation(self, family: tuple[str, str, str]) -> float:
        """Return the standard deviation of the errors of a family's predictions by calibration."""
        if family not in self._deviations:
            ratios = [ratio for _, ratio in self._by_family.get(family, ())]
            self._deviations[family] = ratio_deviation(ratios)
        return self._deviations[family]

    @property
    def _by_family(self) -> Mapping[tuple[str, str, str], Sequence[tuple[Bucket, float]]]:
        """Buckets with their ratios, by device and op, and by device and bottleneck."""
        if self._families is None:
            self._families, self._deviations = {}, {}
            for bucket, ratios in self._nodes.items():
                told = (bucket, robust_ratio(ratios))
                for family in (("op", op_name_of(bucket)), ("bound", bottleneck_of(bucket))):
                    self._families.setdefault((bucket.device, *family), []).append(told)
        return self._families

    def link(self, name: str, predicted: LinkSpeed) -> LinkSpeed:
        """Return latency and bandwidth of a kind of link.

        They fit the quick ones of the latest transfers of each size: on a busy machine most wait
        for a processor.
        """
        latency, bandwidth = predicted
        points = sorted(
            (2.0 ** (size / 2) - 1.0, lower_quartile(seconds[-RECENT:]))
            for (link, size), seconds in self._links.items()
            if link == name
        )
        if not points:
            return predicted
        if math.isfinite(bandwidth) and points[-1][0] >= 16 * max(256.0, points[0][0]):
            return fit_link([size for size, _ in points], [seconds for _, seconds in points])
        ratio = median(s / max(1e-9, latency + n / bandwidth) for n, s in points)
        return latency * ratio, bandwidth / ratio

    def link_ratios(self, name: str) -> list[float]:
        """Return the latest transfers over a kind of link, relative to the median of their size."""
        recent = [s[-RECENT:] for (link, _), s in self._links.items() if link == name]
        return [each / median(seconds) for seconds in recent for each in seconds]

    # Out and in -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "format": FORMAT,
            "key": machine_key(),
            "basis": self.basis,
            "nodes": [
                [b.device, b.busy, b.kind, b.op, b.dtype, b.flops, b.bytes, ratios]
                for b, ratios in self._nodes.items()
            ],
            "links": [[name, size, seconds] for (name, size), seconds in self._links.items()],
            "steps": [[*key, ratios] for key, ratios in self._steps.items()],
            "profiled": list(self._profiled),
            "errors": [[graph, ratios] for graph, ratios in self._errors.items()],
        }

    @staticmethod
    def from_dict(data: Any, basis: str) -> TraceCorrections:
        """Read what `to_dict` made; empty if it is damaged, or of another machine or
        calibration.
        """
        made = TraceCorrections(basis)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            return made
        if data.get("key") != machine_key() or data.get("basis") != basis:
            return made
        read = TraceCorrections(basis)
        try:
            for device, busy, kind, op, dtype, flops, size, ratios in data["nodes"][-BUCKETS:]:
                bucket = Bucket(
                    _check_text(device), busy is True, _check_text(kind), _check_text(op),
                    _check_text(dtype), int(flops), int(size),
                )  # fmt: skip
                read._nodes[bucket] = _check_samples(ratios, LIMITS[0], limit_of(bucket))
            for name, size, seconds in data["links"][-BUCKETS:]:
                read._links[_check_text(name), int(size)] = _check_samples(seconds, 1e-9, SLOWEST)
            for kind, units, size, ratios in data["steps"][-BUCKETS:]:
                key = _check_text(kind), int(units), int(size)
                read._steps[key] = _check_samples(ratios, 0.0, LIMITS[1])
            for graph in data["profiled"][-BUCKETS:]:
                read._profiled[_check_text(graph)] = None
            for graph, ratios in data.get("errors", [])[-BUCKETS:]:
                read._errors[_check_text(graph)] = _check_samples(ratios, *LIMITS)
        except (KeyError, TypeError, ValueError, OverflowError, PlanError):
            return made
        return read


def limit_of(bucket: Bucket) -> float:
    """Return the largest ratio that counts. Turns may call functions that nothing predicts."""
    return MOST_OF_TURNS if bucket.kind == TURN else LIMITS[1]


def ratio_deviation(ratios: Sequence[float]) -> float:
    """Return the standard deviation of ln(ratio) around 0; 0 for fewer than `FEW`."""
    return error_deviation(list(map(math.log, ratios))) if len(ratios) >= FEW else 0.0


def robust_ratio(ratios: Sequence[float]) -> float:
    """Return the ratio that observations support: the lower quartile of the latest ones.

    Other work of a machine only makes nodes slower. `TRUSTED_RATIO` limits the result.
    """
    recent = sorted(ratios[-RECENT:])
    return _limit_ratio(recent[len(recent) // 4], len(recent))


def median_ratio(ratios: Sequence[float]) -> float:
    """Return the median of the latest ratios, within `TRUSTED_RATIO`.

    It predicts what waits for others, and so for their delays.
    """
    recent = ratios[-RECENT:]
    return _limit_ratio(median(recent), len(recent))


def _limit_ratio(ratio: float, count: int) -> float:
    """Return a ratio within what so many observations can establish."""
    most = TRUSTED_RATIO**count
    return min(max(ratio, 1.0 / most), most)


def _append_sample(known: dict[Any, list[float]], key: Any, value: float) -> None:
    """Append a value; above the cap of keys, drop the least recent one."""
    values = known.pop(key, [])
    values.append(value)
    known[key] = values[-SAMPLES:]
    while len(known) > BUCKETS:
        known.pop(next(iter(known)))


def _check_text(value: Any) -> str:
    """Return a text of a file."""
    if not isinstance(value, str):
        raise PlanError(f"{value!r} is no text")  # caught where the file is read
    return value


def _check_samples(values: Any, least: float, most: float) -> list[float]:
    """Return valid samples of a file."""
    numbers = [float(value) for value in values][-SAMPLES:]
    if not numbers or not all(least <= number <= most for number in numbers):
        raise PlanError(f"{values!r} are no samples")  # caught where the file is read
    return numbers
