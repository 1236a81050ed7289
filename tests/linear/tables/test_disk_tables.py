"""Tables larger than memory: the same models as in memory, within the memory that was given."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import dump_svmlight_file
from sklearn.exceptions import ConvergenceWarning

import graphflow as gf
from graphflow.errors import LinearModelError
from graphflow.linear.tables.row_store import RowStore
from graphflow.linear.tables.table_stream import TableStream

ROWS, COLUMNS = 3000, 40
SMALL = 1_300_000
"""Bytes that hold the vectors and some chunks of the tables below, but not the tables."""


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, COLUMNS)) * (random.random((ROWS, COLUMNS)) < 0.7)
    return x, x @ random.normal(size=COLUMNS) + 3 * random.normal(size=ROWS) + 1.0


@pytest.fixture(scope="module")
def paths(data: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tables")
    x, y = data
    dump_svmlight_file(x, y, str(folder / "x.svm"))
    np.save(folder / "x.npy", x)
    np.save(folder / "x32.npy", x.astype(np.float32))
    sp.save_npz(folder / "x.npz", sp.csr_matrix(x))
    return {kind: str(folder / f"x{kind}") for kind in (".svm", ".npy", "32.npy", ".npz")}


@pytest.mark.parametrize("kind", [".svm", ".npy", "32.npy", ".npz"])
def test_a_stream_multiplies_as_its_table_does(
    kind: str, data: tuple[Any, Any], paths: dict[str, str]
) -> None:
    x = data[0].astype(np.float32).astype(np.float64) if kind == "32.npy" else data[0]
    random = np.random.default_rng(1)
    w, beta, used = random.normal(size=COLUMNS), random.normal(size=ROWS), random.random(ROWS) < 0.8
    for some in (None, used):
        rows = slice(None) if some is None else some
        stream = TableStream(gf.linear.open(paths[kind]), SMALL, some)
        assert stream.chunks > 3
        given, b = x[rows], beta[rows]
        f, v = stream.multiply_both(w, b)
        for found, wanted in (
            (f, given @ w), (v, given.T @ b), (stream @ w, given @ w), (stream.T @ b, given.T @ b),
            (stream.sum_squares(b), (given * given).T @ b),
        ):  # fmt: skip
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
        order = np.concatenate(
            [np.arange(len(b))[chunk.rows] for chunk in stream.visit(np.random.default_rng(2))]
        )
        assert sorted(order) == list(range(len(b))) and not (np.diff(order) == 1).all()
        np.testing.assert_allclose(
            stream.with_column(2.0) @ np.append(w, 3.0), given @ w + 6.0, rtol=1e-9, atol=1e-9
        )


ESTIMATORS = [
    ("sdca", lambda: gf.linear.LinearSVC(C=0.1)),
    ("sdca", lambda: gf.linear.LinearSVC(C=1e-3, loss="hinge", tol=1e-4)),
    ("cg", lambda: gf.linear.LinearSVC(C=0.1, solver="newton")),
    ("sdca", lambda: gf.linear.LinearSVR(C=1e-3, epsilon=0.5, tol=1e-4)),
    ("cg", lambda: gf.linear.LogisticRegression(C=0.1)),
    ("sdca", lambda: gf.linear.LogisticRegression(C=0.1, fit_intercept=False)),
    ("cg", lambda: gf.linear.Ridge(3.0)),
    ("sdca", lambda: gf.linear.Ridge(300.0, fit_intercept=False, solver="sdca")),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("case", range(len(ESTIMATORS)))
def test_models_are_those_of_tables_in_memory(
    case: int, data: tuple[Any, Any], paths: dict[str, str]
) -> None:
    solver, make = ESTIMATORS[case]
    x, y = data
    y = y if hasattr(make(), "alpha") or hasattr(make(), "epsilon") else np.sign(y)
    weights = np.random.default_rng(3).integers(0, 3, size=ROWS)
    whole = make().fit(x, y, sample_weight=weights)
    table = gf.linear.open(paths[".svm" if case % 2 else ".npy"], memory=SMALL)
    model = make().fit(table, y, sample_weight=weights)
    assert model.solver_ == solver and model.certificate_.relative_gap <= model.tol
    assert model.n_features_in_ == COLUMNS
    primal = whole.certificate_.primal
    assert model.certificate_.primal == pytest.approx(primal, rel=2 * model.tol)
    np.testing.assert_allclose(model.coef_, whole.coef_, atol=5e-3)
    np.testing.assert_array_equal(model.predict(table), model.predict(table.load()))


def test_labels_come_from_the_file_unless_others_are_given(
    data: tuple[Any, Any], paths: dict[str, str]
) -> None:
    x, y = data
    wanted = gf.linear.Ridge().fit(x, y).coef_
    table = gf.linear.open(paths[".svm"])
    other = copy.deepcopy(table)
    for found in (
        gf.linear.Ridge().fit(table).coef_, -gf.linear.Ridge().fit(table, -y).coef_,
        gf.linear.Ridge().fit(other).coef_,
    ):  # fmt: skip
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert table.targets is not None
    np.testing.assert_allclose(table.targets, y, rtol=1e-14)
    with pytest.raises(LinearModelError, match="holds no labels"):
        gf.linear.Ridge().fit(gf.linear.open(paths[".npy"]))


def test_a_memory_map_too_large_for_memory_is_streamed(
    data: tuple[Any, Any], paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphflow.linear.tables import disk_table

    mapped = np.load(paths["32.npy"], mmap_mode="r")
    monkeypatch.setattr(disk_table, "free_memory", lambda: 2 * SMALL)
    streamed = gf.linear.Ridge(fit_intercept=False).fit(mapped, data[1])
    assert streamed.solver_ == "cg"
    part = gf.linear.Ridge(fit_intercept=False).fit(mapped[:100], data[1][:100])  # no whole file
    assert part.solver_ == "cholesky"


def test_what_does_not_suit_is_refused_with_numbers(
    data: tuple[Any, Any], paths: dict[str, str], tmp_path: Path
) -> None:
    x, y = data
    small = gf.linear.open(paths[".svm"], memory=SMALL)
    with pytest.raises(LinearModelError, match=r"memory=1,300,000 bytes; raise memory="):
        gf.linear.Lasso().fit(small)
    with pytest.raises(LinearModelError, match="use solver='cg' or 'auto', or raise memory="):
        gf.linear.Ridge(solver="cholesky").fit(small)
    with pytest.raises(LinearModelError, match="3 classes and is larger than memory"):
        gf.linear.LogisticRegression().fit(small, np.arange(ROWS) % 3)
    with pytest.raises(LinearModelError, match=r"memory=1,000 bytes: .* raise memory= to \d"):
        gf.linear.Ridge().fit(gf.linear.open(paths[".npy"], memory=1000), y)
    with pytest.raises(LinearModelError, match="3,000 rows, and y has 7"):
        gf.linear.Ridge().fit(small, y[:7])
    with pytest.raises(LinearModelError, match="open the file with n_features=9"):
        gf.linear.Ridge().fit(x[:, :9], y).predict(small)
    with pytest.raises(LinearModelError, match=r"give table\.load\(\)"):
        np.asarray(small)
    np.save(tmp_path / "f.npy", np.asfortranarray(x))
    by_columns = gf.linear.open(tmp_path / "f.npy", memory=SMALL)
    with pytest.raises(LinearModelError, match="column by column"):
        gf.linear.Ridge().fit(by_columns, y)
    bad = x.copy()
    bad[1234, 5] = np.nan
    np.save(tmp_path / "bad.npy", bad)
    with pytest.raises(LinearModelError, match="first in row 1234"):
        gf.linear.Ridge().fit(gf.linear.open(tmp_path / "bad.npy", memory=SMALL), y)


def test_a_full_disk_is_told() -> None:
    with pytest.raises(LinearModelError, match=r"more than 100 bytes in .*GRAPHFLOW_CACHE"):
        RowStore(limit=100).append(values=np.zeros(50))


def test_too_few_passes_leave_a_certified_model(paths: dict[str, str]) -> None:
    small = gf.linear.open(paths[".svm"], memory=SMALL)
    model = gf.linear.LinearSVR(C=10.0, max_iter=1)
    with pytest.warns(ConvergenceWarning, match="relative duality gap"):
        model.fit(small)
    assert 1e-6 < model.certificate_.relative_gap < 1.0 and model.coef_.shape == (COLUMNS,)


PROGRAM = """
import re, sys
import numpy as np
import graphflow as gf

def peak(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

path, memory = sys.argv[1], int(sys.argv[2])
with open("few.svm", "w") as file, open(path) as all:
    file.writelines(line for line, _ in zip(all, range(1000)))
gf.linear.LinearSVC(max_iter=1).fit(gf.linear.open("few.svm", memory=1 << 20))  # loads libraries
before = peak("VmRSS")
model = gf.linear.LinearSVC(C=0.01, tol=1e-3).fit(gf.linear.open(path, memory=memory))
print(peak("VmHWM") - before, model.certificate_.relative_gap)
"""


@pytest.mark.slow(reason="reads a file of 50 MB a dozen times")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_below_its_limit(tmp_path: Path) -> None:
    """A file four times as large as the memory."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(500):
        columns = np.sort(random.choice(2000, size=80, replace=False))
        row = " ".join(f"{j}:{v:.6f}" for j, v in zip(columns, random.normal(size=80), strict=True))
        lines.append(f"{1 if '1' in row[:3] else -1} {row}\n")
    path, memory = tmp_path / "t.svm", 12 << 20
    path.write_text("".join(lines) * 100)
    assert path.stat().st_size > 4 * memory
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(memory)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(gf.__file__).parents[1])},
    )  # fmt: skip
    used, gap = map(float, done.stdout.split())
    assert used < memory and gap <= 1e-3


def test_ctrl_c_leaves_the_last_certified_model(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = TableStream._read_chunk, 0

    def read_some(self: TableStream, segments: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 6 * self.chunks:  # after the first certificate
            raise KeyboardInterrupt
        return read(self, segments)

    monkeypatch.setattr(TableStream, "_read_chunk", read_some)
    table = gf.linear.open(paths[".svm"], memory=SMALL)
    y = np.sign(table.read(0, ROWS) @ np.ones(COLUMNS))
    for model in (gf.linear.LinearSVR(C=100.0, tol=1e-12), gf.linear.LinearSVC(tol=1e-12)):
        reads = 0
        with pytest.raises(KeyboardInterrupt):
            model.fit(table, y)
        assert model.coef_.size == COLUMNS and 0.0 < model.certificate_.relative_gap < 1.0
        assert model.predict(table).shape == (ROWS,)
