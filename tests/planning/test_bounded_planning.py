"""Planning is bounded: what is profiled before the first step, and Ctrl-C at any time of it."""

from __future__ import annotations

import io
import logging
import sys
from types import CodeType

import numpy as np
import pytest

import graphflow as gf
from graphflow.base import progress
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import Graph
from graphflow.passes import optimize
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.planning.trials import profiling_run
from graphflow.planning.trials.profiling_run import ProfilingLimits, profile_first_steps
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from tests.interrupts import interrupt_at

TWO = gf.Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)

pytestmark = pytest.mark.usefixtures("own_cache")


def build_fused_kernel(x: gf.Tensor, number: float) -> gf.Tensor:
    """A graph whose kernel no other test compiles."""
    return gf.sum(gf.tanh(x * number + number) * gf.exp(x - number), axis=0)


def compile_fetch(fetch: gf.Tensor) -> CompiledFetches:
    graph = Graph([fetch])
    return CompiledFetches((fetch,), graph, optimize(graph))


def test_kernels_beyond_the_limit_are_not_profiled_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = gf.placeholder("float32", (64, 96))
    made, learned = compile_fetch(build_fused_kernel(x, 0.3)), TraceCorrections("a")
    few = ProfilingLimits(1.0, 1.0, 10)
    with caplog.at_level(logging.DEBUG, "graphflow.trial"):
        assert profile_first_steps(learned, TWO, ClusterSurvey(), made, {}, limits=few) == 0
    assert len(learned) == 0
    assert "trial.ended" in caplog.text and "kernels have more characters" in caplog.text
    assert profile_first_steps(learned, TWO, ClusterSurvey(), made, {}) > 0 and len(learned) > 0


def test_steps_that_are_predicted_to_be_long_are_not_profiled_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = gf.placeholder("float32", (64, 96))
    made, learned = compile_fetch(build_fused_kernel(x, 0.4)), TraceCorrections("a")
    short = ProfilingLimits(0.0, 1.0, 10**6)
    with caplog.at_level(logging.DEBUG, "graphflow.trial"):
        assert profile_first_steps(learned, TWO, ClusterSurvey(), made, {}, limits=short) == 0
    assert "a step is predicted to take" in caplog.text


def test_a_session_whose_kernels_are_not_profiled_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling_run, "FIRST_PLAN", ProfilingLimits(1.0, 1.0, 10))
    x = gf.placeholder("float32", (64, 96))
    data = np.random.default_rng(0).random((64, 96), "float32")
    expected = (np.tanh(data * 0.6 + 0.6) * np.exp(data - 0.6)).sum(axis=0)
    with gf.Session(TWO) as session:
        np.testing.assert_allclose(
            session.run(build_fused_kernel(x, 0.6), {x: data}), expected, rtol=1e-5
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def is_planning(code: CodeType) -> bool:
    """Whether a line is one of planning: of its progress, its profiling, its plan.

    Python cannot protect the first line of an exit."""
    names = ("progress.py", "profiling_run.py", "deployment.py", "plan_builder.py",
             "placement_choice.py", "greedy.py")  # fmt: skip
    return code.co_filename.endswith(names) and code.co_name != "__exit__"


def test_ctrl_c_at_any_time_of_planning_leaves_a_session_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "LARGE", 1)
    tracer = sys.gettrace()
    x = gf.placeholder("float32", (8, 4))
    data = np.ones((8, 4), "float32")
    interrupted = 0
    with gf.Session(TWO) as session:
        for turn in range(1000):
            fetch = gf.sum(gf.tanh(x @ gf.constant(np.full((4, 4 + turn), 0.1, "float32"))))
            sys.settrace(interrupt_at(1 + 23 * turn, is_planning))
            try:
                session.run(fetch, {x: data})
                sys.settrace(tracer)
                break  # it ended before that many lines
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(tracer)
            assert progress._active.get() is None
            expected = np.float32(np.tanh(0.4) * 8 * (4 + turn))
            np.testing.assert_allclose(session.run(fetch, {x: data}), expected, rtol=1e-4)
    assert interrupted > 20
