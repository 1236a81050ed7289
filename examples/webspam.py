"""A linear SVM of a file that no process reads whole: two workers, each with its bytes of it.

    python examples/webspam.py [--rows 100000] [--columns 20000] [--workers 2]

The file is like that of webspam: log-normal counts of words that follow Zipf's law, rows of length
1. It is written in svmlight format, line by line. Each worker reads the lines between two bytes;
this process sees labels and coefficients only. The result comes with a proof of how good it is.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from command_line import positive_int, run_program

import graphflow as gf

ENTRIES = 60
BLOCK = 2_000


def write_rows(path: Path, rows: int, columns: int) -> None:
    """Write a generated file, some rows at a time."""
    random = np.random.default_rng(0)
    chance = (np.arange(columns) + 10.0) ** -1.1
    ends = np.cumsum(chance / chance.sum())
    truth = random.normal(size=columns)
    with path.open("w") as file:
        for start in range(0, rows, BLOCK):
            for _ in range(min(BLOCK, rows - start)):
                words = np.unique(np.searchsorted(ends, random.random(ENTRIES)))
                words = np.minimum(words, columns - 1)
                counts = np.exp(random.normal(size=len(words)))
                counts /= np.sqrt(counts @ counts)
                label = 1 if counts @ truth[words] + 0.1 * random.normal() > 0 else -1
                pairs = zip(words + 1, counts, strict=True)
                file.write(f"{label} " + " ".join(f"{j}:{v:.6f}" for j, v in pairs) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=positive_int, default=100_000)
    parser.add_argument("--columns", type=positive_int, default=20_000)
    parser.add_argument("--workers", type=positive_int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "webspam.svm"
        write_rows(path, options.rows, options.columns)
        size = os.path.getsize(path)
        print(f"{path.name}: {options.rows:,} rows, {size / 1e6:.0f} MB")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        cluster = gf.Cluster.local(workers=options.workers, threads=1)
        table = gf.linear.open(path, n_features=options.columns)
        model = gf.linear.LinearSVC(C=1.0, tol=1e-3, cluster=cluster).fit(table)
        seconds = time.perf_counter() - start
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    proof = model.certificate_
    print(f"fitted in {seconds:.1f} s, {proof.passes:.0f} passes; this process grew by {more:,} kB")
    print(f"between the workers: {proof.bytes / 1e6:.1f} MB, {model.history_.local_steps:,} local "
          "steps a round")  # fmt: skip
    print(f"objective {proof.primal:.3f}; no model has less than {proof.dual:.3f}")
    assert proof.relative_gap <= 1e-3


if __name__ == "__main__":
    run_program(main)
