"""Speeds by traces: only nodes that two workers ran tell of a worker, not of a prediction."""

from __future__ import annotations

import pytest

from graphflow.placement.calibration.node_bucket import Bucket
from graphflow.placement.cost_model.trace_observations import TraceObservation
from graphflow.planning.feedback.traced_speeds import traced_speeds


def bucket(op: str) -> Bucket:
    return Bucket("|cpu|1", True, "matmul", op, "float32", 40, 40)


def observation(op: str, worker: int, predicted: float = 1.0) -> TraceObservation:
    return TraceObservation(bucket(op), predicted, worker)


KNOWN = {
    "a": observation("matmul", 0),
    "b": observation("matmul", 1),
    "c": observation("exp", 1),
}


def test_a_worker_that_takes_twice_as_long_at_the_same_has_half_of_the_speed() -> None:
    steps = [{"a": 3.0, "b": 6.0, "c": 1.0}] * 4
    assert traced_speeds(KNOWN, steps) == {0: 1.0, 1: pytest.approx(0.5)}


def test_an_op_that_one_worker_runs_alone_tells_nothing_of_it() -> None:
    assert traced_speeds(KNOWN, [{"a": 1.0, "c": 9.0}] * 4) == {}


def test_too_small_a_part_of_a_workers_time_is_not_enough() -> None:
    assert traced_speeds(KNOWN, [{"a": 1.0, "b": 2.0, "c": 50.0}] * 4) == {0: 1.0}


def test_a_worker_that_is_disturbed_in_some_steps_is_not_slow() -> None:
    steps = [{"a": 1.0, "b": 1.0, "c": 1.0}] * 2 + [{"a": 1.0, "b": 9.0, "c": 1.0}] * 2
    assert traced_speeds(KNOWN, steps) == {0: 1.0, 1: 1.0}


def test_one_kind_of_node_that_is_slower_on_a_worker_does_not_make_the_worker_slow() -> None:
    known = {
        f"{op}{worker}": observation(op, worker) for op in ("matmul", "exp") for worker in (0, 1)
    }
    step = {"matmul0": 1.0, "matmul1": 1.0, "exp0": 1.0, "exp1": 2.0}
    assert traced_speeds(known, [step] * 4) == {0: 1.0, 1: 1.0}
    step["matmul1"] = 2.0
    assert traced_speeds(known, [step] * 4) == {0: 1.0, 1: 0.5}


def test_differences_within_the_noise_are_none() -> None:
    assert traced_speeds(KNOWN, [{"a": 1.0, "b": 1.2}] * 4) == {0: 1.0, 1: 1.0}
