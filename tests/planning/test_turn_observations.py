"""Traced windows teach what their turns take."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.op import Tensor
from graphflow.placement.plans.reports.window_lines import measured_seconds
from tests.faults import hazards
from tests.ops.communication.servers import server_and_workers

DELAYS = (0.002, 0.02, 0.04)
"""Seconds of an update, and of a turn of each worker."""


def delayed(party: int, turn: object, x: Tensor) -> Tensor:
    return hazards.sleep(x, seconds=DELAYS[party])


def test_a_traced_window_is_predicted() -> None:
    """Before, nothing is known of what a user's function takes."""
    pins = [f"/worker:{i}" for i in range(3)]
    weights, order, _ = server_and_workers(np.ones(5), [9, 5], pins=pins, disturb=delayed)
    cluster = gf.Cluster.local(3, threads=1)
    (before,) = gf.plan([weights, order], cluster).windows
    assert before.seconds < 0.1
    with gf.Session(cluster, trial=False, ops=["tests.faults.hazards"]) as session:
        session.run([weights, order])
        with session.trace():
            for _ in range(4):
                session.run([weights, order])
        measured = session.plan().measured
    plan = gf.plan([weights, order], cluster).with_measured(measured)
    (window,) = plan.windows
    took = measured_seconds(plan, window)
    assert took is not None and took > 9 * sum(DELAYS[:2])
    assert window.seconds == pytest.approx(took, rel=0.15)
    (line,) = [line for line in str(plan).splitlines() if "window concurrent" in line]
    assert ", measured " in line
