"""Fit linear models to a file larger than the memory that they may use, with proofs of their gaps.

    python examples/webspam.py
    python examples/webspam.py --rows 100000 --memory 64 --workers 2 --out /tmp/webspam

Documents are generated like those of the webspam data: log-normal counts of words that follow
Zipf's law, rows of length 1. They go to one svmlight file, block by block. Then

    gf.linear.LinearSVC(...).fit(gf.linear.open("train.svm", memory=...))

reads it chunk by chunk, in each pass. The program prints the memory that the fits took beside the
size of the file, and the duality gap: no model's objective is better by more. Then two workers fit
it together: each reads the lines between two bytes, and no process has the whole table. At last, a
kernel machine tells the digits 3 and 8 apart. It writes webspam.svg: gaps over seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf

COLUMNS, WORDS = 50_000, 60
BLOCK = 2_000
MIB = 1 << 20


def draw_lines(rows: int) -> Iterator[str]:
    """Yield blocks of lines `label column:value …`; columns are numbered from 1."""
    random = np.random.default_rng(0)
    shares = (np.arange(COLUMNS) + 10.0) ** -1.1
    sums = np.cumsum(shares / shares.sum())
    rule = random.normal(size=COLUMNS)
    for first in range(0, rows, BLOCK):
        count = min(BLOCK, rows - first)
        words = np.searchsorted(sums, random.random((count, WORDS))).clip(0, COLUMNS - 1)
        words.sort(axis=1)
        values = np.exp(random.normal(size=words.shape))
        values[:, 1:][words[:, 1:] == words[:, :-1]] = 0.0  # the same word again
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        scores = (values * rule[words]).sum(axis=1)
        labels = np.where(scores + 0.2 * random.normal(size=count) > 0, 1, -1)
        yield "".join(
            f"{label} {' '.join(f'{j + 1}:{v:.6g}' for j, v in zip(*row, strict=True) if v)}\n"
            for label, *row in zip(labels, words.tolist(), values.tolist(), strict=True)
        )


def peak_memory() -> int | None:
    """Return the most bytes that this process has had in memory; None where Linux does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def fit(name: str, model: Any, table: Any) -> Any:
    """Fit a model to a table on disk, and print what it took."""
    before, start = peak_memory(), time.perf_counter()
    model.fit(table)
    proof, after = model.certificate_, peak_memory()
    grown = "" if before is None or after is None else f", {(after - before) / MIB:.0f} MiB more"
    right = np.mean(model.predict(table) == table.targets)
    print(
        f"{name}: {model.solver_}, {time.perf_counter() - start:.1f} s{grown}; objective "
        f"{proof.primal:,.3f}, relative gap {proof.relative_gap:.1e}; {right:.1%} right",
        flush=True,
    )
    return model


def tell_digits_apart() -> None:
    """Fit a kernel machine to scikit-learn's digits 3 and 8."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = (y == 3) | (y == 8)
    x, y = x[chosen] / 16, y[chosen]
    model = gf.linear.SVC(gamma=0.05, tol=1e-4).fit(x[::2], y[::2])
    print(
        f"digits 3 and 8: {model.n_support_.sum()} support vectors, relative gap "
        f"{model.certificate_.relative_gap:.1e}, "
        f"{model.score(x[1::2], y[1::2]):.1%} of others right"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive_int, default=40_000, help="default: 40,000")
    parser.add_argument(
        "--memory", type=positive_int, default=16, help="MiB that a fit may use; default: 16"
    )
    parser.add_argument(
        "--workers", type=positive_int, default=2,
        help="that fit it together; 1: only this process does; default: 2",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("webspam"), help="folder; default: webspam/"
    )
    options = parser.parse_args()
    if options.rows < 1000:
        parser.error(f"--rows {options.rows}: a model needs 1,000 of them at least")
    check_folder(parser, "--out", options.out)
    return options


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "train.svm"
    with path.open("w", encoding="ascii") as file:
        file.writelines(draw_lines(options.rows))
    size = path.stat().st_size / MIB
    table = gf.linear.open(path, memory=options.memory * MIB)
    rows, columns = table.shape
    halves = [table.part(k, 2).rows for k in range(2)]
    print(
        f"{path}: {size:.0f} MiB of text, {rows:,} x {columns:,}; memory for a fit: "
        f"{options.memory} MiB; its halves by bytes have {halves[0]:,} and {halves[1]:,} rows",
        flush=True,
    )
    svm = fit("support vector machine", gf.linear.LinearSVC(tol=1e-4), table)
    logistic = gf.linear.LogisticRegression(C=10.0, tol=1e-4)
    fit("logistic regression", logistic, table)
    if options.workers > 1:
        cluster = gf.Cluster.local(options.workers, threads=1)
        again = fit("on workers", gf.linear.LinearSVC(tol=1e-3, cluster=cluster), table)
        print(f"between the workers: {again.certificate_.bytes / MIB:.1f} MiB")
    tell_digits_apart()
    place = options.out / "webspam.svg"
    svm.history_.plot(str(place), others=[logistic.history_])
    print(f"wrote {path} and {place}")


if __name__ == "__main__":
    run_program(main)
