"""Errors of the predicted times of nodes: how large they may be, and which nodes err together.

    NodeTimes + calibration + TraceCorrections ─node_errors→ NodeErrors

`placement/calibration/uncertainty.py` defines the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Op
from graphflow.placement.calibration.cluster_rates import device_classes
from graphflow.placement.calibration.node_bucket import Bucket
from graphflow.placement.calibration.roofline import Rates, op_class
from graphflow.placement.calibration.trace_corrections import Evidence, TraceCorrections
from graphflow.placement.calibration.uncertainty import (
    QUANTILE,
    calibration_deviation,
    observed_deviation,
)
from graphflow.placement.cost_model.node_times import NodeTimes
from graphflow.placement.problems.problem import Floats, Ints


@dataclass
class ErrorSources:
    """The sources of errors of one graph's nodes, numbered.

    Attributes:
        names: By number. A source has the same name in other graphs.
        bases: By number, the basis of its predictions, as in "9 observations in traced steps".
    """

    names: list[Hashable] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, name: Hashable, basis: str) -> int:
        """Return the number of a source."""
        found = self._numbers.setdefault(name, len(self.bases))
        if found == len(self.bases):
            self.names.append(name)
            self.bases.append(basis)
        return found


@dataclass(frozen=True, eq=False)
class NodeErrors:
    """Errors of the predicted times of nodes, (n, d) each; 0 where nothing runs.

    Attributes:
        deviation: Standard deviation of ln(actual / predicted).
        source: Number of its source: nodes with the same one err together.
        slowdown: Standard deviation of what busy neighbours add to that; all nodes err together.
            0 where neighbours are idle, or were busy when the node was observed.
        sources: Of the numbers.
    """

    deviation: Floats
    source: Ints
    slowdown: Floats
    sources: ErrorSources

    def note_observed(self, node: int, device: int, found: Evidence) -> None:
        """Note that a node's seconds rest on observations of that node itself."""
        basis = f"{show_count(len(found.ratios), 'observation')} in traced steps"
        prior = float(self.deviation[node, device])
        self.deviation[node, device] = observed_deviation(found.ratios, prior)
        self.source[node, device] = self.sources.number(tuple(found.source), basis)
        self.slowdown[node, device] = 0.0


def node_errors(
    times: NodeTimes,
    compute: Floats,
    speeds: Mapping[str, Rates],
    busy: bool,
    learned: TraceCorrections | None,
    sources: ErrorSources,
) -> NodeErrors | None:
    """Return the errors of predictions; None if a device was described, or never measured apart.

    Args:
        compute: (n, d) seconds that calibration alone predicts.
        busy: Neighbours are busy.
        sources: Gets the sources that are new.
    """
    if any(device.is_described for worker in times.cluster.workers for device in worker.devices):
        return None
    made = NodeErrors(
        np.zeros(compute.shape), np.zeros(compute.shape, np.int64), np.zeros(compute.shape),
        sources,
    )  # fmt: skip
    columns: dict[str, list[int]] = {}
    named = device_classes(times.cluster)
    for at, name in enumerate(times.cluster.devices):
        columns.setdefault(named[name], []).append(at)
    for device, members in columns.items():
        rate = speeds[times.cluster.devices[members[0]]]
        rows = compute[: len(times.nodes), members]
        runs = np.isfinite(rows) & (rows > 0)
        some = np.flatnonzero(runs.any(axis=1))
        seconds = rows[some, runs[some].argmax(axis=1)].tolist()
        known: dict[tuple[int, float], tuple[float, int, float]] = {}
        found: list[tuple[float, int, float]] = []
        for i, key in zip(
            some.tolist(), zip(times.alike[some].tolist(), seconds, strict=True), strict=True
        ):
            if key not in known:
                bucket = times.bucket(times.nodes[i], device, busy, key[1])
                error = _node_error(rate, times.nodes[i].op, bucket, learned, sources)
                if error is None:
                    return None
                known[key] = error
            found.append(known[key])
        for array, values in zip(
            (made.deviation, made.source, made.slowdown), zip(*found, strict=True), strict=False
        ):
            array[some[:, np.newaxis], members] = np.array(values)[:, np.newaxis]
    return made


def _node_error(
    rate: Rates,
    op: Op,
    bucket: Bucket,
    learned: TraceCorrections | None,
    sources: ErrorSources,
) -> tuple[float, int, float] | None:
    """Return deviation, source and slowdown of a node; None if they are unknown.

    If busy neighbours were not observed, calibration tells of them: they slow nodes down by as much
    as products, or by as much as passes over memory. The interval is as wide as these are apart.
    """
    prior = calibration_deviation(rate.speeds, op)
    if prior is None:
        return None
    found = learned.evidence(bucket) if learned else Evidence()
    left = max(prior, found.class_deviation)
    deviation = observed_deviation(found.ratios, left, found.weight)
    measured = op.name in rate.speeds["ops"]
    source: Sequence[Any] = found.source or (bucket.device, op_class(op), measured)
    basis = "calibration of the op" if measured else "calibration of similar ops"
    if found.is_own:
        basis = f"{show_count(len(found.ratios), 'observation')} in traced steps"
    elif found.ratios:
        basis = "similar ops in traced steps"
    unseen = bucket.busy and not (found.is_own and found.busy)
    slowdown = abs(math.log(rate.memory / rate.compute)) / (2 * QUANTILE) if unseen else 0.0
    return deviation, sources.number(tuple(source), basis), slowdown
