"""Ctrl-C during a fit leaves the last certified model, of several classes or targets, too."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.solvers import kernel_machine
from graphflow.linear.solvers.newton import softmax, sparse_softmax


def strike() -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_at_call(own: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function that presses Ctrl-C when it is called for the time of this number."""
    count = 0

    def call(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            strike()
        return own(*given, **named)

    return call


def table(targets: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6))
    return x, x @ random.normal(size=(6, targets)) + 0.3 * random.normal(size=(200, targets))


@pytest.mark.parametrize("number", [2, 4, 6])
def test_ridge_keeps_the_targets_so_far(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Each target has two certificates here: before and after its only step."""
    x, y = table(3)
    whole = gf.linear.Ridge(2.0).fit(x, y)
    monkeypatch.setattr(FitMonitor, "accept", interrupt_at_call(FitMonitor.accept, number))
    model = gf.linear.Ridge(2.0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y)
    done = number // 2 - 1
    np.testing.assert_array_equal(model.coef_[:done], whole.coef_[:done])
    assert not model.coef_[done:].any() and model.predict(x).shape == y.shape
    certificate = model.certificate_
    off = ((y - y.mean(axis=0) * (np.arange(3) == done) - model.predict(x)) ** 2).sum(axis=0)
    assert certificate.primal <= 0.5 * (y**2).sum(axis=0).max() * (1 + 1e-12)
    assert certificate.relative_gap > 0.1 and (off >= 0).all()


@pytest.mark.filterwarnings("ignore:the relative duality gap")
@pytest.mark.parametrize("bias", [True, False])
def test_a_machine_keeps_the_classes_so_far(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    x, y = table(1)
    labels = np.digitize(y.ravel(), [-0.5, 1.0])
    more: dict[str, Any] = {"loss": "hinge", "tol": 1e-15, "max_iter": 500, "fit_intercept": bias}
    first = gf.linear.LinearSVC(**more).fit(x, labels == 0)
    calls = len(first.history_.certificates)
    monkeypatch.setattr(FitMonitor, "accept", interrupt_at_call(FitMonitor.accept, calls + 2))
    model = gf.linear.LinearSVC(**more)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, labels)
    np.testing.assert_allclose(model.coef_[0], first.coef_[0], atol=1e-3)
    assert model.coef_[1].any() and not model.coef_[2].any()
    # The worst certificate is that of the class that was not begun: of coefficients of 0.
    assert model.certificate_.primal == len(x) and model.certificate_.relative_gap == 1.0
    assert model.predict(x).shape == labels.shape


@pytest.mark.parametrize("l1_ratio", [0.0, 1.0])
def test_a_softmax_keeps_its_last_model(monkeypatch: pytest.MonkeyPatch, l1_ratio: float) -> None:
    x, y = table(1)
    labels = np.digitize(y.ravel(), [-0.5, 1.0])
    module = sparse_softmax if l1_ratio else softmax
    monkeypatch.setattr(module, "newton_step", interrupt_at_call(module.newton_step, 4))
    model = gf.linear.LogisticRegression(l1_ratio=l1_ratio, C=10.0, tol=1e-14, max_iter=10**6)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, labels)
    shares = model.predict_proba(x)[np.arange(len(x)), labels]
    sizes = np.abs(model.coef_).sum() if l1_ratio else 0.5 * (model.coef_**2).sum()
    objective = -10.0 * np.log(shares).sum() + sizes
    assert model.certificate_.primal == pytest.approx(objective, rel=1e-9)
    assert model.certificate_.relative_gap > 1e-14


def test_a_kernel_machine_keeps_the_pairs_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = table(1)
    labels = np.digitize(y.ravel(), [-0.5, 1.0])
    whole = gf.linear.SVC().fit(x, labels)
    certify, calls = kernel_machine._certify, len(whole.history_.certificates)
    monkeypatch.setattr(kernel_machine, "_certify", interrupt_at_call(certify, 2 * calls))
    model = gf.linear.SVC()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, labels)
    scores = model.set_params(decision_function_shape="ovo").decision_function(x)
    wanted = whole.set_params(decision_function_shape="ovo").decision_function(x)
    np.testing.assert_allclose(scores[:, 0], wanted[:, 0], atol=1e-9)
    assert not scores[:, 2].any() and model.certificate_.relative_gap == 1.0
    assert model.predict(x).shape == labels.shape


def test_an_interrupt_leaves_the_last_certified_model() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3000, 100)) * 10.0 ** random.uniform(-2, 2, size=100)
    y = x @ random.normal(size=100) + 100 * random.normal(size=3000)
    model = gf.linear.LinearSVR(C=100.0, max_iter=10**9, tol=1e-15, solver="sdca")
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y)
        time.sleep(5)
    certificate = model.certificate_
    assert np.isfinite(model.predict(x)).all() and certificate.passes >= 3
    off = np.abs(model.predict(x) - y).sum() * 100.0
    penalty = 0.5 * (model.coef_ @ model.coef_ + model.intercept_**2)
    assert off + penalty == pytest.approx(certificate.primal, rel=1e-9)
