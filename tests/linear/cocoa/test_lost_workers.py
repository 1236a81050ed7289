"""Fits whose workers die, and fits that end early: what becomes of the model and the processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

import graphflow as gf
from graphflow.errors import LinearModelError, WorkerLost
from graphflow.linear.cocoa.cluster_fit import ClusterFit
from graphflow.linear.fit_history import FitMonitor
from tests.faults.running import have_ended
from tests.linear.cocoa.test_cluster_fit import HERE, fit, table, write_file

SVC, LASSO = gf.linear.LinearSVC(C=0.1), gf.linear.Lasso(alpha=0.05)


class Watch:
    """The fits on clusters since it was made, and all their worker processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fits: list[ClusterFit] = []
        self.pids: list[int] = []
        self.monkeypatch = monkeypatch
        begin = ClusterFit.__init__

        def record_fit(own: ClusterFit, cluster: Any) -> None:
            begin(own, cluster)
            self.fits.append(own)

        monkeypatch.setattr(ClusterFit, "__init__", record_fit)

    def workers(self) -> list[int]:
        """Return the ids of the workers of the last fit, and note them."""
        found: list[int] = self.fits[-1].session._life.hosts.pids  # type: ignore[attr-defined]
        self.pids += found
        return found

    def act_after(self, numbers: set[int], act: Callable[[], None]) -> None:
        """Act after some certificates, numbered from 1."""
        take, count = FitMonitor.take, 0

        def take_and_act(own: FitMonitor, *found: Any) -> bool:
            nonlocal count
            count += 1
            is_good = take(own, *found)
            if count in numbers:
                act()
            return is_good

        self.monkeypatch.setattr(FitMonitor, "take", take_and_act)

    def kill(self) -> None:
        """Kill a worker of the last fit, unless the fit has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.workers()[1], signal.SIGKILL)

    def are_all_gone(self) -> bool:
        """Return True if no process of any fit is left."""
        self.workers()
        return len(self.pids) >= 2 and have_ended(self.pids, 5.0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A watch over the fits of the test."""
    return Watch(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A svmlight file of 150 rows."""
    return write_file(tmp_path)


def local() -> gf.Cluster:
    return gf.Cluster.local(workers=2, threads=1)


def check(estimator: Any, model: Any, x: Any, y: Any) -> None:
    """A model is certified, and is that of one machine."""
    alone = fit(estimator, x, y)
    assert model.certificate_.relative_gap <= 1e-7
    assert np.allclose(model.coef_, alone.coef_, atol=2e-3 * abs(alone.coef_).max())


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(SVC, id="rows"),
        pytest.param(LASSO, id="columns", marks=pytest.mark.slow),
    ],
)
def test_a_fit_goes_on_when_a_worker_is_killed(watch: Watch, estimator: Any) -> None:
    x, y = table(True)
    watch.act_after({2}, watch.kill)
    model = fit(estimator, x, y, cluster=local(), local_steps=4)
    check(estimator, model, x, y)
    assert len(watch.fits) == 1 and watch.fits[0]._restarts == 1 and watch.are_all_gone()
    before, after = model.history_.certificates[1:3]
    assert after.bytes > before.bytes
    # Dual variables are kept: new workers begin with the certificate at which the old ones ended.
    assert before.primal < model.history_.certificates[0].primal
    assert after.primal == pytest.approx(before.primal, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.02])
def test_a_worker_may_die_at_any_moment_of_a_round(watch: Watch, delay: float) -> None:
    x, y = table(True, rows=3000)
    watch.act_after({1}, lambda: threading.Timer(delay, watch.kill).start())
    model = fit(SVC, x, y, cluster=local())
    check(SVC, model, x, y)
    assert watch.are_all_gone()


@pytest.mark.slow
def test_workers_that_are_started_anew_read_their_rows_again(watch: Watch, file: Path) -> None:
    watch.act_after({2}, watch.kill)
    svc = clone(SVC).set_params(tol=1e-7)
    model = clone(svc).set_params(cluster=local()).fit(gf.linear.open(file))
    alone = svc.fit(gf.linear.open(file))
    assert np.allclose(model.coef_, alone.coef_, atol=2e-3 * abs(alone.coef_).max())
    assert watch.fits[0]._restarts == 1 and watch.are_all_gone()


@pytest.mark.slow
def test_the_fourth_loss_ends_a_fit(watch: Watch) -> None:
    x, y = table(True)
    watch.act_after({1, 2, 3, 4}, watch.kill)
    with pytest.raises(WorkerLost) as failure:
        fit(SVC, x, y, cluster=local())
    assert "anew 3 times" in failure.value.__notes__[-1]
    assert watch.are_all_gone()


@pytest.mark.slow
def test_a_session_with_checkpoints_goes_on_by_itself(watch: Watch, tmp_path: Path) -> None:
    x, y = table(True)
    watch.act_after({2}, watch.kill)
    with gf.Session(local(), trial=False, checkpoint=tmp_path) as s:
        model = fit(SVC, x, y, cluster=s)
        check(SVC, model, x, y)
    assert watch.are_all_gone()


@pytest.mark.slow
def test_a_session_without_checkpoints_ends_a_fit_and_says_what_to_do(watch: Watch) -> None:
    x, y = table(True)
    watch.act_after({2}, watch.kill)
    with pytest.raises(WorkerLost) as failure, gf.Session(local(), trial=False) as s:
        fit(SVC, x, y, cluster=s)
    assert any("gf.Cluster" in note for note in failure.value.__notes__)
    assert watch.are_all_gone()


def interrupt(watch: Watch, cluster: gf.Cluster, delay: float | None) -> None:
    """Send SIGINT after the third certificate, and check the model that is left."""
    x, y = table(True, rows=3000)

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    watch.act_after({3}, strike if delay is None else threading.Timer(delay, strike).start)
    model = gf.linear.LinearSVC(C=100.0, tol=1e-15, max_iter=10**6, cluster=cluster)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, np.where(y > 0, "yes", "no"))
    assert model.certificate_.relative_gap < 1.0
    assert model.coef_.shape == (1, 12) and model.score(x, np.where(y > 0, "yes", "no")) > 0.9
    assert watch.fits[0].session._life._closed  # type: ignore[attr-defined]


def test_ctrl_c_leaves_the_last_certified_model(watch: Watch) -> None:
    interrupt(watch, HERE, None)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_ctrl_c_ends_worker_processes(watch: Watch, delay: float) -> None:
    interrupt(watch, local(), delay)
    assert watch.are_all_gone()


@pytest.mark.parametrize(
    "estimator, labels, reason",
    [
        (gf.linear.LinearSVC(), np.ones(150), "one class"),
        (gf.linear.LinearSVC(), np.ones(3), "y has 3"),
        (gf.linear.LogisticRegression(), np.arange(150) % 3, "3 classes"),
        (gf.linear.Ridge(alpha=-1.0), np.ones(150), "alpha"),
        (gf.linear.Glm("logistic"), np.ones(150) * 2, "-1 and 1"),
    ],
    ids=["class", "rows", "classes", "alpha", "targets"],
)
def test_a_refusal_after_workers_read_a_file_ends_them(
    watch: Watch, file: Path, estimator: Any, labels: Any, reason: str
) -> None:
    with pytest.raises(LinearModelError, match=reason):
        clone(estimator).set_params(cluster=HERE).fit(gf.linear.open(file), labels)
    assert watch.fits[0].session._life._closed  # type: ignore[attr-defined]
