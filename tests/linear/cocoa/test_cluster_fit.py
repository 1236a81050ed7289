"""Estimators that several workers fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

import graphflow as gf
from graphflow.errors import LinearModelError

HERE = gf.Cluster.here(devices=["cpu:0", "cpu:1", "cpu:2"], threads=1)
ESTIMATORS = [
    gf.linear.LinearSVC(C=0.1), gf.linear.LinearSVC(loss="hinge", C=0.01),
    gf.linear.LinearSVR(epsilon=0.1, C=0.01), gf.linear.Ridge(alpha=10.0),
    gf.linear.Ridge(alpha=30.0, fit_intercept=False), gf.linear.Lasso(alpha=0.05),
    gf.linear.ElasticNet(alpha=0.05), gf.linear.Lasso(alpha=0.05, positive=True),
    gf.linear.LogisticRegression(C=0.1, fit_intercept=False),
    gf.linear.Glm("huber", gf.linear.L2(30.0)),
]  # fmt: skip


def table(is_sparse: bool, rows: int = 150) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 12))
    x[random.random(x.shape) < 0.4] = 0.0
    y = x @ random.normal(size=12) + 0.3 * random.normal(size=rows) + 0.5
    return sp.csr_matrix(x) if is_sparse else x, y


def fit(estimator: Any, x: Any, y: Any, **changes: Any) -> Any:
    labels = np.where(y > 0, "yes", "no") if hasattr(estimator, "C") else y
    if isinstance(estimator, gf.linear.LinearSVR):
        labels = y
    return clone(estimator).set_params(tol=1e-7, **changes).fit(x, labels)


@pytest.mark.every(7)
@pytest.mark.parametrize(
    "number, is_sparse",
    [
        pytest.param(n, sparse, marks=[pytest.mark.slow] if sparse == (n % 2 == 0) else [])
        for n in range(len(ESTIMATORS))
        for sparse in (False, True)
    ],
)
def test_workers_find_the_model_of_one_machine(number: int, is_sparse: bool) -> None:
    x, y = table(is_sparse)
    alone = fit(ESTIMATORS[number], x, y)
    model = fit(ESTIMATORS[number], x, y, cluster=HERE)
    assert model.solver_ == "cocoa"
    assert model.certificate_.relative_gap <= 1e-7
    assert model.certificate_.bytes > 0
    assert np.allclose(model.coef_, alone.coef_, atol=2e-3 * abs(alone.coef_).max())
    assert np.allclose(model.intercept_, alone.intercept_, atol=5e-3)
    passes = [node for node in model.history_.plan.nodes if node.op == "coordinate_pass"]
    assert len({node.device for node in passes}) == 3


@pytest.mark.slow
def test_each_class_is_fitted_against_the_others() -> None:
    x, y = table(False)
    labels = np.digitize(y, [-0.5, 1.0])
    alone = gf.linear.LinearSVC(C=0.01).fit(x, labels)
    model = gf.linear.LinearSVC(C=0.01, cluster=HERE).fit(x, labels)
    assert np.allclose(model.coef_, alone.coef_, atol=2e-3)


def test_a_fit_repeats_bit_for_bit() -> None:
    x, y = table(True)
    first, again = (fit(ESTIMATORS[1], x, y, cluster=HERE, local_steps=20) for _ in range(2))
    other = fit(ESTIMATORS[1], x, y, cluster=HERE, local_steps=20, random_state=1)
    assert first.coef_.tobytes() == again.coef_.tobytes() != other.coef_.tobytes()


def test_a_session_stays_open_and_traces_the_bytes_of_the_certificate() -> None:
    x, y = table(False)
    with gf.Session(HERE, trial=False) as s:
        with s.trace() as trace:
            model = fit(ESTIMATORS[3], x, y, cluster=s, local_steps=4)
        again = fit(ESTIMATORS[3], x, y, cluster=s, local_steps=4)
    events = [e for step in trace.steps for e in step.events if "start/" in e.name]
    given = sum(e.exchange.bytes for e in events if e.exchange is not None)
    assert model.certificate_.bytes * 3 == given * 4  # a ring of three sends each sum 4/3 times
    assert again.coef_.tobytes() == model.coef_.tobytes()
    assert model.history_.local_steps == 4


def write_file(folder: Path) -> Path:
    """Return a svmlight file of 150 rows, whose columns are numbered from 1."""
    x, y = table(True)
    with (folder / "rows.svm").open("w") as out:
        for row, label in zip(x, np.where(y > 0, 1, -1), strict=True):
            pairs = zip(row.indices, row.data, strict=True)
            out.write(f"{label} " + " ".join(f"{j + 1}:{v:.17g}" for j, v in pairs) + "\n")
    return folder / "rows.svm"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of `write_file`."""
    return write_file(tmp_path)


def test_workers_read_their_own_rows_of_a_file(file: Path) -> None:
    handle = gf.linear.open(file)
    model = gf.linear.LinearSVC(C=0.1, tol=1e-7, cluster=HERE).fit(handle)
    alone = gf.linear.LinearSVC(C=0.1, tol=1e-7).fit(gf.linear.open(file))
    assert handle._store is None  # this process has read no row
    assert np.allclose(model.coef_, alone.coef_, atol=2e-3 * abs(alone.coef_).max())
    assert list(model.classes_) == [-1, 1]
    weights = np.random.default_rng(0).uniform(0.5, 2.0, size=150)
    ours, theirs = (
        gf.linear.LinearSVC(C=0.1, tol=1e-7, cluster=c).fit(handle, None, weights).coef_
        for c in (HERE, None)
    )
    assert np.allclose(ours, theirs, atol=2e-3 * abs(theirs).max())


def test_a_broken_line_of_a_workers_part_is_named(file: Path) -> None:
    lines = file.read_text().splitlines()
    lines[120] = "1 3:four"
    file.write_text("\n".join(lines))
    with pytest.raises(gf.errors.GraphflowError, match=r"line 121: '1 3:four'"):
        gf.linear.LinearSVC(cluster=HERE).fit(gf.linear.open(file))


def test_files_that_workers_cannot_use_are_refused(file: Path) -> None:
    handle = gf.linear.open(file)
    with pytest.raises(LinearModelError, match="solved by columns"):
        gf.linear.Lasso(cluster=HERE).fit(handle)
    with pytest.raises(LinearModelError, match="150 rows, and y has 3"):
        gf.linear.LinearSVC(cluster=HERE).fit(handle, [0, 1, 0])
    with pytest.raises(LinearModelError, match="12 columns, and n_features=5"):
        gf.linear.LinearSVC(cluster=HERE).fit(gf.linear.open(file, n_features=5))
    file.write_text("1 1:1\n-1 1:2\n")
    with pytest.raises(LinearModelError, match="2 rows for 3 workers"):
        gf.linear.LinearSVC(cluster=HERE).fit(gf.linear.open(file))


@pytest.mark.slow
def test_two_worker_processes_fit_a_model() -> None:
    x, y = table(True)
    model = fit(ESTIMATORS[0], x, y, cluster=gf.Cluster.local(workers=2, threads=1))
    assert model.certificate_.relative_gap <= 1e-7


def test_mistakes_are_refused_at_once() -> None:
    x, y = table(False, rows=2)
    with pytest.raises(LinearModelError, match="2 rows for 3 workers"):
        gf.linear.Ridge(fit_intercept=False, cluster=HERE).fit(x, y)
    x, y = table(False)
    with pytest.raises(LinearModelError, match="solver='newton' runs on one machine"):
        gf.linear.Ridge(solver="cholesky", cluster=HERE).set_params(solver="newton").fit(x, y)
    with pytest.raises(LinearModelError, match="local_steps must be"):
        gf.linear.Ridge(cluster=HERE, local_steps=0).fit(x, y)
    with pytest.raises(LinearModelError, match="cluster= with 3 classes"):
        gf.linear.LogisticRegression(cluster=HERE).fit(x, np.digitize(y, [-0.5, 1.0]))
